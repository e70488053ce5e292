# The loops and constants of the compiled StreamDCS step, and the places in its arrays.

cdef extern from "streamdcs.h" nogil:
    ctypedef struct BiasSums:
        double explained, error, variance, others, observed

    double largest_of(const double *values, int64_t n)
    double largest_z(const double *cosines, int64_t k, double average, const double *moments, const double *weights,
                     double prior, double pool_mean, double pool_variance)
    void learn_baseline(const double *cosines, int64_t k, double average, double weight, double horizon,
                        double *weights, double *moments)
    double project(const double *feature, const double *unknown, const double *known, int64_t d)
    void move_mean(double *mean, const double *feature, int64_t d, double count)
    int64_t predict(const double *cosines, const double *bias, int64_t k, double temperature, double *logits)
    double confidence(const double *logits, int64_t k, int64_t best)
    void add_scaled_signals(const double *one, const double *two, int64_t n, const double *means,
                            const double *deviations, double one_weight, double two_weight, double *out)
    void uncertainty(const double *cosines, int64_t k, double *out)
    void add_scaled(double *to, const double *source, int64_t k, double factor)
    BiasSums displacements(const double *weights, const double *responses, const double *likeness, int64_t k,
                           double beta, double total, double squares, double *out)

cdef:
    double BASELINE_PRIOR = c.BASELINE_PRIOR, BASELINE_HORIZON = c.BASELINE_HORIZON
    double REST_WEIGHT = c.REST_WEIGHT[0], MOST_REST_WEIGHT = c.REST_WEIGHT[1]
    double CENTRED_WEIGHT = c.CENTRED_WEIGHT, FIRST_CUT = c.FIRST_CUT, SCALE_PRIOR = c.SCALE_PRIOR
    double LEAST_SHARE = c.LEAST_SHARE, MOST_SHARE = c.MOST_SHARE
    double STAND_OUT_BASE = c.STAND_OUT_BASE, STAND_OUT_RISE = c.STAND_OUT_RISE
    double BIAS_SURE = c.BIAS_SURE, BIAS_HORIZON = c.BIAS_HORIZON, BIAS_PRIOR = c.BIAS_PRIOR
    double BIAS_FLOOR = c.BIAS_FLOOR, BIAS_MAX = c.BIAS_MAX, BIAS_MIN_LIKENESS = c.BIAS_MIN_LIKENESS
    double BIAS_CONFIDENCE_HORIZON = c.BIAS_CONFIDENCE_HORIZON, BIAS_REBUILD = c.BIAS_REBUILD
    double[2] HORIZONS = [c.UNKNOWN_HORIZON, c.KNOWN_HORIZON]
    int64_t LEAST_CLASSES = c.LEAST_CLASSES, FIRST_REFIT = c.FIRST_REFIT, REFIT_PERIOD = c.REFIT_PERIOD
    int64_t LEAST_WINDOW = c.LEAST_WINDOW, SHIFT_WARNING = c.SHIFT_WARNING, LONGEST_BURST = c.LONGEST_BURST
    int64_t LEFT_OUT = c.LEFT_OUT, HEAD_FIRST = c.HEAD_FIRST
    double Z_VARIANCE = c.Z_DEVIATION * c.Z_DEVIATION

# Places in the arrays, as in the files of their names: signals, `pool`, `rule`, `progress`, `samples`, and those of the
# class bias.
cdef enum:
    LARGEST, CENTRED, RAW_Z, CENTRED_Z, HEAD, STAND_OUT, SIGNALS
cdef enum:
    POOL_MEAN, POOL_VARIANCE, POOL_CENTRED_VARIANCE
cdef enum:
    LOOKS_UNKNOWN, LOOKS_KNOWN, HEAD_WEIGHT, HEAD_MIDDLE, HEAD_GAP, HEAD_KNOWN_SIDE, THRESHOLD, SLOPE, SHARE, EVIDENCE
    SEPARATION, SHIFTED
cdef enum:
    SEEN, HEAD_FROM, WINDOW_FROM, PAUSED, OMITTED
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
