# Compiled form of `streamdcs.state.StreamState.step` over the same arrays.

from statistics import NormalDist

from protodcs.core.decision import REASONS


cdef struct Outcome:
    bint known
    int64_t best
    double p_unknown, openness, score
    double[2] spread
    int reason


cdef class StreamStep:
    """The step of one engine. It writes to the arrays of the engine's arena and keeps nothing of its own."""

    cdef const float[:, ::1] prototypes
    cdef const double[::1] inverse_norms
    cdef const double[:, ::1] likeness
    cdef double[:, ::1] moments, head_means, history, scales, bias_rows, bias_vectors
    cdef double[::1] weights, pool, rule, bias_sums, bias_logits, bias_beta, cosines, logits, wide
    cdef int64_t[::1] head_learned, progress, samples
    cdef bint has_bias, linear_head
    cdef double temperature, noise, stand_out_limit
    cdef Deviations normal
    cdef int64_t classes, dimension, held

    def __init__(self, prototypes, inverse_norms, likeness, arena, work, config):
        """Bind the step to an engine.

        Args:
            prototypes, inverse_norms: (K, d) float32 and (K,) float64.
            likeness: (K, K) float64, None if there is no class bias.
            arena: the state.
            work: cosines (K,), logits (K,) and a feature (d,), float64, of the latest sample.
            config: the settings.
        """
        gauss, target = NormalDist().inv_cdf, config.target_false_reject
        self.prototypes, self.inverse_norms = prototypes, inverse_norms
        self.classes, self.dimension = prototypes.shape
        self.cosines, self.logits, self.wide = work
        self.moments, self.weights = arena["baseline_moments"], arena["baseline_weights"]
        self.pool, self.history, self.scales = arena["baseline_pool"], arena["history"], arena["scales"]
        self.head_means, self.head_learned = arena["head_means"], arena["head_learned"]
        self.rule, self.progress, self.samples = arena["rule"], arena["progress"], arena["samples"]
        self.has_bias = likeness is not None
        if self.has_bias:
            self.likeness, self.bias_rows = likeness, arena["bias_rows"]
            self.bias_vectors, self.bias_sums = arena["bias_vectors"], arena["bias_sums"]
            self.bias_logits, self.bias_beta = arena["bias_logits"], arena["bias_beta"]
        self.temperature, self.linear_head, self.held = config.temperature, config.linear_head, config.history
        self.noise = sqrt(2.0 * own_log(max(self.classes, 2)))
        self.stand_out_limit = STAND_OUT_BASE + STAND_OUT_RISE * own_log(self.classes)
        self.normal.target = target
        self.normal.tail = gauss(target) / gauss(0.9)
        self.normal.hidden = gauss(0.05) / gauss(0.9)
        self.normal.skewed = gauss(target * (1.0 + SKEW) / (2.0 * SKEW))

    def step(self, const float[::1] feature, bint learns):
        """Decide on a unit feature (d,), and learn from it if it `learns`. Return the fields of `state.Outcome`."""
        cdef Outcome out
        cdef int failed
        check_length("feature", feature.shape[0], self.dimension)
        with nogil:
            failed = self.advance(&feature[0], learns, &out)
        if failed:
            raise MemoryError
        return (out.known, out.best, out.p_unknown, out.openness, out.score, out.spread[0], out.spread[1],
                None if out.reason == NO_REASON else REASONS[out.reason - 1])

    def run(self, const float[:, ::1] features, bint learns, columns, float[:, ::1] scores):
        """Step through unit features (N, d).

        Args:
            features, learns: see `step`.
            columns: known (N,) uint8, best and reason (N,) int64, and (N, 5) float64 for the other fields.
            scores: (N, K) for the logits; None to leave them out.
        """
        cdef unsigned char[::1] known
        cdef int64_t[::1] best, reasons
        cdef double[:, ::1] numbers
        cdef Outcome out
        cdef int64_t n, k
        cdef int failed = 0
        cdef bint wanted = scores is not None
        known, best, reasons, numbers = columns
        check_length("feature", features.shape[1], self.dimension)
        with nogil:
            for n in range(features.shape[0]):
                failed = self.advance(&features[n, 0], learns, &out)
                if failed:
                    break
                self.samples[SEQUENCE] += not learns
                known[n], best[n], reasons[n] = out.known, out.best, out.reason
                numbers[n, 0], numbers[n, 1], numbers[n, 2] = out.p_unknown, out.openness, out.score
                numbers[n, 3], numbers[n, 4] = out.spread[0], out.spread[1]
                if wanted:
                    for k in range(self.classes):
                        scores[n, k] = <float> self.logits[k]
        if failed:
            raise MemoryError

    def calibrate(self, const float[::1] feature):
        """Learn from a unit feature (d,) without a decision; see `StreamState.calibrate`."""
        cdef double[SIGNALS] signals
        cdef int failed
        check_length("feature", feature.shape[0], self.dimension)
        with nogil:
            self.compare(&feature[0])
            self.measure(signals)
            failed = self.learn(signals)
        if failed:
            raise MemoryError

    def refit_now(self):
        """Compute `Verification.refit`. Return 1 if memory is missing."""
        return self.refit()

    def correct_bias(self):
        """Compute the correction of the logits from the sums of a restored state, to the same bits as a step."""
        if self.has_bias:
            self.correct()

    cdef int advance(self, const float *feature, bint learns, Outcome *out) noexcept nogil:
        cdef double[SIGNALS] signals
        cdef int failed = 0
        cdef int64_t nearest = self.compare(feature)
        out.best = predict(&self.cosines[0], &self.bias_logits[0] if self.has_bias else NULL, self.classes,
                           self.temperature, &self.logits[0])
        self.measure(signals)
        self.decide(signals, out)
        if learns:
            if self.has_bias and out.p_unknown < BIAS_SURE:
                self.learn_bias(out.best)
            failed = self.learn(signals)
            self.samples[SEQUENCE] += 1
            self.samples[LEARNED] += 1
            self.samples[KNOWN_SAMPLES] += out.known
        out.openness = 1.0 - self.cosines[nearest]
        uncertainty(&self.cosines[0], self.classes, out.spread)
        return failed

    # The decision.

    cdef int64_t compare(self, const float *feature) noexcept nogil:
        """Compute the cosines of a feature. Return the class with the first largest one."""
        cdef int64_t i
        for i in range(self.dimension):
            self.wide[i] = feature[i]
        return all_cosines(&self.prototypes[0, 0], &self.inverse_norms[0], &self.wide[0], self.classes, self.dimension,
                           &self.cosines[0])

    cdef void measure(self, double *signals) noexcept nogil:
        cdef const double *cosines = &self.cosines[0]
        cdef int64_t k = self.classes
        cdef double average = sum_of(cosines, k) / k
        cdef double deviation = sqrt(squares_around(cosines, k, average) / k)
        signals[LARGEST] = largest_of(cosines, k)
        signals[CENTRED] = signals[LARGEST] - average
        signals[RAW_Z] = signals[CENTRED_Z] = signals[HEAD] = 0.0
        if self.progress[SEEN]:
            signals[RAW_Z] = largest_z(cosines, k, 0.0, &self.moments[0, 0], &self.weights[0], BASELINE_PRIOR,
                                       self.pool[POOL_MEAN], self.pool[POOL_VARIANCE])
            signals[CENTRED_Z] = largest_z(cosines, k, average, &self.moments[2, 0], &self.weights[0], BASELINE_PRIOR,
                                           0.0, self.pool[POOL_CENTRED_VARIANCE])
        if self.head_learned[UNKNOWN] and self.head_learned[KNOWN] >= HEAD_FIRST:
            signals[HEAD] = project(&self.wide[0], &self.head_means[UNKNOWN, 0], &self.head_means[KNOWN, 0],
                                    self.dimension)
        signals[STAND_OUT] = signals[CENTRED] / at_least(self.noise * deviation, SMALL)

    cdef void decide(self, const double *signals, Outcome *out) noexcept nogil:
        cdef double odds
        cdef int64_t seen = self.progress[SEEN]
        out.reason = REASON_FEW if seen < SHIFT_WINDOW else NO_REASON
        if seen < FIRST_REFIT:
            out.score = 0.0 if seen < 3 else self.text_score(signals[RAW_Z], signals[CENTRED_Z])
            out.known = self.classes < LEAST_CLASSES or signals[STAND_OUT] >= FIRST_CUT
            out.p_unknown = 0.0 if out.known else 0.5
            return
        out.score = self.text_score(signals[RAW_Z], signals[CENTRED_Z])
        if seen >= self.progress[HEAD_FROM]:
            out.score = self.with_head(out.score, signals[HEAD])
        odds = self.rule[SLOPE] * (self.rule[THRESHOLD] - out.score)
        out.p_unknown = 1.0 / (1.0 + own_exp(smaller(at_least(-odds, -50.0), 50.0)))
        out.known = out.p_unknown < 0.5
        if self.rule[SHIFTED] != 0.0:
            out.reason = REASON_SHIFT

    cdef double text_score(self, double raw, double centred) noexcept nogil:
        raw = (raw - self.scales[0, RAW_Z]) / self.scales[1, RAW_Z]
        centred = (centred - self.scales[0, CENTRED_Z]) / self.scales[1, CENTRED_Z]
        return (1.0 - CENTRED_WEIGHT) * raw + CENTRED_WEIGHT * centred

    cdef double cosine_score(self, double largest, double centred) noexcept nogil:
        largest = (largest - self.scales[0, LARGEST]) / self.scales[1, LARGEST]
        return largest + (centred - self.scales[0, CENTRED]) / self.scales[1, CENTRED]

    cdef double with_head(self, double text, double projection) noexcept nogil:
        cdef double side
        if self.rule[HEAD_WEIGHT] <= 0.0:
            return text
        side = (projection - self.rule[HEAD_MIDDLE]) / self.rule[HEAD_GAP]
        return text + self.rule[HEAD_WEIGHT] * (side if side < 0.0 else self.rule[HEAD_KNOWN_SIDE] * side)

    cdef int learn(self, const double *signals) noexcept nogil:
        """Learn from the latest sample. Return 1 if memory for a refit is missing."""
        cdef double weight = REST_WEIGHT, score
        cdef int64_t seen = self.progress[SEEN], i
        if seen >= FIRST_REFIT:
            weight = at_least(weight, MOST_REST_WEIGHT * self.rule[EVIDENCE] * smaller(1.0, 2.0 * self.rule[SHARE]))
            score = self.cosine_score(signals[LARGEST], signals[CENTRED])
            if score <= self.rule[LOOKS_UNKNOWN]:
                weight = 1.0
                self.learn_head(UNKNOWN)
            elif score > self.rule[LOOKS_KNOWN]:
                self.learn_head(KNOWN)
        if self.progress[PAUSED] == 0 or self.progress[PAUSED] == LONGEST_BURST:
            self.learn_baselines(weight, seen + 1)
        for i in range(SIGNALS):
            self.history[seen % self.history.shape[0], i] = signals[i]
        seen += 1
        self.progress[SEEN] = seen
        if self.head_learned[UNKNOWN] < HEAD_FIRST:
            self.progress[HEAD_FROM] = seen
        if seen < 3 or (seen > FIRST_REFIT and seen % REFIT_PERIOD):
            return 0
        return self.refit()

    cdef void learn_head(self, int side) noexcept nogil:
        self.head_learned[side] += 1
        move_mean(&self.head_means[side, 0], &self.wide[0], self.dimension,
                  smaller(<double> self.head_learned[side], HORIZONS[side]))

    cdef void learn_baselines(self, double weight, int64_t count) noexcept nogil:
        cdef const double *cosines = &self.cosines[0]
        cdef int64_t k = self.classes
        cdef double average = sum_of(cosines, k) / k, rate = 1.0 / smaller(<double> count, BASELINE_HORIZON)
        learn_baseline(cosines, k, average, weight, BASELINE_HORIZON, &self.weights[0], &self.moments[0, 0])
        self.pool[POOL_MEAN] += rate * (average - self.pool[POOL_MEAN])
        self.pool[POOL_VARIANCE] += rate * (
            squares_around(cosines, k, self.pool[POOL_MEAN]) / k - self.pool[POOL_VARIANCE]
        )
        self.pool[POOL_CENTRED_VARIANCE] += rate * (
            squares_around(cosines, k, average) / k - self.pool[POOL_CENTRED_VARIANCE]
        )

    # Class bias.

    cdef void learn_bias(self, int64_t best) noexcept nogil:
        cdef double sure = confidence(&self.logits[0], self.classes, best)
        cdef double share, mean, rate
        cdef int64_t k
        self.bias_sums[BIAS_SEEN] = smaller(self.bias_sums[BIAS_SEEN] + 1.0, BIAS_CONFIDENCE_HORIZON)
        self.bias_sums[CONFIDENCE] += (sure - self.bias_sums[CONFIDENCE]) / self.bias_sums[BIAS_SEEN]
        share = smaller(1.0, sure / self.bias_sums[CONFIDENCE])
        self.count_row(best, -1.0)
        mean = (sum_of(&self.cosines[0], self.classes) - self.cosines[best]) / (self.classes - 1)
        self.bias_vectors[COUNT, best] = smaller(self.bias_vectors[COUNT, best] + share, BIAS_HORIZON)
        rate = share / self.bias_vectors[COUNT, best]
        for k in range(self.classes):
            self.bias_rows[best, k] += rate * (self.cosines[k] - mean - self.bias_rows[best, k])
        self.bias_rows[best, best] = 0.0
        self.describe_row(best)
        self.count_row(best, 1.0)
        self.bias_sums[SINCE] += 1.0
        if self.bias_sums[SINCE] >= BIAS_REBUILD:
            self.rebuild_bias()
        self.correct()

    cdef void describe_row(self, int64_t row) noexcept nogil:
        cdef const double *values = &self.bias_rows[row, 0]
        self.bias_vectors[LIKE, row] = product_of(values, &self.likeness[row, 0], self.classes)
        self.bias_vectors[SELF, row] = product_of(values, values, self.classes)
        self.bias_vectors[WEIGHT, row] = self.bias_vectors[COUNT, row] / (self.bias_vectors[COUNT, row] + BIAS_PRIOR)

    cdef void count_row(self, int64_t row, double sign) noexcept nogil:
        cdef const double *like = &self.likeness[row, 0]
        cdef double weight = sign * self.bias_vectors[WEIGHT, row]
        add_scaled(&self.bias_vectors[RESPONSES, 0], &self.bias_rows[row, 0], self.classes, weight)
        add_scaled(&self.bias_vectors[LIKENESS, 0], like, self.classes, weight)
        self.bias_sums[XY] += weight * self.bias_vectors[LIKE, row]
        self.bias_sums[XX] += weight * product_of(like, like, self.classes)
        self.bias_sums[YY] += weight * self.bias_vectors[SELF, row]
        self.bias_sums[W] += weight
        self.bias_sums[WW] += weight * self.bias_vectors[WEIGHT, row]

    cdef void rebuild_bias(self) noexcept nogil:
        cdef int64_t k
        for k in range(WW + 1):
            self.bias_sums[k] = 0.0
        self.bias_sums[SINCE] = 0.0
        for k in range(self.classes):
            self.bias_vectors[RESPONSES, k] = self.bias_vectors[LIKENESS, k] = 0.0
        for k in range(self.classes):
            if self.bias_vectors[COUNT, k] != 0.0:
                self.describe_row(k)
                self.count_row(k, 1.0)

    cdef void correct(self) noexcept nogil:
        cdef int64_t classes = self.classes, k
        cdef double beta = 0.0, known = 0.0, misfit, scale
        cdef BiasSums found
        if self.bias_sums[XX] > BIAS_MIN_LIKENESS * self.bias_sums[W] * (classes - 1):
            beta = at_least(self.bias_sums[XY] / self.bias_sums[XX], 0.0)
        found = displacements(
            &self.bias_vectors[WEIGHT, 0], &self.bias_vectors[RESPONSES, 0], &self.bias_vectors[LIKENESS, 0], classes,
            beta, self.bias_sums[W], self.bias_sums[WW], &self.bias_logits[0],
        )
        if found.observed > 1.0:
            misfit = at_least(self.bias_sums[YY] - beta * self.bias_sums[XY] - found.explained, 0.0)
            misfit *= found.observed / (found.observed - 1.0) / at_least(found.others, 1e-9)
            known = 1.0 - misfit * found.error / classes / (found.variance / (classes - 1) + 1e-12)
        scale = -at_least(known, 0.0) * smaller(BIAS_MAX, at_least(beta * beta - BIAS_FLOOR, 0.0)) / self.temperature
        for k in range(classes):
            self.bias_logits[k] *= scale
        self.bias_beta[0] = beta

    cdef int refit(self) noexcept nogil:
        """Measure scales and, from the first refit on, the rule. Return 1 if memory is missing."""
        cdef int64_t seen = self.progress[SEEN], rows = self.history.shape[0], first = 1, n, i, row, signal
        cdef double *room, *columns
        cdef Work work
        if seen >= FIRST_REFIT:
            first = max(min(LEFT_OUT, seen - LEFT_OUT), seen - self.held)
        n = seen - first
        room = <double *> malloc((SIGNALS + 10) * n * sizeof(double))
        if room == NULL:
            return 1
        columns, work.cosine, work.text = room, room + SIGNALS * n, room + (SIGNALS + 1) * n
        work.scores, work.ordered, work.spare = work.text + n, work.text + 2 * n, work.text + 3 * n
        work.unknown, work.other = work.text + 4 * n, work.text + 5 * n
        work.low, work.high, work.all_ordered = work.text + 6 * n, work.text + 7 * n, work.text + 8 * n
        row = first % rows
        for i in range(n):
            for signal in range(SIGNALS):
                columns[signal * n + i] = self.history[row, signal]
            row = row + 1 if row + 1 < rows else 0
        self.measure_scales(columns, n)
        if seen >= FIRST_REFIT:
            self.fit(columns, first, n, &work)
        free(room)
        return 0

    cdef void fit(self, const double *columns, int64_t first, int64_t n, Work *work) noexcept nogil:
        """Fit the rule, and react to a drop of the scores. See `fit_rule` for the arguments."""
        cdef Drop drop
        cdef bint noticed_before = self.rule[SHIFTED] != 0.0 and not self.progress[PAUSED]
        drop.shift = drop.burst = False
        self.fit_rule(columns, first, n, work)
        if self.rule[SHIFTED] != 0.0 and not self.shifted_lately():
            drop = kind_of_drop(columns + STAND_OUT * n, n, self.stand_out_limit, noticed_before)
        if drop.shift:
            self.progress[WINDOW_FROM] = self.progress[SEEN] - SHIFT_WINDOW
            self.fit_rule(columns, first, n, work)
        if not drop.burst:
            self.progress[PAUSED] = 0
        elif self.progress[PAUSED] < LONGEST_BURST:
            self.leave_out()

    cdef void leave_out(self) noexcept nogil:
        cdef int64_t seen = self.progress[SEEN], rows = self.history.shape[0], from_head = self.progress[HEAD_FROM]
        cdef int64_t i, before, latest, signal
        for i in range(REFIT_PERIOD):
            before, latest = (seen - 2 * REFIT_PERIOD + i) % rows, (seen - REFIT_PERIOD + i) % rows
            for signal in range(SIGNALS):
                self.history[before, signal] = self.history[latest, signal]
                self.history[latest, signal] = 0.0
        self.progress[SEEN] = seen - REFIT_PERIOD
        self.progress[HEAD_FROM] = min(from_head, max(seen - 2 * REFIT_PERIOD, from_head - REFIT_PERIOD))
        self.progress[PAUSED] += REFIT_PERIOD
        self.progress[OMITTED] += REFIT_PERIOD

    cdef bint shifted_lately(self) noexcept nogil:
        return self.progress[WINDOW_FROM] > 0 and self.progress[SEEN] - self.progress[WINDOW_FROM] <= SHIFT_WARNING

    cdef void measure_scales(self, const double *columns, int64_t n) noexcept nogil:
        cdef double mean, variance
        cdef double[4] prior
        cdef int64_t signal
        prior[0], prior[1] = self.pool[POOL_VARIANCE], self.pool[POOL_CENTRED_VARIANCE]
        prior[2] = prior[3] = Z_VARIANCE
        for signal in range(4):
            mean = sum_of(columns + signal * n, n) / n
            variance = squares_around(columns + signal * n, n, mean) + SCALE_PRIOR * prior[signal]
            self.scales[0, signal] = mean
            self.scales[1, signal] = at_least(sqrt(variance / (n + SCALE_PRIOR)), SMALL)

    cdef void fit_rule(self, const double *columns, int64_t first, int64_t n, Work *work) noexcept nogil:
        """Fit the rule to `columns` (6, n), the signals of the samples from number `first` on."""
        cdef const double *projections = columns + HEAD * n
        cdef const double *stand_out
        cdef int64_t since = self.progress[SEEN] - self.progress[WINDOW_FROM], i, late
        cdef int64_t window = min(min(WINDOW, since), n)
        cdef int64_t headed = min(max(self.progress[HEAD_FROM] - first, 0), n)
        cdef Groups groups
        cdef HeadWeight head
        cdef double tail
        add_scaled_signals(columns, columns + n, n, &self.scales[0, 0], &self.scales[1, 0], 1.0, 1.0, work.cosine)
        add_scaled_signals(columns + RAW_Z * n, columns + CENTRED_Z * n, n, &self.scales[0, RAW_Z],
                           &self.scales[1, RAW_Z], 1.0 - CENTRED_WEIGHT, CENTRED_WEIGHT, work.text)
        groups = find_groups(work.cosine + n - window, columns + (STAND_OUT + 1) * n - window, window,
                             self.stand_out_limit, &self.normal, work)
        sort(work.cosine, work.all_ordered, work.spare, n)
        tail = smaller(MOST_SHARE, at_least(LEAST_SHARE, groups.share))
        self.rule[LOOKS_UNKNOWN] = quantile(work.all_ordered, n, tail)
        self.rule[LOOKS_KNOWN] = quantile(work.all_ordered, n, tail + 0.5 * (1.0 - tail))
        head.weight, head.middle, head.gap, head.known_side = 0.0, 0.0, 1.0, 0.0
        if self.linear_head:
            if headed:
                sort(work.cosine + headed, work.all_ordered, work.spare, n - headed)
            head = weigh_head(projections + headed, work.cosine + headed, work.text + headed, n - headed, &groups, work)
        self.rule[HEAD_WEIGHT], self.rule[HEAD_MIDDLE] = head.weight, head.middle
        self.rule[HEAD_GAP], self.rule[HEAD_KNOWN_SIDE] = head.gap, head.known_side
        for i in range(n):
            work.scores[i] = work.text[i] if i < headed else self.with_head(work.text[i], projections[i])
        late = max(LEAST_WINDOW, min(WINDOW, since // 2))
        late = min(late, n)
        stand_out = columns + (STAND_OUT + 1) * n - late if self.classes >= LEAST_CLASSES else NULL
        fit_threshold(work.scores + n - late, work.text + n - late, stand_out, late, &groups, window,
                      self.stand_out_limit, &self.normal, work, &self.rule[THRESHOLD])
        self.rule[SHARE], self.rule[EVIDENCE] = groups.share, groups.evidence
        self.rule[SEPARATION] = separation(&groups.mixture) if groups.found else 0.0
        self.rule[SHIFTED] = lower_than_before(
            work.scores + n - window, window, self.rule[THRESHOLD], work
        ) or self.shifted_lately()
