# Compiled form of `streamdcs.threshold` and `linear_head.weigh_head`.

from protodcs.core.streamdcs import constants as c

cdef extern from "streamdcs.h" nogil:
    ctypedef struct Mixture:
        double likelihood, share, mode, width, mean, deviation
    ctypedef struct Width:
        double expected, weight
    ctypedef struct Widths:
        Width known, unknown

    double own_exp(double x)
    double own_log(double x)
    double at_least(double value, double least)
    double sum_of(const double *values, int64_t n)
    double product_of(const double *a, const double *b, int64_t n)
    double squares_around(const double *values, int64_t n, double centre)
    Mixture fit_mixture(const double *scores, double *unknown, int64_t n, double skew, Widths prior, int iterations)
    double single_likelihood(const double *sorted_values, int64_t n, double skew, Width prior)
    void sort(const double *values, double *sorted_values, double *spare, int64_t n)
    int64_t count_below(const double *sorted_values, int64_t n, double value)
    double exceeding(const double *high, int64_t n, const double *low, int64_t m)

cdef:
    double SMALL = 1e-9
    int EM_ITERATIONS = 25
    double[4] EM_STARTS = [0.1, 0.4, 0.7, 0.9]
    double SKEW = c.SKEW, WIDTH_PRIOR = c.WIDTH_PRIOR, CAUTION = c.CAUTION
    double GAIN = c.GAIN, DOUBT = c.DOUBT
    double HARD_KNOWN_LEAST = c.HARD_KNOWN[0], HARD_KNOWN_FULL = c.HARD_KNOWN[1]
    double ALONE_LEAST = c.ALONE[0], ALONE_MOST = c.ALONE[1], ALONE_DEVIATIONS = c.ALONE_DEVIATIONS
    double HEAD_AUROC_LEAST = c.HEAD_AUROC[0], HEAD_AUROC_FULL = c.HEAD_AUROC[1], HEAD_ODDS = c.HEAD_ODDS
    double SHIFT_QUANTILE = c.SHIFT_QUANTILE, SHIFT_DEVIATIONS = c.SHIFT_DEVIATIONS
    int64_t WINDOW = c.WINDOW, SHIFT_WINDOW = c.SHIFT_WINDOW, HEAD_FIRST = c.HEAD_FIRST


# Work space of a refit, each of the length of the history.
cdef struct Work:
    double *scores
    double *known
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


# See `linear_head.HeadWeight`.
cdef struct HeadWeight:
    double weight
    double trust
    double middle
    double gap
    double known_side


cdef inline double smaller(double a, double b) noexcept nogil:
    return a if a < b else b


cdef inline double ramp(double value, double low, double high) noexcept nogil:
    return smaller(1.0, at_least((value - low) / (high - low), 0.0))


cdef inline double quantile(const double *ordered, int64_t n, double fraction) noexcept nogil:
    cdef int64_t place = <int64_t> (fraction * n)
    return ordered[place if place < n - 1 else n - 1]


cdef inline double separation(Mixture *fit) noexcept nogil:
    return (fit.mode - fit.mean) / sqrt(0.5 * (fit.width * fit.width + fit.deviation * fit.deviation))


cdef inline double side_of(HeadWeight *head, double projection) noexcept nogil:
    cdef double side = smaller(at_least((projection - head.middle) / head.gap, -0.5), 0.5)
    return side if side < 0.0 else head.known_side * side


cdef Groups find_groups(
    const double *text, const double *leads, bint general, int64_t n, Widths widths, Work *work
) noexcept nogil:
    cdef Groups groups
    cdef Mixture fit
    cdef double cut, lead, gain, doubt
    cdef double *swap
    cdef int64_t i
    cdef int start
    sort(text, work.ordered, work.spare, n)
    groups.found, groups.evidence, groups.share = False, 0.0, 0.0
    for start in range(4):
        cut = work.ordered[<int64_t> (EM_STARTS[start] * n)]
        for i in range(n):
            work.other[i] = 1.0 if text[i] <= cut else 0.0
        fit = fit_mixture(text, work.other, n, SKEW, widths, EM_ITERATIONS)
        if fit.mean < fit.mode and (not groups.found or fit.likelihood > groups.mixture.likelihood):
            groups.found, groups.mixture = True, fit
            swap, work.unknown, work.other = work.unknown, work.other, work.unknown
    if not groups.found:
        return groups
    gain = groups.mixture.likelihood - single_likelihood(work.ordered, n, SKEW, widths.known)
    lead = product_of(work.unknown, leads, n) / at_least(sum_of(work.unknown, n), SMALL)
    doubt = DOUBT * groups.mixture.share * (ramp(lead, ALONE_LEAST, HARD_KNOWN_LEAST) if general else 1.0)
    groups.evidence = ramp(gain - doubt, 0.0, GAIN)
    groups.evidence *= 1.0 - ramp(lead, HARD_KNOWN_LEAST, HARD_KNOWN_FULL)
    groups.share = groups.evidence * groups.mixture.share
    return groups


cdef HeadWeight weigh_head(
    const double *projections, const double *base, const double *text, int64_t n, double tail, double many,
    Groups *groups, Work *work,
) noexcept nogil:
    """Weigh the head. `work.ordered` has the base scores (n) in order.

    The tails are the same samples as in a stable sort: of equal scores the earlier ones are lower.
    """
    cdef double share = groups.share
    cdef HeadWeight head
    cdef int64_t lowest = <int64_t> (tail * n)
    cdef int64_t first = <int64_t> ((share + 0.5 * (1.0 - share)) * n), lows = 0, highs = 0, low_ties, high_ties, i
    cdef double low_cut, high_cut, text_low = 0.0, text_high = 0.0, area, low_mean, high_mean, distance
    head.weight, head.trust, head.middle, head.gap, head.known_side = 0.0, 0.0, 0.0, 1.0, 0.0
    if lowest < HEAD_FIRST:
        return head
    low_cut, high_cut = work.ordered[lowest - 1], work.ordered[first]
    # How many of the samples at each cut are on its lower side.
    low_ties = lowest - count_below(work.ordered, n, low_cut)
    high_ties = first - count_below(work.ordered, n, high_cut)
    for i in range(n):
        if base[i] < low_cut or (base[i] == low_cut and low_ties > 0):
            low_ties -= base[i] == low_cut
            work.low[lows] = projections[i]
            text_low += text[i]
            lows += 1
        if base[i] > high_cut or (base[i] == high_cut and high_ties <= 0):
            work.high[highs] = projections[i]
            text_high += text[i]
            highs += 1
        elif base[i] == high_cut:
            high_ties -= 1
    low_mean, high_mean = sum_of(work.low, lows) / lows, sum_of(work.high, highs) / highs
    sort(work.low, work.low, work.spare, lows)
    sort(work.high, work.high, work.spare, highs)
    area = exceeding(work.high, highs, work.low, lows)
    distance = at_least(text_high / highs - text_low / lows, 0.0)
    area -= sqrt(area * (1.0 - area) / lowest)
    head.trust = at_least(groups.evidence, many) * ramp(area, HEAD_AUROC_LEAST, HEAD_AUROC_FULL)
    head.weight = head.trust * distance
    head.middle, head.gap = 0.5 * (low_mean + high_mean), at_least(high_mean - low_mean, SMALL)
    head.known_side = groups.evidence
    return head


cdef double weighted_quantile(
    const double *scores, const double *known, int64_t n, double part, Work *work
) noexcept nogil:
    """Return the smallest score up to which the part `part` of the weights lies. `work.ordered` has the scores."""
    cdef int64_t low = 0, high = n - 1, middle, i
    cdef double wanted = part * sum_of(known, n), below
    while low < high:
        middle = (low + high) // 2
        below = 0.0
        for i in range(n):
            if scores[i] <= work.ordered[middle]:
                below += known[i]
        if below >= wanted:
            high = middle
        else:
            low = middle + 1
    return work.ordered[low]


cdef void fit_threshold(
    const double *scores, const double *known, const double *leads, int64_t n, double target, Work *work, double *out
) noexcept nogil:
    """Write the threshold of `scores` (n) and its slope to `out` (2). `leads` is NULL without a vocabulary."""
    cdef double tail, median, mean, lead = 0.0, alone
    cdef int64_t upper = 0, i
    sort(scores, work.ordered, work.spare, n)
    tail = weighted_quantile(scores, known, n, target, work)
    median = weighted_quantile(scores, known, n, 0.5, work)
    out[0] = median - (median - tail) * (1.0 + CAUTION / n)
    out[1] = 4.0 / at_least(median - out[0], SMALL)
    if leads == NULL:
        return
    for i in range(n):
        if scores[i] >= median:
            lead += leads[i]
            upper += 1
    alone = 1.0 - ramp(lead / upper, ALONE_LEAST, ALONE_MOST)
    mean = sum_of(scores, n) / n
    tail = mean + ALONE_DEVIATIONS * sqrt(squares_around(scores, n, mean) / n)
    out[0] = alone * tail + (1.0 - alone) * out[0]


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
