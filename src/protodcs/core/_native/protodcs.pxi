# Compiled form of `protodcs.core.protodcs`: one step over the arrays of a state, for the usual readings of the paper.

cdef extern from "protodcs.h" nogil:
    ctypedef struct Step:
        int64_t classes, width, size, opened_classes, gate_capacity, mixture_capacity
        const float *text
        const double *inverse_norms
        const int64_t *opened
        float *cache
        float *visual
        float *adapted
        float *text_alignment
        double *quality
        double *lengths
        double *text_sum
        double *visual_sum
        double *mixture
        double *gate_arrivals
        double *gate_ordered
        double *mixture_arrivals
        double *mixture_ordered
        int64_t *counts
        double cache_quantile, trust_quantile, cache_similarity, aleatoric_weight, epistemic_weight, alignment_weight
        double alignment_temperature, text_rate, visual_rate, step_epsilon, affinity_weight, affinity_sharpness
        double temperature
        int first_check, visual_prototypes, all_keys
        double *cosines
        double *after
        double *slopes
        double *affinity
        double *scores
        double *wide
        double *previous
        double *current
        double *gain
        double *loss
    ctypedef struct Found:
        int64_t nearest, slot, best
        int confident, trusted, placed
        double openness_first, quality, openness, aleatoric, epistemic, entropy, p_unknown
    void first_check(const Step *step, int64_t pushed, Found *found)
    int64_t choose_slot(const Step *step, int64_t k, double uncertainty)
    void place(const Step *step, const float *feature, int64_t k, int64_t slot, double uncertainty)
    void adapt_and_predict(const Step *step, const float *feature, Found *found)
    void verify(const Step *step, int64_t pushed, Found *found)


cdef class ProtoDCSStep:
    """One step of ProtoDCS over the arrays of a state.

    Attributes:
        cosines, after, slopes, affinity, scores: (K,) results of the latest step.
    """

    cdef Step step
    cdef Found found
    # Holds the arrays, so that they live as long as the step.
    cdef object arrays
    cdef readonly object cosines, after, slopes, affinity, scores

    def __init__(self, state, work):
        """Bind the arrays of a state; `work` (10, at least K and d) is work space."""
        cdef const float[:, ::1] text = state.text
        cdef const double[::1] inverse_norms = state.inverse_norms
        cdef const int64_t[::1] opened = state.opened
        cdef float[:, :, ::1] cache = state.cache
        cdef float[:, ::1] visual = state.visual, adapted = state.adapted, text_alignment = state.text_alignment
        cdef double[:, ::1] quality = state.quality, text_sum = state.text_sum, visual_sum = state.visual_sum
        cdef double[::1] lengths = state.lengths, mixture = state.mixture
        cdef double[::1] gate_arrivals = state.gate_window.arrivals, gate_ordered = state.gate_window.ordered
        cdef double[::1] mixture_arrivals = state.mixture_window.arrivals
        cdef double[::1] mixture_ordered = state.mixture_window.ordered
        cdef int64_t[::1] counts = state.counts
        cdef double[:, ::1] room = work
        cdef Step *step = &self.step
        self.arrays = (
            text, inverse_norms, opened, cache, visual, adapted, text_alignment, quality, text_sum, visual_sum, lengths,
            mixture, gate_arrivals, gate_ordered, mixture_arrivals, mixture_ordered, counts, room,
        )
        step.classes, step.width, step.size = text.shape[0], text.shape[1], cache.shape[1]
        step.opened_classes = opened.shape[0]
        check_length("work", room.shape[0], 10)
        if room.shape[1] < max(step.classes, step.width):
            raise ValueError("`work` is too small.")
        step.text, step.inverse_norms = &text[0, 0], &inverse_norms[0]
        step.opened = &opened[0] if step.opened_classes else NULL
        step.cache, step.visual, step.adapted = &cache[0, 0, 0], &visual[0, 0], &adapted[0, 0]
        step.text_alignment, step.quality, step.lengths = &text_alignment[0, 0], &quality[0, 0], &lengths[0]
        step.text_sum, step.visual_sum, step.mixture = &text_sum[0, 0], &visual_sum[0, 0], &mixture[0]
        step.gate_arrivals, step.gate_ordered = &gate_arrivals[0], &gate_ordered[0]
        step.mixture_arrivals, step.mixture_ordered = &mixture_arrivals[0], &mixture_ordered[0]
        step.gate_capacity, step.mixture_capacity = gate_arrivals.shape[0], mixture_arrivals.shape[0]
        step.counts = &counts[0]
        self.set_up(state.config)
        self.cosines, self.after, self.slopes, self.affinity, self.scores = work[:5, : step.classes]
        step.cosines, step.after, step.slopes = &room[0, 0], &room[1, 0], &room[2, 0]
        step.affinity, step.scores, step.wide = &room[3, 0], &room[4, 0], &room[5, 0]
        step.previous, step.current = &room[6, 0], &room[7, 0]
        step.gain, step.loss = &room[8, 0], &room[9, 0]

    cdef set_up(self, config):
        cdef Step *step = &self.step
        step.cache_quantile, step.trust_quantile = config.cache_quantile, config.trust_quantile
        step.cache_similarity = config.cache_similarity
        step.aleatoric_weight, step.epistemic_weight = config.aleatoric_weight, config.epistemic_weight
        step.alignment_weight, step.alignment_temperature = config.alignment_weight, config.alignment_temperature
        step.text_rate, step.visual_rate, step.step_epsilon = config.text_rate, config.visual_rate, config.step_epsilon
        step.affinity_weight, step.affinity_sharpness = config.affinity_weight, config.affinity_sharpness
        step.temperature = config.temperature
        step.first_check, step.visual_prototypes = config.first_check, config.visual_prototypes
        step.all_keys = config.alignment_keys == "all"

    def run(self, const float[::1] feature, int64_t pushed, bint offered, bint follows, int64_t judged):
        """Check a unit feature (d,), offer it to its queue, take the step, predict and verify.

        Args:
            feature: the sample.
            pushed: how many samples the window W_c took before.
            offered: whether a confident sample is offered to its queue.
            follows: whether a queue that is not empty may change here.
            judged: how many samples the window W_g took before; negative if the caller verifies.

        Returns:
            The first check (nearest class, S, confident, trusted, quality), the slot for the sample (-1 for none),
            whether it was put there, S', the best class, AU, EU, entropy and P(unknown). If there is a slot that the
            sample was not put into, everything from S' on is missing: `finish` computes it.
        """
        cdef int64_t i
        cdef Found *found = &self.found
        check_length("feature", feature.shape[0], self.step.width)
        with nogil:
            for i in range(self.step.width):
                self.step.wide[i] = feature[i]
            first_check(&self.step, pushed, found)
            found.slot, found.placed = -1, 0
            if offered and found.confident:
                found.slot = choose_slot(&self.step, found.nearest, found.quality)
            if found.slot >= 0 and follows and self.step.counts[found.nearest] > 0:
                place(&self.step, &feature[0], found.nearest, found.slot, found.quality)
                found.placed = 1
            if found.slot < 0 or found.placed:
                self.decide(&feature[0], judged)
        return self.result()

    def finish(self, const float[::1] feature, bint trusted, int64_t judged):
        """Take the step of a feature (d,) whose first check another step has made, predict and verify, see `run`."""
        cdef int64_t i
        check_length("feature", feature.shape[0], self.step.width)
        with nogil:
            for i in range(self.step.width):
                self.step.wide[i] = feature[i]
            self.found.trusted = trusted
            self.decide(&feature[0], judged)
        return self.result()

    cdef void decide(self, const float *feature, int64_t judged) noexcept nogil:
        adapt_and_predict(&self.step, feature, &self.found)
        if judged >= 0:
            verify(&self.step, judged, &self.found)

    cdef tuple result(self):
        cdef Found *found = &self.found
        return (
            found.nearest, found.openness_first, found.confident != 0, found.trusted != 0, found.quality,
            found.slot, found.placed != 0, found.openness, found.best, found.aleatoric, found.epistemic, found.entropy,
            found.p_unknown,
        )
