/* Loops over arrays that must give the same bytes with every instruction set.
 *
 * Sums run in 16 lanes: element i is added to lane i % 16, and the lanes are added pairwise at the end. Nothing is
 * rounded differently with wider vectors, and exp and log are our own.
 */
#ifndef PROTODCS_LOOPS_H
#define PROTODCS_LOOPS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define LANES 16
#if defined(__AVX512F__)
#define WIDTH 8
#elif defined(__AVX2__)
#define WIDTH 4
#else
#define WIDTH 2
#endif
#define PARTS (LANES / WIDTH)

/* Elements of arrays that a caller hands in, which may begin anywhere. */
typedef float UnalignedFloat __attribute__((aligned(1)));
typedef double UnalignedDouble __attribute__((aligned(1)));

typedef double Vec __attribute__((vector_size(8 * WIDTH)));
typedef int64_t Mask __attribute__((vector_size(8 * WIDTH)));

static inline Vec load(const double *from)
{
    Vec vec;
    memcpy(&vec, from, sizeof vec);
    return vec;
}

static inline void store(double *to, Vec vec)
{
    memcpy(to, &vec, sizeof vec);
}

/* Return WIDTH floats as doubles. Compilers split the generic conversion into halves, so there are intrinsics. */
static inline Vec widen(const float *from)
{
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtps_pd(_mm_loadu_ps(from));
#elif defined(__SSE2__)
    return (Vec)_mm_cvtps_pd(_mm_castpd_ps(_mm_load_sd((const double *)from)));
#else
    return (Vec){from[0], from[1]};
#endif
}

/* Return a * b + c for factors that were floats. Their product is exact, so it does not matter whether it is rounded. */
static inline Vec add_exact_product(Vec a, Vec b, Vec c)
{
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

/* Return the sum of four lanes, every fourth one from the j-th on. */
static inline double quarter(const double *lane, int j)
{
    return (lane[j] + lane[j + 8]) + (lane[j + 4] + lane[j + 12]);
}

/* Return the sum of the lanes, added pairwise. Compilers make slow code of this as a loop. */
static inline double fold(const double *lane)
{
    return (quarter(lane, 0) + quarter(lane, 2)) + (quarter(lane, 1) + quarter(lane, 3));
}

/* Return the sum of 16 lanes that are held in vectors. */
static inline double fold_parts(const Vec *parts)
{
    double lane[LANES];
    for (int part = 0; part < PARTS; part++)
        store(lane + part * WIDTH, parts[part]);
    return fold(lane);
}

static inline Vec every(double value)
{
    return value - (Vec){0.0};
}

/* Return a where the mask is set, else b. */
static inline Vec choose(Mask mask, Vec a, Vec b)
{
    return (Vec)((mask & (Mask)a) | (~mask & (Mask)b));
}

/* The sum of `expression` over i from 0 to n - 1. */
#define SUM(n, expression)                                                                                             \
    ({                                                                                                                 \
        double lane[LANES] = {0.0};                                                                                    \
        int64_t full = (n) / LANES * LANES;                                                                            \
        for (int64_t at = 0; at < full; at += LANES)                                                                   \
            for (int j = 0; j < LANES; j++) {                                                                          \
                int64_t i = at + j;                                                                                    \
                lane[j] += (expression);                                                                               \
            }                                                                                                          \
        for (int64_t i = full; i < (n); i++)                                                                           \
            lane[i - full] += (expression);                                                                            \
        fold(lane);                                                                                                    \
    })

/* The largest `expression` over i from 0 to n - 1, at least `least`. */
#define MAX(n, least, expression)                                                                                      \
    ({                                                                                                                 \
        double lane[LANES], largest = (least);                                                                         \
        for (int j = 0; j < LANES; j++)                                                                                \
            lane[j] = (least);                                                                                         \
        int64_t full = (n) / LANES * LANES;                                                                            \
        for (int64_t at = 0; at < full; at += LANES)                                                                   \
            for (int j = 0; j < LANES; j++) {                                                                          \
                int64_t i = at + j;                                                                                    \
                double value = (expression);                                                                           \
                lane[j] = value > lane[j] ? value : lane[j];                                                           \
            }                                                                                                          \
        for (int64_t i = full; i < (n); i++) {                                                                         \
            double value = (expression);                                                                               \
            largest = value > largest ? value : largest;                                                               \
        }                                                                                                              \
        for (int j = 0; j < LANES; j++)                                                                                \
            largest = lane[j] > largest ? lane[j] : largest;                                                           \
        largest;                                                                                                       \
    })

#define TOO_SHORT 1e-6

/* The body of `normalise`, for either type of input. */
#define NORMALISE(feature, d, unit)                                                                                    \
    double scale = 1.0, total = SUM(d, (double)feature[i] * (double)feature[i]);                                       \
    if (total == INFINITY) { /* The squares overflow: try again with the largest value as the unit. */                 \
        scale = MAX(d, 1.0, fabs((double)feature[i]));                                                                 \
        total = SUM(d, ((double)feature[i] / scale) * ((double)feature[i] / scale));                                   \
    }                                                                                                                  \
    double norm = sqrt(total), inverse = 1.0 / norm;                                                                   \
    if (!(norm * scale > TOO_SHORT && norm * scale < INFINITY))                                                        \
        return 0;                                                                                                      \
    for (int64_t i = 0; i < d; i++)                                                                                    \
        unit[i] = (float)((double)feature[i] / scale * inverse);                                                       \
    return 1;

/* Write `feature` (d) divided by its norm to `unit`. Return 0 if it is not finite or shorter than 1e-6. */
static int normalise_single(const UnalignedFloat *feature, int64_t d, float *unit)
{
    NORMALISE(feature, d, unit)
}

static int normalise_double(const UnalignedDouble *feature, int64_t d, float *unit)
{
    NORMALISE(feature, d, unit)
}

/* Rows that share the loads of the feature: as many as there are registers for. */
#if defined(__AVX512F__)
#define BLOCK 4
#elif defined(__AVX2__)
#define BLOCK 2
#else
#define BLOCK 1
#endif

/* Write the products of `count` rows, a constant, with `wide` (d) to `out`. */
static inline __attribute__((always_inline)) void products(const float *rows, const double *wide, int64_t d,
                                                           const int count, double *out)
{
    Vec sums[BLOCK][PARTS];
    for (int row = 0; row < count; row++)
        for (int part = 0; part < PARTS; part++)
            sums[row][part] = (Vec){0.0};
    double lane[BLOCK][LANES];
    int64_t full = d / LANES * LANES;
    for (int64_t at = 0; at < full; at += LANES)
        for (int part = 0; part < PARTS; part++) {
            Vec other = load(wide + at + part * WIDTH);
            for (int row = 0; row < count; row++)
                sums[row][part] = add_exact_product(widen(rows + row * d + at + part * WIDTH), other, sums[row][part]);
        }
    for (int row = 0; row < count; row++) {
        for (int part = 0; part < PARTS; part++)
            store(lane[row] + part * WIDTH, sums[row][part]);
        for (int64_t i = full; i < d; i++)
            lane[row][i - full] += (double)rows[row * d + i] * wide[i];
        out[row] = fold(lane[row]);
    }
}

/* Write the cosines of `wide` (d) with each of `rows` (k, d) to `out` (k). Return the first largest. */
static int64_t all_cosines(const float *rows, const double *inverse_norms, const double *wide, int64_t k, int64_t d,
                           double *out)
{
    int64_t at = 0, best = 0;
    for (; at + BLOCK <= k; at += BLOCK)
        products(rows + at * d, wide, d, BLOCK, out + at);
    for (; at < k; at++)
        products(rows + at * d, wide, d, 1, out + at);
    for (int64_t i = 0; i < k; i++)
        out[i] *= inverse_norms[i];
    for (int64_t i = 1; i < k; i++)
        if (out[i] > out[best])
            best = i;
    return best;
}

/* Return the sum of the squares of `values` (n). */
static double squares(const float *values, int64_t n)
{
    return SUM(n, (double)values[i] * (double)values[i]);
}

/* Return whether the CPU has the instruction set with this name. */
static int cpu_supports(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("fma");
#endif
    return strcmp(name, "baseline") == 0;
}

#endif
