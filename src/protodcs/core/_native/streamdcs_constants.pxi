# The loops and constants of the compiled StreamDCS step, and the places in its arrays.

cdef extern from "streamdcs.h" nogil:
    ctypedef struct BiasSums:
        double explained, error, variance, others, observed

    double largest_of(const double *values, int64_t n)
    void centred(const double *cosines, int64_t k, double centre, double unit, double *scores)
    double text_score(const double *scores, int64_t k, const double *moments, const double *weights, double prior,
                      double many, double common)
    void learn_baseline(const double *scores, int64_t k, double weight, double horizon, double *weights,
                        double *moments)
    double project(const double *feature, const double *unknown, const double *known, int64_t d)
    void move_mean(double *mean, const double *feature, int64_t d, double count)
    int64_t predict(const double *cosines, const double *bias, int64_t k, double temperature, double *logits)
    double confidence(const double *logits, int64_t k, int64_t best)
    void uncertainty(const double *cosines, int64_t k, double *out)
    void add_scaled(double *to, const double *source, int64_t k, double factor)
    BiasSums displacements(const double *weights, const double *responses, const double *likeness, int64_t k,
                           double beta, double total, double squares, double *out)

cdef:
    double BASELINE_PRIOR = c.BASELINE_PRIOR, BASELINE_HORIZON = c.BASELINE_HORIZON, REST_WEIGHT = c.REST_WEIGHT
    double FIRST_LEAD = c.FIRST_LEAD, TAIL_LEAST = c.TAIL_LEAST, TAIL_SHARE = c.TAIL_SHARE
    double BIAS_SURE = c.BIAS_SURE, BIAS_HORIZON = c.BIAS_HORIZON, BIAS_PRIOR = c.BIAS_PRIOR
    double BIAS_FLOOR = c.BIAS_FLOOR, BIAS_MAX = c.BIAS_MAX, BIAS_MIN_LIKENESS = c.BIAS_MIN_LIKENESS
    double BIAS_CONFIDENCE_HORIZON = c.BIAS_CONFIDENCE_HORIZON, BIAS_REBUILD = c.BIAS_REBUILD
    double[2] HORIZONS = [c.UNKNOWN_HORIZON, c.KNOWN_HORIZON]
    int64_t FIRST_REFIT = c.FIRST_REFIT, REFIT_PERIOD = c.REFIT_PERIOD, SHIFT_WARNING = c.SHIFT_WARNING

# Places in the arrays, as in the files of their names: signals, `pool`, `rule`, `progress`, `samples`, and those of the
# class bias.
cdef enum:
    BASE, TEXT, HEAD, LEAD, SIGNALS
cdef enum:
    POOL_MEAN, POOL_VARIANCE
cdef enum:
    LOOKS_UNKNOWN, LOOKS_KNOWN, HEAD_WEIGHT, HEAD_TRUST, HEAD_MIDDLE, HEAD_GAP, HEAD_KNOWN_SIDE, THRESHOLD, SLOPE, SHARE
    EVIDENCE, SEPARATION, SHIFTED
cdef enum:
    SEEN, HEAD_FROM, WINDOW_FROM
cdef enum:
    SEQUENCE, LEARNED, KNOWN_SAMPLES
cdef enum:
    COUNT, WEIGHT, LIKE, SELF, RESPONSES, LIKENESS
cdef enum:
    XY, XX, YY, W, WW, CONFIDENCE, BIAS_SEEN, SINCE
cdef enum:
    UNKNOWN, KNOWN
cdef enum:
    NO_REASON, REASON_FEW, REASON_SHIFT
