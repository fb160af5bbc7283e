/* Clipping and AdamW. */
#include "common.h"

/* ---- the optimizer: lists of tensors; each thread processes its share of every tensor ---- */

int norm_of_float(float *const *gradients, const int64_t *sizes, int64_t count, double *to) {
    double *sums = calloc((size_t)omp_get_max_threads(), sizeof(double));
    if (!sums) return 1;
#pragma omp parallel
    {
        double sum = 0;
        for (int64_t t = 0; t < count; t++) {
            int64_t first, last;
            share(sizes[t], &first, &last);
            for (int64_t i = first; i < last; i += 4096) { /* sums in float within a stretch, in double over all */
                int64_t end = last - i < 4096 ? last : i + 4096;
                vec squares = {0};
                for (int64_t c = i; c < end; c += LANES) {
                    vec g = load(gradients[t], (size_t)c, some(c, end), 0);
                    squares += g * g;
                }
                sum += total(squares);
            }
        }
        sums[omp_get_thread_num()] = sum;
    }
    *to = 0;
    for (int t = 0; t < omp_get_max_threads(); t++) *to += sums[t];
    free(sums);
    *to = sqrt(*to);
    return 0;
}

int scale_float(float *const *gradients, const int64_t *sizes, int64_t count, float factor) {
#pragma omp parallel
    for (int64_t t = 0; t < count; t++) {
        int64_t first, last;
        share(sizes[t], &first, &last);
        for (int64_t c = first; c < last; c += LANES) {
            int n = some(c, last);
            store(gradients[t], (size_t)c, n, 0, load(gradients[t], (size_t)c, n, 0) * factor);
        }
    }
    return 0;
}

/* `rate` includes the bias correction of the first moment; `root` is the square root of that of the second. `fresh1` and
 * `fresh2` are 1 - beta, computed in double: computed from 0.999 as a float, the fifth digit would be wrong. */
int adamw_float(float *const *values, float *const *gradients, float *const *means, float *const *squares, const int64_t *sizes,
                int64_t count, float rate, float kept, float fresh1, float beta2, float fresh2, float root, float epsilon) {
#pragma omp parallel
    for (int64_t t = 0; t < count; t++) {
        int64_t first, last;
        share(sizes[t], &first, &last);
        for (int64_t c = first; c < last; c += LANES) {
            int n = some(c, last);
            vec g = load(gradients[t], (size_t)c, n, 0), m = load(means[t], (size_t)c, n, 0), v = load(squares[t], (size_t)c, n, 0);
            m += (g - m) * fresh1;
            v = v * beta2 + g * g * fresh2;
            vec divisor = v;
            for (int i = 0; i < LANES; i++) divisor[i] = sqrtf(v[i]);
            divisor = divisor / root + epsilon;
            vec p = load(values[t], (size_t)c, n, 0) * kept - rate * m / divisor;
            store(means[t], (size_t)c, n, 0, m);
            store(squares[t], (size_t)c, n, 0, v);
            store(values[t], (size_t)c, n, 0, p);
        }
    }
    return 0;
}
