/* Attention within spans of tokens. */
#include "common.h"

/* ---- attention over spans of rows that see each other: softmax(Q K^T / sqrt(size)), dropout, times V ----
 *
 * The tokens of all spans are concatenated; span s consists of tokens offsets[s] to offsets[s + 1]. Row t of query, key and
 * value begins at t * stride, head h at h * size within it. A thread computes one (span, head) at a time, in its own memory.
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

/* Copies the rows of one head as float, times `factor`, padded with zeros to `width` columns. */
INLINE void unpack(const void *from, int64_t stride, int64_t at, int64_t rows, int64_t size, float *to, int64_t width, float factor,
                   int half) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
            int n = some(c, size);
            vec v = n > 0 ? load(from, (size_t)(r * stride + at + c), n, half) * factor : (vec){0};
            *(vec_u *)(to + r * width + c) = v;
        }
}

/* Transposes to `size` rows of `width` >= rows columns. */
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

/* Dropout factors of the first `n` probabilities of a query. */
INLINE void keep_row(const Drop *drop, int64_t token, int64_t head, int64_t heads, int64_t across, int64_t n, float *to) {
    uint64_t base = (uint64_t)((token * heads + head) * across);
    for (int64_t c = 0; c < n; c += 32) {
        vec low, high;
        keep(drop, base + (uint64_t)(c / 32), &low, &high);
        *(vec_u *)(to + c) = low;
        *(vec_u *)(to + c + 16) = high;
    }
}

INLINE int attend_any(const Heads *in, void *out, float *normalizer, int64_t seed, int64_t threshold, int half) {
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
                    normalizer[(start + q + r) * in->heads + head] = top + logf(all);
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

/* Gradients of query, key and value, in the same layout; `out` is the result of `attend`. */
INLINE int attend_back_any(const Heads *in, const void *out, const float *normalizer, const void *dout, void *dquery, void *dkey,
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
                    const float norm = normalizer[(start + q + r) * in->heads + head];
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
/* The same with products of bfloat16 pairs, which these processors multiply twice as fast as floats. A pair has 32 bits.
 * Operand B of a product holds rows 2p and 2p + 1 of a matrix as pairs, operand A pairs along the dimension that is summed.
 * Requires a head size that is a multiple of 16. */
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

/* Combines rows 2p and 2p + 1: `to` has (rows + 1) / 2 rows of `columns` pairs; a missing last row counts as zeros. */
INLINE void zip(const uint16_t *from, int64_t stride, int64_t rows, int64_t columns, uint32_t *to, int64_t width) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            uvec low = __builtin_convertvector(*(const hvec_u *)(from + r * stride + c), uvec), high = {0};
            if (r + 1 < rows) high = __builtin_convertvector(*(const hvec_u *)(from + (r + 1) * stride + c), uvec);
            uvec pair = low | (high << 16);
            memcpy(to + (r / 2) * width + c, &pair, sizeof pair);
        }
}

/* Transposes in pairs of columns to size / 2 rows of `width` >= rows pairs. */
INLINE void transpose_pairs(const uint16_t *from, int64_t stride, int64_t rows, int64_t size, uint32_t *to, int64_t width) {
    for (int64_t block = 0; block < width; block += LANES)
        for (int64_t c = 0; c < size / 2; c++) {
            uint32_t column[LANES] = {0};
            for (int i = 0; i < LANES && block + i < rows; i++) memcpy(column + i, from + (block + i) * stride + 2 * c, 4);
            memcpy(to + c * width + block, column, sizeof column);
        }
}

static int attend_pairs(const Heads *in, uint16_t *out, float *normalizer, int64_t seed, int64_t threshold) {
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
                    normalizer[(start + q + r) * in->heads + head] = top + logf(all);
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

static int attend_back_pairs(const Heads *in, const uint16_t *out, const float *normalizer, const uint16_t *dout, uint16_t *dquery,
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
                    const float norm = normalizer[(start + q + r) * in->heads + head];
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
#define attend_pairs(in, out, normalizer, seed, threshold) 1
#define attend_back_pairs(in, out, normalizer, dout, dquery, dkey, dvalue, seed, threshold) 1
#endif

#define ATTEND(name, half)                                                                                                        \
    int attend_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,         \
                      const int64_t *offsets, int64_t spans, void *out, float *normalizer, int64_t seed, int64_t threshold) {   \
        Heads in = {query, key, value, stride, size, heads, spans, offsets};                                                      \
        if (PAIRS(half, size)) return attend_pairs(&in, out, normalizer, seed, threshold);                                        \
        return attend_any(&in, out, normalizer, seed, threshold, half);                                                           \
    }                                                                                                                             \
    int attend_back_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,    \
                           const int64_t *offsets, int64_t spans, const void *out, const float *normalizer, const void *dout,     \
                           void *dquery, void *dkey, void *dvalue, int64_t seed, int64_t threshold) {                           \
        Heads in = {query, key, value, stride, size, heads, spans, offsets};                                                      \
        if (PAIRS(half, size))                                                                                                    \
            return attend_back_pairs(&in, out, normalizer, dout, dquery, dkey, dvalue, seed, threshold);                          \
        return attend_back_any(&in, out, normalizer, dout, dquery, dkey, dvalue, seed, threshold, half);                          \
    }
ATTEND(float, 0)
ATTEND(half, 1)
