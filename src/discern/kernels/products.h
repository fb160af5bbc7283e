/* Products of small matrices in the cache, C = A B or C += A B, summed in float, and the forms of their operands.
 *
 * If `low` is set, operands hold bfloat16, and what is multiplied at a time is a pair of two of them; otherwise a float. Both
 * have 32 bits, a `unit`. A left operand holds its units row by row, a right one has a row of units for each step of the sum:
 * of bfloat16, it pairs rows 2p and 2p + 1 of the matrix.
 *
 * Left operands are filled with zeros to multiples of 32 rows and of 16 units. Then every form follows by whole blocks of
 * 16 x 16 units: transposing the units of a left operand gives the right operand of its transpose.
 *
 * Three micro-kernels: floats; pairs (AVX-512 BF16); tiles of 16 x 16 units (AMX), where the processor has them and the
 * operating system grants them.
 */
#ifndef DISCERN_PRODUCTS_H
#define DISCERN_PRODUCTS_H
#include "common.h"

#define BLOCK 16 /* units to each side of what is transposed, and of a tile */

INLINE int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* A stride of at least `width` that is no large power of two, which would put all rows into the same few sets of the cache. */
INLINE int64_t spread(int64_t width) { return width | BLOCK; }

/* ---- forms of operands ---- */

#ifdef __AVX512F__
INLINE void transpose_block(const uint32_t *from, int64_t stride, uint32_t *to, int64_t width) {
    __m512i r[BLOCK], t[BLOCK];
    for (int i = 0; i < BLOCK; i++) r[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < BLOCK; i += 2) { /* within quarters of the vectors, then the quarters */
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < BLOCK; i += 4)
        for (int k = 0; k < 2; k++) {
            r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
            r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
        }
    for (int i = 0; i < BLOCK; i += 8)
        for (int k = 0; k < 4; k++) {
            t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0x88);
            t[i + k + 4] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        _mm512_storeu_si512(to + k * width, _mm512_shuffle_i32x4(t[k], t[k + 8], 0x88));
        _mm512_storeu_si512(to + (k + 8) * width, _mm512_shuffle_i32x4(t[k], t[k + 8], 0xdd));
    }
}
#else
INLINE void transpose_block(const uint32_t *from, int64_t stride, uint32_t *to, int64_t width) {
    for (int c = 0; c < BLOCK; c++)
        for (int r = 0; r < BLOCK; r++) to[c * width + r] = from[r * stride + c];
}
#endif

/* Transposes `rows` rows of `units`, both rounded up to multiples of 16. */
INLINE void transpose(const void *from, int64_t stride, int64_t rows, int64_t units, void *to, int64_t width) {
    for (int64_t r = 0; r < rows; r += BLOCK)
        for (int64_t c = 0; c < units; c += BLOCK)
            transpose_block((const uint32_t *)from + r * stride + c, stride, (uint32_t *)to + c * width + r, width);
}

/* Pairs the bfloat16 rows 2p and 2p + 1 of a left operand with `columns` numbers a row. */
INLINE void pair_rows(const void *from, int64_t rows, int64_t columns, void *to) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            const uint16_t *at = (const uint16_t *)from + r * columns + c;
            uvec pair = extend(*(const hvec_u *)at) | extend(*(const hvec_u *)(at + columns)) << 16;
            *(vec_u *)((float *)to + r / 2 * columns + c) = (vec)pair;
        }
}

/* ---- micro-kernels: m x n of C, k units; unit i, p of A is at i * row + p * step ---- */

#define MR 6
#define NR (LANES / 4) /* as many as there are registers for */

#define MICRO(name, type, operand, broadcast, load_row, multiply_add)                                                          \
    INLINE void name(int m, int nv, int64_t k, const type *a, int64_t row, int64_t step, const type *b, int64_t ldb, float *c, \
                     int64_t ldc, int add) {                                                                                   \
        vec sum[MR][NR];                                                                                                       \
        for (int i = 0; i < m; i++)                                                                                            \
            for (int j = 0; j < nv; j++) sum[i][j] = add ? *(vec_u *)(c + i * ldc + j * LANES) : (vec){0};                     \
        for (int64_t p = 0; p < k; p++) {                                                                                      \
            operand right[NR];                                                                                                 \
            for (int j = 0; j < nv; j++) right[j] = load_row(b + p * ldb + j * LANES);                                         \
            for (int i = 0; i < m; i++) {                                                                                      \
                operand left = broadcast(a[i * row + p * step]);                                                               \
                for (int j = 0; j < nv; j++) sum[i][j] = multiply_add(sum[i][j], left, right[j]);                              \
            }                                                                                                                  \
        }                                                                                                                      \
        for (int i = 0; i < m; i++)                                                                                            \
            for (int j = 0; j < nv; j++) *(vec_u *)(c + i * ldc + j * LANES) = sum[i][j];                                      \
    }

#define ROWS(micro, m, nv)                                                                                                     \
    case m: micro(m, nv, k, a + i * row, row, step, b + j, ldb, c + i * ldc + j, ldc, add); break;
#define STRIP(micro, nv)                                                                                                       \
    for (int64_t i = 0; i < m; i += MR) {                                                                                      \
        switch (m - i < MR ? (int)(m - i) : MR) {                                                                              \
            ROWS(micro, 1, nv) ROWS(micro, 2, nv) ROWS(micro, 3, nv) ROWS(micro, 4, nv) ROWS(micro, 5, nv) ROWS(micro, 6, nv)  \
        }                                                                                                                      \
    }
#define PRODUCT(name, micro, type)                                                                                             \
    static void name(int64_t m, int64_t n, int64_t k, const type *a, int64_t row, int64_t step, const type *b, int64_t ldb,    \
                     float *c, int64_t ldc, int add) {                                                                         \
        int64_t j = 0;                                                                                                         \
        for (; j + NR * LANES <= n; j += NR * LANES) { STRIP(micro, NR) }                                                      \
        for (; j + 2 * LANES <= n; j += 2 * LANES) { STRIP(micro, 2) }                                                         \
        for (; j < n; j += LANES) { STRIP(micro, 1) }                                                                          \
    }

#define LOAD_FLOATS(at) (*(const vec_u *)(at))
#define MULTIPLY_ADD(sum, left, right) ((sum) + (left) * (right))
MICRO(micro_floats, float, vec, splat, LOAD_FLOATS, MULTIPLY_ADD)
PRODUCT(product_floats, micro_floats, float)

#ifdef __AVX512BF16__
#define LOAD_PAIRS(at) ((__m512bh)_mm512_loadu_si512(at))
#define BROADCAST_PAIR(pair) ((__m512bh)_mm512_set1_epi32((int)(pair)))
#define MULTIPLY_ADD_PAIRS(sum, left, right) ((vec)_mm512_dpbf16_ps((__m512)(sum), left, right))
MICRO(micro_pairs, uint32_t, __m512bh, BROADCAST_PAIR, LOAD_PAIRS, MULTIPLY_ADD_PAIRS)
PRODUCT(product_pairs, micro_pairs, uint32_t)
#else
#define product_pairs(m, n, k, a, row, step, b, ldb, c, ldc, add) ((void)0)
#endif

#if defined(__AMX_BF16__) || defined(DISCERN_TILE_MODEL) /* the model is for tests */
#ifndef DISCERN_TILE_MODEL
#include <sys/syscall.h>
#include <unistd.h>

/* Whether this process may use tiles: Linux grants their data on request, since it enlarges the state of its threads. */
static int has_tiles(void) {
    static int granted = -1;
    if (granted < 0) granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}
#endif

/* GCC does not know that the instructions read memory: what they read must have been written. */
#define WRITTEN(at) __asm__ volatile("" : : "r"(at) : "memory")

/* All eight tiles have 16 rows of 16 units. Other libraries configure them differently, so before every use in a thread. */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = 16;
    WRITTEN(&shape);
    _tile_loadconfig(&shape);
}

INLINE void end_tiles(void) { _tile_release(); }

/* As the others, with step = 1; m, n and k are rounded up to multiples of 16. A block of C has up to 2 x 2 tiles. */
static void product_tiles(int64_t m, int64_t n, int64_t k, const uint32_t *a, int64_t row, const uint32_t *b, int64_t ldb, float *c,
                          int64_t ldc, int add) {
    WRITTEN(a);
    for (int64_t i = 0; i < m; i += 32)
        for (int64_t j = 0; j < n; j += 32) {
            const int below = i + 16 < m, beside = j + 16 < n;
            float *at = c + i * ldc + j, *under = at + 16 * ldc;
            if (add) _tile_loadd(0, at, ldc * 4); else _tile_zero(0);
            if (add && beside) _tile_loadd(1, at + 16, ldc * 4); else _tile_zero(1);
            if (add && below) _tile_loadd(2, under, ldc * 4); else _tile_zero(2);
            if (add && below && beside) _tile_loadd(3, under + 16, ldc * 4); else _tile_zero(3);
            for (int64_t p = 0; p < k; p += 16) {
                const uint32_t *left = a + i * row + p, *right = b + p * ldb + j;
                _tile_loadd(4, left, row * 4);
                _tile_loadd(6, right, ldb * 4);
                _tile_dpbf16ps(0, 4, 6);
                if (beside) {
                    _tile_loadd(7, right + 16, ldb * 4);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (below) {
                    _tile_loadd(5, left + 16 * row, row * 4);
                    _tile_dpbf16ps(2, 5, 6);
                    if (beside) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, at, ldc * 4);
            if (beside) _tile_stored(1, at + 16, ldc * 4);
            if (below) _tile_stored(2, under, ldc * 4);
            if (below && beside) _tile_stored(3, under + 16, ldc * 4);
        }
}
#else
#define has_tiles() 0
#define begin_tiles() ((void)0)
#define end_tiles() ((void)0)
#define product_tiles(m, n, k, a, row, b, ldb, c, ldc, add) ((void)0)
#endif

/* Whether there are products of bfloat16. */
#if defined(__AVX512BF16__) || defined(DISCERN_TILE_MODEL)
#define HAS_LOW 1
#else
#define HAS_LOW 0
#endif

/* Units of n numbers. */
INLINE int64_t units(int64_t n, int low) { return low ? (n + 1) / 2 : n; }

/* A left operand: unit i, p is at i * row + p * step. */
typedef struct {
    const void *at;
    int64_t row, step;
} Left;

INLINE void product(int64_t m, int64_t n, int64_t k, Left a, const void *b, int64_t ldb, float *c, int64_t ldc, int add, int low) {
    if (!low) product_floats(m, n, k, a.at, a.row, a.step, b, ldb, c, ldc, add);
    else if (has_tiles()) product_tiles(m, n, k, a.at, a.row, b, ldb, c, ldc, add);
    else product_pairs(m, n, k, a.at, a.row, a.step, b, ldb, c, ldc, add);
}

/* The transpose of a left operand of 32 rows of `columns` numbers, as a left operand; `room` has 32 * columns units. */
INLINE Left transposed(const void *from, int64_t columns, void *room, int low) {
    if (!low) return (Left){from, 1, columns};
    pair_rows(from, 32, columns, room);
    if (!has_tiles()) return (Left){room, 1, columns};
    uint32_t *turned = (uint32_t *)room + 16 * columns;
    transpose(room, columns, 16, columns, turned, 16);
    return (Left){turned, 16, 1};
}

#endif
