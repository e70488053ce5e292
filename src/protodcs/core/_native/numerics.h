/* What both methods compute alike: powers, logarithms, Dirichlet uncertainty and windows, see `core/numerics`. */
#ifndef PROTODCS_NUMERICS_H
#define PROTODCS_NUMERICS_H

#include "loops.h"

static inline double at_least(double value, double least)
{
    return value > least ? value : least;
}

/* e to the x: a power of two times a series. */
static inline double own_exp(double x)
{
    const double shift = 0x1.8p52; /* Adding it rounds to an integer, which is then in the lowest bits. */
    x = x < -708.0 ? -708.0 : x;
    x = x > 709.0 ? 709.0 : x;
    double shifted = x * 0x1.71547652b82fep+0 + shift;
    double octaves = shifted - shift;
    double r = (x - octaves * 0x1.62e42fefa3800p-1) - octaves * 0x1.ef35793c76730p-45;
    double series = 1.0 / 6227020800.0;
    series = series * r + 1.0 / 479001600.0;
    series = series * r + 1.0 / 39916800.0;
    series = series * r + 1.0 / 3628800.0;
    series = series * r + 1.0 / 362880.0;
    series = series * r + 1.0 / 40320.0;
    series = series * r + 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = series * r + 1.0;
    series = series * r + 1.0;
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int64_t)((uint64_t)(bits + 1023) << 52);
    double power;
    memcpy(&power, &bits, sizeof power);
    return series * power;
}

/* The same for a vector of numbers up to 709. */
static inline Vec exp_parts(Vec x)
{
    const Vec shift = every(0x1.8p52); /* Adding it rounds to an integer, which is then in the lowest bits. */
    static const double series[] = {
        1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
        1.0 / 720.0,       1.0 / 120.0,      1.0 / 24.0,      1.0 / 6.0,      0.5,           1.0,
        1.0};
    x = choose(x < -708.0, every(-708.0), x);
    Vec shifted = x * 0x1.71547652b82fep+0 + shift, octaves = shifted - shift;
    Vec r = (x - octaves * 0x1.62e42fefa3800p-1) - octaves * 0x1.ef35793c76730p-45, sum = every(1.0 / 6227020800.0);
    for (int n = 0; n < 13; n++)
        sum = sum * r + series[n];
    return sum * (Vec)(((Mask)shifted + 1023) << 52);
}

/* The natural logarithm of a normal positive number. */
static inline double own_log(double x)
{
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t octaves = (bits - 0x3fe6a09e667f3bcdll) >> 52; /* The rest is then between sqrt(1/2) and sqrt(2). */
    bits -= (int64_t)((uint64_t)octaves << 52);
    memcpy(&x, &bits, sizeof x);
    double s = (x - 1.0) / (x + 1.0), r = s * s, series = 1.0 / 25.0;
    for (int n = 23; n > 0; n -= 2)
        series = series * r + 1.0 / n;
    return octaves * 0x1.62e42fefa3800p-1 + (2.0 * s * series + octaves * 0x1.ef35793c76730p-45);
}

/* psi(x) for x > 0: recurrence up to 8, then the asymptotic series. */
static double digamma(double x)
{
    double result = 0.0;
    for (; x < 8.0; x += 1.0)
        result -= 1.0 / x;
    double r = 1.0 / (x * x);
    double tail = 1.0 / 132 - r * (691.0 / 32760);
    tail = r * (1.0 / 12 - r * (1.0 / 120 - r * (1.0 / 252 - r * (1.0 / 240 - r * tail))));
    return result + own_log(x) - 0.5 / x - tail;
}

/* psi(a + 1) for the evidence a = 1 .. 2.1 of a cosine: Taylor's series around 2.5, written out to become vectors. */
static inline double evidence_digamma(double a)
{
    double h = a + 1.0 - 2.5, value = -2.7534182401274526e-8;
    value = value * h + 6.8882254155130349e-8;
    value = value * h + -1.7237026144441995e-7;
    value = value * h + 4.315056529691794e-7;
    value = value * h + -1.0808116193449875e-6;
    value = value * h + 2.7092759794669097e-6;
    value = value * h + -6.7989292319747948e-6;
    value = value * h + 1.7089167198843548e-5;
    value = value * h + -4.3052688655542602e-5;
    value = value * h + 0.00010882584206868631;
    value = value * h + -0.00027643925426264713;
    value = value * h + 0.00070738816518316098;
    value = value * h + -0.0018305640382639378;
    value = value * h + 0.0048214098213931957;
    value = value * h + -0.013073166646113807;
    value = value * h + 0.037317641469542009;
    value = value * h + -0.1181020258208637;
    value = value * h + 0.49035775610023486;
    return value * h + 0.70315664064524319;
}

/* Write aleatoric and epistemic uncertainty of `cosines` (k) to `out` (2). */
static void uncertainty(const double *cosines, int64_t k, double *out)
{
    double total = SUM(k, at_least(cosines[i], 0.0) + 1.0);
    double weighted =
        SUM(k, (at_least(cosines[i], 0.0) + 1.0) * evidence_digamma(at_least(cosines[i], 0.0) + 1.0));
    out[0] = k == 1 ? 0.0 : at_least(digamma(total + 1.0) - weighted / total, 0.0);
    out[1] = k / total;
}

/* The derivative of psi(a + 1) in the same way. */
static inline double evidence_trigamma(double a)
{
    double h = a + 1.0 - 2.5, value = 18 * -2.7534182401274526e-8;
    value = value * h + 17 * 6.8882254155130349e-8;
    value = value * h + 16 * -1.7237026144441995e-7;
    value = value * h + 15 * 4.315056529691794e-7;
    value = value * h + 14 * -1.0808116193449875e-6;
    value = value * h + 13 * 2.7092759794669097e-6;
    value = value * h + 12 * -6.7989292319747948e-6;
    value = value * h + 11 * 1.7089167198843548e-5;
    value = value * h + 10 * -4.3052688655542602e-5;
    value = value * h + 9 * 0.00010882584206868631;
    value = value * h + 8 * -0.00027643925426264713;
    value = value * h + 7 * 0.00070738816518316098;
    value = value * h + 6 * -0.0018305640382639378;
    value = value * h + 5 * 0.0048214098213931957;
    value = value * h + 4 * -0.013073166646113807;
    value = value * h + 3 * 0.037317641469542009;
    value = value * h + 2 * -0.1181020258208637;
    return value * h + 0.49035775610023486;
}

static double trigamma(double x)
{
    double result = 0.0;
    for (; x < 8.0; x += 1.0)
        result += 1.0 / (x * x);
    double r = 1.0 / (x * x);
    double tail =
        r * (1 / 6.0 - r * (1 / 30.0 - r * (1 / 42.0 - r * (1 / 30.0 - r * (5 / 66.0 - r * (691 / 2730.0))))));
    return result + 1.0 / x + 0.5 * r + tail / x;
}

static void uncertainty_gradient(const double *logits, int64_t n, double by_aleatoric, double by_epistemic, double *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = evidence_digamma(at_least(logits[i], 0.0) + 1.0);
    double total = SUM(n, at_least(logits[i], 0.0) + 1.0);
    double weighted = SUM(n, (at_least(logits[i], 0.0) + 1.0) * out[i]);
    double common = by_aleatoric * (trigamma(total + 1.0) + weighted / total / total) - by_epistemic * n / (total * total);
    double share = by_aleatoric / total;
    for (int64_t i = 0; i < n; i++) {
        double a = at_least(logits[i], 0.0) + 1.0;
        double slope = common - share * (out[i] + a * evidence_trigamma(a));
        out[i] = logits[i] > 0.0 ? slope : 0.0;
    }
}

/* Windows. */

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

/* Add `value` to a window that took `pushed` values before. Return how many it holds. */
static int64_t push(double *arrivals, double *ordered, int64_t capacity, int64_t pushed, double value)
{
    int64_t size = pushed < capacity ? pushed : capacity, slot = pushed % capacity;
    if (size == capacity) {
        int64_t gap = count_below(ordered, capacity, arrivals[slot]);
        size -= 1;
        memmove(ordered + gap, ordered + gap + 1, (size - gap) * sizeof *ordered);
    }
    int64_t place = count_below(ordered, size, value);
    memmove(ordered + place + 1, ordered + place, (size - place) * sizeof *ordered);
    ordered[place] = arrivals[slot] = value;
    return size + 1;
}

static double quantile(const double *ordered, int64_t size, double fraction)
{
    double position = fraction * (size - 1);
    int64_t low = (int64_t)position;
    if (low >= size - 1)
        return ordered[size - 1];
    double part = position - low, step = ordered[low + 1] - ordered[low];
    return part >= 0.5 ? ordered[low + 1] - step * (1.0 - part) : ordered[low] + step * part;
}

#endif
