/* The loops of StreamDCS. See loops.h for what they must keep to. */
#ifndef PROTODCS_STREAMDCS_H
#define PROTODCS_STREAMDCS_H

#include "numerics.h"
#include "sorting.h"

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

/* Class baseline. `moments` (2, k) are mean and variance of the score of each class. */

#define LEAST_VARIANCE 1e-10

/* Write the cosines (k) minus `centre`, in units, to `scores` (k). */
static void centred(const double *restrict cosines, int64_t k, double centre, double unit, double *restrict scores)
{
    for (int64_t i = 0; i < k; i++)
        scores[i] = (cosines[i] - centre) / unit;
}

static inline double own_part(double weight, double prior, double many)
{
    return many * weight / (weight + prior);
}

static inline double relative(double own, double variance, double common)
{
    return sqrt(common / at_least(own * variance + (1.0 - own) * common, LEAST_VARIANCE));
}

/* Return the largest of `scores` (k), each by the baseline of its class; `common` is the variance of all classes. */
static double text_score(const double *scores, int64_t k, const double *moments, const double *weights, double prior,
                         double many, double common)
{
    double total = SUM(k, own_part(weights[i], prior, many));
    double middle = SUM(k, own_part(weights[i], prior, many) * moments[i]);
    middle = total != 0.0 ? middle / total : 0.0;
    if (common <= 0.0)
        return MAX(k, -INFINITY, scores[i] - own_part(weights[i], prior, many) * (moments[i] - middle));
    return MAX(k, -INFINITY,
               (scores[i] - own_part(weights[i], prior, many) * (moments[i] - middle)) *
                   relative(own_part(weights[i], prior, many), moments[k + i], common));
}

static void learn_baseline(const double *restrict scores, int64_t k, double weight, double horizon,
                           double *restrict weights, double *restrict moments)
{
    for (int64_t i = 0; i < k; i++) {
        weights[i] = weights[i] + weight < horizon ? weights[i] + weight : horizon;
        double rate = weight / weights[i], gap = scores[i] - moments[i];
        moments[i] += rate * gap;
        moments[k + i] += rate * (gap * (scores[i] - moments[i]) - moments[k + i]);
    }
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
    Vec sums[PARTS];
    double lane[LANES], rest[LANES];
    int64_t full = k / LANES * LANES;
    for (int part = 0; part < PARTS; part++)
        sums[part] = every(0.0);
    for (int64_t at = 0; at < full; at += LANES)
        for (int part = 0; part < PARTS; part++)
            sums[part] += exp_parts(load(logits + at + part * WIDTH) - logits[best]);
    for (int part = 0; part < PARTS; part++)
        store(lane + part * WIDTH, sums[part]);
    for (int64_t i = full; i < k; i++)
        rest[i - full] = own_exp(logits[i] - logits[best]);
    for (int64_t i = full; i < k; i++)
        lane[i - full] += rest[i - full];
    return 1.0 / fold(lane);
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

/* Sums over the scores s with P(unknown) p and q = (1 - p), divided by `skew` squared below the mode. */
typedef struct {
    Vec unknown[PARTS], unknown_scores[PARTS], known[PARTS], known_scores[PARTS], larger[PARTS], product[PARTS];
} MixtureSums;

/* The numbers that a round of EM computes densities from. */
typedef struct {
    double mode, mean, lower, known_base, unknown_base, above, under, spread;
} Densities;

static inline __attribute__((always_inline)) void add_score(MixtureSums *sums, int part, Vec s, Vec p, Vec q)
{
    sums->unknown[part] += p;
    sums->unknown_scores[part] += p * s;
    sums->known[part] += q;
    sums->known_scores[part] += q * s;
}

/* Compute P(unknown) of WIDTH scores. Those outside `valid` count for nothing. */
static inline __attribute__((always_inline)) Vec expect(const Densities *of, MixtureSums *sums, int part, Vec s,
                                                        Mask valid)
{
    Mask below = s < of->mode;
    Vec from_mode = s - of->mode, from_mean = s - of->mean;
    Vec as_known = of->known_base - choose(below, every(of->under), every(of->above)) * (from_mode * from_mode);
    Vec as_unknown = of->unknown_base - of->spread * (from_mean * from_mean);
    Mask rather_known = as_unknown < as_known;
    Vec larger = choose(rather_known, as_known, as_unknown), smaller = choose(rather_known, as_unknown, as_known);
    Vec t = exp_parts(smaller - larger), share = 1.0 / (1.0 + t);
    /* Above the mode a wide unknown component would win again; nothing there is unknown. */
    Vec p = choose(s > of->mode, every(0.0), choose(rather_known, t * share, share));
    Vec q = (1.0 - p) * choose(below, every(of->lower), every(1.0));
    p = choose(valid, p, every(0.0));
    add_score(sums, part, s, p, choose(valid, q, every(0.0)));
    sums->larger[part] += choose(valid, larger, every(0.0));
    sums->product[part] *= choose(valid, 1.0 + t, every(1.0));
    return p;
}

/* Copy the last `rest` elements, fewer than 16, into a block of 16 that is filled up with `fill`. */
static inline void pad(double *block, const double *from, int64_t rest, double fill)
{
    for (int64_t i = 0; i < LANES; i++)
        block[i] = i < rest ? from[i] : fill;
}

/* The expected width of a group of scores, and how many samples that counts for; 0 if nothing is expected. */
typedef struct {
    double expected, weight;
} Width;

/* See `threshold.Widths`. */
typedef struct {
    Width known, unknown;
} Widths;

/* Return the log-density of a width, up to a constant. */
static double width_density(const Width *of, double width)
{
    if (of->weight == 0.0)
        return 0.0;
    double ratio = of->expected / width;
    return of->weight * (own_log(ratio) + 0.5 - 0.5 * ratio * ratio);
}

/* Fit two groups to `scores` (n) by EM, starting from P(unknown) in `unknown` (n), which is overwritten. */
static Mixture fit_mixture(const double *scores, double *unknown, int64_t n, double skew, Widths prior, int iterations)
{
    const double small = 1e-9, count = (double)n;
    const int64_t full = n / LANES * LANES, rest = n - full;
    Densities of = {.lower = 1.0 / (skew * skew)};
    Mixture fit = {0};
    MixtureSums sums;
    Mask whole = every(0.0) == every(0.0), valid[PARTS];
    double before = -INFINITY, narrowest = 0.1 * prior.known.expected;
    double squares = prior.known.weight * prior.known.expected * prior.known.expected;
    double unknown_squares = prior.unknown.weight * prior.unknown.expected * prior.unknown.expected;
    double known_sum = SUM(n, (1.0 - unknown[i]) * scores[i]), total = SUM(n, unknown[i]);
    double unknown_sum = SUM(n, unknown[i] * scores[i]), lane[LANES], tail[LANES], tail_unknown[LANES];
    fit.mode = known_sum / at_least(count - total, small);
    double known = SUM(n, (1.0 - unknown[i]) * (scores[i] < fit.mode ? of.lower : 1.0));
    known_sum = SUM(n, (1.0 - unknown[i]) * (scores[i] < fit.mode ? of.lower : 1.0) * scores[i]);
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (int part = 0; part < PARTS; part++)
        valid[part] = load(lane + part * WIDTH) < (double)rest;
    for (int round = 0; round < iterations; round++) {
        fit.share = (total + 1.0) / (count + 2.0);
        fit.share = fit.share < 0.005 ? 0.005 : fit.share > 0.98 ? 0.98 : fit.share;
        of.mean = fit.mean = unknown_sum / at_least(total, small);
        of.mode = fit.mode = known_sum / at_least(known, small);
        Vec u[PARTS], v[PARTS];
        for (int part = 0; part < PARTS; part++)
            u[part] = v[part] = every(0.0);
        pad(tail, scores + full, rest, of.mean);
        pad(tail_unknown, unknown + full, rest, 1.0);
        for (int64_t at = 0; at < n; at += LANES)
            for (int part = 0; part < PARTS; part++) {
                Vec s = load((at < full ? scores + at : tail) + part * WIDTH);
                Vec p = load((at < full ? unknown + at : tail_unknown) + part * WIDTH);
                Vec below = choose(s < of.mode, every(of.lower), every(1.0));
                u[part] += p * ((s - of.mean) * (s - of.mean));
                v[part] += (1.0 - p) * below * ((s - of.mode) * (s - of.mode));
            }
        fit.deviation = sqrt((fold_parts(u) + unknown_squares) / at_least(total + prior.unknown.weight, small));
        fit.deviation = at_least(fit.deviation, narrowest);
        fit.width = at_least(sqrt((fold_parts(v) + squares) / (count - total + prior.known.weight)), narrowest);

        of.known_base = own_log(1.0 - fit.share) - own_log(0.5 * (1.0 + skew) * fit.width);
        of.unknown_base = own_log(fit.share / fit.deviation);
        of.above = 0.5 / (fit.width * fit.width);
        of.under = of.above * of.lower;
        of.spread = 0.5 / (fit.deviation * fit.deviation);
        for (int part = 0; part < PARTS; part++) {
            sums.unknown[part] = sums.unknown_scores[part] = sums.known[part] = sums.known_scores[part] = every(0.0);
            sums.larger[part] = every(0.0);
            sums.product[part] = every(1.0);
        }
        double logs = 0.0;
        for (int64_t from = 0; from < full; from += 256 * LANES) {
            int64_t until = full - from < 256 * LANES ? full : from + 256 * LANES;
            for (int64_t at = from; at < until; at += LANES)
                for (int part = 0; part < PARTS; part++) {
                    int64_t place = at + part * WIDTH;
                    store(unknown + place, expect(&of, &sums, part, load(scores + place), whole));
                }
            /* The sum of log(1 + t) is the log of a product, which is at most 2 to the 257. */
            for (int part = 0; part < PARTS; part++) {
                store(lane + part * WIDTH, sums.product[part]);
                sums.product[part] = every(1.0);
            }
            for (int i = 0; i < LANES; i++)
                logs += own_log(lane[i]);
        }
        if (rest > 0) {
            for (int part = 0; part < PARTS; part++) {
                store(tail_unknown + part * WIDTH, expect(&of, &sums, part, load(tail + part * WIDTH), valid[part]));
                store(lane + part * WIDTH, sums.product[part]);
            }
            memcpy(unknown + full, tail_unknown, rest * sizeof *unknown);
            for (int i = 0; i < LANES; i++)
                logs += own_log(lane[i]);
        }
        fit.likelihood = fold_parts(sums.larger) + logs + width_density(&prior.known, fit.width);
        fit.likelihood += width_density(&prior.unknown, fit.deviation);
        total = fold_parts(sums.unknown), unknown_sum = fold_parts(sums.unknown_scores);
        known = fold_parts(sums.known), known_sum = fold_parts(sums.known_scores);
        if (fit.likelihood - before < 1e-5 * count)
            break;
        before = fit.likelihood;
    }
    return fit;
}

/* Return the log-likelihood of one group of known scores, `sorted` (n). */
static double single_likelihood(const double *sorted, int64_t n, double skew, Width prior)
{
    const double lower = 1.0 / (skew * skew);
    double mode = 0.5 * (sorted[(n - 1) / 2] + sorted[n / 2]), edge = mode;
    for (int round = 0; round < 8; round++) {
        edge = mode;
        double weights = SUM(n, sorted[i] < edge ? lower : 1.0);
        mode = SUM(n, (sorted[i] < edge ? lower : 1.0) * sorted[i]) / weights;
    }
    double spread = SUM(n, (sorted[i] < edge ? lower : 1.0) * ((sorted[i] - mode) * (sorted[i] - mode)));
    double width = sqrt((spread + prior.weight * prior.expected * prior.expected) / (n + prior.weight));
    double above = 0.5 / (width * width), under = above * lower;
    double squares = SUM(n, (sorted[i] < mode ? under : above) * ((sorted[i] - mode) * (sorted[i] - mode)));
    return -n * own_log(0.5 * (1.0 + skew) * width) - squares + width_density(&prior, width);
}

#endif
