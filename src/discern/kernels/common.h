/* Definitions that all kernels share: lanes, bfloat16, elementary functions, the hash for dropout, the division of rows.
 *
 * Each kernel computes what lies between two matrix products of a training step in one pass over memory, on a CPU.
 *
 * Every kernel has a plain counterpart in PyTorch, which is used if there is no compiler, and to which the tests compare it.
 * The code uses the vector extensions of GCC and Clang, with 16 lanes; the compiler splits them if registers are narrower.
 *
 * Conventions: matrices are row-major, and dense unless a stride is named; if `half` is set, a matrix holds bfloat16 instead
 * of float; sums are computed in float or double. Where rows are summed, each thread gets one contiguous range of them, so
 * results are the same from run to run for a given number of threads.
 */
#ifndef DISCERN_COMMON_H
#define DISCERN_COMMON_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
__attribute__((unused)) static int omp_get_max_threads(void) { return 1; }
__attribute__((unused)) static int omp_get_thread_num(void) { return 0; }
__attribute__((unused)) static int omp_get_num_threads(void) { return 1; }
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

INLINE uvec extend(hvec h) {
#ifdef __AVX512F__ /* GCC would do it in halves */
    return (uvec)_mm512_cvtepu16_epi32((__m256i)h);
#endif
    return __builtin_convertvector(h, uvec);
}

INLINE vec widen(hvec h) { return (vec)(extend(h) << 16); }

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

INLINE float total(vec x) { /* a tree: a chain of 16 additions would take longer than the loop before it */
    union { vec whole; half_vec half[2]; } a = {x};
    union { half_vec whole; quarter_vec half[2]; } b = {a.half[0] + a.half[1]};
    quarter_vec q = b.half[0] + b.half[1];
    return (q[0] + q[1]) + (q[2] + q[3]);
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)(((uvec)which & (uvec)yes) | (~(uvec)which & (uvec)no)); }

INLINE vec maximum(vec a, vec b) { /* b where a is NaN, as in the instruction of x86 */
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return choose(a > b, a, b);
}

INLINE float largest(vec x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float top[LANES];
    memcpy(top, &x, sizeof top);
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++) top[i] = top[i] > top[i + count] ? top[i] : top[i + count];
    return top[0];
}

/* ---- elementary functions ---- */

/* e^x; 0 below -87, so that probability 0 stays 0; x must be at most 88. Relative error 1e-7, or 1e-4 if `rough` is set, which
 * bfloat16 does not see.
 *
 * x log2(e) = n + r with |r| <= 1/2: a polynomial gives 2^r, and n is added to its exponent. Adding 1.5 * 2^23 rounds to an
 * integer, which is then in the lowest bits. */
INLINE vec exponential(vec x, int rough) {
    const float log2e = 1.44269504088896341f, magic = 12582912.0f;
    vec shifted = x * log2e + magic, r = x * log2e - (shifted - magic), p;
    if (rough) p = ((5.50089313e-2f * r + 2.42210968e-1f) * r + 6.93282928e-1f) * r + 1.0f;
    else p = ((((1.32647273e-3f * r + 9.67151279e-3f) * r + 5.55073374e-2f) * r + 2.40222421e-1f) * r + 6.93146978e-1f) * r + 1.0f;
    vec power = (vec)((ivec)p + ((ivec)shifted << 23));
    return (vec)(~(uvec)(x < -87.0f) & (uvec)power);
}

/* ln x of a positive number: x = 2^n (1 + r) with 1 + r between the roots of 1/2 and of 2. Absolute error 1e-7. */
INLINE vec logarithm(vec x) {
    ivec n = ((ivec)x - 0x3f3504f3) >> 23;
    vec r = (vec)((ivec)x - (n << 23)) - 1.0f, p = splat(0.0873484604f);
    p = (((p * r - 0.143075268f) * r + 0.149179748f) * r - 0.165705076f) * r + 0.199620720f;
    p = ((p * r - 0.250017553f) * r + 0.333339502f) * r - 0.499999916f;
    return p * r * r + r + __builtin_convertvector(n, vec) * 0.693147181f;
}

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

/* The maximum of a row. */
INLINE float row_top(const void *x, size_t row, int64_t columns, int half) {
    vec high = splat(-INFINITY);
    for (int64_t c = 0; c < columns; c += LANES) {
        int n = some(c, columns);
        vec v = load(x, row + c, n, half);
        high = maximum(n == LANES ? v : choose((ivec)LANE < n, v, splat(-INFINITY)), high);
    }
    return largest(high);
}

/* ---- dropout: 16 bits per element from a keyed hash of its index, so that the backward pass gets the same mask ---- */

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

/* Sums over rows, separate for each thread: `count` floats for the latest rows, which are added to `count` doubles every
 * EMPTY_EVERY rows. With many rows, a single chain of float additions would lose digits. */
#define EMPTY_EVERY 64

typedef struct {
    double *whole; /* threads x count */
    float *recent;
    int64_t count;
} Sums;

__attribute__((unused)) static int make_sums(Sums *sums, int64_t count) {
    const size_t places = (size_t)(omp_get_max_threads() * count);
    sums->count = count;
    sums->whole = calloc(places, sizeof(double) + sizeof(float));
    sums->recent = (float *)(sums->whole + places);
    return sums->whole != NULL;
}

INLINE float *own_sums(const Sums *sums) { return sums->recent + omp_get_thread_num() * sums->count; }

INLINE void empty_sums(const Sums *sums, int64_t rows_done, int last) {
    if (!last && rows_done % EMPTY_EVERY) return;
    float *recent = own_sums(sums);
    double *whole = sums->whole + omp_get_thread_num() * sums->count;
    for (int64_t c = 0; c < sums->count; c++) {
        whole[c] += recent[c];
        recent[c] = 0;
    }
}

/* Adds up the sums of all threads, from index `from` on. */
__attribute__((unused)) static void gather(const Sums *sums, int64_t from, int64_t columns, float *to) {
    if (!to) return;
    for (int64_t c = 0; c < columns; c++) {
        double sum = 0;
        for (int t = 0; t < omp_get_max_threads(); t++) sum += sums->whole[t * sums->count + from + c];
        to[c] = (float)sum;
    }
}

#endif
