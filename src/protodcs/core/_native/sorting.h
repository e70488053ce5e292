/* Sorting, and what is read off sorted values. */
#ifndef PROTODCS_SORTING_H
#define PROTODCS_SORTING_H

#include <stdint.h>
#include <string.h>

#define DIGIT 8
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
    /* The upper 32 bits nearly always decide; insertion moves the rest by few places, or everything is sorted again. */
    sort_digits(keys, (uint64_t *)spare, n, 32);
    int64_t moves = 0;
    for (int64_t i = 1; i < n && moves <= 4 * n; i++) {
        uint64_t key = keys[i];
        int64_t place = i;
        for (; place > 0 && keys[place - 1] > key; place--, moves++)
            keys[place] = keys[place - 1];
        keys[place] = key;
    }
    if (moves > 4 * n)
        sort_digits(keys, (uint64_t *)spare, n, 0);
    for (int64_t i = 0; i < n; i++)
        keys[i] ^= (uint64_t)(~(int64_t)keys[i] >> 63) | 0x8000000000000000ull;
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
