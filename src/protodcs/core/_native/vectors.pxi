# Compiled form of `protodcs.core.vectors`: the same functions over the same arrays.

from libc.stdlib cimport free, malloc

cdef extern from "loops.h" nogil:
    int normalise_single(const float *feature, int64_t d, float *unit)
    int normalise_double(const double *feature, int64_t d, float *unit)
    int64_t all_cosines(const float *rows, const double *inverse_norms, const double *wide, int64_t k, int64_t d,
                        double *out)
    double squares(const float *values, int64_t n)
    int cpu_supports(const char *name)
    double sqrt(double x)


def supports(str instructions):
    """Return whether the CPU has an instruction set."""
    return cpu_supports(instructions.encode()) != 0


def to_unit(values, float[::1] out):
    """Normalise `values` (d,), float32 or float64, into `out`. Return False if not finite or shorter than 1e-6."""
    cdef const float[::1] single
    cdef const double[::1] wide
    cdef int64_t d = out.shape[0]
    cdef int fits
    if values.itemsize == 4:
        single = values
        check_length("values", single.shape[0], d)
        with nogil:
            fits = normalise_single(&single[0], d, &out[0])
    else:
        wide = values
        check_length("values", wide.shape[0], d)
        with nogil:
            fits = normalise_double(&wide[0], d, &out[0])
    return fits != 0


def to_unit_rows(const float[:, ::1] rows, float[:, ::1] out):
    """Normalise `rows` (N, d) into `out` like `to_unit`, up to the first that cannot be. Return how many can."""
    cdef int64_t count = rows.shape[0], d = out.shape[1], n = 0
    check_length("rows", rows.shape[1], d)
    if count:
        check_length("out", out.shape[0], count)
    with nogil:
        while n < count and normalise_single(&rows[n, 0], d, &out[n, 0]):
            n += 1
    return n


def move_towards(float[::1] mean, const float[:, ::1] rows, const float[::1] rates):
    """Move `mean` (d,) towards one of `rows` (N, d) after the other, by its share in `rates` (N,)."""
    cdef int64_t count = rows.shape[0], d = mean.shape[0], n, i
    check_length("rows", rows.shape[1], d)
    if count:
        check_length("rates", rates.shape[0], count)
    with nogil:
        for n in range(count):
            if rates[n] != 0.0:
                for i in range(d):
                    mean[i] += (rows[n, i] - mean[i]) * rates[n]


def cosines(const float[:, ::1] prototypes, const double[::1] inverse_norms, const float[:] feature, double[::1] out):
    """Write the cosine of `feature` (d,) with each prototype (K, d) to `out` (K,). Return the first largest."""
    cdef int64_t classes = prototypes.shape[0], d = prototypes.shape[1], best, i
    cdef double *wide
    check_length("inverse_norms", inverse_norms.shape[0], classes)
    check_length("out", out.shape[0], classes)
    check_length("feature", feature.shape[0], d)
    wide = <double *> malloc(d * sizeof(double))
    if wide == NULL:
        raise MemoryError
    with nogil:
        for i in range(d):
            wide[i] = feature[i]
        best = all_cosines(&prototypes[0, 0], &inverse_norms[0], wide, classes, d, &out[0])
        free(wide)
    return best


def invert_norms(const float[:, ::1] rows, double[::1] out):
    """Write 1 / norm of each of `rows` (K, d) to `out` (K,)."""
    cdef int64_t k
    check_length("out", out.shape[0], rows.shape[0])
    with nogil:
        for k in range(rows.shape[0]):
            out[k] = 1.0 / sqrt(squares(&rows[k, 0], rows.shape[1]))


cdef int check_length(str name, int64_t given, int64_t wanted) except -1:
    if given != wanted or not wanted:
        raise ValueError(f"`{name}` has length {given}; it must have {wanted}, at least 1.")
    return 0
