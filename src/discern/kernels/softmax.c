/* The softmax over a vocabulary: loss, gradient, samples. */
#include "common.h"

/* ---- softmax: loss and gradient of a cross-entropy, and one sample per row ----
 *
 * The maximum of a row is found together with its sum of exponentials, whose base is what is likely to be near it: only if it
 * is not, the row is read again.
 */

/* Sum of e^(x * inverse - base) over columns `from` to `to` of a row; x * inverse raises `high`. */
INLINE float row_sum(const void *x, size_t row, int64_t from, int64_t to, float inverse, float base, vec *high, int half) {
    vec sum = {0};
    for (int64_t c = from; c < to; c += LANES) {
        int n = some(c, to);
        vec v = load(x, row + c, n, half) * inverse;
        if (n != LANES) v = choose((ivec)LANE < n, v, splat(-INFINITY));
        *high = maximum(v, *high);
        sum += exponential(v - base, 0);
    }
    return total(sum);
}

INLINE void entropy_rows(const void *x, const int64_t *targets, float *losses, float *normalizer, int64_t first, int64_t last,
                         int64_t columns, int half) {
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * columns);
        const float own = load(x, row + targets[r], 1, half)[0];
        vec high = splat(-INFINITY);
        float base = own, sum = row_sum(x, row, 0, columns, 1.0f, base, &high, half);
        if (!(largest(high) - base < 50.0f)) {
            base = largest(high);
            sum = row_sum(x, row, 0, columns, 1.0f, base, &high, half);
        }
        normalizer[r] = base + logf(sum);
        losses[r] = (base - own) + logf(sum);
    }
}

INLINE void entropy_back_rows(const void *x, const int64_t *targets, const float *normalizer, float scale, void *dx, int64_t first,
                              int64_t last, int64_t columns, int half) {
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * columns);
        for (int64_t c = 0; c < columns; c += LANES) {
            int n = some(c, columns);
            store(dx, row + c, n, half, exponential(load(x, row + c, n, half) - normalizer[r], 0) * scale);
        }
        const float own = expf(load(x, row + targets[r], 1, half)[0] - normalizer[r]);
        store(dx, row + targets[r], 1, half, splat((own - 1.0f) * scale));
    }
}

/* Inverts the distribution function at a uniform number: finds the stretch by the sums of stretches, then the column in it. */
INLINE void sample_rows(const void *x, const float *uniforms, int64_t *to, double *sums, int64_t first, int64_t last,
                        int64_t columns, float inverse, int half) {
    const int64_t stretch = 16 * LANES, count = (columns + stretch - 1) / stretch;
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * columns);
        float base = 0;
        double sum = 0;
        for (int pass = 0; pass < 2; pass++) {
            vec high = splat(-INFINITY);
            sum = 0;
            for (int64_t b = 0; b < count; b++) {
                int64_t end = (b + 1) * stretch < columns ? (b + 1) * stretch : columns;
                sums[b] = row_sum(x, row, b * stretch, end, inverse, base, &high, half);
                sum += sums[b];
            }
            if (fabsf(largest(high)) < 50.0f) break;
            base = largest(high);
        }
        double goal = (double)uniforms[r] * sum, walked = 0;
        int64_t b = 0;
        while (b < count - 1 && walked + sums[b] <= goal) walked += sums[b++];
        int64_t end = (b + 1) * stretch < columns ? (b + 1) * stretch : columns;
        to[r] = b * stretch;
        for (int64_t c = b * stretch; c < end && walked <= goal; c += LANES) {
            int n = some(c, end);
            vec e = exponential(load(x, row + c, n, half) * inverse - base, 0);
            for (int i = 0; i < n && walked <= goal; i++) {
                if (e[i] > 0) to[r] = c + i; /* never a column of probability 0, even if rounding leaves `walked` too small */
                walked += e[i];
            }
        }
    }
}

#define SOFTMAX(name, half)                                                                                                      \
    int entropy_##name(const void *x, const int64_t *targets, float *losses, float *normalizer, int64_t rows, int64_t columns) { \
        for (int64_t r = 0; r < rows; r++)                                                                                       \
            if (targets[r] < 0 || targets[r] >= columns) return 2;                                                               \
        PARALLEL(entropy_rows(x, targets, losses, normalizer, first, last, columns, half))                                       \
        return 0;                                                                                                                \
    }                                                                                                                            \
    int entropy_back_##name(const void *x, const int64_t *targets, const float *normalizer, const float *scale, void *dx,        \
                            int64_t rows, int64_t columns) {                                                                     \
        PARALLEL(entropy_back_rows(x, targets, normalizer, *scale, dx, first, last, columns, half))                              \
        return 0;                                                                                                                \
    }                                                                                                                            \
    int sample_##name(const void *x, const float *uniforms, int64_t *to, int64_t rows, int64_t columns, float inverse) {         \
        const int64_t count = columns / (16 * LANES) + 1;                                                                        \
        double *sums = malloc((size_t)(omp_get_max_threads() * count) * sizeof(double));                                         \
        if (!sums) return 1;                                                                                                     \
        PARALLEL(sample_rows(x, uniforms, to, sums + omp_get_thread_num() * count, first, last, columns, inverse, half))         \
        free(sums);                                                                                                              \
        return 0;                                                                                                                \
    }
SOFTMAX(float, 0)
SOFTMAX(half, 1)
