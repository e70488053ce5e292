# Compiled form of `streamdcs.threshold`, `streamdcs.drop` and `linear_head.weigh_head`.

from protodcs.core.streamdcs import constants as c

cdef extern from "streamdcs.h" nogil:
    ctypedef struct Mixture:
        double likelihood, share, mode, width, mean, deviation

    double own_exp(double x)
    double own_log(double x)
    double at_least(double value, double least)
    double sum_of(const double *values, int64_t n)
    double product_of(const double *a, const double *b, int64_t n)
    double squares_around(const double *values, int64_t n, double centre)
    Mixture fit_mixture(const double *scores, double *unknown, int64_t n, double skew, int iterations)
    double single_likelihood(const double *sorted_values, int64_t n, double skew)
    void sort(const double *values, double *sorted_values, double *spare, int64_t n)
    int64_t count_below(const double *sorted_values, int64_t n, double value)
    double exceeding(const double *high, int64_t n, const double *low, int64_t m)

cdef:
    double SMALL = 1e-9
    int EM_ITERATIONS = 25
    double[3] EM_STARTS = [0.1, 0.4, 0.7]
    double SKEW = c.SKEW, MIRROR_RATIO = c.MIRROR_RATIO, MOST_HIDDEN = c.MOST_HIDDEN
    double LEAST_SEPARATION = c.LEAST_SEPARATION, STAND_OUT_RAMP = c.STAND_OUT_RAMP
    double GAIN_FEW_LEAST = c.GAIN_FEW[0], GAIN_FEW_ENOUGH = c.GAIN_FEW[1]
    double GAIN_ALL_LEAST = c.GAIN_ALL[0], GAIN_ALL_ENOUGH = c.GAIN_ALL[1]
    double CAUTION = c.CAUTION, CAUTIOUS_SCORES = c.CAUTIOUS_SCORES
    double HEAD_TAIL = c.HEAD_TAIL, HEAD_SHARE = c.HEAD_SHARE
    double HEAD_AUROC_LEAST = c.HEAD_AUROC[0], HEAD_AUROC_FULL = c.HEAD_AUROC[1]
    double SHIFT_QUANTILE = c.SHIFT_QUANTILE, SHIFT_DEVIATIONS = c.SHIFT_DEVIATIONS
    double STAND_OUT_KEPT = c.STAND_OUT_KEPT
    int64_t WINDOW = c.WINDOW, HEAD_LEAST = c.HEAD_LEAST, SHIFT_WINDOW = c.SHIFT_WINDOW


# Work space of a refit, each of the length of the history.
cdef struct Work:
    double *cosine
    double *text
    double *scores
    double *all_ordered
    double *ordered
    double *spare
    double *unknown
    double *other
    double *low
    double *high


# See `threshold.Groups`. `Work.unknown` has P(unknown) of each score.
cdef struct Groups:
    bint found
    Mixture mixture
    double evidence
    double share


cdef struct Tail:
    double score
    double median
    double share


# See `linear_head.HeadWeight`.
cdef struct HeadWeight:
    double weight
    double middle
    double gap
    double known_side


# See `drop.Drop`.
cdef struct Drop:
    bint shift
    bint burst


# Deviations of a Gaussian that depend on the operating point alone.
cdef struct Deviations:
    double target
    double tail        # of `target`, over that of 0.9
    double hidden      # of 0.05, over that of 0.9
    double skewed      # of the target in the wider lower half


cdef inline double smaller(double a, double b) noexcept nogil:
    return a if a < b else b


cdef inline double ramp(double value, double low, double high) noexcept nogil:
    return smaller(1.0, at_least((value - low) / (high - low), 0.0))


cdef inline double quantile(const double *ordered, int64_t n, double fraction) noexcept nogil:
    cdef int64_t place = <int64_t> (fraction * n)
    return ordered[place if place < n - 1 else n - 1]


cdef inline double separation(Mixture *fit) noexcept nogil:
    return (fit.mode - fit.mean) / sqrt(0.5 * (fit.width * fit.width + fit.deviation * fit.deviation))


cdef Tail mirrored_tail(
    const double *ordered, int64_t n, double target, double deviations, double ratio
) noexcept nogil:
    cdef Tail tail
    cdef double below
    cdef int turn
    tail.share = 0.0
    for turn in range(8):
        tail.median = quantile(ordered, n, tail.share + 0.5 * (1.0 - tail.share))
        below = quantile(ordered, n, tail.share + 0.9 * (1.0 - tail.share)) - tail.median
        tail.score = tail.median + ratio * deviations * below
        below = <double> count_below(ordered, n, tail.score) / n
        tail.share = smaller(0.5, at_least(below - target * (1.0 - tail.share), 0.0))
    return tail


cdef Groups find_groups(
    const double *scores, const double *stand_out, int64_t n, double limit, Deviations *normal, Work *work
) noexcept nogil:
    cdef Groups groups
    cdef Mixture fit
    cdef double hidden, full, least, enough, gain, found, cut
    cdef double *swap
    cdef int64_t i
    cdef int start
    sort(scores, work.ordered, work.spare, n)
    groups.found = False
    for start in range(3):
        cut = work.ordered[<int64_t> (EM_STARTS[start] * n)]
        for i in range(n):
            work.other[i] = 1.0 if scores[i] <= cut else 0.0
        fit = fit_mixture(scores, work.other, n, SKEW, EM_ITERATIONS)
        if fit.mean < fit.mode and (not groups.found or fit.likelihood > groups.mixture.likelihood):
            groups.found, groups.mixture = True, fit
            swap, work.unknown, work.other = work.unknown, work.other, work.unknown
    hidden = smaller(mirrored_tail(work.ordered, n, 0.05, normal.hidden, SKEW).share, MOST_HIDDEN)
    groups.evidence, groups.share = 0.0, hidden
    if not groups.found or separation(&groups.mixture) <= LEAST_SEPARATION:
        groups.found = False
        return groups
    full = <double> n / WINDOW
    least = (1.0 - full) * GAIN_FEW_LEAST + full * GAIN_ALL_LEAST
    enough = (1.0 - full) * GAIN_FEW_ENOUGH + full * GAIN_ALL_ENOUGH
    gain = groups.mixture.likelihood - single_likelihood(work.ordered, n, SKEW)
    found = product_of(work.unknown, stand_out, n) / at_least(sum_of(work.unknown, n), SMALL)
    groups.evidence = ramp(gain, least, enough)
    groups.evidence *= 1.0 - ramp(found, limit - STAND_OUT_RAMP, limit + STAND_OUT_RAMP)
    groups.share = groups.evidence * groups.mixture.share + (1.0 - groups.evidence) * hidden
    return groups


cdef HeadWeight weigh_head(
    const double *projections, const double *cosine_scores, const double *text, int64_t n, Groups *groups, Work *work
) noexcept nogil:
    """Weigh the head. `work.all_ordered` has the cosine scores in order.

    The tails are the same samples as in a stable sort: of equal scores the earlier ones are lower.
    """
    cdef double share = groups.share
    cdef HeadWeight head
    cdef int64_t lowest = <int64_t> (at_least(HEAD_TAIL, HEAD_SHARE * share) * n)
    cdef int64_t first = <int64_t> ((share + 0.5 * (1.0 - share)) * n), lows = 0, highs = 0, low_ties, high_ties, i
    cdef double low_cut, high_cut, text_low = 0.0, text_high = 0.0, area, low_mean, high_mean, distance
    head.weight, head.middle, head.gap, head.known_side = 0.0, 0.0, 1.0, 0.0
    if lowest < HEAD_LEAST:
        return head
    low_cut, high_cut = work.all_ordered[lowest - 1], work.all_ordered[first]
    # How many of the samples at each cut are on its lower side.
    low_ties = lowest - count_below(work.all_ordered, n, low_cut)
    high_ties = first - count_below(work.all_ordered, n, high_cut)
    for i in range(n):
        if cosine_scores[i] < low_cut or (cosine_scores[i] == low_cut and low_ties > 0):
            low_ties -= cosine_scores[i] == low_cut
            work.low[lows] = projections[i]
            text_low += text[i]
            lows += 1
        if cosine_scores[i] > high_cut or (cosine_scores[i] == high_cut and high_ties <= 0):
            work.high[highs] = projections[i]
            text_high += text[i]
            highs += 1
        elif cosine_scores[i] == high_cut:
            high_ties -= 1
    low_mean, high_mean = sum_of(work.low, lows) / lows, sum_of(work.high, highs) / highs
    sort(work.low, work.low, work.spare, lows)
    sort(work.high, work.high, work.spare, highs)
    area = exceeding(work.high, highs, work.low, lows)
    distance = at_least(text_high / highs - text_low / lows, 0.0)
    area -= sqrt(area * (1.0 - area) / lowest)
    head.weight = ramp(area, HEAD_AUROC_LEAST, HEAD_AUROC_FULL) * distance
    head.middle, head.gap = 0.5 * (low_mean + high_mean), at_least(high_mean - low_mean, SMALL)
    head.known_side = groups.evidence
    return head


cdef void fit_threshold(
    const double *scores, const double *text, const double *stand_out, int64_t n, Groups *groups, int64_t window,
    double limit, Deviations *normal, Work *work, double *out,
) noexcept nogil:
    """Write the threshold of `scores` (n), the latest of a window of scores, and its slope to `out` (2).

    `stand_out` is NULL if there are too few classes to tell.
    """
    cdef Tail tail
    cdef Mixture fit
    cdef double rejected, most, lowest, between, steep, known, low_stand_out = 0.0, evidence = groups.evidence
    cdef int64_t low = 0, i
    sort(text, work.ordered, work.spare, n)
    tail = mirrored_tail(work.ordered, n, normal.target, normal.tail, MIRROR_RATIO)
    rejected = <double> count_below(work.ordered, n, tail.score) / n
    sort(scores, work.ordered, work.spare, n)
    tail = mirrored_tail(work.ordered, n, normal.target, normal.tail, MIRROR_RATIO)
    most = normal.target + MOST_HIDDEN * smaller(1.0, n / CAUTIOUS_SCORES)
    lowest = 0.5 * (tail.score + quantile(work.ordered, n, rejected))
    lowest = smaller(lowest, quantile(work.ordered, n, most))
    for i in range(n if stand_out != NULL else 0):
        if scores[i] < lowest:
            low_stand_out += stand_out[i]
            low += 1
    if low:
        known = ramp(low_stand_out / low, limit - STAND_OUT_RAMP, limit + STAND_OUT_RAMP)
        lowest = known * smaller(lowest, quantile(work.ordered, n, normal.target)) + (1.0 - known) * lowest
    out[0] = tail.median + (lowest - tail.median) * (1.0 + CAUTION / n)
    out[1] = 4.0 / at_least(tail.median - out[0], SMALL)
    if not groups.found or evidence == 0.0:
        return
    fit = fit_mixture(scores, work.unknown + window - n, n, SKEW, EM_ITERATIONS)
    between = fit.mode + SKEW * fit.width * normal.skewed
    steep = (fit.mode - between) / (SKEW * fit.width * (SKEW * fit.width))
    steep = at_least((between - fit.mean) / (fit.deviation * fit.deviation) + steep, 1e-3)
    out[0] = evidence * between + (1.0 - evidence) * out[0]
    out[1] = evidence * steep + (1.0 - evidence) * out[1]


cdef bint lower_than_before(const double *scores, int64_t n, double threshold, Work *work) noexcept nogil:
    cdef int64_t earlier = n - SHIFT_WINDOW, low = 0, i
    cdef double fraction, cut, expected
    if earlier < SHIFT_WINDOW:
        return False
    sort(scores, work.ordered, work.spare, earlier)
    fraction = at_least(SHIFT_QUANTILE, <double> count_below(work.ordered, earlier, threshold) / earlier)
    cut = quantile(work.ordered, earlier, fraction)
    for i in range(earlier, n):
        low += scores[i] < cut
    expected = SHIFT_WINDOW * fraction
    return low >= expected + SHIFT_DEVIATIONS * sqrt(expected * (1.0 - fraction))


cdef Drop kind_of_drop(const double *stand_out, int64_t n, double limit, bint noticed_before) noexcept nogil:
    cdef Drop drop
    cdef int64_t before = n - SHIFT_WINDOW
    cdef double latest = sum_of(stand_out + before, SHIFT_WINDOW) / SHIFT_WINDOW
    cdef double earlier = sum_of(stand_out, before) / before
    cdef double part = STAND_OUT_KEPT * at_least(earlier - limit, 0.0)
    drop.shift = latest > limit + 2.0 * part or (noticed_before and latest > limit + part)
    drop.burst = earlier > limit and latest <= limit + part
    return drop
