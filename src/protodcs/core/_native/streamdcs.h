/* The loops of StreamDCS. See loops.h for what they must keep to. */
#ifndef PROTODCS_STREAMDCS_H
#define PROTODCS_STREAMDCS_H

#include "numerics.h"

static double sum_of(const double *values, int64_t n)
{
    return SUM(n, values[i]);
}

static double product_of(const double *a, const double *b, int64_t n)
{
    return SUM(n, a[i] * b[i]);
}

static double largest_of(const double *values, int64_t n)
{
    return MAX(n, -INFINITY, values[i]);
}

/* Return the sum of the squared distances of `values` (n) from `centre`. */
static double squares_around(const double *values, int64_t n, double centre)
{
    return SUM(n, (values[i] - centre) * (values[i] - centre));
}

/* Class baseline. `moments` (4, k) are mean and variance of the raw and of the centred cosines. */

#define LEAST_VARIANCE 1e-10

static double shrunk_z(double value, double own, double mean, double variance, double pool_mean, double pool_variance)
{
    double rest = 1.0 - own;
    double spread = at_least(own * variance + rest * pool_variance, LEAST_VARIANCE);
    return (value - (own * mean + rest * pool_mean)) / sqrt(spread);
}

/* Return the largest z-score of `cosines` (k) minus `average`, by one mean and variance of each class. */
static double largest_z(const double *cosines, int64_t k, double average, const double *moments, const double *weights,
                        double prior, double pool_mean, double pool_variance)
{
    return MAX(k, -INFINITY,
               shrunk_z(cosines[i] - average, weights[i] / (weights[i] + prior), moments[i], moments[k + i], pool_mean,
                        pool_variance));
}

static void move_moments(const double *restrict cosines, int64_t k, double average, double weight,
                         const double *restrict weights, double *restrict means, double *restrict variances)
{
    for (int64_t i = 0; i < k; i++) {
        double rate = weight / weights[i], value = cosines[i] - average, gap = value - means[i];
        means[i] += rate * gap;
        variances[i] += rate * (gap * (value - means[i]) - variances[i]);
    }
}

static void learn_baseline(const double *cosines, int64_t k, double average, double weight, double horizon,
                           double *restrict weights, double *moments)
{
    for (int64_t i = 0; i < k; i++)
        weights[i] = weights[i] + weight < horizon ? weights[i] + weight : horizon;
    move_moments(cosines, k, 0.0, weight, weights, moments, moments + k);
    move_moments(cosines, k, average, weight, weights, moments + 2 * k, moments + 3 * k);
}

/* Linear head. */

/* Return how far `feature` (d) lies on the known side: its distance from `known` along `known` - `unknown`. */
static double project(const double *feature, const double *unknown, const double *known, int64_t d)
{
    double length = SUM(d, (known[i] - unknown[i]) * (known[i] - unknown[i]));
    double along = SUM(d, (feature[i] - known[i]) * (known[i] - unknown[i]));
    return along / at_least(sqrt(length), 1e-9);
}

static void move_mean(double *restrict mean, const double *restrict feature, int64_t d, double count)
{
    for (int64_t i = 0; i < d; i++)
        mean[i] += (feature[i] - mean[i]) / count;
}

/* Prediction. */

/* Write `cosines` (k) / temperature + `bias` to `logits`; `bias` may be NULL. Return the first largest. */
static int64_t predict(const double *restrict cosines, const double *restrict bias, int64_t k, double temperature,
                       double *restrict logits)
{
    int64_t best = 0;
    for (int64_t i = 0; i < k; i++)
        logits[i] = cosines[i] / temperature;
    if (bias != NULL)
        for (int64_t i = 0; i < k; i++)
            logits[i] += bias[i];
    for (int64_t i = 1; i < k; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* Return the softmax probability of the class `best`. */
static double confidence(const double *logits, int64_t k, int64_t best)
{
    double top = logits[best];
    return 1.0 / SUM(k, own_exp(logits[i] - top));
}

/* Class bias. */

static void add_scaled(double *restrict to, const double *restrict from, int64_t k, double factor)
{
    for (int64_t i = 0; i < k; i++)
        to[i] += factor * from[i];
}

/* Sums over the classes that the correction needs. */
typedef struct {
    double explained, error, variance, others, observed;
} BiasSums;

/* Write each class's displacement to `out` (k), minus their mean. `weights`, `responses` and `likeness` are (k). */
static BiasSums displacements(const double *restrict weights, const double *restrict responses,
                              const double *restrict likeness, int64_t k, double beta, double total, double squares,
                              double *restrict out)
{
    BiasSums sums;
    for (int64_t i = 0; i < k; i++) {
        double others = total - weights[i];
        out[i] = others > 1e-6 ? (responses[i] - beta * likeness[i]) / others : 0.0;
    }
    sums.explained = SUM(k, (total - weights[i]) * out[i] * out[i]);
    sums.error = SUM(k, total - weights[i] > 1e-6 ? (squares - weights[i] * weights[i]) /
                                                        ((total - weights[i]) * (total - weights[i]))
                                                  : 0.0);
    sums.others = SUM(k, total - weights[i]);
    sums.observed = SUM(k, weights[i] > 0.0 ? 1.0 : 0.0);
    double mean = SUM(k, out[i]) / k;
    for (int64_t i = 0; i < k; i++)
        out[i] -= mean;
    sums.variance = SUM(k, out[i] * out[i]);
    return sums;
}

/* Threshold. */

/* Two groups of scores, see `threshold.Mixture`. */
typedef struct {
    double likelihood, share, mode, width, mean, deviation;
} Mixture;

/* What the next round of EM starts from: sums over u, u * s, v and v * s, where u is P(unknown) of a score s and
 * v = (1 - u), divided by `skew` squared below the mode. */
typedef struct {
    double unknown, unknown_scores, known, known_scores;
} MixtureSums;

#define LANE_LOOP(n, ...)                                                                                              \
    do {                                                                                                               \
        int64_t full = (n) / LANES * LANES;                                                                            \
        for (int64_t at = 0; at < full; at += LANES)                                                                   \
            for (int j = 0; j < LANES; j++) {                                                                          \
                int64_t i = at + j;                                                                                    \
                __VA_ARGS__                                                                                            \
            }                                                                                                          \
        for (int64_t i = full; i < (n); i++) {                                                                         \
            int j = (int)(i - full);                                                                                   \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    } while (0)

static MixtureSums mixture_sums(const double *scores, const double *unknown, int64_t n, double mode, double skew)
{
    double lower = 1.0 / (skew * skew);
    double u[LANES] = {0}, us[LANES] = {0}, v[LANES] = {0}, vs[LANES] = {0};
    LANE_LOOP(n, {
        double s = scores[i], p = unknown[i], q = (1.0 - p) * (s < mode ? lower : 1.0);
        u[j] += p;
        us[j] += p * s;
        v[j] += q;
        vs[j] += q * s;
    });
    return (MixtureSums){fold(u), fold(us), fold(v), fold(vs)};
}

/* Fit two groups to `scores` (n) by EM, starting from P(unknown) in `unknown` (n), which is overwritten. */
static Mixture fit_mixture(const double *restrict scores, double *restrict unknown, int64_t n, double skew,
                           int iterations)
{
    const double small = 1e-9, count = (double)n, lower = 1.0 / (skew * skew);
    Mixture fit = {0};
    double average = SUM(n, scores[i]) / count;
    double narrowest = 0.1 * sqrt(SUM(n, (scores[i] - average) * (scores[i] - average)) / count) + small;
    double known_sum = SUM(n, (1.0 - unknown[i]) * scores[i]), unknown_sum = SUM(n, unknown[i]);
    double before = -INFINITY;
    fit.mode = known_sum / at_least(count - unknown_sum, small);
    MixtureSums sums = mixture_sums(scores, unknown, n, fit.mode, skew);
    for (int round = 0; round < iterations; round++) {
        double total = sums.unknown, divisor = at_least(total, small);
        fit.share = (total + 1.0) / (count + 2.0);
        fit.share = fit.share < 0.005 ? 0.005 : fit.share > 0.98 ? 0.98 : fit.share;
        fit.mean = sums.unknown_scores / divisor;
        fit.mode = sums.known_scores / at_least(sums.known, small);
        const double mean = fit.mean, mode = fit.mode;
        double u[LANES] = {0}, v[LANES] = {0};
        LANE_LOOP(n, {
            double s = scores[i], p = unknown[i], below = s < mode ? lower : 1.0;
            u[j] += p * ((s - mean) * (s - mean));
            v[j] += (1.0 - p) * below * ((s - mode) * (s - mode));
        });
        fit.deviation = at_least(sqrt(fold(u) / divisor), narrowest);
        fit.width = at_least(sqrt(fold(v) / at_least(count - total, small)), narrowest);

        const double known_base = own_log(1.0 - fit.share) - own_log(0.5 * (1.0 + skew) * fit.width);
        const double unknown_base = own_log(fit.share / fit.deviation);
        const double above = 0.5 / (fit.width * fit.width), under = above * lower;
        const double spread = 0.5 / (fit.deviation * fit.deviation);
        /* The sum of log(1 + t) is the log of a product: at most 2 to the number of scores in a lane. */
        double larger[LANES] = {0}, product[LANES], next[4][LANES] = {{0}};
        double logs = 0.0;
        for (int j = 0; j < LANES; j++)
            product[j] = 1.0;
        for (int64_t from = 0; from < n; from += 256 * LANES) {
            int64_t size = n - from < 256 * LANES ? n - from : 256 * LANES;
            const double *restrict some = scores + from;
            double *restrict found = unknown + from;
            LANE_LOOP(size, {
                double s = some[i];
                double as_known = known_base - (s < mode ? under : above) * ((s - mode) * (s - mode));
                double as_unknown = unknown_base - spread * ((s - mean) * (s - mean));
                double difference = as_unknown - as_known;
                double t = own_exp(difference < 0.0 ? difference : -difference);
                larger[j] += difference < 0.0 ? as_known : as_unknown;
                product[j] *= 1.0 + t;
                /* Above the mode a wide unknown component would win again; nothing there is unknown. */
                double p = (difference < 0.0 ? t : 1.0) / (1.0 + t);
                p = s > mode ? 0.0 : p;
                double q = (1.0 - p) * (s < mode ? lower : 1.0);
                found[i] = p;
                next[0][j] += p;
                next[1][j] += p * s;
                next[2][j] += q;
                next[3][j] += q * s;
            });
            for (int j = 0; j < LANES; j++) {
                logs += own_log(product[j]);
                product[j] = 1.0;
            }
        }
        fit.likelihood = fold(larger) + logs;
        sums = (MixtureSums){fold(next[0]), fold(next[1]), fold(next[2]), fold(next[3])};
        if (fit.likelihood - before < 1e-5 * count)
            break;
        before = fit.likelihood;
    }
    return fit;
}

/* Return the log-likelihood of one group of known scores, `sorted` (n). */
static double single_likelihood(const double *sorted, int64_t n, double skew)
{
    const double lower = 1.0 / (skew * skew);
    double mode = 0.5 * (sorted[(n - 1) / 2] + sorted[n / 2]), edge = mode;
    for (int round = 0; round < 8; round++) {
        edge = mode;
        double weights = SUM(n, sorted[i] < edge ? lower : 1.0);
        mode = SUM(n, (sorted[i] < edge ? lower : 1.0) * sorted[i]) / weights;
    }
    double spread = SUM(n, (sorted[i] < edge ? lower : 1.0) * ((sorted[i] - mode) * (sorted[i] - mode)));
    double width = at_least(sqrt(spread / n), 1e-9);
    double above = 0.5 / (width * width), under = above * lower;
    double squares = SUM(n, (sorted[i] < mode ? under : above) * ((sorted[i] - mode) * (sorted[i] - mode)));
    return -n * own_log(0.5 * (1.0 + skew) * width) - squares;
}

/* Sorting: the same result as any other sort, so it may depend on nothing. */

#define DIGIT 11
#define BUCKETS (1 << DIGIT)

/* Sort `keys` (n) by the bits from `first` upwards, stably; `spare` is (n). */
static void sort_digits(uint64_t *keys, uint64_t *spare, int64_t n, int first)
{
    uint64_t *from = keys, *to = spare;
    for (int shift = first; shift < 64; shift += DIGIT) {
        int32_t starts[BUCKETS] = {0};
        for (int64_t i = 0; i < n; i++)
            starts[from[i] >> shift & (BUCKETS - 1)]++;
        int32_t start = 0;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            int32_t count = starts[bucket];
            starts[bucket] = start;
            start += count;
        }
        for (int64_t i = 0; i < n; i++)
            to[starts[from[i] >> shift & (BUCKETS - 1)]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys)
        memcpy(keys, from, n * sizeof *keys);
}

/* Write `values` (n) in rising order to `sorted` (n); `spare` is (n). */
static void sort(const double *values, double *sorted, double *spare, int64_t n)
{
    uint64_t *keys = (uint64_t *)sorted;
    memcpy(keys, values, n * sizeof *keys);
    for (int64_t i = 0; i < n; i++) /* As integers, floats are ordered by size if the negative ones are inverted. */
        keys[i] ^= (uint64_t)((int64_t)keys[i] >> 63) | 0x8000000000000000ull;
    /* The upper 33 bits nearly always decide; insertion moves the rest by few places, or everything is sorted again. */
    sort_digits(keys, (uint64_t *)spare, n, 64 - 3 * DIGIT);
    int64_t moves = 0;
    for (int64_t i = 1; i < n && moves <= 4 * n; i++) {
        uint64_t key = keys[i];
        int64_t place = i;
        for (; place > 0 && keys[place - 1] > key; place--, moves++)
            keys[place] = keys[place - 1];
        keys[place] = key;
    }
    if (moves > 4 * n)
        sort_digits(keys, (uint64_t *)spare, n, 64 - 6 * DIGIT < 0 ? 0 : 64 - 6 * DIGIT);
    for (int64_t i = 0; i < n; i++)
        keys[i] ^= (uint64_t)(~(int64_t)keys[i] >> 63) | 0x8000000000000000ull;
}

/* Return the number of `sorted` (n) values below `value`. */
static int64_t count_below(const double *sorted, int64_t n, double value)
{
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (sorted[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the probability that one of `high` (n) exceeds one of `low` (m); both are sorted, a tie counts one half. */
static double exceeding(const double *high, int64_t n, const double *low, int64_t m)
{
    int64_t below = 0, not_above = 0, halves = 0;
    for (int64_t i = 0; i < n; i++) {
        while (below < m && low[below] < high[i])
            below++;
        while (not_above < m && low[not_above] <= high[i])
            not_above++;
        halves += below + not_above;
    }
    return (double)halves / (2.0 * (double)n * (double)m);
}

#endif
