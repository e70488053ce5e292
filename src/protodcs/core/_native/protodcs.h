/* The step of ProtoDCS over the arrays of a state: what `core/protodcs` does for the usual readings of the paper.
 *
 * Each function has the name of what it computes there. Rows are compared in float64, moved in float32.
 */
#ifndef PROTODCS_STEP_H
#define PROTODCS_STEP_H

#include "numerics.h"

typedef struct {
    int64_t classes, width, size, opened_classes, gate_capacity, mixture_capacity;
    /* The state. */
    const float *text;
    const double *inverse_norms;
    const int64_t *opened;
    float *cache, *visual, *adapted, *text_alignment;
    double *quality, *lengths, *text_sum, *visual_sum, *mixture;
    double *gate_arrivals, *gate_ordered, *mixture_arrivals, *mixture_ordered;
    int64_t *counts;
    /* Settings. */
    double cache_quantile, trust_quantile, cache_similarity, aleatoric_weight, epistemic_weight, alignment_weight;
    double alignment_temperature, text_rate, visual_rate, step_epsilon, affinity_weight, affinity_sharpness, temperature;
    int first_check, visual_prototypes, all_keys;
    /* Results (K) and work space: `wide`, `previous`, `current` (d), the others (K). */
    double *cosines, *after, *slopes, *affinity, *scores;
    double *wide, *previous, *current, *gain, *loss;
} Step;

typedef struct {
    int64_t nearest, slot, best;
    int confident, trusted, placed;
    double openness_first, quality, openness, aleatoric, epistemic, entropy, p_unknown;
} Found;

/* Rows. */

/* Write the product of a row (d) with two directions (d) to `one` and `other`. */
static void two_products(const float *row, const double *first, const double *second, int64_t d, double *one,
                         double *other)
{
    Vec sums[2][PARTS];
    double lane[2][LANES];
    int64_t full = d / LANES * LANES;
    for (int part = 0; part < PARTS; part++)
        sums[0][part] = sums[1][part] = (Vec){0.0};
    for (int64_t at = 0; at < full; at += LANES)
        for (int part = 0; part < PARTS; part++) {
            Vec values = widen(row + at + part * WIDTH);
            sums[0][part] += values * load(first + at + part * WIDTH);
            sums[1][part] += values * load(second + at + part * WIDTH);
        }
    for (int part = 0; part < PARTS; part++) {
        store(lane[0] + part * WIDTH, sums[0][part]);
        store(lane[1] + part * WIDTH, sums[1][part]);
    }
    for (int64_t i = full; i < d; i++) {
        lane[0][i - full] += (double)row[i] * first[i];
        lane[1][i - full] += (double)row[i] * second[i];
    }
    *one = fold(lane[0]);
    *other = fold(lane[1]);
}

/* Write the products of the sample with the `rows` of the open classes to `out`. Runs of neighbours go together. */
static void opened_products(const Step *step, const float *rows, double *out)
{
    int64_t d = step->width, count = step->opened_classes, at = 0;
    const int64_t *opened = step->opened;
    while (at < count) {
        if (at + BLOCK <= count && opened[at + BLOCK - 1] - opened[at] == BLOCK - 1) {
            products(rows + opened[at] * d, step->wide, d, BLOCK, out + at);
            at += BLOCK;
        } else {
            products(rows + opened[at] * d, step->wide, d, 1, out + at);
            at += 1;
        }
    }
}

#define SINGLES (2 * WIDTH)
typedef float Single __attribute__((vector_size(4 * SINGLES)));
typedef int32_t Bits __attribute__((vector_size(4 * SINGLES)));

static inline Single load_single(const float *from)
{
    Single single;
    memcpy(&single, from, sizeof single);
    return single;
}

static inline Single load_gradient(const float *row, const float *feature, const float *alignment, float toward,
                                   float along)
{
    return toward * load_single(feature) - along * load_single(row) + load_single(alignment);
}

/* Return |x| + epsilon. */
static inline Single size_of(Single x, float epsilon)
{
    return (Single)((Bits)x & 0x7fffffff) + epsilon;
}

/* Return the cosine of the sample with a text prototype after its step, see `residual.text_gradient`.
 *
 * A division takes longer than all else together. So elements i and i + 16 share one: a/b = a d / (b d). */
static double moved_cosine(const float *row, const float *feature, const float *alignment, const double *wide, int64_t d,
                           float toward, float along, float rate, float epsilon)
{
    Vec dots[PARTS], squared[PARTS];
    double dot[LANES], square[LANES];
    float moved[2 * LANES] __attribute__((aligned(64)));
    int64_t full = d / (2 * LANES) * (2 * LANES);
    for (int part = 0; part < PARTS; part++)
        dots[part] = squared[part] = (Vec){0.0};
    for (int64_t at = 0; at < full; at += 2 * LANES) {
        for (int i = 0; i < LANES; i += SINGLES) {
            int64_t here = at + i, there = here + LANES;
            Single g = load_gradient(row + here, feature + here, alignment + here, toward, along);
            Single h = load_gradient(row + there, feature + there, alignment + there, toward, along);
            Single b = size_of(g, epsilon), c = size_of(h, epsilon), shared = rate / (b * c);
            g = load_single(row + here) - g * c * shared;
            h = load_single(row + there) - h * b * shared;
            memcpy(moved + i, &g, sizeof g);
            memcpy(moved + LANES + i, &h, sizeof h);
        }
        for (int half = 0; half < 2 * LANES; half += LANES)
            for (int part = 0; part < PARTS; part++) {
                Vec values = widen(moved + half + part * WIDTH);
                dots[part] = add_exact_product(values, load(wide + at + half + part * WIDTH), dots[part]);
                squared[part] = add_exact_product(values, values, squared[part]);
            }
    }
    for (int part = 0; part < PARTS; part++) {
        store(dot + part * WIDTH, dots[part]);
        store(square + part * WIDTH, squared[part]);
    }
    for (int64_t i = full; i < d; i++) {
        float g = toward * feature[i] - along * row[i] + alignment[i];
        float value = row[i] - rate * (g / (fabsf(g) + epsilon));
        dot[i % LANES] += (double)value * wide[i];
        square[i % LANES] += (double)value * (double)value;
    }
    return fold(dot) / sqrt(fold(square));
}

/* Cache. */

/* Write the direction (d) of the mean of a queue. Return its length. */
static double queue_mean(const float *queue, int64_t count, int64_t d, double *direction)
{
    for (int64_t i = 0; i < d; i++)
        direction[i] = queue[i];
    for (int64_t slot = 1; slot < count; slot++)
        for (int64_t i = 0; i < d; i++)
            direction[i] += queue[slot * d + i];
    for (int64_t i = 0; i < d; i++)
        direction[i] /= count;
    double length = sqrt(SUM(d, direction[i] * direction[i]));
    length = length > 1e-12 ? length : 1e-12;
    for (int64_t i = 0; i < d; i++)
        direction[i] /= length;
    return length;
}

/* Return the slot of queue k for the sample, -1 if it does not enter (Algorithm 2). */
static int64_t choose_slot(const Step *step, int64_t k, double uncertainty)
{
    int64_t d = step->width, count = step->counts[k], nearest = -1, worst = 0;
    const float *queue = step->cache + k * step->size * d;
    const double *quality = step->quality + k * step->size;
    double similarity = -INFINITY;
    for (int64_t slot = 0; slot < count; slot++) {
        double cosine;
        products(queue + slot * d, step->wide, d, 1, &cosine);
        if (cosine > similarity) {
            nearest = slot;
            similarity = cosine;
        }
        if (quality[slot] > quality[worst])
            worst = slot;
    }
    if (similarity > step->cache_similarity)
        return uncertainty < quality[nearest] ? nearest : -1;
    return count < step->size ? count : worst;
}

/* Alignment. */

static double alignment_scale(const Step *step)
{
    int64_t queries = step->opened_classes > 1 ? step->opened_classes : 1;
    return step->alignment_weight / (queries * step->alignment_temperature);
}

/* Turn logits (n) into probabilities. */
static void softmax_in_place(double *logits, int64_t n)
{
    double top = MAX(n, -INFINITY, logits[i]);
    for (int64_t i = 0; i < n; i++)
        logits[i] = own_exp(logits[i] - top);
    double total = SUM(n, logits[i]);
    for (int64_t i = 0; i < n; i++)
        logits[i] /= total;
}

/* Write P'_v of class k, see `alignment.visual_step`. */
static void visual_step(const Step *step, int64_t k, double *work)
{
    int64_t d = step->width;
    const double *sum = step->visual_sum + k * d, scale = alignment_scale(step), length = step->lengths[k];
    const float *visual = step->visual + k * d;
    float *out = step->adapted + k * d;
    double along = SUM(d, scale * sum[i] * visual[i]);
    for (int64_t i = 0; i < d; i++) {
        double g = (scale * sum[i] - along * visual[i]) / length;
        work[i] = length * visual[i] - step->visual_rate * (g / (fabs(g) + step->step_epsilon));
    }
    double norm = sqrt(SUM(d, work[i] * work[i]));
    for (int64_t i = 0; i < d; i++)
        out[i] = (float)(work[i] / norm);
}

/* Update the alignment after queue k has changed from `previous` to `current` (d), see `alignment.follow`. */
static void follow(const Step *step, int64_t k)
{
    int64_t d = step->width, keys = step->all_keys ? step->classes : step->opened_classes;
    const double *restrict current = step->current, *restrict previous = step->previous, scale = alignment_scale(step);
    double *gain = step->gain, *loss = step->loss, *restrict visual_sum = step->visual_sum + k * d;
    for (int64_t at = 0; at < keys; at++) {
        int64_t j = step->all_keys ? at : step->opened[at];
        two_products(step->text + j * d, current, previous, d, gain + at, loss + at);
        gain[at] *= step->inverse_norms[j] / step->alignment_temperature;
        loss[at] *= step->inverse_norms[j] / step->alignment_temperature;
    }
    softmax_in_place(gain, keys);
    softmax_in_place(loss, keys);
    memset(visual_sum, 0, d * sizeof *visual_sum);
    for (int64_t at = 0; at < keys; at++) {
        int64_t j = step->all_keys ? at : step->opened[at];
        const float *restrict text = step->text + j * d;
        float *restrict alignment = step->text_alignment + j * d;
        double *restrict sum = step->text_sum + j * d, inverse = step->inverse_norms[j], own = j == k ? 1.0 : 0.0;
        double added = gain[at] - own, dropped = loss[at] - own, weight = added * inverse;
        for (int64_t i = 0; i < d; i++) {
            sum[i] += added * current[i] - dropped * previous[i];
            visual_sum[i] += weight * text[i];
        }
        double along = SUM(d, sum[i] * text[i]) * inverse * inverse;
        for (int64_t i = 0; i < d; i++)
            alignment[i] = (float)(scale * inverse * (sum[i] - along * text[i]));
    }
}

/* Put the sample into a slot of the open queue k; alignment and P'_v follow. */
static void place(const Step *step, const float *feature, int64_t k, int64_t slot, double uncertainty)
{
    int64_t d = step->width, count = step->counts[k];
    float *queue = step->cache + k * step->size * d, *visual = step->visual + k * d;
    queue_mean(queue, count, d, step->previous);
    memcpy(queue + slot * d, feature, d * sizeof *feature);
    step->quality[k * step->size + slot] = uncertainty;
    step->counts[k] = slot < count ? count : slot + 1;
    step->lengths[k] = queue_mean(queue, step->counts[k], d, step->current);
    for (int64_t i = 0; i < d; i++)
        visual[i] = (float)step->current[i];
    follow(step, k);
    visual_step(step, k, step->previous);
}

/* The stages. */

static void first_check(const Step *step, int64_t pushed, Found *found)
{
    found->nearest =
        all_cosines(step->text, step->inverse_norms, step->wide, step->classes, step->width, step->cosines);
    double openness = found->openness_first = 1.0 - step->cosines[found->nearest];
    int64_t size = push(step->gate_arrivals, step->gate_ordered, step->gate_capacity, pushed, openness);
    found->trusted = !step->first_check || openness < quantile(step->gate_ordered, size, step->trust_quantile);
    found->confident = !step->first_check || openness < quantile(step->gate_ordered, size, step->cache_quantile);
    found->confident = found->confident && step->visual_prototypes;
    found->quality = 0.0;
    if (found->confident) {
        double both[2];
        uncertainty(step->cosines, step->classes, both);
        found->quality = both[0];
    }
}

/* Temporary prototypes, and the prediction with them. */
static void adapt_and_predict(const Step *step, const float *feature, Found *found)
{
    int64_t n = step->classes, d = step->width;
    memcpy(step->after, step->cosines, n * sizeof(double));
    memset(step->slopes, 0, n * sizeof(double));
    if (found->trusted && step->text_rate > 0.0) {
        uncertainty_gradient(step->cosines, n, step->aleatoric_weight, step->epistemic_weight, step->slopes);
        for (int64_t k = 0; k < n; k++) {
            double inverse = step->inverse_norms[k], toward = step->slopes[k] * inverse;
            double along = step->slopes[k] * step->cosines[k] * (inverse * inverse);
            step->after[k] = moved_cosine(step->text + k * d, feature, step->text_alignment + k * d, step->wide, d,
                                          (float)toward, (float)along, (float)step->text_rate,
                                          (float)step->step_epsilon);
        }
    }
    double top = MAX(n, -INFINITY, step->after[i]), total, both[2];
    found->openness = 1.0 - top;
    uncertainty(step->after, n, both);
    found->aleatoric = both[0];
    found->epistemic = both[1];
    memset(step->affinity, 0, n * sizeof(double));
    const float *visual = found->trusted ? step->adapted : step->visual;
    opened_products(step, visual, step->gain);
    for (int64_t at = 0; at < step->opened_classes; at++)
        step->gain[at] = step->affinity_weight * own_exp(-step->affinity_sharpness * (1.0 - step->gain[at]));
    for (int64_t at = 0; at < step->opened_classes; at++)
        step->affinity[step->opened[at]] = step->gain[at];
    for (int64_t k = 0; k < n; k++)
        step->gain[k] = step->after[k] / step->temperature;
    top /= step->temperature;
    for (int64_t k = 0; k < n; k++)
        step->scores[k] = own_exp(step->gain[k] - top);
    total = SUM(n, step->scores[i]);
    for (int64_t k = 0; k < n; k++)
        step->scores[k] /= total;
    found->entropy = at_least(own_log(total) - SUM(n, step->scores[i] * (step->gain[i] - top)), 0.0);
    found->best = 0;
    for (int64_t k = 0; k < n; k++) {
        step->scores[k] += step->affinity[k];
        if (step->scores[k] > step->scores[found->best])
            found->best = k;
    }
}

/* Return log(weight * normal density), up to a constant, for a component (weight, mean, variance). */
static double log_density(const double *component, double value)
{
    double distance = value - component[1];
    return own_log(component[0]) - 0.5 * own_log(component[2]) - 0.5 * distance * distance / component[2];
}

static void verify(const Step *step, int64_t pushed, Found *found)
{
    push(step->mixture_arrivals, step->mixture_ordered, step->mixture_capacity, pushed, found->openness);
    double odds = log_density(step->mixture + 3, found->openness) - log_density(step->mixture, found->openness);
    double power = own_exp(odds < 0.0 ? odds : -odds);
    found->p_unknown = (odds < 0.0 ? power : 1.0) / (1.0 + power);
}

#endif
