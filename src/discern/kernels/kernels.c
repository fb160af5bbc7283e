/* Fused kernels of the training step, for processors: what stands between two matrix products, in one pass over memory.
 *
 * Every kernel has a plain counterpart in torch, which is used where no compiler is at hand and which tests hold it to.
 * Written with the vector extensions of GCC and Clang: 16 lanes, cut up by the compiler where registers are narrower.
 *
 * Conventions: matrices are row-major and dense unless a stride is named; `half` says that a matrix holds bfloat16 instead
 * of float; sums are taken in float or double. Rows are dealt to the threads in one contiguous stretch each, so results are
 * the same from run to run for a given number of threads.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define LANES 16
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));
typedef float vec_u __attribute__((vector_size(64), aligned(4)));
typedef hvec hvec_u __attribute__((aligned(2)));

#define INLINE static inline __attribute__((always_inline))

static const uvec LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE vec splat(float x) { return x - (vec){0}; }

/* ---- loads and stores of `count` <= 16 elements, bfloat16 or float ---- */

INLINE vec widen(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

INLINE hvec narrow(vec x) { /* round to nearest, ties to even; NaN stays NaN */
#ifdef __AVX512BF16__
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#endif
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uvec quiet = (bits >> 16) | 0x40u;
    uvec nan = (uvec)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (quiet & nan), hvec);
}

INLINE vec load(const void *from, size_t at, int count, int half) {
    if (half) {
        const uint16_t *p = (const uint16_t *)from + at;
        if (count == LANES) return widen(*(const hvec_u *)p);
        hvec h = {0};
        memcpy(&h, p, (size_t)count * 2);
        return widen(h);
    }
    const float *p = (const float *)from + at;
    if (count == LANES) return *(const vec_u *)p;
    vec v = {0};
    memcpy(&v, p, (size_t)count * 4);
    return v;
}

INLINE void store(void *to, size_t at, int count, int half, vec x) {
    if (half) {
        uint16_t *p = (uint16_t *)to + at;
        hvec h = narrow(x);
        if (count == LANES) *(hvec_u *)p = h;
        else memcpy(p, &h, (size_t)count * 2);
        return;
    }
    float *p = (float *)to + at;
    if (count == LANES) *(vec_u *)p = x;
    else memcpy(p, &x, (size_t)count * 4);
}

INLINE int some(int64_t at, int64_t end) { return end - at < LANES ? (int)(end - at) : LANES; }

INLINE float total(vec x) { /* in a tree: a chain of 16 additions would cost more than the sum it ends */
    union { vec whole; half_vec half[2]; } a = {x};
    union { half_vec whole; quarter_vec half[2]; } b = {a.half[0] + a.half[1]};
    quarter_vec q = b.half[0] + b.half[1];
    return (q[0] + q[1]) + (q[2] + q[3]);
}

INLINE float largest(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)(((uvec)which & (uvec)yes) | (~(uvec)which & (uvec)no)); }

INLINE vec maximum(vec a, vec b) { return choose(a > b, a, b); }

/* ---- elementary functions ---- */

/* e^x to about one unit in the last place; 0 below -87, so that what is impossible stays so, and held at e^88. */
INLINE vec exponential(vec x) {
    ivec tiny = x < -87.0f;
    x = choose(x > 88.0f, splat(88.0f), x);
    vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)(~(uvec)tiny & (uvec)(p * (vec)scale));
}

/* The normal distribution function at x, and e^(-x^2/2). Abramowitz and Stegun 7.1.26: absolute error 1.5e-7. */
INLINE vec normal_cdf(vec x, vec *bell) {
    vec size = (vec)((uvec)x & 0x7fffffffu) * 0.70710678118654752f;
    vec t = 1.0f / (1.0f + 0.3275911f * size);
    vec e = exponential(-size * size);
    vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vec tail = 0.5f * p * t * e; /* 1 - cdf(|x|) */
    *bell = e;
    return choose(x < 0.0f, tail, 1.0f - tail);
}

/* ---- dropout: 16 bits an element from a keyed hash of its place, so that the backward pass finds the same mask ---- */

typedef struct {
    uint32_t key1, key2, threshold;
    float scale;
} Drop;

INLINE Drop make_drop(int64_t seed, int64_t threshold) {
    Drop drop = {(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32), (uint32_t)threshold, 65536.0f / (65536.0f - (float)threshold)};
    return drop;
}

INLINE uvec mixed(uvec x) { /* a bijection of 32 bits with low bias (Wellons 2018) */
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

/* Factors of the 32 elements of block `block`: the first 16 in `low`, the rest in `high`. */
INLINE void keep(const Drop *drop, uint64_t block, vec *low, vec *high) {
    uvec x = LANE + (uint32_t)(block << 4);
    x = mixed(x ^ drop->key1) + (drop->key2 ^ ((uint32_t)(block >> 28) * 0x9e3779b9u));
    x = mixed(x);
    uvec scale = (uvec)splat(drop->scale);
    *low = (vec)((uvec)((x & 0xffffu) >= drop->threshold) & scale);
    *high = (vec)((uvec)((x >> 16) >= drop->threshold) & scale);
}

INLINE int64_t blocks(int64_t columns) { return (columns + 31) / 32; }

/* Rows of the calling thread. */
INLINE void share(int64_t rows, int64_t *first, int64_t *last) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = rows * me / threads;
    *last = rows * (me + 1) / threads;
}

/* Work below this many elements is not worth waking another thread for. */
#define SMALL 16384

/* Sums over rows that each thread gathers apart: `sets` vectors of `columns` floats. */
static float *scratch_for(int64_t sets, int64_t columns) {
    return calloc((size_t)(omp_get_max_threads() * sets * columns), sizeof(float));
}

static void gather(const float *scratch, int64_t sets, int64_t columns, int64_t set, float *to) {
    if (!to) return;
    int threads = omp_get_max_threads();
    for (int64_t c = 0; c < columns; c++) {
        float sum = 0;
        for (int t = 0; t < threads; t++) sum += scratch[(t * sets + set) * columns + c];
        to[c] = sum;
    }
}

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

/* ---- GELU(x + bias); `slope`, its derivative there, is kept for the backward pass: cheaper than a second exponential ---- */

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
    float *scratch = scratch_for(1, columns);
    if (!scratch) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        float *sums = scratch + omp_get_thread_num() * columns;
        for (int64_t r = first; r < last; r++)
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                vec d = load(dy, r * columns + c, n, half) * load(slope, r * columns + c, n, half);
                store(dx, r * columns + c, n, half, d);
                store(sums, c, n, 0, load(sums, c, n, 0) + d);
            }
    }
    gather(scratch, 1, columns, 0, dbias);
    free(scratch);
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
    float *scratch = scratch_for(3, columns);
    if (!scratch) return 1;
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        float *sums = scratch + omp_get_thread_num() * 3 * columns;
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
        }
    }
    gather(scratch, 3, columns, 0, dbias);
    gather(scratch, 3, columns, 1, dgain);
    gather(scratch, 3, columns, 2, dshift);
    free(scratch);
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

/* ---- softmax: loss and gradient of a cross-entropy, and one sample a row ---- */

INLINE float row_top(const void *x, size_t row, int64_t columns, int half) {
    vec high = splat(-INFINITY);
    for (int64_t c = 0; c < columns; c += LANES) {
        int n = some(c, columns);
        vec v = load(x, row + c, n, half);
        high = maximum(n == LANES ? v : choose((ivec)LANE < n, v, splat(-INFINITY)), high);
    }
    return largest(high);
}

/* Sum of e^(x * inverse - top) over columns `from` to `to` of a row. */
INLINE float row_sum(const void *x, size_t row, int64_t from, int64_t to, float inverse, float top, int half) {
    vec sum = {0};
    for (int64_t c = from; c < to; c += LANES) {
        int n = some(c, to);
        vec e = exponential(load(x, row + c, n, half) * inverse - top);
        sum += n == LANES ? e : choose((ivec)LANE < n, e, (vec){0});
    }
    return total(sum);
}

INLINE int entropy_any(const void *x, const int64_t *targets, float *losses, float *normaliser, int64_t rows, int64_t columns,
                        int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            float top = row_top(x, row, columns, half);
            float log_sum = logf(row_sum(x, row, 0, columns, 1.0f, top, half));
            normaliser[r] = top + log_sum;
            losses[r] = (top - load(x, row + targets[r], 1, half)[0]) + log_sum;
        }
    }
    return 0;
}

INLINE int entropy_back_any(const void *x, const int64_t *targets, const float *normaliser, const float *scale, void *dx,
                             int64_t rows, int64_t columns, int half) {
#pragma omp parallel if (rows * columns > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            size_t row = (size_t)(r * columns);
            for (int64_t c = 0; c < columns; c += LANES) {
                int n = some(c, columns);
                store(dx, row + c, n, half, exponential(load(x, row + c, n, half) - normaliser[r]) * *scale);
            }
            float own = expf(load(x, row + targets[r], 1, half)[0] - normaliser[r]);
            store(dx, row + targets[r], 1, half, splat((own - 1.0f) * *scale));
        }
    }
    return 0;
}

/* The inverse of the distribution function at a uniform number: a walk over the sums of stretches, then within one. */
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
                float e = exponential(load(x, row + c, 1, half) * inverse - top)[0];
                if (e > 0) to[r] = c; /* never one that is impossible, even where rounding leaves the walk short */
                walked += e;
            }
        }
    }
    free(scratch);
    return 0;
}

#define SOFTMAX(name, half)                                                                                                     \
    int entropy_##name(const void *x, const int64_t *targets, float *losses, float *normaliser, int64_t rows, int64_t columns) { \
        return entropy_any(x, targets, losses, normaliser, rows, columns, half);                                                       \
    }                                                                                                                           \
    int entropy_back_##name(const void *x, const int64_t *targets, const float *normaliser, const float *scale, void *dx,      \
                             int64_t rows, int64_t columns) {                                                                   \
        return entropy_back_any(x, targets, normaliser, scale, dx, rows, columns, half);                                               \
    }                                                                                                                           \
    int sample_##name(const void *x, const float *uniforms, int64_t *to, int64_t rows, int64_t columns, float inverse) {        \
        return sample_any(x, uniforms, to, rows, columns, inverse, half);                                                              \
    }
SOFTMAX(float, 0)
SOFTMAX(half, 1)

/* ---- the optimizer: lists of tensors, each thread taking its share of every one ---- */

int norm_of_float(float *const *gradients, const int64_t *sizes, int64_t count, double *to) {
    double *sums = calloc((size_t)omp_get_max_threads(), sizeof(double));
    if (!sums) return 1;
#pragma omp parallel
    {
        double sum = 0;
        for (int64_t t = 0; t < count; t++) {
            int64_t first, last;
            share(sizes[t], &first, &last);
            for (int64_t i = first; i < last; i += 4096) { /* floats add up in stretches, stretches as doubles */
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

/* `rate` has the first moment's correction in it, `root` is the square root of the second's; `fresh` is 1 - beta, taken in double:
 * from 0.999 as a float it would be wrong in the fifth digit. */
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
            vec divisor;
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

/* ---- attention over spans of rows that see each other: softmax(Q K^T / sqrt(size)), dropout, times V ----
 *
 * Tokens of all spans lie one after another; span s is tokens offsets[s] to offsets[s + 1]. Row t of query, key and value
 * begins at t * stride, head h at h * size within it. One (span, head) is worked on at a time, in a thread's own memory.
 */

#define TILE 32 /* queries at a time */
#define MR 6
#define NR 4

/* C (m x n) = A (m x k; element i, j at i * ai + j * aj) B (k x n) [+ C]; n is a multiple of 16, B and C are float. */
INLINE void micro(int m, int nv, int64_t k, const float *a, int64_t ai, int64_t aj, const float *b, int64_t ldb, float *c,
                  int64_t ldc, int add) {
    vec sum[MR][NR];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < nv; j++) sum[i][j] = add ? *(vec_u *)(c + i * ldc + j * LANES) : (vec){0};
    for (int64_t p = 0; p < k; p++) {
        vec row[NR];
        for (int j = 0; j < nv; j++) row[j] = *(const vec_u *)(b + p * ldb + j * LANES);
        for (int i = 0; i < m; i++) {
            vec scalar = splat(a[i * ai + p * aj]);
            for (int j = 0; j < nv; j++) sum[i][j] += scalar * row[j];
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < nv; j++) *(vec_u *)(c + i * ldc + j * LANES) = sum[i][j];
}

#define ROWS(m, nv)                                                                                                              \
    case m: micro(m, nv, k, a + i * ai, ai, aj, b + j, ldb, c + i * ldc + j, ldc, add); break;
#define STRIP(nv)                                                                                                                \
    for (int64_t i = 0; i < m; i += MR) {                                                                                        \
        switch (m - i < MR ? (int)(m - i) : MR) { ROWS(1, nv) ROWS(2, nv) ROWS(3, nv) ROWS(4, nv) ROWS(5, nv) ROWS(6, nv) }       \
    }

static void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t ai, int64_t aj, const float *b, int64_t ldb, float *c,
                    int64_t ldc, int add) {
    int64_t j = 0;
    for (; j + NR * LANES <= n; j += NR * LANES) { STRIP(NR) }
    for (; j + 2 * LANES <= n; j += 2 * LANES) { STRIP(2) }
    for (; j < n; j += LANES) { STRIP(1) }
}

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Rows of one head as float, `width` wide with zeros behind; times `factor`. */
INLINE void unpack(const void *from, int64_t stride, int64_t at, int64_t rows, int64_t size, float *to, int64_t width, float factor,
                   int half) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
            int n = some(c, size);
            vec v = n > 0 ? load(from, (size_t)(r * stride + at + c), n, half) * factor : (vec){0};
            *(vec_u *)(to + r * width + c) = v;
        }
}

/* The transpose: `size` rows of `width` >= rows columns. */
INLINE void transpose(const float *from, int64_t rows, int64_t size, int64_t from_width, float *to, int64_t width) {
    for (int64_t c = 0; c < size; c++) {
        for (int64_t r = 0; r < rows; r++) to[c * width + r] = from[r * from_width + c];
        for (int64_t r = rows; r < width; r++) to[c * width + r] = 0;
    }
}

INLINE void repack(const float *from, int64_t rows, int64_t size, int64_t width, void *to, int64_t stride, int64_t at, float factor,
                   int half) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < size; c += LANES)
            store(to, (size_t)(r * stride + at + c), some(c, size), half, *(const vec_u *)(from + r * width + c) * factor);
}

typedef struct {
    const void *query, *key, *value;
    int64_t stride, size, heads, spans;
    const int64_t *offsets;
} Heads;

static int64_t longest(const Heads *in) {
    int64_t most = 1;
    for (int64_t s = 0; s < in->spans; s++) {
        int64_t n = in->offsets[s + 1] - in->offsets[s];
        most = n > most ? n : most;
    }
    return most;
}

/* Factors of `n` probabilities from column 0 of one query's row. */
INLINE void keep_row(const Drop *drop, int64_t token, int64_t head, int64_t heads, int64_t across, int64_t n, float *to) {
    uint64_t base = (uint64_t)((token * heads + head) * across);
    for (int64_t c = 0; c < n; c += 32) {
        vec low, high;
        keep(drop, base + (uint64_t)(c / 32), &low, &high);
        *(vec_u *)(to + c) = low;
        *(vec_u *)(to + c + 16) = high;
    }
}

INLINE int attend_any(const Heads *in, void *out, float *normaliser, int64_t seed, int64_t threshold, int half) {
    const int64_t most = padded(longest(in)) + LANES, size = in->size, wide = padded(size), across = blocks(most);
    const int64_t each = 3 * most * wide + TILE * (most + 2 * wide) + most + 2 * LANES;
    const float factor = 1.0f / sqrtf((float)size);
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *key = scratch + omp_get_thread_num() * each, *across_key = key + most * wide, *value = across_key + most * wide;
        float *query = value + most * wide, *scores = query + TILE * wide, *sums = scores + TILE * most, *mask = sums + TILE * wide;
#pragma omp for schedule(static)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, width = padded(n), origin = start * in->stride + head * size;
            unpack(in->key, in->stride, origin, n, size, key, wide, 1.0f, half);
            transpose(key, n, size, wide, across_key, width);
            unpack(in->value, in->stride, origin, n, size, value, wide, 1.0f, half);
            for (int64_t q = 0; q < n; q += TILE) {
                const int64_t rows = n - q < TILE ? n - q : TILE;
                unpack(in->query, in->stride, origin + q * in->stride, rows, size, query, wide, factor, half);
                product(rows, width, size, query, wide, 1, across_key, width, scores, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * width;
                    const float top = row_top(row, 0, n, 0);
                    vec sum = {0};
                    for (int64_t c = 0; c < width; c += LANES) {
                        vec e = exponential(*(vec_u *)(row + c) - top);
                        if (c + LANES > n) e = choose((ivec)LANE < (int)(n - c), e, (vec){0});
                        *(vec_u *)(row + c) = e;
                        sum += e;
                    }
                    const float all = total(sum), inverse = 1.0f / all;
                    normaliser[(start + q + r) * in->heads + head] = top + logf(all);
                    if (threshold) {
                        keep_row(&drop, start + q + r, head, in->heads, across, n, mask);
                        for (int64_t c = 0; c < width; c += LANES) *(vec_u *)(row + c) *= *(vec_u *)(mask + c) * inverse;
                    } else {
                        for (int64_t c = 0; c < width; c += LANES) *(vec_u *)(row + c) *= inverse;
                    }
                }
                product(rows, wide, n, scores, width, 1, value, wide, sums, wide, 0);
                repack(sums, rows, size, wide, out, in->heads * size, (start + q) * in->heads * size + head * size, 1.0f, half);
            }
        }
    }
    free(scratch);
    return 0;
}

/* Gradients of query, key and value, laid out like them; `out` is what `attend` gave. */
INLINE int attend_back_any(const Heads *in, const void *out, const float *normaliser, const void *dout, void *dquery, void *dkey,
                           void *dvalue, int64_t seed, int64_t threshold, int half) {
    const int64_t most = padded(longest(in)) + LANES, size = in->size, wide = padded(size), across = blocks(most);
    const int64_t each = 6 * most * wide + TILE * (3 * most + 4 * wide) + most + 2 * LANES;
    const float factor = 1.0f / sqrtf((float)size);
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *key = scratch + omp_get_thread_num() * each, *across_key = key + most * wide, *value = across_key + most * wide;
        float *across_value = value + most * wide, *key_sums = across_value + most * wide, *value_sums = key_sums + most * wide;
        float *query = value_sums + most * wide, *gradient = query + TILE * wide, *result = gradient + TILE * wide;
        float *query_sums = result + TILE * wide, *scores = query_sums + TILE * wide, *dropped = scores + TILE * most;
        float *slopes = dropped + TILE * most, *mask = slopes + TILE * most;
#pragma omp for schedule(static)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, width = padded(n), origin = start * in->stride + head * size;
            const int64_t ours = in->heads * size;
            unpack(in->key, in->stride, origin, n, size, key, wide, 1.0f, half);
            transpose(key, n, size, wide, across_key, width);
            unpack(in->value, in->stride, origin, n, size, value, wide, 1.0f, half);
            transpose(value, n, size, wide, across_value, width);
            for (int64_t q = 0; q < n; q += TILE) {
                const int64_t rows = n - q < TILE ? n - q : TILE, at = (start + q) * ours + head * size;
                unpack(in->query, in->stride, origin + q * in->stride, rows, size, query, wide, factor, half);
                unpack(dout, ours, at, rows, size, gradient, wide, 1.0f, half);
                unpack(out, ours, at, rows, size, result, wide, 1.0f, half);
                product(rows, width, size, query, wide, 1, across_key, width, scores, width, 0);
                product(rows, width, size, gradient, wide, 1, across_value, width, slopes, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * width, *kept = dropped + r * width, *slope = slopes + r * width;
                    const float norm = normaliser[(start + q + r) * in->heads + head];
                    vec sum = {0};
                    for (int64_t c = 0; c < wide; c += LANES) sum += *(vec_u *)(gradient + r * wide + c) * *(vec_u *)(result + r * wide + c);
                    const float delta = total(sum);
                    if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, n, mask);
                    for (int64_t c = 0; c < width; c += LANES) {
                        vec p = exponential(*(vec_u *)(row + c) - norm);
                        if (c + LANES > n) p = choose((ivec)LANE < (int)(n - c), p, (vec){0});
                        vec factors = threshold ? *(vec_u *)(mask + c) : splat(1.0f);
                        *(vec_u *)(kept + c) = p * factors;
                        *(vec_u *)(slope + c) = p * (*(vec_u *)(slope + c) * factors - delta);
                    }
                }
                product(n, wide, rows, dropped, 1, width, gradient, wide, value_sums, wide, q > 0);
                product(n, wide, rows, slopes, 1, width, query, wide, key_sums, wide, q > 0);
                product(rows, wide, n, slopes, width, 1, key, wide, query_sums, wide, 0);
                repack(query_sums, rows, size, wide, dquery, in->stride, origin + q * in->stride, factor, half);
            }
            repack(key_sums, n, size, wide, dkey, in->stride, origin, 1.0f, half);
            repack(value_sums, n, size, wide, dvalue, in->stride, origin, 1.0f, half);
        }
    }
    free(scratch);
    return 0;
}

#ifdef __AVX512BF16__
/* The same with products of bfloat16 pairs, which these processors multiply twice as fast as floats. A pair is 32 bits; operand
 * B of a product holds rows 2p and 2p + 1 of a matrix zipped together, operand A pairs along the dimension summed over.
 * Wants a head size that is a multiple of 16. */
INLINE void micro_pairs(int m, int nv, int64_t k, const uint32_t *a, int64_t ai, int64_t aj, const uint32_t *b, int64_t ldb, float *c,
                        int64_t ldc, int add) {
    __m512 sum[MR][NR];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < nv; j++) sum[i][j] = add ? _mm512_loadu_ps(c + i * ldc + j * LANES) : _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
        __m512bh row[NR];
        for (int j = 0; j < nv; j++) row[j] = (__m512bh)_mm512_loadu_si512(b + p * ldb + j * LANES);
        for (int i = 0; i < m; i++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32((int)a[i * ai + p * aj]);
            for (int j = 0; j < nv; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], pair, row[j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < nv; j++) _mm512_storeu_ps(c + i * ldc + j * LANES, sum[i][j]);
}

#define micro micro_pairs
static void product_pairs(int64_t m, int64_t n, int64_t k, const uint32_t *a, int64_t ai, int64_t aj, const uint32_t *b, int64_t ldb,
                          float *c, int64_t ldc, int add) {
    int64_t j = 0;
    for (; j + NR * LANES <= n; j += NR * LANES) { STRIP(NR) }
    for (; j + 2 * LANES <= n; j += 2 * LANES) { STRIP(2) }
    for (; j < n; j += LANES) { STRIP(1) }
}
#undef micro

/* Rows 2p and 2p + 1 side by side: `to` has (rows + 1) / 2 rows of `columns` pairs; a missing last row is zeros. */
INLINE void zip(const uint16_t *from, int64_t stride, int64_t rows, int64_t columns, uint32_t *to, int64_t width) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            uvec low = __builtin_convertvector(*(const hvec_u *)(from + r * stride + c), uvec), high = {0};
            if (r + 1 < rows) high = __builtin_convertvector(*(const hvec_u *)(from + (r + 1) * stride + c), uvec);
            uvec pair = low | (high << 16);
            memcpy(to + (r / 2) * width + c, &pair, sizeof pair);
        }
}

/* The transpose in pairs of columns: size / 2 rows of `width` >= rows pairs. */
INLINE void transpose_pairs(const uint16_t *from, int64_t stride, int64_t rows, int64_t size, uint32_t *to, int64_t width) {
    for (int64_t block = 0; block < width; block += LANES)
        for (int64_t c = 0; c < size / 2; c++) {
            uint32_t column[LANES] = {0};
            for (int i = 0; i < LANES && block + i < rows; i++) memcpy(column + i, from + (block + i) * stride + 2 * c, 4);
            memcpy(to + c * width + block, column, sizeof column);
        }
}

static int attend_pairs(const Heads *in, uint16_t *out, float *normaliser, int64_t seed, int64_t threshold) {
    const int64_t most = padded(longest(in)) + LANES, size = in->size, across = blocks(most), ours = in->heads * size;
    const int64_t each = most * size + TILE * (most + most / 2 + size) + most + 2 * LANES;
    const float factor = 1.0f / sqrtf((float)size);
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *scores = scratch + omp_get_thread_num() * each, *sums = scores + TILE * most, *mask = sums + TILE * size;
        uint32_t *across_key = (uint32_t *)(mask + most + 2 * LANES), *value = across_key + most * size / 2;
        uint16_t *weights = (uint16_t *)(value + most * size / 2);
#pragma omp for schedule(static)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, width = padded(n), origin = start * in->stride + head * size;
            const uint16_t *query = (const uint16_t *)in->query + origin;
            transpose_pairs((const uint16_t *)in->key + origin, in->stride, n, size, across_key, width);
            zip((const uint16_t *)in->value + origin, in->stride, n, size, value, size);
            for (int64_t q = 0; q < n; q += TILE) {
                const int64_t rows = n - q < TILE ? n - q : TILE;
                product_pairs(rows, width, size / 2, (const uint32_t *)(query + q * in->stride), in->stride / 2, 1, across_key, width,
                              scores, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * width;
                    const float top = row_top(row, 0, n, 0) * factor;
                    vec sum = {0};
                    for (int64_t c = 0; c < width; c += LANES) {
                        vec e = exponential(*(vec_u *)(row + c) * factor - top);
                        if (c + LANES > n) e = choose((ivec)LANE < (int)(n - c), e, (vec){0});
                        *(vec_u *)(row + c) = e;
                        sum += e;
                    }
                    const float all = total(sum), inverse = 1.0f / all;
                    normaliser[(start + q + r) * in->heads + head] = top + logf(all);
                    if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, n, mask);
                    for (int64_t c = 0; c < width; c += LANES) {
                        vec p = *(vec_u *)(row + c) * inverse;
                        store(weights, (size_t)(r * width + c), LANES, 1, threshold ? p * *(vec_u *)(mask + c) : p);
                    }
                }
                product_pairs(rows, size, (n + 1) / 2, (const uint32_t *)weights, width / 2, 1, value, size, sums, size, 0);
                repack(sums, rows, size, size, out, ours, (start + q) * ours + head * size, 1.0f, 1);
            }
        }
    }
    free(scratch);
    return 0;
}

static int attend_back_pairs(const Heads *in, const uint16_t *out, const float *normaliser, const uint16_t *dout, uint16_t *dquery,
                             uint16_t *dkey, uint16_t *dvalue, int64_t seed, int64_t threshold) {
    const int64_t most = padded(longest(in)) + LANES, size = in->size, across = blocks(most), ours = in->heads * size;
    const int64_t each = most * size * 4 + TILE * (4 * most + 2 * size) + most + 2 * LANES;
    const float factor = 1.0f / sqrtf((float)size);
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *scores = scratch + omp_get_thread_num() * each, *slopes = scores + TILE * most, *query_sums = slopes + TILE * most;
        float *key_sums = query_sums + TILE * size, *value_sums = key_sums + most * size, *mask = value_sums + most * size;
        uint32_t *across_key = (uint32_t *)(mask + most + 2 * LANES), *across_value = across_key + most * size / 2;
        uint32_t *key = across_value + most * size / 2, *query = key + most * size / 2, *gradient = query + TILE * size / 2;
        uint32_t *zipped_weights = gradient + TILE * size / 2, *zipped_slopes = zipped_weights + TILE * most / 2;
        uint16_t *weights = (uint16_t *)(zipped_slopes + TILE * most / 2), *low_slopes = weights + TILE * most;
#pragma omp for schedule(static)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, width = padded(n), origin = start * in->stride + head * size;
            const uint16_t *own_key = (const uint16_t *)in->key + origin, *own_value = (const uint16_t *)in->value + origin;
            transpose_pairs(own_key, in->stride, n, size, across_key, width);
            transpose_pairs(own_value, in->stride, n, size, across_value, width);
            zip(own_key, in->stride, n, size, key, size);
            for (int64_t q = 0; q < n; q += TILE) {
                const int64_t rows = n - q < TILE ? n - q : TILE, at = (start + q) * ours + head * size;
                const uint16_t *own_query = (const uint16_t *)in->query + origin + q * in->stride;
                product_pairs(rows, width, size / 2, (const uint32_t *)own_query, in->stride / 2, 1, across_key, width, scores, width, 0);
                product_pairs(rows, width, size / 2, (const uint32_t *)(dout + at), ours / 2, 1, across_value, width, slopes, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    const float *row = scores + r * width, *slope = slopes + r * width;
                    const float norm = normaliser[(start + q + r) * in->heads + head];
                    vec sum = {0};
                    for (int64_t c = 0; c < size; c += LANES)
                        sum += load(dout, (size_t)(at + r * ours + c), LANES, 1) * load(out, (size_t)(at + r * ours + c), LANES, 1);
                    const float delta = total(sum);
                    if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, n, mask);
                    for (int64_t c = 0; c < width; c += LANES) {
                        vec p = exponential(*(const vec_u *)(row + c) * factor - norm);
                        if (c + LANES > n) p = choose((ivec)LANE < (int)(n - c), p, (vec){0});
                        vec factors = threshold ? *(vec_u *)(mask + c) : splat(1.0f);
                        store(weights, (size_t)(r * width + c), LANES, 1, p * factors);
                        store(low_slopes, (size_t)(r * width + c), LANES, 1, p * (*(const vec_u *)(slope + c) * factors - delta));
                    }
                }
                zip(weights, width, rows, width, zipped_weights, width);
                zip(low_slopes, width, rows, width, zipped_slopes, width);
                zip(own_query, in->stride, rows, size, query, size);
                zip(dout + at, ours, rows, size, gradient, size);
                const int64_t pairs = (rows + 1) / 2;
                product_pairs(n, size, pairs, zipped_weights, 1, width, gradient, size, value_sums, size, q > 0);
                product_pairs(n, size, pairs, zipped_slopes, 1, width, query, size, key_sums, size, q > 0);
                product_pairs(rows, size, (n + 1) / 2, (const uint32_t *)low_slopes, width / 2, 1, key, size, query_sums, size, 0);
                repack(query_sums, rows, size, size, dquery, in->stride, origin + q * in->stride, factor, 1);
            }
            repack(key_sums, n, size, size, dkey, in->stride, origin, factor, 1);
            repack(value_sums, n, size, size, dvalue, in->stride, origin, 1.0f, 1);
        }
    }
    free(scratch);
    return 0;
}
#define PAIRS(half, size) ((half) && (size) % LANES == 0)
#else
#define PAIRS(half, size) 0
#define attend_pairs(in, out, normaliser, seed, threshold) 1
#define attend_back_pairs(in, out, normaliser, dout, dquery, dkey, dvalue, seed, threshold) 1
#endif

#define ATTEND(name, half)                                                                                                        \
    int attend_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,         \
                      const int64_t *offsets, int64_t spans, void *out, float *normaliser, int64_t seed, int64_t threshold) {   \
        Heads in = {query, key, value, stride, size, heads, spans, offsets};                                                      \
        if (PAIRS(half, size)) return attend_pairs(&in, out, normaliser, seed, threshold);                                        \
        return attend_any(&in, out, normaliser, seed, threshold, half);                                                           \
    }                                                                                                                             \
    int attend_back_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,    \
                           const int64_t *offsets, int64_t spans, const void *out, const float *normaliser, const void *dout,     \
                           void *dquery, void *dkey, void *dvalue, int64_t seed, int64_t threshold) {                           \
        Heads in = {query, key, value, stride, size, heads, spans, offsets};                                                      \
        if (PAIRS(half, size))                                                                                                    \
            return attend_back_pairs(&in, out, normaliser, dout, dquery, dkey, dvalue, seed, threshold);                          \
        return attend_back_any(&in, out, normaliser, dout, dquery, dkey, dvalue, seed, threshold, half);                          \
    }
ATTEND(float, 0)
ATTEND(half, 1)
