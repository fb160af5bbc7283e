/* Dropout, GELU and LayerNorm, fused with the operations before them. */
#include "common.h"

/* ---- dropout alone: y = x * mask; the backward pass is the same with dy ---- */

INLINE int dropout_any(const void *x, void *y, int64_t rows, int64_t columns, int64_t seed, int64_t threshold, int half) {
    Drop drop = make_drop(seed, threshold);
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++)
            for (int64_t c = 0; c < columns; c += 32) {
                vec mask[2];
                keep(&drop, (uint64_t)(r * blocks(columns) + c / 32), &mask[0], &mask[1]);
                for (int k = 0; k < 2 && c + 16 * k < columns; k++) {
                    int64_t at = c + 16 * k;
                    int n = some(at, columns);
                    store(y, r * columns + at, n, half, load(x, r * columns + at, n, half) * mask[k]);
                }
            }
    }
    return 0;
}

int dropout_float(const void *x, void *y, int64_t rows, int64_t columns, int64_t seed, int64_t threshold) {
    return dropout_any(x, y, rows, columns, seed, threshold, 0);
}
int dropout_half(const void *x, void *y, int64_t rows, int64_t columns, int64_t seed, int64_t threshold) {
    return dropout_any(x, y, rows, columns, seed, threshold, 1);
}

/* ---- GELU(x + bias); its derivative `slope` is stored for the backward pass: cheaper than a second exponential ---- */

INLINE int gelu_any(const void *x, const float *bias, void *y, void *slope, int64_t rows, int64_t columns, int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++)
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec bell, v = load(x, r * columns + c, n, half) + load(bias, c, n, 0);
                vec cdf = normal_cdf(v, &bell);
                store(y, r * columns + c, n, half, v * cdf);
                if (slope) store(slope, r * columns + c, n, half, cdf + v * bell * 0.39894228040143268f);
            }
    }
    return 0;
}

INLINE int gelu_back_any(const void *slope, const void *dy, void *dx, float *dbias, int64_t rows, int64_t columns, int half) {
    Sums gathered;
    if (!make_sums(&gathered, columns)) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        float *sums = own_sums(&gathered);
        for (int64_t r = first; r < last; r++) {
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec d = load(dy, r * columns + c, n, half) * load(slope, r * columns + c, n, half);
                store(dx, r * columns + c, n, half, d);
                store(sums, c, n, 0, load(sums, c, n, 0) + d);
            }
            empty_sums(&gathered, r + 1 - first, r + 1 == last);
        }
    }
    gather(&gathered, 0, columns, dbias);
    free(gathered.whole);
    return 0;
}

#define GELU(name, half)                                                                                                   \
    int gelu_##name(const void *x, const float *bias, void *y, void *slope, int64_t rows, int64_t columns) {               \
        return gelu_any(x, bias, y, slope, rows, columns, half);                                                           \
    }                                                                                                                      \
    int gelu_back_##name(const void *slope, const void *dy, void *dx, float *dbias, int64_t rows, int64_t columns) {       \
        return gelu_back_any(slope, dy, dx, dbias, rows, columns, half);                                                   \
    }
GELU(float, 0)
GELU(half, 1)

/* ---- LayerNorm(residual + dropout(part + bias)): `low` is the result in bfloat16, for the next product ---- */

INLINE int norm_any(const void *part, const float *bias, const float *residual, const float *gain, const float *shift, float *y,
                     void *low, float *normal, float *deviation, int64_t rows, int64_t columns, float epsilon, int64_t seed,
                     int64_t threshold, int half) {
    Drop drop = make_drop(seed, threshold);
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            vec sum = {0};
            for (int64_t c = 0; c < columns; c += 32) {
                vec mask[2] = {splat(1.0f), splat(1.0f)};
                if (threshold) keep(&drop, (uint64_t)(r * blocks(columns) + c / 32), &mask[0], &mask[1]);
                for (int k = 0; k < 2 && c + 16 * k < columns; k++) {
                    int64_t at = c + 16 * k;
                    int n = some(at, columns);
                    vec s = load(part, row + at, n, half);
                    if (bias) s += load(bias, at, n, 0);
                    s *= mask[k];
                    if (residual) s += load(residual, row + at, n, 0);
                    store(normal, row + at, n, 0, s);
                    sum += n == LANES ? s : choose((ivec)LANE < n, s, (vec){0});
                }
            }
            float mean = total(sum) / (float)columns;
            vec square = {0};
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec d = load(normal, row + c, n, 0) - mean;
                if (n != LANES) d = choose((ivec)LANE < n, d, (vec){0});
                square += d * d;
            }
            float inverse = 1.0f / sqrtf(total(square) / (float)columns + epsilon);
            deviation[r] = inverse;
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec d = (load(normal, row + c, n, 0) - mean) * inverse;
                store(normal, row + c, n, 0, d);
                vec v = d * load(gain, c, n, 0) + load(shift, c, n, 0);
                if (y) store(y, row + c, n, 0, v);
                if (low) store(low, row + c, n, 1, v);
            }
        }
    }
    return 0;
}

INLINE int norm_back_any(const float *dy, const void *dlow, const float *normal, const float *deviation, const float *gain,
                         float *dresidual, void *dpart, float *dbias, float *dgain, float *dshift, int64_t rows, int64_t columns,
                         int64_t seed, int64_t threshold, int half) {
    Drop drop = make_drop(seed, threshold);
    Sums gathered;
    if (!make_sums(&gathered, 3 * columns)) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        float *sums = own_sums(&gathered);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            vec sum = {0}, product = {0};
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec g = {0};
                if (dy) g += load(dy, row + c, n, 0);
                if (dlow) g += load(dlow, row + c, n, 1);
                vec d = load(normal, row + c, n, 0);
                store(sums + columns, c, n, 0, load(sums + columns, c, n, 0) + g * d);
                store(sums + 2 * columns, c, n, 0, load(sums + 2 * columns, c, n, 0) + g);
                g *= load(gain, c, n, 0);
                sum += g;
                product += g * d;
            }
            float mean = total(sum) / (float)columns, slope = total(product) / (float)columns, inverse = deviation[r];
            for (int64_t c = 0; c < columns; c += 32) {
                vec mask[2] = {splat(1.0f), splat(1.0f)};
                if (threshold) keep(&drop, (uint64_t)(r * blocks(columns) + c / 32), &mask[0], &mask[1]);
                for (int k = 0; k < 2 && c + 16 * k < columns; k++) {
                    int64_t at = c + 16 * k;
                    int n = some(at, columns);
                    vec g = {0};
                    if (dy) g += load(dy, row + at, n, 0);
                    if (dlow) g += load(dlow, row + at, n, 1);
                    vec d = (g * load(gain, at, n, 0) - mean - load(normal, row + at, n, 0) * slope) * inverse;
                    if (dresidual) store(dresidual, row + at, n, 0, d);
                    d *= mask[k];
                    store(dpart, row + at, n, half, d);
                    store(sums, at, n, 0, load(sums, at, n, 0) + d);
                }
            }
            empty_sums(&gathered, r + 1 - first, r + 1 == last);
        }
    }
    gather(&gathered, 0, columns, dbias);
    gather(&gathered, columns, columns, dgain);
    gather(&gathered, 2 * columns, columns, dshift);
    free(gathered.whole);
    return 0;
}

#define NORM(name, half)                                                                                                          \
    int norm_##name(const void *part, const float *bias, const float *residual, const float *gain, const float *shift, float *y, \
                     void *low, float *normal, float *deviation, int64_t rows, int64_t columns, float epsilon, int64_t seed,     \
                     int64_t threshold) {                                                                                        \
        return norm_any(part, bias, residual, gain, shift, y, low, normal, deviation, rows, columns, epsilon, seed, threshold, half);    \
    }                                                                                                                             \
    int norm_back_##name(const float *dy, const void *dlow, const float *normal, const float *deviation, const float *gain,       \
                         float *dresidual, void *dpart, float *dbias, float *dgain, float *dshift, int64_t rows, int64_t columns, \
                         int64_t seed, int64_t threshold) {                                                                     \
        return norm_back_any(dy, dlow, normal, deviation, gain, dresidual, dpart, dbias, dgain, dshift, rows, columns, seed,      \
                             threshold, half);                                                                                    \
    }
NORM(float, 0)
NORM(half, 1)
