/* Attention within spans of tokens. */
#include "common.h"

/* ---- attention over spans of rows that see each other: softmax(Q K^T / sqrt(size)), dropout, times V ----
 *
 * The tokens of all spans are concatenated; span s consists of tokens offsets[s] to offsets[s + 1]. Row t of query, key and
 * value begins at t * stride, head h at h * size within it. A thread computes one (span, head) at a time, in its own memory,
 * whichever comes next: spans differ in length, and a thread that is interrupted does not hold up the others. Each result is
 * computed by one thread alone, so it does not depend on which.
 *
 * Token i of a span sees token j if |i - j| <= window. A tile of queries is multiplied only with its band, the keys that any of
 * its rows sees, so the time is proportional to the length of the span times the window. Full attention has a window as long
 * as the longest span.
 *
 * Disentangled attention, which has no window, adds to the score of query i and key j the products of the query with the vector
 * of their distance, and of the key with another one. `position` has a row of both for each bucket of distances, all heads of
 * the first side by side, then all heads of the second. `bucket` has the row of each distance j - i from 1 - reach to reach - 1,
 * and never increases. Of a tile, only the products with the buckets of its distances are computed.
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
    int64_t window; /* negative: no limit */
    float factor; /* of the scores */
    const void *position; /* null: none */
    const int32_t *bucket;
    int64_t buckets, reach;
} Heads;

static int64_t longest(const Heads *in) {
    int64_t most = 1;
    for (int64_t s = 0; s < in->spans; s++) {
        int64_t n = in->offsets[s + 1] - in->offsets[s];
        most = n > most ? n : most;
    }
    return most;
}

/* Columns for the keys of a span and for the scores of a tile, and the window, at most as long as the longest span. */
typedef struct {
    int64_t keys, scores, window;
} Room;

INLINE Room make_room(const Heads *in) {
    const int64_t most = longest(in), window = in->window < 0 || in->window > most ? most : in->window;
    const int64_t band = padded(2 * TILE + 2 * window), keys = padded(most) + LANES;
    return (Room){keys, band < keys ? band : keys, window};
}

/* A stride of at least `width` that is no large power of two, which would put all rows into the same few sets of the cache. */
INLINE int64_t spread(int64_t width) { return width | LANES; }

/* The spans are divided into groups; one thread computes a group for one head. With positions, a group has many spans, since
 * their vectors are prepared and their gradients summed once a group; the number does not depend on the number of threads. */
#define GROUPS 8

INLINE int64_t groups(const Heads *in) { return in->position && in->spans > GROUPS ? GROUPS : in->spans; }

/* Vectors of the buckets of one head, and the products of the keys (a row for each token of a span) and of the queries (a row
 * for each of a tile) with them. Rows of products and of transposed matrices have `width` columns. */
typedef struct {
    float *key, *query, *across_key, *across_query, *of_keys, *of_queries;
    int64_t width;
} Positions;

INLINE int64_t positions_width(const Heads *in) { return in->position ? spread(padded(in->buckets) + LANES) : 0; }

INLINE int64_t positions_size(const Heads *in, int64_t most, int64_t wide) {
    return in->position ? 2 * in->buckets * wide + positions_width(in) * (2 * wide + most + TILE) : 0;
}

INLINE Positions make_positions(const Heads *in, int64_t head, int64_t most, int64_t wide, float *room, int half) {
    const int64_t size = in->size, count = in->buckets, stride = 2 * in->heads * size, width = positions_width(in);
    Positions p = {.key = room, .query = room + count * wide, .across_key = room + 2 * count * wide, .width = width};
    p.across_query = p.across_key + wide * width;
    p.of_keys = p.across_query + wide * width;
    p.of_queries = p.of_keys + most * width;
    unpack(in->position, stride, head * size, count, size, p.key, wide, 1.0f, half);
    unpack(in->position, stride, (in->heads + head) * size, count, size, p.query, wide, in->factor, half);
    transpose(p.key, count, size, wide, p.across_key, width);
    transpose(p.query, count, size, wide, p.across_query, width);
    return p;
}

/* Buckets of the distances between queries and keys: from the last key to the first query, and the reverse. */
typedef struct {
    int64_t low, count;
} Range;

INLINE Range make_range(const Heads *in, int64_t query, int64_t queries, int64_t key, int64_t keys) {
    const int32_t *bucket = in->bucket + in->reach - 1;
    const int64_t low = bucket[key + keys - 1 - query];
    return (Range){low, bucket[key - (query + queries - 1)] - low + 1};
}

/* The products of the n keys of a span. */
INLINE void positions_of_keys(const Heads *in, const Positions *p, const float *key, int64_t n, int64_t wide) {
    for (int64_t k = 0; k < n; k += TILE) {
        const int64_t rows = n - k < TILE ? n - k : TILE;
        const Range range = make_range(in, 0, n, k, rows);
        product(rows, padded(range.count), in->size, key + k * wide, wide, 1, p->across_query + range.low, p->width,
                p->of_keys + k * p->width + range.low, p->width, 0);
    }
}

/* Adds the scores of positions to those of `rows` queries from query q on. */
INLINE void add_positions(const Heads *in, const Positions *p, const float *query, int64_t q, int64_t rows, int64_t n, int64_t wide,
                          float *scores, int64_t width) {
    const Range range = make_range(in, q, rows, 0, n);
    product(rows, padded(range.count), in->size, query, wide, 1, p->across_key + range.low, p->width, p->of_queries + range.low,
            p->width, 0);
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *bucket = in->bucket + in->reach - 1 - (q + r);
        const float *of_query = p->of_queries + r * p->width, *of_keys = p->of_keys;
        float *row = scores + r * width;
        for (int64_t j = 0; j < n; j++) row[j] += of_query[bucket[j]] + of_keys[j * p->width + bucket[j]];
    }
}

/* Queries `q` to `q + rows` of a span of n tokens, and their band: keys `low` to `high`, in `width` columns. `low` is a
 * multiple of 32, at which a block of the dropout mask begins, so that the mask does not depend on the window. */
typedef struct {
    int64_t q, rows, low, high, width;
} Tile;

INLINE Tile make_tile(int64_t q, int64_t n, int64_t window) {
    const int64_t rows = n - q < TILE ? n - q : TILE, low = q > window ? (q - window) / 32 * 32 : 0;
    const int64_t high = n - q - rows > window ? q + rows + window : n;
    return (Tile){q, rows, low, high, padded(high - low)};
}

/* One row sees columns [from, to) of the band; [first, last) are the whole vectors that contain them. */
typedef struct {
    int64_t from, to, first, last;
} Seen;

INLINE Seen make_seen(const Tile *tile, int64_t r, int64_t window) {
    const int64_t i = tile->q + r - tile->low, end = tile->high - tile->low;
    const int64_t from = i > window ? i - window : 0, to = end - i > window ? i + window + 1 : end;
    return (Seen){from, to, from / LANES * LANES, padded(to)};
}

/* Sets the scores before column `from`, in its vector, to -INFINITY, so that their probabilities are 0. */
INLINE void hide(float *row, const Seen *seen) {
    if (seen->from == seen->first) return;
    vec v = *(vec_u *)(row + seen->first);
    *(vec_u *)(row + seen->first) = choose((ivec)LANE < (int)(seen->from - seen->first), splat(-INFINITY), v);
}

/* Zeros the columns of the band outside of [first, last); an element has `bytes` bytes. */
INLINE void clear(void *row, const Seen *seen, int64_t width, int64_t bytes) {
    if (seen->first > 0) memset(row, 0, (size_t)(seen->first * bytes));
    if (seen->last < width) memset((char *)row + seen->last * bytes, 0, (size_t)((width - seen->last) * bytes));
}

/* Dropout factors of the probabilities of a query, for the columns that it sees. */
INLINE void keep_row(const Drop *drop, int64_t token, int64_t head, int64_t heads, int64_t across, int64_t low,
                     const Seen *seen, float *to) {
    uint64_t base = (uint64_t)((token * heads + head) * across + low / 32);
    for (int64_t c = seen->first / 32 * 32; c < seen->to; c += 32) {
        vec even, odd;
        keep(drop, base + (uint64_t)(c / 32), &even, &odd);
        *(vec_u *)(to + c) = even;
        *(vec_u *)(to + c + 16) = odd;
    }
}

INLINE int attend_any(const Heads *in, void *out, float *normalizer, int64_t seed, int64_t threshold, int half) {
    const Room room = make_room(in);
    const int64_t most = room.keys, band = room.scores, window = room.window, across = blocks(most);
    const int64_t size = in->size, wide = padded(size);
    const int64_t before = 3 * most * wide + TILE * (band + 2 * wide) + band + 2 * LANES;
    const int64_t each = before + positions_size(in, most, wide), parts = groups(in);
    const float factor = in->factor;
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *key = scratch + omp_get_thread_num() * each, *across_key = key + most * wide, *value = across_key + most * wide;
        float *query = value + most * wide, *scores = query + TILE * wide, *sums = scores + TILE * band;
        float *mask = sums + TILE * wide;
        Positions positions;
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < parts * in->heads; job++) {
            const int64_t head = job % in->heads, part = job / in->heads;
            if (in->position) positions = make_positions(in, head, most, wide, key + before, half);
            for (int64_t span = in->spans * part / parts; span < in->spans * (part + 1) / parts; span++) {
                const int64_t start = in->offsets[span], n = in->offsets[span + 1] - start, apart = spread(padded(n));
                const int64_t origin = start * in->stride + head * size;
                unpack(in->key, in->stride, origin, n, size, key, wide, 1.0f, half);
                transpose(key, n, size, wide, across_key, apart);
                unpack(in->value, in->stride, origin, n, size, value, wide, 1.0f, half);
                if (in->position) positions_of_keys(in, &positions, key, n, wide);
                for (int64_t q = 0; q < n; q += TILE) {
                    const Tile tile = make_tile(q, n, window);
                    const int64_t rows = tile.rows, low = tile.low, count = tile.high - low, width = tile.width;
                    unpack(in->query, in->stride, origin + q * in->stride, rows, size, query, wide, factor, half);
                    product(rows, width, size, query, wide, 1, across_key + low, apart, scores, width, 0);
                    if (in->position) add_positions(in, &positions, query, q, rows, n, wide, scores, width);
                    for (int64_t r = 0; r < rows; r++) {
                        float *row = scores + r * width;
                        const Seen seen = make_seen(&tile, r, window);
                        hide(row, &seen);
                        clear(row, &seen, width, sizeof(float));
                        const float top = row_top(row, (size_t)seen.first, seen.to - seen.first, 0);
                        vec sum = {0};
                        for (int64_t c = seen.first; c < seen.to; c += LANES) {
                            vec e = exponential(*(vec_u *)(row + c) - top, 0);
                            if (c + LANES > seen.to) e = choose((ivec)LANE < (int)(seen.to - c), e, (vec){0});
                            *(vec_u *)(row + c) = e;
                            sum += e;
                        }
                        const float all = total(sum), inverse = 1.0f / all;
                        normalizer[(start + q + r) * in->heads + head] = top + logf(all);
                        if (threshold) {
                            keep_row(&drop, start + q + r, head, in->heads, across, low, &seen, mask);
                            for (int64_t c = seen.first; c < seen.to; c += LANES)
                                *(vec_u *)(row + c) *= *(vec_u *)(mask + c) * inverse;
                        } else {
                            for (int64_t c = seen.first; c < seen.to; c += LANES) *(vec_u *)(row + c) *= inverse;
                        }
                    }
                    product(rows, wide, count, scores, width, 1, value + low * wide, wide, sums, wide, 0);
                    repack(sums, rows, size, wide, out, in->heads * size, (start + q) * in->heads * size + head * size, 1.0f, half);
                }
            }
        }
    }
    free(scratch);
    return 0;
}

/* Gradients of query, key and value, in the same layout; `out` is the result of `attend`. */
INLINE int attend_back_any(const Heads *in, const void *out, const float *normalizer, const void *dout, void *dquery, void *dkey,
                           void *dvalue, void *dposition, int64_t seed, int64_t threshold, int half) {
    const Room room = make_room(in);
    const int64_t most = room.keys, band = room.scores, window = room.window, across = blocks(most);
    const int64_t size = in->size, wide = padded(size);
    const int64_t before = 6 * most * wide + TILE * (3 * band + 4 * wide) + band + 2 * LANES, across_buckets = positions_width(in);
    const int64_t each = before + positions_size(in, most, wide) + (most + TILE) * across_buckets, parts = groups(in);
    const int64_t head_sums = 2 * in->buckets * wide; /* gradients of the vectors of one head, in one group */
    const float factor = in->factor;
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    float *position_sums = in->position ? calloc((size_t)(parts * in->heads * head_sums + 1), sizeof(float)) : NULL;
    if (!scratch || (in->position && !position_sums)) {
        free(scratch), free(position_sums);
        return 1;
    }
#pragma omp parallel
    {
        float *key = scratch + omp_get_thread_num() * each, *across_key = key + most * wide, *value = across_key + most * wide;
        float *across_value = value + most * wide, *key_sums = across_value + most * wide, *value_sums = key_sums + most * wide;
        float *query = value_sums + most * wide, *gradient = query + TILE * wide, *result = gradient + TILE * wide;
        float *query_sums = result + TILE * wide, *scores = query_sums + TILE * wide, *dropped = scores + TILE * band;
        float *slopes = dropped + TILE * band, *mask = slopes + TILE * band;
        float *dof_keys = key + each - (most + TILE) * across_buckets, *dof_queries = dof_keys + most * across_buckets;
        Positions positions;
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < parts * in->heads; job++) {
            const int64_t head = job % in->heads, part = job / in->heads;
            float *dposition_key = position_sums + job * head_sums, *dposition_query = dposition_key + in->buckets * wide;
            if (in->position) positions = make_positions(in, head, most, wide, key + before, half);
            for (int64_t span = in->spans * part / parts; span < in->spans * (part + 1) / parts; span++) {
                const int64_t start = in->offsets[span], n = in->offsets[span + 1] - start, apart = spread(padded(n));
                const int64_t origin = start * in->stride + head * size;
                const int64_t ours = in->heads * size;
                unpack(in->key, in->stride, origin, n, size, key, wide, 1.0f, half);
                transpose(key, n, size, wide, across_key, apart);
                unpack(in->value, in->stride, origin, n, size, value, wide, 1.0f, half);
                transpose(value, n, size, wide, across_value, apart);
                memset(key_sums, 0, (size_t)(n * wide) * sizeof(float));
                memset(value_sums, 0, (size_t)(n * wide) * sizeof(float));
                if (in->position) {
                    positions_of_keys(in, &positions, key, n, wide);
                    memset(dof_keys, 0, (size_t)(n * across_buckets) * sizeof(float));
                }
                for (int64_t q = 0; q < n; q += TILE) {
                    const Tile tile = make_tile(q, n, window);
                    const int64_t rows = tile.rows, low = tile.low, count = tile.high - low, width = tile.width;
                    const int64_t at = (start + q) * ours + head * size;
                    unpack(in->query, in->stride, origin + q * in->stride, rows, size, query, wide, factor, half);
                    unpack(dout, ours, at, rows, size, gradient, wide, 1.0f, half);
                    unpack(out, ours, at, rows, size, result, wide, 1.0f, half);
                    product(rows, width, size, query, wide, 1, across_key + low, apart, scores, width, 0);
                    if (in->position) add_positions(in, &positions, query, q, rows, n, wide, scores, width);
                    product(rows, width, size, gradient, wide, 1, across_value + low, apart, slopes, width, 0);
                    for (int64_t r = 0; r < rows; r++) {
                        float *row = scores + r * width, *kept = dropped + r * width, *slope = slopes + r * width;
                        const Seen seen = make_seen(&tile, r, window);
                        hide(row, &seen);
                        clear(kept, &seen, width, sizeof(float));
                        clear(slope, &seen, width, sizeof(float));
                        const float norm = normalizer[(start + q + r) * in->heads + head];
                        vec sum = {0};
                        for (int64_t c = 0; c < wide; c += LANES)
                            sum += *(vec_u *)(gradient + r * wide + c) * *(vec_u *)(result + r * wide + c);
                        const float delta = total(sum);
                        if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, low, &seen, mask);
                        for (int64_t c = seen.first; c < seen.to; c += LANES) {
                            vec p = exponential(*(vec_u *)(row + c) - norm, 0);
                            if (c + LANES > seen.to) p = choose((ivec)LANE < (int)(seen.to - c), p, (vec){0});
                            vec factors = threshold ? *(vec_u *)(mask + c) : splat(1.0f);
                            *(vec_u *)(kept + c) = p * factors;
                            *(vec_u *)(slope + c) = p * (*(vec_u *)(slope + c) * factors - delta);
                        }
                    }
                    product(count, wide, rows, dropped, 1, width, gradient, wide, value_sums + low * wide, wide, 1);
                    product(count, wide, rows, slopes, 1, width, query, wide, key_sums + low * wide, wide, 1);
                    product(rows, wide, count, slopes, width, 1, key + low * wide, wide, query_sums, wide, 0);
                    if (in->position) {
                        const Range range = make_range(in, q, rows, 0, n);
                        for (int64_t r = 0; r < rows; r++) {
                            const int32_t *bucket = in->bucket + in->reach - 1 - (q + r);
                            const float *slope = slopes + r * width;
                            float *of_query = dof_queries + r * across_buckets;
                            memset(of_query + range.low, 0, (size_t)range.count * sizeof(float));
                            for (int64_t j = 0; j < n; j++) {
                                of_query[bucket[j]] += slope[j];
                                dof_keys[j * across_buckets + bucket[j]] += slope[j];
                            }
                        }
                        product(rows, wide, range.count, dof_queries + range.low, across_buckets, 1,
                                positions.key + range.low * wide, wide, query_sums, wide, 1);
                        product(range.count, wide, rows, dof_queries + range.low, 1, across_buckets, query, wide,
                                dposition_key + range.low * wide, wide, 1);
                    }
                    repack(query_sums, rows, size, wide, dquery, in->stride, origin + q * in->stride, factor, half);
                }
                for (int64_t k = 0; in->position && k < n; k += TILE) {
                    const int64_t rows = n - k < TILE ? n - k : TILE;
                    const Range range = make_range(in, 0, n, k, rows);
                    const float *slope = dof_keys + k * across_buckets + range.low;
                    product(rows, wide, range.count, slope, across_buckets, 1, positions.query + range.low * wide, wide,
                            key_sums + k * wide, wide, 1);
                    product(range.count, wide, rows, slope, 1, across_buckets, key + k * wide, wide,
                            dposition_query + range.low * wide, wide, 1);
                }
                repack(key_sums, n, size, wide, dkey, in->stride, origin, 1.0f, half);
                repack(value_sums, n, size, wide, dvalue, in->stride, origin, 1.0f, half);
            }
        }
        /* The sums of all groups, in order. */
#pragma omp for
        for (int64_t side = 0; side < (in->position ? 2 * in->heads : 0); side++) {
            const int64_t head = side % in->heads, which = side / in->heads;
            float *whole = position_sums + head * head_sums + which * in->buckets * wide;
            for (int64_t part = 1; part < parts; part++)
                for (int64_t i = 0; i < in->buckets * wide; i++) whole[i] += whole[part * in->heads * head_sums + i];
            repack(whole, in->buckets, size, wide, dposition, 2 * in->heads * size, side * size, which ? factor : 1.0f, half);
        }
    }
    free(scratch), free(position_sums);
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

/* Transposes a square of 16 x 16 pairs: first within quarters of the vectors, then the quarters. */
INLINE void transpose_block(__m512i *r) {
    __m512i t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
            r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int k = 0; k < 4; k++) {
            t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0x88);
            t[i + k + 4] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        r[k] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0x88);
        r[k + 8] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0xdd);
    }
}

/* Transposes in pairs of columns to size / 2 rows of `width` >= rows pairs, padded with zeros. */
INLINE void transpose_pairs(const uint16_t *from, int64_t stride, int64_t rows, int64_t size, uint32_t *to, int64_t width) {
    for (int64_t block = 0; block < width; block += LANES)
        for (int64_t c = 0; c < size / 2; c += LANES) {
            const int columns = some(c, size / 2);
            const __mmask16 inside = (__mmask16)((1u << columns) - 1u);
            __m512i square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = _mm512_maskz_loadu_epi32(block + i < rows ? inside : 0, from + (block + i) * stride + 2 * c);
            transpose_block(square);
            for (int i = 0; i < columns; i++) _mm512_storeu_si512(to + (c + i) * width + block, square[i]);
        }
}

static int attend_pairs(const Heads *in, uint16_t *out, float *normalizer, int64_t seed, int64_t threshold) {
    const Room room = make_room(in);
    const int64_t most = room.keys, band = room.scores, window = room.window, across = blocks(most);
    const int64_t size = in->size, ours = in->heads * size;
    const int64_t each = most * size + TILE * (band + band / 2 + size) + band + 2 * LANES;
    const float factor = in->factor;
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *scores = scratch + omp_get_thread_num() * each, *sums = scores + TILE * band, *mask = sums + TILE * size;
        uint32_t *across_key = (uint32_t *)(mask + band + 2 * LANES), *value = across_key + most * size / 2;
        uint16_t *weights = (uint16_t *)(value + most * size / 2);
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, apart = spread(padded(n));
            const int64_t origin = start * in->stride + head * size;
            const uint16_t *query = (const uint16_t *)in->query + origin;
            transpose_pairs((const uint16_t *)in->key + origin, in->stride, n, size, across_key, apart);
            zip((const uint16_t *)in->value + origin, in->stride, n, size, value, size);
            for (int64_t q = 0; q < n; q += TILE) {
                const Tile tile = make_tile(q, n, window);
                const int64_t rows = tile.rows, low = tile.low, count = tile.high - low, width = tile.width;
                product_pairs(rows, width, size / 2, (const uint32_t *)(query + q * in->stride), in->stride / 2, 1,
                              across_key + low, apart, scores, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * width;
                    const Seen seen = make_seen(&tile, r, window);
                    hide(row, &seen);
                    clear(weights + r * width, &seen, width, sizeof(uint16_t));
                    const float top = row_top(row, (size_t)seen.first, seen.to - seen.first, 0) * factor;
                    vec sum = {0};
                    for (int64_t c = seen.first; c < seen.to; c += LANES) {
                        vec e = exponential(*(vec_u *)(row + c) * factor - top, 0);
                        if (c + LANES > seen.to) e = choose((ivec)LANE < (int)(seen.to - c), e, (vec){0});
                        *(vec_u *)(row + c) = e;
                        sum += e;
                    }
                    const float all = total(sum), inverse = 1.0f / all;
                    normalizer[(start + q + r) * in->heads + head] = top + logf(all);
                    if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, low, &seen, mask);
                    for (int64_t c = seen.first; c < seen.to; c += LANES) {
                        vec p = *(vec_u *)(row + c) * inverse;
                        store(weights, (size_t)(r * width + c), LANES, 1, threshold ? p * *(vec_u *)(mask + c) : p);
                    }
                }
                product_pairs(rows, size, (count + 1) / 2, (const uint32_t *)weights, width / 2, 1, value + low / 2 * size,
                              size, sums, size, 0);
                repack(sums, rows, size, size, out, ours, (start + q) * ours + head * size, 1.0f, 1);
            }
        }
    }
    free(scratch);
    return 0;
}

static int attend_back_pairs(const Heads *in, const uint16_t *out, const float *normalizer, const uint16_t *dout, uint16_t *dquery,
                             uint16_t *dkey, uint16_t *dvalue, int64_t seed, int64_t threshold) {
    const Room room = make_room(in);
    const int64_t most = room.keys, band = room.scores, window = room.window, across = blocks(most);
    const int64_t size = in->size, ours = in->heads * size;
    const int64_t each = most * size * 4 + TILE * (4 * band + 2 * size) + band + 2 * LANES;
    const float factor = in->factor;
    Drop drop = make_drop(seed, threshold);
    float *scratch = malloc((size_t)(omp_get_max_threads() * each) * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel
    {
        float *scores = scratch + omp_get_thread_num() * each, *slopes = scores + TILE * band;
        float *query_sums = slopes + TILE * band, *key_sums = query_sums + TILE * size, *value_sums = key_sums + most * size;
        float *mask = value_sums + most * size;
        uint32_t *across_key = (uint32_t *)(mask + band + 2 * LANES), *across_value = across_key + most * size / 2;
        uint32_t *key = across_value + most * size / 2, *query = key + most * size / 2, *gradient = query + TILE * size / 2;
        uint32_t *zipped_weights = gradient + TILE * size / 2, *zipped_slopes = zipped_weights + TILE * band / 2;
        uint16_t *weights = (uint16_t *)(zipped_slopes + TILE * band / 2), *low_slopes = weights + TILE * band;
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < in->spans * in->heads; job++) {
            const int64_t span = job / in->heads, head = job % in->heads, start = in->offsets[span];
            const int64_t n = in->offsets[span + 1] - start, apart = spread(padded(n));
            const int64_t origin = start * in->stride + head * size;
            const uint16_t *own_key = (const uint16_t *)in->key + origin, *own_value = (const uint16_t *)in->value + origin;
            transpose_pairs(own_key, in->stride, n, size, across_key, apart);
            transpose_pairs(own_value, in->stride, n, size, across_value, apart);
            zip(own_key, in->stride, n, size, key, size);
            memset(key_sums, 0, (size_t)(n * size) * sizeof(float));
            memset(value_sums, 0, (size_t)(n * size) * sizeof(float));
            for (int64_t q = 0; q < n; q += TILE) {
                const Tile tile = make_tile(q, n, window);
                const int64_t rows = tile.rows, low = tile.low, count = tile.high - low, width = tile.width;
                const int64_t at = (start + q) * ours + head * size;
                const uint16_t *own_query = (const uint16_t *)in->query + origin + q * in->stride;
                product_pairs(rows, width, size / 2, (const uint32_t *)own_query, in->stride / 2, 1, across_key + low,
                              apart, scores, width, 0);
                product_pairs(rows, width, size / 2, (const uint32_t *)(dout + at), ours / 2, 1, across_value + low, apart,
                              slopes, width, 0);
                for (int64_t r = 0; r < rows; r++) {
                    float *row = scores + r * width, *slope = slopes + r * width;
                    const Seen seen = make_seen(&tile, r, window);
                    hide(row, &seen);
                    clear(weights + r * width, &seen, width, sizeof(uint16_t));
                    clear(low_slopes + r * width, &seen, width, sizeof(uint16_t));
                    const float norm = normalizer[(start + q + r) * in->heads + head];
                    vec sum = {0};
                    for (int64_t c = 0; c < size; c += LANES)
                        sum += load(dout, (size_t)(at + r * ours + c), LANES, 1) * load(out, (size_t)(at + r * ours + c), LANES, 1);
                    const float delta = total(sum);
                    if (threshold) keep_row(&drop, start + q + r, head, in->heads, across, low, &seen, mask);
                    for (int64_t c = seen.first; c < seen.to; c += LANES) {
                        vec p = exponential(*(const vec_u *)(row + c) * factor - norm, 0);
                        if (c + LANES > seen.to) p = choose((ivec)LANE < (int)(seen.to - c), p, (vec){0});
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
                product_pairs(count, size, pairs, zipped_weights, 1, width, gradient, size, value_sums + low * size, size, 1);
                product_pairs(count, size, pairs, zipped_slopes, 1, width, query, size, key_sums + low * size, size, 1);
                product_pairs(rows, size, (count + 1) / 2, (const uint32_t *)low_slopes, width / 2, 1, key + low / 2 * size,
                              size, query_sums, size, 0);
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

#define ATTEND(name, half)                                                                                                     \
    int attend_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,      \
                      const int64_t *offsets, int64_t spans, int64_t window, float factor, const void *position,               \
                      const int32_t *bucket, int64_t buckets, int64_t reach, void *out, float *normalizer, int64_t seed,       \
                      int64_t threshold) {                                                                                     \
        Heads in = {query, key, value, stride, size, heads, spans, offsets, window, factor, position, bucket, buckets, reach}; \
        if (PAIRS(half, size) && !position) return attend_pairs(&in, out, normalizer, seed, threshold);                        \
        return attend_any(&in, out, normalizer, seed, threshold, half);                                                        \
    }                                                                                                                          \
    int attend_back_##name(const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads, \
                           const int64_t *offsets, int64_t spans, int64_t window, float factor, const void *position,          \
                           const int32_t *bucket, int64_t buckets, int64_t reach, const void *out, const float *normalizer,    \
                           const void *dout, void *dquery, void *dkey, void *dvalue, void *dposition, int64_t seed,            \
                           int64_t threshold) {                                                                                \
        Heads in = {query, key, value, stride, size, heads, spans, offsets, window, factor, position, bucket, buckets, reach}; \
        if (PAIRS(half, size) && !position)                                                                                    \
            return attend_back_pairs(&in, out, normalizer, dout, dquery, dkey, dvalue, seed, threshold);                       \
        return attend_back_any(&in, out, normalizer, dout, dquery, dkey, dvalue, dposition, seed, threshold, half);            \
    }
ATTEND(float, 0)
ATTEND(half, 1)
