/* Dropout, GELU and LayerNorm, fused with the operations before them. */
#include "common.h"

/* ---- dropout alone: y = x * mask; the backward pass is the same with dy ---- */

INLINE void dropout_rows(const void *x, void *y, int64_t first, int64_t last, int64_t columns, const Drop *drop, int half) {
    for (int64_t r = first; r < last; r++)
        for (int64_t c = 0; c < columns; c += 32) {
            vec mask[32 / LANES];
            factors(drop, (uint64_t)(r * blocks(columns) + c / 32), mask);
            for (int k = 0; k < 32 / LANES && c + LANES * k < columns; k++) {
                int64_t at = c + LANES * k;
                int n = some(at, columns);
                store(y, r * columns + at, n, half, load(x, r * columns + at, n, half) * mask[k]);
            }
        }
}

#define DROPOUT(name, half)                                                                                                \
    int dropout_##name(const void *x, void *y, int64_t rows, int64_t columns, int64_t seed, int64_t threshold) {           \
        const Drop drop = make_drop(seed, threshold);                                                                      \
        PARALLEL(dropout_rows(x, y, first, last, columns, &drop, half))                                                    \
        return 0;                                                                                                          \
    }
DROPOUT(float, 0)
DROPOUT(half, 1)

/* ---- GELU(x + bias), or, if `gated`, GELU(left) * right: the halves, of `columns` each, of a row of x + bias ----
 *
 * The backward pass computes the derivative from x again: storing it would take as much memory again as x.
 */

/* The normal distribution function at x, and e^(-x^2/2). Abramowitz and Stegun 7.1.26: absolute error 1.5e-7. */
INLINE vec normal_cdf(vec x, vec *bell) {
    vec size = (vec)((uvec)x & 0x7fffffffu) * 0.70710678118654752f;
    vec t = 1.0f / (1.0f + 0.3275911f * size);
    vec e = exponential(-size * size, 0);
    vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vec tail = 0.5f * p * t * e; /* 1 - cdf(|x|) */
    *bell = e;
    return choose(x < 0.0f, tail, 1.0f - tail);
}

/* GELU and, in *slope, its derivative, each of which costs nothing if it is not used.
 *
 * For `half`: for negative x, the distribution function and the derivative are close to (1 - |x|/end)^k times a polynomial of
 * -|x|, which is 0 from `end` on; for positive x, they are 1 minus that. The errors are below 2^-14 |GELU| + 1e-6 and
 * 2^-13 |derivative| + 5e-6, against 2^-9 of rounding to bfloat16. */
INLINE vec gelu(vec x, int half, vec *slope) {
    if (!half) {
        vec bell, cdf = normal_cdf(x, &bell);
        *slope = cdf + x * bell * 0.39894228040143268f;
        return x * cdf;
    }
    const float end = 6.0f, slope_end = 5.5f;
    const vec size = (vec)((uvec)x | 0x80000000u); /* -|x| */
    vec n = maximum(splat(-end), size), w = n * (1 / end) + 1.0f; /* in this order NaN stays NaN */
    vec p = (((-3.8346519e-4f * n - 5.15483107e-3f) * n - 2.33214826e-2f) * n - 2.85099692e-2f) * n + 3.97673074e-2f;
    p = ((p * n - 3.59930293e-2f) * n - 2.67889883e-1f) * n + 5.00035935e-1f;
    w *= w;
    w *= w;
    p *= w * w;
    const vec cdf = choose(x < 0.0f, p, 1.0f - p);
    n = maximum(splat(-slope_end), size);
    w = n * (1 / slope_end) + 1.0f;
    p = (((-1.1341271e-3f * n - 1.63989448e-2f) * n - 8.66459471e-2f) * n - 1.78718832e-1f) * n - 4.49540321e-2f;
    p = (((p * n + 4.67036149e-2f) * n - 5.43084064e-1f) * n + 2.50322829e-1f) * n + 4.99962027e-1f;
    w *= w;
    p *= w * w * w;
    *slope = choose(x < 0.0f, p, 1.0f - p);
    return x * cdf;
}

/* Numbers of a row, or zeros if it is null. */
INLINE vec optional(const void *from, size_t at, int n, int half) { return from ? load(from, at, n, half) : (vec){0}; }

INLINE void gelu_rows(const void *x, const float *bias, void *y, int64_t first, int64_t last, int64_t columns, int gated,
                      int half) {
    const float *right_bias = bias ? bias + columns : NULL;
    for (int64_t r = first; r < last; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            int n = some(c, columns);
            size_t at = (size_t)((1 + gated) * r * columns + c);
            vec slope, v = gelu(load(x, at, n, half) + optional(bias, c, n, 0), half, &slope);
            if (gated) {
                v *= load(x, at + columns, n, half) + optional(right_bias, c, n, 0);
                fetch(x, at + 4 * columns, half);
                fetch(x, at + 5 * columns, half);
            }
            store(y, r * columns + c, n, half, v);
        }
}

INLINE void gelu_back_rows(const void *x, const float *bias, const void *dy, void *dx, const Sums *sums, int64_t first,
                           int64_t last, int64_t columns, int gated, int half) {
    const float *right_bias = bias ? bias + columns : NULL;
    float *left_sum = own_sums(sums), *right_sum = left_sum + columns;
    for (int64_t r = first; r < last; r++) {
        for (int64_t c = 0; c < columns; c += LANES) {
            int n = some(c, columns);
            size_t at = (size_t)((1 + gated) * r * columns + c);
            vec slope, v = gelu(load(x, at, n, half) + optional(bias, c, n, 0), half, &slope);
            vec d = load(dy, r * columns + c, n, half);
            if (gated) {
                v *= d;
                d *= load(x, at + columns, n, half) + optional(right_bias, c, n, 0);
                store(dx, at + columns, n, half, v);
                fetch(x, at + 4 * columns, half);
                fetch(x, at + 5 * columns, half);
                fetch(dy, (r + 2) * columns + c, half);
                if (bias) store(right_sum, c, n, 0, load(right_sum, c, n, 0) + v);
            }
            d *= slope;
            store(dx, at, n, half, d);
            if (bias) store(left_sum, c, n, 0, load(left_sum, c, n, 0) + d);
        }
        if (bias) empty_sums(sums, r + 1 - first, r + 1 == last);
    }
}

#define GELU(name, type, gated, half)                                                                                       \
    int name##_##type(const void *x, const float *bias, void *y, int64_t rows, int64_t columns) {                           \
        PARALLEL(gelu_rows(x, bias, y, first, last, columns, gated, half))                                                  \
        return 0;                                                                                                           \
    }                                                                                                                       \
    int name##_back_##type(const void *x, const float *bias, const void *dy, void *dx, float *dbias, int64_t rows,          \
                           int64_t columns) {                                                                               \
        Sums sums;                                                                                                          \
        if (!make_sums(&sums, (1 + gated) * columns)) return 1;                                                             \
        PARALLEL(gelu_back_rows(x, bias, dy, dx, &sums, first, last, columns, gated, half))                                 \
        gather(&sums, 0, (1 + gated) * columns, dbias);                                                                     \
        free(sums.whole);                                                                                                   \
        return 0;                                                                                                           \
    }
GELU(gelu, float, 0, 0)
GELU(gelu, half, 0, 1)
GELU(geglu, float, 1, 0)
GELU(geglu, half, 1, 1)

/* ---- total = residual + dropout(part + bias), and its LayerNorm in float (`values`), bfloat16 (`low`), or both ----
 *
 * The backward pass computes the normalized rows again from the total: a pre-norm block keeps it as the next residual anyway.
 */

INLINE void norm_rows(const void *part, const float *bias, const float *residual, const float *gain, const float *shift,
                      float *sum_out, float *values, void *low, float *mean, float *deviation, int64_t first, int64_t last,
                      int64_t columns, float epsilon, const Drop *drop, int half) {
    for (int64_t r = first; r < last; r++) {
        size_t row = (size_t)(r * columns);
        vec sum = {0};
        for (int64_t c = 0; c < columns; c += 32) {
            vec mask[32 / LANES];
            factors(drop, (uint64_t)(r * blocks(columns) + c / 32), mask);
            for (int k = 0; k < 32 / LANES && c + LANES * k < columns; k++) {
                int64_t at = c + LANES * k;
                int n = some(at, columns);
                vec s = (load(part, row + at, n, half) + optional(bias, at, n, 0)) * mask[k] + optional(residual, row + at, n, 0);
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
            vec v = (load(sum_out, row + c, n, 0) - middle) * inverse * load(gain, c, n, 0) + optional(shift, c, n, 0);
            if (values) store(values, row + c, n, 0, v);
            if (low) store(low, row + c, n, 1, v);
        }
    }
}

/* Gradients of the total `dsum`, and of the LayerNorm in float `dvalues` and in bfloat16 `dlow`: any may be null. */
INLINE void norm_back_rows(const float *dsum, const float *dvalues, const void *dlow, const float *summed, const float *mean,
                           const float *deviation, const float *gain, float *dresidual, void *dpart, const float *dbias,
                           const float *dshift, const Sums *sums, int64_t first, int64_t last, int64_t columns, const Drop *drop,
                           int half) {
    float *bias_sum = own_sums(sums), *gain_sum = bias_sum + columns, *shift_sum = gain_sum + columns;
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * columns);
        const float middle = mean[r], inverse = deviation[r];
        vec sum = {0}, product = {0};
        for (int64_t c = 0; c < columns; c += LANES) {
            int n = some(c, columns);
            vec g = optional(dvalues, row + c, n, 0) + optional(dlow, row + c, n, 1);
            vec d = (load(summed, row + c, n, 0) - middle) * inverse;
            store(gain_sum, c, n, 0, load(gain_sum, c, n, 0) + g * d);
            if (dshift) store(shift_sum, c, n, 0, load(shift_sum, c, n, 0) + g);
            g *= load(gain, c, n, 0);
            sum += g; /* zero after the last column, as the loads are */
            product += g * d;
        }
        const float shift = total(sum) / (float)columns, slope = total(product) / (float)columns;
        for (int64_t c = 0; c < columns; c += 32) {
            vec mask[32 / LANES];
            factors(drop, (uint64_t)(r * blocks(columns) + c / 32), mask);
            for (int k = 0; k < 32 / LANES && c + LANES * k < columns; k++) {
                int64_t at = c + LANES * k;
                int n = some(at, columns);
                vec g = (optional(dvalues, row + at, n, 0) + optional(dlow, row + at, n, 1)) * load(gain, at, n, 0);
                vec d = (g - shift - (load(summed, row + at, n, 0) - middle) * inverse * slope) * inverse;
                d += optional(dsum, row + at, n, 0);
                if (dresidual) store(dresidual, row + at, n, 0, d);
                d *= mask[k];
                store(dpart, row + at, n, half, d);
                if (dbias) store(bias_sum, at, n, 0, load(bias_sum, at, n, 0) + d);
            }
        }
        empty_sums(sums, r + 1 - first, r + 1 == last);
    }
}

#define NORM(name, half)                                                                                                       \
    int norm_##name(const void *part, const float *bias, const float *residual, const float *gain, const float *shift,         \
                    float *sum_out, float *values, void *low, float *mean, float *deviation, int64_t rows, int64_t columns,    \
                    float epsilon, int64_t seed, int64_t threshold) {                                                          \
        const Drop drop = make_drop(seed, threshold);                                                                          \
        PARALLEL(norm_rows(part, bias, residual, gain, shift, sum_out, values, low, mean, deviation, first, last, columns,     \
                           epsilon, &drop, half))                                                                              \
        return 0;                                                                                                              \
    }                                                                                                                          \
    int norm_back_##name(const float *dsum, const float *dvalues, const void *dlow, const float *summed, const float *mean,    \
                         const float *deviation, const float *gain, float *dresidual, void *dpart, float *dbias, float *dgain, \
                         float *dshift, int64_t rows, int64_t columns, int64_t seed, int64_t threshold) {                      \
        const Drop drop = make_drop(seed, threshold);                                                                          \
        Sums sums;                                                                                                             \
        if (!make_sums(&sums, 3 * columns)) return 1;                                                                          \
        PARALLEL(norm_back_rows(dsum, dvalues, dlow, summed, mean, deviation, gain, dresidual, dpart, dbias, dshift, &sums,    \
                                first, last, columns, &drop, half))                                                            \
        gather(&sums, 0, columns, dbias);                                                                                      \
        gather(&sums, columns, columns, dgain);                                                                                \
        gather(&sums, 2 * columns, columns, dshift);                                                                           \
        free(sums.whole);                                                                                                      \
        return 0;                                                                                                              \
    }
NORM(float, 0)
NORM(half, 1)
