"""The tuned constants of StreamDCS, all in one place.

docs/explanation/how-a-decision-is-made.md has the measurement behind each of them. A value that several names share, or
that is a fixed multiple of another one, is written as an expression and is not counted as a constant.
"""

# Windows and horizons, in samples.
SHORT_WINDOW = 64  # Smallest number of recent scores that a threshold or a shift is measured on.
FIRST_REFIT, REFIT_PERIOD = SHORT_WINDOW // 4, SHORT_WINDOW // 2
LEFT_OUT = FIRST_REFIT // 2  # First samples that scales and threshold leave out, because they had no baseline yet.
LEAST_WINDOW, WINDOW = SHORT_WINDOW, 16 * SHORT_WINDOW  # Recent scores behind the threshold: at least, and at most.
CAUTIOUS_SCORES = 2 * SHORT_WINDOW  # With fewer the mirrored tail may assume fewer unknown samples, in proportion.
SHIFT_WINDOW = SHORT_WINDOW  # Recent samples that are compared with the earlier ones.
SHIFT_WARNING = 3 * SHORT_WINDOW  # Samples after a shift for which decisions carry a warning.
LONGEST_BURST = WINDOW  # Unknown samples in a row that the history leaves out at most.
UNKNOWN_HORIZON, KNOWN_HORIZON = 4 * SHORT_WINDOW, WINDOW  # Samples behind the two mean features of the head.
BASELINE_HORIZON = 2.0 * WINDOW  # Samples after which baselines forget.
BIAS_CONFIDENCE_HORIZON = float(WINDOW)  # Samples that the mean confidence of the class bias remembers.

# Class baseline.
BASELINE_PRIOR = 60.0  # Samples that the baseline of all classes counts for in the baseline of one class.
REST_WEIGHT = (0.03, 0.6)  # Weight in the baseline of a sample that does not look unknown: least, most.
CENTRED_WEIGHT = 0.6  # Weight of the centred cosines in the text score; the raw cosines have the rest.

# Which samples look unknown, by their cosines alone.
STAND_OUT_BASE, STAND_OUT_RISE = 0.72, 0.055  # How far the best class of unknown samples stands out at most, by ln K.
STAND_OUT_RAMP = 0.04  # Half the width of that limit.
LEAST_CLASSES = 5  # With fewer, single samples are not judged by how far they stand out.
LEAST_SHARE, MOST_SHARE = 0.04, 0.6  # Bounds of the fraction of samples that look unknown.
MOST_HIDDEN = 0.15  # Largest share of unknown samples that is assumed without two groups.

# Linear head.
HEAD_FIRST = 8  # Samples of each kind from which projections on it count.
HEAD_TAIL, HEAD_SHARE = 0.05, 0.6  # Fraction of samples that test it: least, and per estimated unknown one.
HEAD_LEAST = 6  # Smallest number of samples that test it.
HEAD_AUROC = (0.84, 0.92)  # AUROC minus one standard error from which it counts, and counts in full.

# Threshold.
SKEW = 1.1  # The lower side of the known scores is wider than the upper side by this factor.
MIRROR_RATIO = 1.2  # The same if the lower side is estimated from the upper one.
GAIN_FEW = (4.0, 9.0)  # Nats that a second group must gain with few scores, and to count in full.
GAIN_ALL = (GAIN_FEW[1], 22.0)  # The same with a full window.
LEAST_SEPARATION = 1.8  # Distance between the two groups, in standard deviations.
CAUTION = 8.0  # With n scores the mirrored tail is longer by this / n.
SCALE_PRIOR, Z_DEVIATION = 4.0, 0.6  # Samples that the prior deviation of a signal counts for, and that of a z-score.

# The first samples, before any threshold is fitted.
FIRST_CUT = 0.75  # A sample is unknown if its best class stands out less than this.

# Shifts and bursts.
SHIFT_QUANTILE = 0.25  # A shift moves more samples below this quantile of the earlier scores than chance does,
SHIFT_DEVIATIONS = 4.0  # by this many standard deviations.
# How far samples stand out above the limit: if the latest ones keep less than this part of it, they are a burst of
# unknown ones. If they keep more than twice this part, they are known ones after a shift.
STAND_OUT_KEPT = 1.0 / 3.0

# Class bias.
BIAS_SURE = 0.1  # Learn from samples with P(unknown) below this.
BIAS_HORIZON = 50.0  # Samples that a class remembers.
BIAS_PRIOR = BIAS_HORIZON / 5.0  # Samples at which the weight of a class is one half.
BIAS_FLOOR, BIAS_MAX = 0.1, 1.25  # The correction is scaled by beta squared minus the first, at most by the second.

# Corrections.
CORRECTED_CLASS = 0.04  # What a correction adds to the cosine of its class at similarity one.
CORRECTED_SCORE = 4.0  # What it adds to the score, or takes from it.
CORRECTED_MARGIN = 1.0  # Least distance of a near-duplicate from the threshold, in scores.
NEAR_DUPLICATE = 0.9  # Cosine after centring from which the correction decides.

# Not tuned: tolerances and maintenance.
BIAS_MIN_LIKENESS = 1e-6  # Mean square of the centred cosines between prototypes that have a geometry to follow.
BIAS_REBUILD = 1000  # Samples after which running sums are computed again, because rounding errors accumulate.
SAME_SAMPLE = 0.999  # Cosine before centring from which a correction replaces an earlier one.
