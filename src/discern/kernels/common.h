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

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8 /* of 16, GCC would keep the halves in memory */
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4)));
typedef hvec hvec_u __attribute__((aligned(2)));

#define INLINE static inline __attribute__((always_inline))

#if LANES == 16
static const uvec LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const uvec LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

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

/* The rest of a row is loaded and stored without a call of memcpy, which would keep the vectors of a loop in memory. */
INLINE vec load(const void *from, size_t at, int count, int half) {
    if (half) {
        const uint16_t *p = (const uint16_t *)from + at;
        if (count == LANES) return widen(*(const hvec_u *)p);
#ifdef __AVX512BW__
        return widen((hvec)_mm256_maskz_loadu_epi16((__mmask16)~(~0u << count), p));
#endif
        hvec h = {0};
        for (int i = 0; i < count; i++) h[i] = p[i];
        return widen(h);
    }
    const float *p = (const float *)from + at;
    if (count == LANES) return *(const vec_u *)p;
#ifdef __AVX512BW__
    return (vec)_mm512_maskz_loadu_ps((__mmask16)~(~0u << count), p);
#endif
    vec v = {0};
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
}

INLINE void store(void *to, size_t at, int count, int half, vec x) {
    if (half) {
        uint16_t *p = (uint16_t *)to + at;
        hvec h = narrow(x);
        if (count == LANES) *(hvec_u *)p = h;
        else
#ifdef __AVX512BW__
            _mm256_mask_storeu_epi16(p, (__mmask16)~(~0u << count), (__m256i)h);
#else
            for (int i = 0; i < count; i++) p[i] = h[i];
#endif
        return;
    }
    float *p = (float *)to + at;
    if (count == LANES) *(vec_u *)p = x;
    else
#ifdef __AVX512BW__
        _mm512_mask_storeu_ps(p, (__mmask16)~(~0u << count), (__m512)x);
#else
        for (int i = 0; i < count; i++) p[i] = x[i];
#endif
}

/* Starts a load for later: processors do not foresee several sequences of short rows. */
INLINE void fetch(const void *from, size_t at, int half) { __builtin_prefetch((const char *)from + at * (half ? 2 : 4)); }

INLINE int some(int64_t at, int64_t end) { return end - at < LANES ? (int)(end - at) : LANES; }

INLINE float total(vec x) { /* a tree: a chain of additions would take longer than the loop before it */
#if LANES == 16
    union { vec whole; vec8 half[2]; } a = {x};
    vec8 eight = a.half[0] + a.half[1];
#else
    vec8 eight = x;
#endif
    union { vec8 whole; vec4 half[2]; } b = {eight};
    vec4 four = b.half[0] + b.half[1];
    return (four[0] + four[1]) + (four[2] + four[3]);
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

/* Factors of the 32 elements of block `block`: of the first 16 from the lower halves of hashes, of the rest from the upper ones. */
INLINE void factors(const Drop *drop, uint64_t block, vec *to) {
    for (int k = 0; k < 16 / LANES; k++) {
        to[k] = to[k + 16 / LANES] = splat(1.0f);
        if (!drop->threshold) continue;
        uvec x = LANE + ((uint32_t)(block << 4) + (uint32_t)(k * LANES));
        x = mixed(x ^ drop->key1) + (drop->key2 ^ ((uint32_t)(block >> 28) * 0x9e3779b9u));
        x = mixed(x);
        uvec scale = (uvec)splat(drop->scale);
        to[k] = (vec)((uvec)((x & 0xffffu) >= drop->threshold) & scale);
        to[k + 16 / LANES] = (vec)((uvec)((x >> 16) >= drop->threshold) & scale);
    }
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

/* Runs a call on every thread, for its rows `first` to `last`. An inline function that is called with a constant is compiled for
 * it; if the function contained the parallel region, the constant would be a variable there, and be tested in the inner loops. */
#define PARALLEL(call)                                  \
    _Pragma("omp parallel if (rows * columns > SMALL)") \
    {                                                   \
        int64_t first, last;                            \
        share(rows, &first, &last);                     \
        call;                                           \
    }

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
