/* The softmax over a vocabulary: loss, gradient, samples. */
#include "common.h"

/* ---- softmax: loss and gradient of a cross-entropy, and one sample per row ---- */

/* Sum of e^(x * inverse - top) over columns `from` to `to` of a row. */
INLINE float row_sum(const void *x, size_t row, int64_t from, int64_t to, float inverse, float top, int half) {
    vec sum = {0};
    for (int64_t c = from; c < to; c += LANES) {
        int n = some(c, to);
        vec e = exponential(load(x, row + c, n, half) * inverse - top, 0);
        sum += n == LANES ? e : choose((ivec)LANE < n, e, (vec){0});
    }
    return total(sum);
}

INLINE int entropy_any(const void *x, const int64_t *targets, float *losses, float *normalizer, int64_t rows, int64_t columns,
                        int half) {
    for (int64_t r = 0; r < rows; r++)
        if (targets[r] < 0 || targets[r] >= columns) return 2;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            float top = row_top(x, row, columns, half);
            float log_sum = logf(row_sum(x, row, 0, columns, 1.0f, top, half));
            normalizer[r] = top + log_sum;
            losses[r] = (top - load(x, row + targets[r], 1, half)[0]) + log_sum;
        }
    }
    return 0;
}

INLINE int entropy_back_any(const void *x, const int64_t *targets, const float *normalizer, const float *scale, void *dx,
                             int64_t rows, int64_t columns, int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                store(dx, row + c, n, half, exponential(load(x, row + c, n, half) - normalizer[r], 0) * *scale);
            }
            float own = expf(load(x, row + targets[r], 1, half)[0] - normalizer[r]);
            store(dx, row + targets[r], 1, half, splat((own - 1.0f) * *scale));
        }
    }
    return 0;
}

/* Inverts the distribution function at a uniform number: finds the stretch by the sums of stretches, then the column in it. */
INLINE int sample_any(const void *x, const float *uniforms, int64_t *to, int64_t rows, int64_t columns, float inverse, int half) {
    const int64_t stretch = 16 * LANES, count = (columns + stretch - 1) / stretch;
    double *scratch = malloc((size_t)(omp_get_max_threads() * count) * sizeof(double));
    if (!scratch) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        double *sums = scratch + omp_get_thread_num() * count;
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            float top = row_top(x, row, columns, half) * inverse;
            double sum = 0;
            for (int64_t b = 0; b < count; b++) {
                int64_t end = (b + 1) * stretch < columns ? (b + 1) * stretch : columns;
                sums[b] = row_sum(x, row, b * stretch, end, inverse, top, half);
                sum += sums[b];
            }
            double goal = (double)uniforms[r] * sum, walked = 0;
            int64_t b = 0;
            while (b < count - 1 && walked + sums[b] <= goal) walked += sums[b++];
            int64_t end = (b + 1) * stretch < columns ? (b + 1) * stretch : columns;
            to[r] = b * stretch;
            for (int64_t c = b * stretch; c < end && walked <= goal; c++) {
                float e = exponential(load(x, row + c, 1, half) * inverse - top, 0)[0];
                if (e > 0) to[r] = c; /* never a column of probability 0, even if rounding leaves `walked` too small */
                walked += e;
            }
        }
    }
    free(scratch);
    return 0;
}

#define SOFTMAX(name, half)                                                                                                     \
    int entropy_##name(const void *x, const int64_t *targets, float *losses, float *normalizer, int64_t rows, int64_t columns) { \
        return entropy_any(x, targets, losses, normalizer, rows, columns, half);                                                       \
    }                                                                                                                           \
    int entropy_back_##name(const void *x, const int64_t *targets, const float *normalizer, const float *scale, void *dx,      \
                             int64_t rows, int64_t columns) {                                                                   \
        return entropy_back_any(x, targets, normalizer, scale, dx, rows, columns, half);                                               \
    }                                                                                                                           \
    int sample_##name(const void *x, const float *uniforms, int64_t *to, int64_t rows, int64_t columns, float inverse) {        \
        return sample_any(x, uniforms, to, rows, columns, inverse, half);                                                              \
    }
SOFTMAX(float, 0)
SOFTMAX(half, 1)
