"""The tuned constants of StreamDCS, all in one place.

docs/explanation/how-a-decision-is-made.md has the measurement behind each of them.
"""

# Class baseline.
BASELINE_PRIOR = 60.0  # Samples that the baseline of all classes counts for in the baseline of one class.
REST_WEIGHT = (0.03, 0.6)  # Weight in the baseline of a sample that does not look unknown: least, most.
BASELINE_HORIZON = 2000.0  # Samples after which baselines forget.
CENTRED_WEIGHT = 0.6  # Weight of the centred cosines in the text score; the raw cosines have the rest.

# Which samples look unknown, by their cosines alone.
STAND_OUT_BASE, STAND_OUT_RISE = 0.72, 0.055  # How far the best class of unknown samples stands out at most, by ln K.
STAND_OUT_RAMP = 0.04  # Half the width of that limit.
LEAST_SHARE, MOST_SHARE = 0.04, 0.6  # Bounds of the fraction of samples that look unknown.
MOST_HIDDEN = 0.15  # Largest share of unknown samples that is assumed without two groups.

# Linear head.
UNKNOWN_HORIZON, KNOWN_HORIZON = 256, 1000  # Samples behind the two mean features.
HEAD_FIRST = (3, 8)  # Unknown-looking and known-looking samples that it needs.
HEAD_TAIL, HEAD_LEAST = 0.05, 6  # Fraction and smallest number of samples that test it.
HEAD_AUROC = (0.84, 0.92)  # AUROC minus one standard error from which it counts, and counts in full.

# Threshold.
SKEW = 1.1  # The lower side of the known scores is wider than the upper side by this factor.
MIRROR_RATIO = 1.2  # The same if the lower side is estimated from the upper one.
GAIN_FEW, GAIN_ALL = (4.0, 9.0), (9.0, 22.0)  # Nats that a second group must gain: few scores, and a full window.
LEAST_SEPARATION = 1.8  # Distance between the two groups, in standard deviations.
WINDOW, LEAST_WINDOW = 1024, 64  # Recent scores behind the threshold: at most, and at least.
FIRST_REFIT, REFIT_PERIOD = 16, 32  # Samples.
CAUTION = 8.0  # With n scores the mirrored tail is longer by this / n.
CAUTIOUS_SCORES = 128  # With fewer scores the mirrored tail may assume fewer unknown samples, in proportion.
SCALE_PRIOR = 4.0  # Samples that the prior deviation of a signal counts for.

# The first samples, before any threshold is fitted.
FIRST_CUT, FIRST_CLASSES = 0.75, 5  # Fraction of what noise reaches; classes that this test needs.

# Shift.
SHIFT_WINDOW = 64  # Recent samples that are compared with the earlier ones.
SHIFT_QUANTILE = 0.25  # A shift moves more of them below this quantile of the earlier scores than chance does,
SHIFT_DEVIATIONS = 4.0  # by this many standard deviations.
SHIFT_WARNING = 192  # Samples after a shift for which decisions carry a warning.

# Class bias.
BIAS_SURE = 0.1  # Learn from samples with P(unknown) below this.
BIAS_HORIZON, BIAS_PRIOR = 50.0, 10.0  # Samples that a class remembers, and at which its weight is one half.
BIAS_FLOOR, BIAS_MAX = 0.1, 1.25  # The correction is scaled by beta squared minus the first, at most by the second.
BIAS_MIN_LIKENESS = 1e-6  # Mean square of the centred cosines between prototypes that have a geometry to follow.
BIAS_CONFIDENCE_HORIZON = 1000.0  # Samples that the mean confidence remembers.
BIAS_REBUILD = 1000  # Samples after which running sums are computed again, because rounding errors accumulate.

# Corrections.
CORRECTED_CLASS = 0.04  # What a correction adds to the cosine of its class at similarity one.
CORRECTED_SCORE = 4.0  # What it adds to the score, or takes from it.
CORRECTED_MARGIN = 1.0  # Least distance of a near-duplicate from the threshold, in scores.
NEAR_DUPLICATE = 0.9  # Cosine after centring from which the correction decides.
SAME_SAMPLE = 0.999  # Cosine before centring from which a correction replaces an earlier one.
