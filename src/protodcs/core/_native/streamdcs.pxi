# Compiled form of `streamdcs.state.StreamState.step` over the same arrays.

from protodcs.core.decision import REASONS


cdef struct StepResult:
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
    cdef const double[::1] names
    cdef double[:, ::1] moments, head_means, history, bias_rows, bias_vectors
    cdef double[::1] weights, pool, rule, bias_sums, bias_logits, bias_beta, cosines, logits, scores, wide
    cdef int64_t[::1] head_learned, progress, samples
    cdef bint has_bias, has_names, linear_head
    cdef double temperature, target, many, class_part, names_part, unit, noise, width
    cdef int64_t classes, dimension

    def __init__(self, prototypes, inverse_norms, likeness, centring, arena, work, config):
        """Bind the step to an engine.

        Args:
            prototypes, inverse_norms: (K, d) float32 and (K,) float64.
            likeness: (K, K) float64, None if there is no class bias.
            centring: a `Centring`.
            arena: the state.
            work: cosines, logits and scores (K,) and a feature (d,), float64, of the latest sample.
            config: the settings.
        """
        self.prototypes, self.inverse_norms = prototypes, inverse_norms
        self.classes, self.dimension = prototypes.shape
        self.cosines, self.logits, self.scores, self.wide = work
        self.moments, self.weights = arena["baseline_moments"], arena["baseline_weights"]
        self.pool, self.history = arena["baseline_pool"], arena["history"]
        self.head_means, self.head_learned = arena["head_means"], arena["head_learned"]
        self.rule, self.progress, self.samples = arena["rule"], arena["progress"], arena["samples"]
        self.has_bias = likeness is not None
        if self.has_bias:
            self.likeness, self.bias_rows = likeness, arena["bias_rows"]
            self.bias_vectors, self.bias_sums = arena["bias_vectors"], arena["bias_sums"]
            self.bias_logits, self.bias_beta = arena["bias_logits"], arena["bias_beta"]
        self.has_names = centring.names is not None
        if self.has_names:
            self.names = centring.names
        self.many, self.class_part, self.names_part = centring.many, centring.class_part, centring.names_part
        self.unit, self.noise, self.width = centring.unit, centring.noise, centring.width
        self.temperature, self.linear_head = config.temperature, config.linear_head
        self.target = config.target_false_reject

    def step(self, const float[::1] feature, bint learns):
        """Decide on a unit feature (d,), and learn from it if it `learns`. Return the fields of `state.StepResult`."""
        cdef StepResult out
        cdef int failed
        check_length("feature", feature.shape[0], self.dimension)
        with nogil:
            failed = self.advance(&feature[0], learns, &out)
        if failed:
            raise MemoryError
        return (out.known, out.best, out.p_unknown, out.openness, out.score, out.spread[0], out.spread[1],
                None if out.reason == NO_REASON else REASONS[out.reason - 1])

    def run(self, const float[:, ::1] features, bint learns, columns, float[:, ::1] scores, double[:, ::1] cosines):
        """Step through unit features (N, d).

        Args:
            features, learns: see `step`.
            columns: known (N,) uint8, best and reason (N,) int64, and (5, N) float64 for the other fields.
            scores, cosines: (N, K) for the logits, and for the cosines; None to leave them out.
        """
        cdef unsigned char[::1] known
        cdef int64_t[::1] best, reasons
        cdef double[:, ::1] numbers
        cdef StepResult out
        cdef int64_t n, k
        cdef int failed = 0
        cdef bint with_scores = scores is not None, with_cosines = cosines is not None
        known, best, reasons, numbers = columns
        check_length("feature", features.shape[1], self.dimension)
        with nogil:
            for n in range(features.shape[0]):
                failed = self.advance(&features[n, 0], learns, &out)
                if failed:
                    break
                self.samples[SEQUENCE] += not learns
                known[n], best[n], reasons[n] = out.known, out.best, out.reason
                numbers[0, n], numbers[1, n], numbers[2, n] = out.p_unknown, out.openness, out.score
                numbers[3, n], numbers[4, n] = out.spread[0], out.spread[1]
                if with_scores:
                    for k in range(self.classes):
                        scores[n, k] = <float> self.logits[k]
                if with_cosines:
                    for k in range(self.classes):
                        cosines[n, k] = self.cosines[k]
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

    cdef int advance(self, const float *feature, bint learns, StepResult *out) noexcept nogil:
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
        cdef double average = sum_of(cosines, k) / k, with_names = average, lead = 0.0
        if self.has_names:
            with_names = product_of(&self.wide[0], &self.names[0], self.dimension)
        if self.noise != 0.0:
            lead = (largest_of(cosines, k) - with_names) / (self.unit * self.noise)
        centred(cosines, k, self.class_part * average + self.names_part * with_names, self.unit, &self.scores[0])
        signals[BASE] = largest_of(&self.scores[0], k)
        signals[TEXT] = text_score(&self.scores[0], k, &self.moments[0, 0], &self.weights[0], BASELINE_PRIOR, self.many,
                                   self.pool[POOL_VARIANCE])
        signals[HEAD] = 0.0
        if self.head_learned[UNKNOWN] and self.head_learned[KNOWN] >= HEAD_FIRST:
            signals[HEAD] = project(&self.wide[0], &self.head_means[UNKNOWN, 0], &self.head_means[KNOWN, 0],
                                    self.dimension)
        signals[LEAD] = lead

    cdef void decide(self, const double *signals, StepResult *out) noexcept nogil:
        cdef double odds
        cdef int64_t seen = self.progress[SEEN]
        cdef HeadWeight head = self.head_weight()
        out.reason = REASON_FEW if seen < SHIFT_WINDOW else NO_REASON
        out.score = signals[TEXT]
        if seen < FIRST_REFIT:
            out.known = self.noise == 0.0 or signals[LEAD] >= FIRST_LEAD
            out.p_unknown = 0.0 if out.known else 0.5
            return
        if seen >= self.progress[HEAD_FROM]:
            out.score += head.weight * side_of(&head, signals[HEAD])
        odds = self.rule[SLOPE] * (self.rule[THRESHOLD] - out.score)
        out.p_unknown = 1.0 / (1.0 + own_exp(smaller(at_least(-odds, -50.0), 50.0)))
        out.known = out.p_unknown < 0.5
        if self.rule[SHIFTED] != 0.0:
            out.reason = REASON_SHIFT

    cdef HeadWeight head_weight(self) noexcept nogil:
        cdef HeadWeight head
        head.weight, head.trust, head.middle = self.rule[HEAD_WEIGHT], self.rule[HEAD_TRUST], self.rule[HEAD_MIDDLE]
        head.gap, head.known_side = self.rule[HEAD_GAP], self.rule[HEAD_KNOWN_SIDE]
        return head

    cdef int learn(self, const double *signals) noexcept nogil:
        """Learn from the latest sample, whose class scores `measure` left behind. Return 1 if memory is missing."""
        cdef double weight = REST_WEIGHT
        cdef int64_t seen = self.progress[SEEN], i
        if seen >= FIRST_REFIT:
            weight = at_least(weight, self.rule[SHARE] * self.rule[SHARE])
            if signals[BASE] <= self.rule[LOOKS_UNKNOWN]:
                weight = 1.0
                self.learn_head(UNKNOWN)
            elif signals[BASE] > self.rule[LOOKS_KNOWN]:
                self.learn_head(KNOWN)
        self.learn_baselines(weight, seen + 1)
        for i in range(SIGNALS):
            self.history[seen % self.history.shape[0], i] = signals[i]
        seen += 1
        self.progress[SEEN] = seen
        if self.head_learned[UNKNOWN] < HEAD_FIRST:
            self.progress[HEAD_FROM] = seen
        if seen < FIRST_REFIT or (seen > FIRST_REFIT and seen % REFIT_PERIOD):
            return 0
        return self.refit()

    cdef void learn_head(self, int side) noexcept nogil:
        self.head_learned[side] += 1
        move_mean(&self.head_means[side, 0], &self.wide[0], self.dimension,
                  smaller(<double> self.head_learned[side], HORIZONS[side]))

    cdef void learn_baselines(self, double weight, int64_t count) noexcept nogil:
        cdef const double *scores = &self.scores[0]
        cdef int64_t k = self.classes
        cdef double rate = 1.0 / smaller(<double> count, BASELINE_HORIZON)
        learn_baseline(scores, k, weight, BASELINE_HORIZON, &self.weights[0], &self.moments[0, 0])
        self.pool[POOL_MEAN] += rate * (sum_of(scores, k) / k - self.pool[POOL_MEAN])
        self.pool[POOL_VARIANCE] += rate * (
            squares_around(scores, k, self.pool[POOL_MEAN]) / k - self.pool[POOL_VARIANCE]
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
        """Fit the rule. Return 1 if memory is missing."""
        cdef int64_t seen = self.progress[SEEN], rows = self.history.shape[0], n, i, row, signal
        cdef double *room
        cdef Work work
        n = min(seen, rows)
        room = <double *> malloc((SIGNALS + 8) * n * sizeof(double))
        if room == NULL:
            return 1
        work.scores, work.known = room + SIGNALS * n, room + (SIGNALS + 1) * n
        work.ordered, work.spare, work.unknown = work.known + n, work.known + 2 * n, work.known + 3 * n
        work.other, work.low, work.high = work.known + 4 * n, work.known + 5 * n, work.known + 6 * n
        row = (seen - n) % rows
        for i in range(n):
            for signal in range(SIGNALS):
                room[signal * n + i] = self.history[row, signal]
            row = row + 1 if row + 1 < rows else 0
        self.fit(room, n, &work)
        free(room)
        return 0

    cdef void fit(self, const double *columns, int64_t n, Work *work) noexcept nogil:
        """Fit the rule to `columns` (4, n), the signals of recent samples, and react to a shift."""
        cdef bint dropped_before = self.rule[SHIFTED] != 0.0
        self.fit_rule(columns, n, work)
        if dropped_before and self.rule[SHIFTED] != 0.0 and not self.shifted_lately():
            if sum_of(columns + (LEAD + 1) * n - SHIFT_WINDOW, SHIFT_WINDOW) / SHIFT_WINDOW > ALONE_MOST:
                self.progress[WINDOW_FROM] = self.progress[SEEN] - SHIFT_WINDOW
                self.fit_rule(columns, n, work)

    cdef bint shifted_lately(self) noexcept nogil:
        return self.progress[WINDOW_FROM] > 0 and self.progress[SEEN] - self.progress[WINDOW_FROM] <= SHIFT_WARNING

    cdef void fit_rule(self, const double *columns, int64_t n, Work *work) noexcept nogil:
        cdef int64_t seen = self.progress[SEEN], i
        cdef int64_t size = min(min(WINDOW, seen - self.progress[WINDOW_FROM]), n)
        cdef int64_t headed = min(max(self.progress[HEAD_FROM] - (seen - n), 0), n)
        cdef const double *text = columns + (TEXT + 1) * n - size
        cdef const double *projections = columns + (HEAD + 1) * n - size
        cdef const double *leads = columns + (LEAD + 1) * n - size
        cdef Groups groups
        cdef HeadWeight head
        cdef double tail, mean, side, odds
        cdef Widths widths
        mean = sum_of(text, size) / size
        widths.known.weight, widths.unknown.weight = WIDTH_PRIOR, 0.0
        widths.known.expected = at_least(2.0 / (1.0 + SKEW) * sqrt(squares_around(text, size, mean) / size), SMALL)
        if self.noise != 0.0:
            widths.known.expected = smaller(self.width, widths.known.expected)
            widths.unknown.weight = WIDTH_PRIOR
        widths.unknown.expected = widths.known.expected / SKEW
        groups = find_groups(text, leads, self.has_names, size, widths, work)
        tail = at_least(TAIL_LEAST, TAIL_SHARE * groups.share)
        sort(columns, work.ordered, work.spare, n)
        self.rule[LOOKS_UNKNOWN] = quantile(work.ordered, n, tail)
        self.rule[LOOKS_KNOWN] = quantile(work.ordered, n, tail + 0.5 * (1.0 - tail))
        head.weight, head.trust, head.middle, head.gap, head.known_side = 0.0, 0.0, 0.0, 1.0, 0.0
        if self.linear_head and headed < n:
            if headed:
                sort(columns + headed, work.ordered, work.spare, n - headed)
            head = weigh_head(columns + HEAD * n + headed, columns + headed, columns + TEXT * n + headed, n - headed,
                              tail, self.many, &groups, work)
        self.rule[HEAD_WEIGHT], self.rule[HEAD_TRUST], self.rule[HEAD_MIDDLE] = head.weight, head.trust, head.middle
        self.rule[HEAD_GAP], self.rule[HEAD_KNOWN_SIDE] = head.gap, head.known_side
        for i in range(size):
            side = side_of(&head, projections[i]) if n - size + i >= headed else 0.0
            work.scores[i], work.known[i] = text[i] + head.weight * side, 1.0
            if groups.found:
                odds = (1.0 - work.unknown[i]) / at_least(work.unknown[i], SMALL)
                odds *= own_exp(HEAD_ODDS * head.trust * side)
                work.known[i] -= groups.evidence * (1.0 - odds / (1.0 + odds))
        fit_threshold(work.scores, work.known, leads if self.has_names else NULL, size, self.target, work,
                      &self.rule[THRESHOLD])
        self.rule[SHARE], self.rule[EVIDENCE] = groups.share, groups.evidence
        self.rule[SEPARATION] = separation(&groups.mixture) if groups.found else 0.0
        self.rule[SHIFTED] = lower_than_before(
            work.scores, size, self.rule[THRESHOLD], work
        ) or self.shifted_lately()
