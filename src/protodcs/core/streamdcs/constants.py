"""The tuned constants of StreamDCS, all in one place.

docs/explanation/how-a-decision-is-made.md has the measurement behind each of them. A value that several names share, or
that is a fixed multiple of another one, is written as an expression and is not counted as a constant.
"""

# Windows and horizons, in samples.
SHORT_WINDOW = 64  # Recent samples that a shift is measured on.
FIRST_REFIT, REFIT_PERIOD = SHORT_WINDOW // 4, SHORT_WINDOW // 2
WINDOW = 16 * SHORT_WINDOW  # Recent scores behind the threshold, at most.
SHIFT_WINDOW = SHORT_WINDOW  # Recent samples that are compared with the earlier ones.
SHIFT_WARNING = 3 * SHORT_WINDOW  # Samples after a shift for which decisions carry a warning.
UNKNOWN_HORIZON, KNOWN_HORIZON = 4 * SHORT_WINDOW, WINDOW  # Samples behind the two mean features of the head.
BASELINE_HORIZON = 2.0 * WINDOW  # Samples after which baselines forget.
BIAS_CONFIDENCE_HORIZON = float(WINDOW)  # Samples that the mean confidence of the class bias remembers.

# Centring.
NAMES_PRIOR = 20.0  # The names of a vocabulary count as this many classes.
CLASSES_PRIOR = 8.0  # Without names: classes at which their mean counts for one half.
RAW_PART = 0.4  # Part of the centre that is left out if there are many classes.
LEAST_NAMES = 16  # Smallest number of classes that serve as names if there is no vocabulary.

# Class baseline.
BASELINE_PRIOR = 240.0  # Samples that the baseline of all classes counts for in the baseline of one class.

# Which samples look unknown.
TAIL_LEAST, TAIL_SHARE = 0.05, 0.6  # Fraction of samples that look unknown: least, and per estimated unknown one.
REST_WEIGHT = TAIL_LEAST  # Least weight in the baseline of a sample that does not look unknown.

# Linear head.
HEAD_FIRST = 8  # Samples of each kind from which projections on it count.
HEAD_AUROC = (0.84, 0.92)  # AUROC minus one standard error from which it counts, and counts in full.
HEAD_ODDS = 6.0  # What it adds to the log-odds of being known, per distance between its two means.

# Groups and threshold, in units of the score.
SKEW = 1.3  # The lower side of the known scores is wider than the upper side by this factor.
KNOWN_WIDTH = (0.8, 0.3)  # Expected width of the upper side: with few classes, and what many classes add.
WIDTH_PRIOR = 60.0  # Samples that this expectation counts for.
GAIN = 5.0  # Nats that a second group must gain to count in full.
DOUBT = 20.0  # Nats more, per share of the second group, if its lead over names is that of known samples.
HARD_KNOWN = (1.6, 2.4)  # Mean lead over names from which, and from which fully, the lower group is known.
CAUTION = 8.0  # With n scores, the threshold is farther below the middle of the known scores by this / n.

# Lead over names, as a part of what the largest of the names is expected to have.
ALONE = (0.85, 1.05)  # If the known group leads by less than the second, some, and than the first, all is unknown.
FIRST_LEAD = ALONE[0]  # Before any threshold is fitted, a sample is unknown if its best class leads by less.
ALONE_DEVIATIONS = 2.0  # The threshold is then this many deviations above the mean.

# Shifts.
SHIFT_QUANTILE = 0.25  # A shift moves more samples below this quantile of the earlier scores than chance does,
SHIFT_DEVIATIONS = 4.0  # by this many standard deviations.

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

# Not tuned: tolerances, maintenance, and a scale on which no decision depends.
UNIT = 0.02  # Cosine that counts as one unit of the score if there are no names.
BIAS_MIN_LIKENESS = 1e-6  # Mean square of the centred cosines between prototypes that have a geometry to follow.
BIAS_REBUILD = 1000  # Samples after which running sums are computed again, because rounding errors accumulate.
SAME_SAMPLE = 0.999  # Cosine before centring from which a correction replaces an earlier one.
