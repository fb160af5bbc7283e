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

/* The bias, or zeros if there is none. */
INLINE vec optional(const float *bias, int64_t c, int n) { return bias ? load(bias, c, n, 0) : (vec){0}; }

INLINE int gelu_any(const void *x, const float *bias, void *y, void *slope, int64_t rows, int64_t columns, int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++)
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec bell, v = load(x, r * columns + c, n, half) + optional(bias, c, n);
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

/* ---- GELU(left) * right, where left and right, of `columns` each, are the halves of a row of x + bias ----
 *
 * The backward pass computes the exponential again: storing derivatives would take as much memory again as x.
 */

INLINE int geglu_any(const void *x, const float *bias, void *y, int64_t rows, int64_t columns, int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        const float *right_bias = bias ? bias + columns : NULL;
        for (int64_t r = first; r < last; r++)
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                size_t at = (size_t)(2 * r * columns + c);
                vec bell, left = load(x, at, n, half) + optional(bias, c, n);
                vec right = load(x, at + columns, n, half) + optional(right_bias, c, n);
                store(y, r * columns + c, n, half, left * normal_cdf(left, &bell) * right);
            }
    }
    return 0;
}

INLINE int geglu_back_any(const void *x, const float *bias, const void *dy, void *dx, float *dbias, int64_t rows,
                          int64_t columns, int half) {
    Sums gathered;
    if (!make_sums(&gathered, 2 * columns)) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        const float *right_bias = bias ? bias + columns : NULL;
        float *sums = own_sums(&gathered), *right_sums = sums + columns;
        for (int64_t r = first; r < last; r++) {
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                size_t at = (size_t)(2 * r * columns + c);
                vec bell, left = load(x, at, n, half) + optional(bias, c, n), d = load(dy, r * columns + c, n, half);
                vec right = load(x, at + columns, n, half) + optional(right_bias, c, n);
                vec cdf = normal_cdf(left, &bell);
                vec dleft = d * right * (cdf + left * bell * 0.39894228040143268f), dright = d * left * cdf;
                store(dx, at, n, half, dleft);
                store(dx, at + columns, n, half, dright);
                if (dbias) {
                    store(sums, c, n, 0, load(sums, c, n, 0) + dleft);
                    store(right_sums, c, n, 0, load(right_sums, c, n, 0) + dright);
                }
            }
            if (dbias) empty_sums(&gathered, r + 1 - first, r + 1 == last);
        }
    }
    gather(&gathered, 0, 2 * columns, dbias);
    free(gathered.whole);
    return 0;
}

#define GEGLU(name, half)                                                                                                  \
    int geglu_##name(const void *x, const float *bias, void *y, int64_t rows, int64_t columns) {                           \
        return geglu_any(x, bias, y, rows, columns, half);                                                                 \
    }                                                                                                                      \
    int geglu_back_##name(const void *x, const float *bias, const void *dy, void *dx, float *dbias, int64_t rows,          \
                          int64_t columns) {                                                                               \
        return geglu_back_any(x, bias, dy, dx, dbias, rows, columns, half);                                                \
    }
GEGLU(float, 0)
GEGLU(half, 1)

/* ---- LayerNorm(residual + dropout(part + bias)): `low` is the result again in bfloat16, for the next product ---- */

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

/* ---- total = residual + dropout(part + bias), and its LayerNorm in bfloat16 (`low`) or in float (`values`) ----
 *
 * The backward pass computes the normalized rows again from the total, which is kept in any case as the next residual.
 */

INLINE int add_norm_any(const void *part, const float *bias, const float *residual, const float *gain, const float *shift,
                        float *sum_out, float *values, void *low, float *mean, float *deviation, int64_t rows, int64_t columns,
                        float epsilon, int64_t seed, int64_t threshold, int half) {
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
                    vec s = load(residual, row + at, n, 0) + (load(part, row + at, n, half) + optional(bias, at, n)) * mask[k];
                    store(sum_out, row + at, n, 0, s);
                    sum += n == LANES ? s : choose((ivec)LANE < n, s, (vec){0});
                }
            }
            const float middle = total(sum) / (float)columns;
            vec square = {0};
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec d = load(sum_out, row + c, n, 0) - middle;
                if (n != LANES) d = choose((ivec)LANE < n, d, (vec){0});
                square += d * d;
            }
            const float inverse = 1.0f / sqrtf(total(square) / (float)columns + epsilon);
            mean[r] = middle;
            deviation[r] = inverse;
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec v = (load(sum_out, row + c, n, 0) - middle) * inverse * load(gain, c, n, 0) + load(shift, c, n, 0);
                if (low) store(low, row + c, n, 1, v);
                else store(values, row + c, n, 0, v);
            }
        }
    }
    return 0;
}

/* The gradient of the total `dsum`, or that of the LayerNorm `dnorm`, may be null; if `low` is set, dnorm holds bfloat16. */
INLINE int add_norm_back_any(const float *dsum, const void *dnorm, int64_t low, const float *summed, const float *mean,
                             const float *deviation, const float *gain, float *dresidual, void *dpart, float *dbias,
                             float *dgain, float *dshift, int64_t rows, int64_t columns, int64_t seed, int64_t threshold,
                             int half) {
    Drop drop = make_drop(seed, threshold);
    Sums gathered;
    if (!make_sums(&gathered, 3 * columns)) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        float *sums = own_sums(&gathered);
        for (int64_t r = first; r < last; r++) {
            const size_t row = (size_t)(r * columns);
            const float middle = mean[r], inverse = deviation[r];
            vec sum = {0}, product = {0};
            for (int64_t c = 0; dnorm && c < columns; c += LANES) {
                int n = some(c, columns);
                vec g = low ? load(dnorm, row + c, n, 1) : load(dnorm, row + c, n, 0);
                vec d = (load(summed, row + c, n, 0) - middle) * inverse;
                store(sums + columns, c, n, 0, load(sums + columns, c, n, 0) + g * d);
                if (dshift) store(sums + 2 * columns, c, n, 0, load(sums + 2 * columns, c, n, 0) + g);
                g *= load(gain, c, n, 0);
                sum += g; /* zero after the last column, as the loads are */
                product += g * d;
            }
            const float shift = total(sum) / (float)columns, slope = total(product) / (float)columns;
            for (int64_t c = 0; c < columns; c += 32) {
                vec mask[2] = {splat(1.0f), splat(1.0f)};
                if (threshold) keep(&drop, (uint64_t)(r * blocks(columns) + c / 32), &mask[0], &mask[1]);
                for (int k = 0; k < 2 && c + 16 * k < columns; k++) {
                    int64_t at = c + 16 * k;
                    int n = some(at, columns);
                    vec d = {0};
                    if (dnorm) {
                        vec g = low ? load(dnorm, row + at, n, 1) : load(dnorm, row + at, n, 0);
                        vec normal = (load(summed, row + at, n, 0) - middle) * inverse;
                        d = (g * load(gain, at, n, 0) - shift - normal * slope) * inverse;
                    }
                    if (dsum) d += load(dsum, row + at, n, 0);
                    if (dresidual) store(dresidual, row + at, n, 0, d);
                    d *= mask[k];
                    store(dpart, row + at, n, half, d);
                    if (dbias) store(sums, at, n, 0, load(sums, at, n, 0) + d);
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

#define ADD_NORM(name, half)                                                                                                   \
    int add_norm_##name(const void *part, const float *bias, const float *residual, const float *gain, const float *shift,     \
                        float *sum_out, float *values, void *low, float *mean, float *deviation, int64_t rows,                 \
                        int64_t columns, float epsilon, int64_t seed, int64_t threshold) {                                     \
        return add_norm_any(part, bias, residual, gain, shift, sum_out, values, low, mean, deviation, rows, columns, epsilon,  \
                            seed, threshold, half);                                                                            \
    }                                                                                                                          \
    int add_norm_back_##name(const float *dsum, const void *dnorm, int64_t low, const float *summed, const float *mean,        \
                             const float *deviation, const float *gain, float *dresidual, void *dpart, float *dbias,           \
                             float *dgain, float *dshift, int64_t rows, int64_t columns, int64_t seed, int64_t threshold) {    \
        return add_norm_back_any(dsum, dnorm, low, summed, mean, deviation, gain, dresidual, dpart, dbias, dgain, dshift,      \
                                 rows, columns, seed, threshold, half);                                                        \
    }
ADD_NORM(float, 0)
ADD_NORM(half, 1)
