/* Attention within spans of tokens: softmax(Q K^T * factor), dropout, times V; forward and backward.
 *
 * The tokens of all spans are concatenated; span s consists of tokens offsets[s] to offsets[s + 1]. Row t of query, key and
 * value begins at t * stride, head h at h * size within it. A thread computes one (span, head) at a time, in its own memory,
 * whichever comes next: spans differ in length, and a thread that is interrupted does not hold up the others. Each result is
 * computed by one thread alone, so it does not depend on which.
 *
 * Queries are taken 32 at a time. Their scores are a product that stays in the cache; the softmax is not divided by its sum
 * before the product with V, but the result is. The backward pass computes the probabilities again from the saved logarithm of
 * the sum, and the gradients by the four products of the chain rule (Dao et al. 2022, FlashAttention, algorithms 2 and 4).
 *
 * With tables of angles, queries and keys are rotated as they are read, and their gradients back as they are written: the
 * halves x1 and x2 of a head become x1 cos - x2 sin and x2 cos + x1 sin. A table has a row for each token.
 *
 * Token i of a span sees token j if |i - j| <= window, and in a span with a direction only if j precedes, or follows, it. A tile
 * of queries is multiplied only with its band, the keys that any of its rows sees, so the time is proportional to the length of
 * the span times the window. Full attention has a window as long as the longest span.
 *
 * Disentangled attention adds to the score of query i and key j the products of the query with the vector
 * of their distance, and of the key with another one. `position` has a row of both for each bucket of distances, all heads of
 * the first side by side, then all heads of the second. `bucket` has the row of each distance j - i from 1 - reach to reach - 1,
 * and never increases. Of a tile, only the products with the buckets of its distances are computed.
 */
#include "products.h"

#define TILE 32 /* queries at a time */

typedef struct {
    const void *query, *key, *value;
    int64_t stride, size, heads, spans;
    const int64_t *offsets;
    const int8_t *direction; /* of each span: 1: a token sees what precedes it, -1: what follows it, 0: both; null: all both */
    int64_t window; /* negative: no limit */
    float factor; /* of the scores */
    const float *cosine, *sine; /* null: no rotation */
    const void *position; /* null: none */
    const int32_t *bucket;
    int64_t buckets, reach;
} Heads;

/* ---- rows of one head: read as left operands, written from sums ---- */

/* Rotates the two halves of a row; the angles are negated for sign = -1. */
INLINE void rotate(const void *from, size_t at, int from_half, void *to, size_t to_at, int to_half, int64_t size,
                   const float *cosine, const float *sine, float sign, float factor) {
    const int64_t middle = size / 2;
    for (int64_t c = 0; c < middle; c += LANES) {
        const int n = some(c, middle);
        vec x1 = load(from, at + c, n, from_half) * factor, x2 = load(from, at + middle + c, n, from_half) * factor;
        vec cos = load(cosine, c, n, 0), sin = load(sine, c, n, 0) * sign;
        store(to, to_at + c, n, to_half, x1 * cos - x2 * sin);
        store(to, to_at + middle + c, n, to_half, x2 * cos + x1 * sin);
    }
}

INLINE void prefetch(const void *from, int64_t at, int64_t size, int half) {
    for (int64_t c = 0; c < size; c += half ? 32 : 16) fetch(from, (size_t)(at + c), half);
}

/* Rows of one head from element `at` on, with zeros to multiples of 32 rows and of `deep` columns. `token`: the row of the tables
 * of angles for the first; negative: they are not rotated. The rows `ahead` elements further on, which the thread reads next, are
 * prefetched. */
INLINE void read_rows(const Heads *in, const void *from, int64_t stride, size_t at, int64_t rows, int64_t token, int64_t ahead,
                      void *to, int64_t deep, int half, int low) {
    const int64_t size = in->size, middle = size / 2, bytes = low ? 2 : 4;
    for (int64_t r = 0; r < rows; r++, at += stride) {
        prefetch(from, (int64_t)at + ahead, size, half);
        if (token >= 0 && in->cosine) {
            const size_t table = (size_t)((token + r) * middle);
            rotate(from, at, half, to, r * deep, low, size, in->cosine + table, in->sine + table, 1.0f, 1.0f);
            memset((char *)to + (r * deep + size) * bytes, 0, (size_t)((deep - size) * bytes));
        } else {
            int64_t c = 0;
            for (; c + LANES <= size; c += LANES) store(to, r * deep + c, LANES, low, load(from, at + c, LANES, half));
            if (c < size) store(to, r * deep + c, LANES, low, load(from, at + c, (int)(size - c), half));
            for (c = up(size, LANES); c < deep; c += LANES) store(to, r * deep + c, LANES, low, (vec){0});
        }
    }
    memset((char *)to + rows * deep * bytes, 0, (size_t)((up(rows, TILE) - rows) * deep * bytes));
}

/* Sums of `wide` columns, each row times `factor` and, where there are any, times its own of `factors`; rotated back. */
INLINE void write_rows(const Heads *in, const float *sums, int64_t rows, int64_t wide, float factor, const float *factors,
                       int64_t token, void *to, int64_t stride, size_t at, int half) {
    const int64_t size = in->size, middle = size / 2;
    for (int64_t r = 0; r < rows; r++, at += stride) {
        const float *row = sums + r * wide, scale = factors ? factors[r] : factor;
        if (token >= 0 && in->cosine) {
            const size_t table = (size_t)((token + r) * middle);
            rotate(row, 0, 0, to, at, half, size, in->cosine + table, in->sine + table, -1.0f, scale);
        } else {
            int64_t c = 0;
            for (; c + LANES <= size; c += LANES) store(to, at + c, LANES, half, *(const vec_u *)(row + c) * scale);
            if (c < size) store(to, at + c, (int)(size - c), half, *(const vec_u *)(row + c) * scale);
        }
    }
}

/* ---- tiles of queries, and the keys that they see ---- */

/* Queries `q` to `q + rows` of a span of n tokens, and their band: keys `low` to `high`, in `width` columns. `low` is a
 * multiple of 32, at which a block of the dropout mask begins, so that the mask does not depend on the window. */
typedef struct {
    int64_t q, rows, low, high, width;
} Tile;

/* How far the tokens of a span see. */
typedef struct {
    int64_t before, after;
} Window;

INLINE Window make_window(const Heads *in, int64_t span, int64_t window) {
    const int direction = in->direction ? in->direction[span] : 0;
    return (Window){direction < 0 ? 0 : window, direction > 0 ? 0 : window};
}

INLINE Tile make_tile(int64_t q, int64_t n, Window window) {
    const int64_t rows = n - q < TILE ? n - q : TILE, low = q > window.before ? (q - window.before) / 32 * 32 : 0;
    const int64_t high = n - q - rows > window.after ? q + rows + window.after : n;
    return (Tile){q, rows, low, high, up(high - low, 32)};
}

/* One row sees columns [from, to) of the band; [first, last) are the whole blocks of 32 that contain them. */
typedef struct {
    int64_t from, to, first, last;
} Seen;

INLINE Seen make_seen(const Tile *tile, int64_t r, Window window) {
    const int64_t i = tile->q + r - tile->low, end = tile->high - tile->low;
    const int64_t from = i > window.before ? i - window.before : 0, to = end - i > window.after ? i + window.after + 1 : end;
    return (Seen){from, to, from / 32 * 32, up(to, 32)};
}

/* The elements at column c and the 15 after it, with `other` for those that are not seen. */
INLINE vec visible(vec x, int64_t c, const Seen *seen, float other) {
    if (c >= seen->from && c + LANES <= seen->to) return x;
    ivec column = (ivec)LANE + (int)c;
    return choose((column >= (int)seen->from) & (column < (int)seen->to), x, splat(other));
}

/* Zeros the columns of the band outside of [first, last); an element has `bytes` bytes. */
INLINE void clear(void *row, const Seen *seen, int64_t width, int64_t bytes) {
    if (seen->first > 0) memset(row, 0, (size_t)(seen->first * bytes));
    if (seen->last < width) memset((char *)row + seen->last * bytes, 0, (size_t)((width - seen->last) * bytes));
}

/* ---- working memory of a thread ---- */

/* Vectors of the buckets of one head, and the products of the keys (a row for each token of a span) and of the queries (a row
 * for each of a tile) with them, and the gradients of those. Rows of products have `width` columns. */
typedef struct {
    float *key, *query, *across_key, *across_query, *of_keys, *of_queries, *dof_keys, *dof_queries;
    int64_t width;
} Positions;

typedef struct {
    /* Operands of a span: left, transposed, paired; without `low`, the last are the first. */
    void *key, *across_key, *key_pairs, *value, *across_value, *value_pairs;
    /* Operands of a tile. `weights` and `slopes` are the probabilities and the gradients of the scores; `turned` is room for
     * the transpose of one. */
    void *query, *query_pairs, *gradient, *gradient_pairs, *weights, *slopes, *turned;
    float *scores, *dscores, *sums, *key_sums, *value_sums;
    Positions positions;
    int64_t deep, wide; /* columns of left operands and of sums */
    int64_t window, blocks; /* the window, at most as long as the longest span; blocks of a dropout mask over its keys */
    size_t bytes;
} Work;

static Work make_work(const Heads *in, char *base, int low) {
    int64_t most = 1;
    for (int64_t s = 0; s < in->spans; s++) {
        int64_t n = in->offsets[s + 1] - in->offsets[s];
        most = n > most ? n : most;
    }
    Work w = {.window = in->window < 0 || in->window > most ? most : in->window, .wide = up(in->size, BLOCK)};
    w.deep = low ? up(in->size, 32) : w.wide, w.blocks = blocks(most);
    const int64_t keys = up(most, 32), deep = low ? w.deep / 2 : w.deep, across = up(deep, BLOCK) * spread(keys);
    const int64_t band = up(2 * TILE + 2 * w.window, 32) < keys ? up(2 * TILE + 2 * w.window, 32) : keys;
#define TAKE(count) (void *)(base + w.bytes); w.bytes += (size_t)up(count, BLOCK) * 4
    w.key = TAKE(keys * deep);
    w.across_key = TAKE(across);
    w.value = TAKE(keys * deep);
    w.across_value = TAKE(across);
    w.query = TAKE(TILE * deep);
    w.gradient = TAKE(TILE * deep);
    w.scores = TAKE(TILE * band);
    w.dscores = TAKE(TILE * band);
    w.sums = TAKE(TILE * w.wide);
    w.key_sums = TAKE(keys * w.wide);
    w.value_sums = TAKE(keys * w.wide);
    w.key_pairs = w.key, w.value_pairs = w.value, w.query_pairs = w.query, w.gradient_pairs = w.gradient;
    w.weights = w.scores, w.slopes = w.dscores;
    if (low) {
        w.key_pairs = TAKE(keys * deep);
        w.value_pairs = TAKE(keys * deep);
        w.query_pairs = TAKE(TILE * deep);
        w.gradient_pairs = TAKE(TILE * deep);
        w.weights = TAKE(TILE / 2 * band);
        w.slopes = TAKE(TILE / 2 * band);
        w.turned = TAKE(TILE * band);
    }
    if (in->position) {
        Positions *p = &w.positions;
        p->width = spread(up(in->buckets, BLOCK) + BLOCK);
        p->key = TAKE(up(in->buckets, 32) * w.wide);
        p->query = TAKE(up(in->buckets, 32) * w.wide);
        p->across_key = TAKE(w.wide * p->width);
        p->across_query = TAKE(w.wide * p->width);
        p->of_keys = TAKE(keys * p->width);
        p->of_queries = TAKE(TILE * p->width);
        p->dof_keys = TAKE(keys * p->width);
        p->dof_queries = TAKE(TILE * p->width);
    }
#undef TAKE
    return w;
}

/* ---- scores of positions, in float ---- */

/* The spans are divided into groups; one thread computes a group for one head. With positions, a group has many spans, since
 * their vectors are prepared and their gradients summed once a group; the number does not depend on the number of threads. */
#define GROUPS 8

INLINE int64_t groups(const Heads *in) { return in->position && in->spans > GROUPS ? GROUPS : in->spans; }

/* Number of sums for the gradients of the vectors: two for each bucket of each head in each group. */
INLINE size_t position_sums_of(const Heads *in) {
    return in->position ? (size_t)(groups(in) * in->heads * 2 * in->buckets * up(in->size, BLOCK)) : 0;
}

INLINE void read_positions(const Heads *in, int64_t head, const Work *w, int half) {
    const Positions *p = &w->positions;
    const int64_t size = in->size, stride = 2 * in->heads * size;
    read_rows(in, in->position, stride, head * size, in->buckets, -1, 0, p->key, w->wide, half, 0);
    read_rows(in, in->position, stride, (in->heads + head) * size, in->buckets, -1, 0, p->query, w->wide, half, 0);
    transpose(p->key, w->wide, in->buckets, w->wide, p->across_key, p->width);
    transpose(p->query, w->wide, in->buckets, w->wide, p->across_query, p->width);
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
INLINE void positions_of_keys(const Heads *in, const Work *w, int64_t n) {
    const Positions *p = &w->positions;
    for (int64_t k = 0; k < n; k += TILE) {
        const int64_t rows = n - k < TILE ? n - k : TILE;
        const Range range = make_range(in, 0, n, k, rows);
        product(rows, up(range.count, LANES), in->size, (Left){(float *)w->key + k * w->wide, w->wide, 1},
                p->across_query + range.low, p->width, p->of_keys + k * p->width + range.low, p->width, 0, 0);
    }
}

/* Adds the products of positions to those of a tile. */
INLINE void add_positions(const Heads *in, const Work *w, const Tile *tile) {
    const Positions *p = &w->positions;
    const Range range = make_range(in, tile->q, tile->rows, tile->low, tile->high - tile->low);
    product(tile->rows, up(range.count, LANES), in->size, (Left){w->query, w->wide, 1}, p->across_key + range.low, p->width,
            p->of_queries + range.low, p->width, 0, 0);
    for (int64_t r = 0; r < tile->rows; r++) {
        const int32_t *bucket = in->bucket + in->reach - 1 - (tile->q + r);
        const float *of_query = p->of_queries + r * p->width, *of_keys = p->of_keys;
        float *row = w->scores + r * tile->width - tile->low;
        for (int64_t j = tile->low; j < tile->high; j++) row[j] += of_query[bucket[j]] + of_keys[j * p->width + bucket[j]];
    }
}

/* ---- the two passes ---- */

/* How far it is from a job to the one that this thread probably takes next. */
typedef struct {
    int64_t tokens, column;
} Step;

INLINE Step next_job(const Heads *in, int64_t job, int64_t parts) {
    const int64_t last = parts * in->heads - 1, next = job + omp_get_num_threads() < last ? job + omp_get_num_threads() : last;
    const int64_t tokens = in->offsets[in->spans * (next / in->heads) / parts] - in->offsets[in->spans * (job / in->heads) / parts];
    return (Step){tokens, (next % in->heads - job % in->heads) * in->size};
}

/* The share of a thread in each pass. The parallel region is around the calls: a compiler splits it off before it inlines, and
 * `half` and `low` would not be constants inside. */
INLINE void attend(const Heads *in, char *scratch, void *out, float *normalizer, int64_t seed, int64_t threshold, int half,
                   int low) {
    const int64_t size = in->size, ours = in->heads * size, parts = groups(in), pair = low ? 2 : 1;
    const float factor = in->factor;
    const Drop drop = make_drop(seed, threshold);
    const Work w = make_work(in, scratch, low);
    const int64_t deep = w.deep / pair; /* units in a row */
    if (low && has_tiles()) begin_tiles();
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < parts * in->heads; job++) {
        const int64_t head = job % in->heads, part = job / in->heads;
        if (in->position) read_positions(in, head, &w, half);
        for (int64_t span = in->spans * part / parts; span < in->spans * (part + 1) / parts; span++) {
            const int64_t start = in->offsets[span], n = in->offsets[span + 1] - start, apart = spread(up(n, 32));
            const size_t origin = (size_t)(start * in->stride + head * size);
            const Step next = next_job(in, job, parts);
            const int64_t ahead = next.tokens * in->stride + next.column;
            read_rows(in, in->key, in->stride, origin, n, start, ahead, w.key, w.deep, half, low);
            transpose(w.key, deep, up(n, 32), deep, w.across_key, apart);
            read_rows(in, in->value, in->stride, origin, n, -1, ahead, w.value, w.deep, half, low);
            if (low) pair_rows(w.value, up(n, 32), w.deep, w.value_pairs);
            if (in->position) positions_of_keys(in, &w, n);
            const Window window = make_window(in, span, w.window);
            for (int64_t q = 0; q < n; q += TILE) {
                const Tile tile = make_tile(q, n, window);
                const int64_t rows = tile.rows, width = tile.width;
                /* Scores */
                read_rows(in, in->query, in->stride, origin + q * in->stride, rows, start + q, ahead, w.query, w.deep, half, low);
                product(rows, width, units(size, low), (Left){w.query, deep, 1}, (uint32_t *)w.across_key + tile.low,
                        apart, w.scores, width, 0, low);
                if (in->position) add_positions(in, &w, &tile);
                /* Softmax, without the division */
                float inverse[TILE], tops[TILE] = {0}, sums[TILE] = {0};
                for (int64_t r = 0; r < rows; r++) {
                    const float *row = w.scores + r * width;
                    const Seen seen = make_seen(&tile, r, window);
                    vec high = splat(-INFINITY), sum = {0};
                    for (int64_t c = seen.first; c < seen.last; c += LANES)
                        high = maximum(visible(*(const vec_u *)(row + c), c, &seen, -INFINITY), high);
                    const float top = largest(high) * factor;
                    const uint64_t block = (uint64_t)(((start + q + r) * in->heads + head) * w.blocks + tile.low / 32);
                    clear((char *)w.weights + r * width * 4 / pair, &seen, width, 4 / pair);
                    for (int64_t c = seen.first; c < seen.last; c += 32) {
                        vec mask[32 / LANES];
                        factors(&drop, block + (uint64_t)c / 32, mask);
                        for (int k = 0; k < 32 / LANES; k++) {
                            const int64_t column = c + k * LANES;
                            vec e = visible(exponential(*(const vec_u *)(row + column) * factor - top, low), column, &seen, 0.0f);
                            sum += e;
                            store(w.weights, r * width + column, LANES, low, e * mask[k]);
                        }
                    }
                    tops[r] = top, sums[r] = total(sum);
                }
                for (int r = 0; r < TILE; r += LANES) {
                    const vec all = *(vec_u *)(sums + r);
                    *(vec_u *)(inverse + r) = 1.0f / all;
                    *(vec_u *)(tops + r) += logarithm(all);
                }
                for (int64_t r = 0; r < rows; r++) normalizer[(start + q + r) * in->heads + head] = tops[r];
                /* Weighted values */
                product(rows, w.wide, units(tile.high - tile.low, low), (Left){w.weights, width / pair, 1},
                        (uint32_t *)w.value_pairs + tile.low / pair * w.deep, w.deep, w.sums, w.wide, 0, low);
                write_rows(in, w.sums, rows, w.wide, 0, inverse, -1, out, ours, (start + q) * ours + head * size, half);
            }
        }
    }
    if (low && has_tiles()) end_tiles();
}

/* Gradients of query, key and value, in the same layout; `out` is the result of `attend`. */
INLINE void attend_back(const Heads *in, char *scratch, float *position_sums, const void *out, const float *normalizer,
                        const void *dout, void *dquery, void *dkey, void *dvalue, void *dposition, int64_t seed, int64_t threshold,
                        int half, int low) {
    const int64_t size = in->size, ours = in->heads * size, parts = groups(in), pair = low ? 2 : 1, wide = up(size, BLOCK);
    const int64_t head_sums = 2 * in->buckets * wide; /* gradients of the vectors of one head, in one group */
    const float factor = in->factor;
    const Drop drop = make_drop(seed, threshold);
    const Work w = make_work(in, scratch, low);
    const Positions *p = &w.positions;
    const int64_t deep = w.deep / pair; /* units in a row */
    if (low && has_tiles()) begin_tiles();
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < parts * in->heads; job++) {
        const int64_t head = job % in->heads, part = job / in->heads;
        float *dposition_key = position_sums + job * head_sums, *dposition_query = dposition_key + in->buckets * wide;
        if (in->position) read_positions(in, head, &w, half);
        for (int64_t span = in->spans * part / parts; span < in->spans * (part + 1) / parts; span++) {
            const int64_t start = in->offsets[span], n = in->offsets[span + 1] - start, apart = spread(up(n, 32));
            const size_t origin = (size_t)(start * in->stride + head * size);
            const Step next = next_job(in, job, parts);
            const int64_t ahead = next.tokens * in->stride + next.column;
            read_rows(in, in->key, in->stride, origin, n, start, ahead, w.key, w.deep, half, low);
            read_rows(in, in->value, in->stride, origin, n, -1, ahead, w.value, w.deep, half, low);
            transpose(w.key, deep, up(n, 32), deep, w.across_key, apart);
            transpose(w.value, deep, up(n, 32), deep, w.across_value, apart);
            if (low) pair_rows(w.key, up(n, 32), w.deep, w.key_pairs);
            memset(w.key_sums, 0, (size_t)(up(n, 32) * wide) * sizeof(float));
            memset(w.value_sums, 0, (size_t)(up(n, 32) * wide) * sizeof(float));
            if (in->position) {
                positions_of_keys(in, &w, n);
                memset(p->dof_keys, 0, (size_t)(n * p->width) * sizeof(float));
            }
            const Window window = make_window(in, span, w.window);
            for (int64_t q = 0; q < n; q += TILE) {
                const Tile tile = make_tile(q, n, window);
                const int64_t rows = tile.rows, width = tile.width, count = tile.high - tile.low, bytes = 4 / pair;
                const size_t at = (size_t)((start + q) * ours + head * size);
                /* Scores, and gradients of the probabilities before dropout */
                read_rows(in, in->query, in->stride, origin + q * in->stride, rows, start + q, ahead, w.query, w.deep, half, low);
                for (int64_t r = 0; r < rows; r++)
                    prefetch(out, (int64_t)at + r * ours + next.tokens * ours + next.column, size, half);
                read_rows(in, dout, ours, at, rows, -1, next.tokens * ours + next.column, w.gradient, w.deep, half, low);
                product(rows, width, units(size, low), (Left){w.query, deep, 1}, (uint32_t *)w.across_key + tile.low,
                        apart, w.scores, width, 0, low);
                if (in->position) add_positions(in, &w, &tile);
                product(rows, width, units(size, low), (Left){w.gradient, deep, 1},
                        (uint32_t *)w.across_value + tile.low, apart, w.dscores, width, 0, low);
                /* Probabilities, and gradients of the scores */
                for (int64_t r = 0; r < rows; r++) {
                    const float *row = w.scores + r * width, *drow = w.dscores + r * width;
                    const Seen seen = make_seen(&tile, r, window);
                    const float norm = normalizer[(start + q + r) * in->heads + head];
                    vec sum = {0};
                    for (int64_t c = 0; c < size; c += LANES)
                        sum += load(dout, at + r * ours + c, some(c, size), half) * load(out, at + r * ours + c, some(c, size), half);
                    const float delta = total(sum);
                    const uint64_t block = (uint64_t)(((start + q + r) * in->heads + head) * w.blocks + tile.low / 32);
                    clear((char *)w.weights + r * width * bytes, &seen, width, bytes);
                    clear((char *)w.slopes + r * width * bytes, &seen, width, bytes);
                    for (int64_t c = seen.first; c < seen.last; c += 32) {
                        vec mask[32 / LANES];
                        factors(&drop, block + (uint64_t)c / 32, mask);
                        for (int k = 0; k < 32 / LANES; k++) {
                            const int64_t column = c + k * LANES;
                            vec weight = visible(exponential(*(const vec_u *)(row + column) * factor - norm, low), column, &seen, 0.0f);
                            vec slope = weight * (*(const vec_u *)(drow + column) * mask[k] - delta);
                            store(w.weights, r * width + column, LANES, low, weight * mask[k]);
                            store(w.slopes, r * width + column, LANES, low, slope);
                        }
                    }
                }
                if (low) { /* the sums over the queries are over whole tiles */
                    memset((char *)w.weights + rows * width * bytes, 0, (size_t)((TILE - rows) * width * bytes));
                    memset((char *)w.slopes + rows * width * bytes, 0, (size_t)((TILE - rows) * width * bytes));
                    pair_rows(w.query, TILE, w.deep, w.query_pairs);
                    pair_rows(w.gradient, TILE, w.deep, w.gradient_pairs);
                }
                /* Gradients */
                product(count, wide, units(rows, low), transposed(w.weights, width, w.turned, low), w.gradient_pairs, w.deep,
                        w.value_sums + tile.low * wide, wide, 1, low);
                product(count, wide, units(rows, low), transposed(w.slopes, width, w.turned, low), w.query_pairs, w.deep,
                        w.key_sums + tile.low * wide, wide, 1, low);
                product(rows, wide, units(count, low), (Left){w.slopes, width / pair, 1},
                        (uint32_t *)w.key_pairs + tile.low / pair * w.deep, w.deep, w.sums, wide, 0, low);
                if (in->position) {
                    const Range range = make_range(in, q, rows, tile.low, count);
                    for (int64_t r = 0; r < rows; r++) {
                        const int32_t *bucket = in->bucket + in->reach - 1 - (q + r);
                        const float *slope = w.dscores + r * width - tile.low;
                        float *of_query = p->dof_queries + r * p->width;
                        memset(of_query + range.low, 0, (size_t)range.count * sizeof(float));
                        for (int64_t j = tile.low; j < tile.high; j++) {
                            of_query[bucket[j]] += slope[j];
                            p->dof_keys[j * p->width + bucket[j]] += slope[j];
                        }
                    }
                    const float *slope = p->dof_queries + range.low;
                    product(rows, wide, range.count, (Left){slope, p->width, 1}, p->key + range.low * wide, wide, w.sums, wide, 1,
                            0);
                    product(range.count, wide, rows, (Left){slope, 1, p->width}, w.query, wide, dposition_key + range.low * wide,
                            wide, 1, 0);
                }
                write_rows(in, w.sums, rows, wide, factor, NULL, start + q, dquery, in->stride, origin + q * in->stride, half);
            }
            for (int64_t k = 0; in->position && k < n; k += TILE) {
                const int64_t rows = n - k < TILE ? n - k : TILE;
                const Range range = make_range(in, 0, n, k, rows);
                const float *slope = p->dof_keys + k * p->width + range.low;
                product(rows, wide, range.count, (Left){slope, p->width, 1}, p->query + range.low * wide, wide,
                        w.key_sums + k * wide, wide, 1, 0);
                product(range.count, wide, rows, (Left){slope, 1, p->width}, (float *)w.key + k * wide, wide,
                        dposition_query + range.low * wide, wide, 1, 0);
            }
            write_rows(in, w.key_sums, n, wide, factor, NULL, start, dkey, in->stride, origin, half);
            write_rows(in, w.value_sums, n, wide, 1.0f, NULL, -1, dvalue, in->stride, origin, half);
        }
    }
    if (low && has_tiles()) end_tiles();
    /* The sums of all groups, in order. */
#pragma omp for
    for (int64_t side = 0; side < (in->position ? 2 * in->heads : 0); side++) {
        const int64_t head = side % in->heads, which = side / in->heads;
        float *whole = position_sums + head * head_sums + which * in->buckets * wide;
        for (int64_t part = 1; part < parts; part++)
            for (int64_t i = 0; i < in->buckets * wide; i++) whole[i] += whole[part * in->heads * head_sums + i];
        write_rows(in, whole, in->buckets, wide, factor, NULL, -1, dposition, 2 * in->heads * size, (size_t)(side * size), half);
    }
}

#define LAYOUT                                                                                                                 \
    const void *query, const void *key, const void *value, int64_t stride, int64_t size, int64_t heads,                        \
        const int64_t *offsets, const int8_t *direction, int64_t spans, int64_t window, float factor, const float *cosine, const float *sine,           \
        const void *position, const int32_t *bucket, int64_t buckets, int64_t reach
#define HEADS                                                                                                                  \
    Heads in = {query,  key,  value,    stride, size,   heads,   spans, offsets, direction, window,                            \
                factor, cosine, sine, position, bucket, buckets, reach}
#define ATTEND(name, half)                                                                                                     \
    int attend_##name(LAYOUT, void *out, float *normalizer, int64_t seed, int64_t threshold) {                                 \
        HEADS;                                                                                                                 \
        const int low = HAS_LOW && (half) && !position;                                                                          \
        const size_t each = make_work(&in, NULL, low).bytes;                                                                   \
        char *scratch = aligned_alloc(64, (size_t)omp_get_max_threads() * each);                                               \
        if (!scratch) return 1;                                                                                                \
        _Pragma("omp parallel") {                                                                                              \
            char *own = scratch + (size_t)omp_get_thread_num() * each;                                                         \
            if (low) attend(&in, own, out, normalizer, seed, threshold, half, 1);                                              \
            else attend(&in, own, out, normalizer, seed, threshold, half, 0);                                                  \
        }                                                                                                                      \
        free(scratch);                                                                                                         \
        return 0;                                                                                                              \
    }                                                                                                                          \
    int attend_back_##name(LAYOUT, const void *out, const float *normalizer, const void *dout, void *dq, void *dk, void *dv,   \
                           void *dposition, int64_t seed, int64_t threshold) {                                                 \
        HEADS;                                                                                                                 \
        const int low = HAS_LOW && (half) && !position;                                                                          \
        const size_t each = make_work(&in, NULL, low).bytes, sums = position_sums_of(&in);                                     \
        char *scratch = aligned_alloc(64, (size_t)omp_get_max_threads() * each);                                               \
        float *shared = calloc(sums + 1, sizeof(float));                                                                       \
        if (scratch && shared) {                                                                                               \
            _Pragma("omp parallel") {                                                                                          \
                char *own = scratch + (size_t)omp_get_thread_num() * each;                                                     \
                if (low) attend_back(&in, own, shared, out, normalizer, dout, dq, dk, dv, dposition, seed, threshold, half, 1); \
                else attend_back(&in, own, shared, out, normalizer, dout, dq, dk, dv, dposition, seed, threshold, half, 0);    \
            }                                                                                                                  \
        }                                                                                                                      \
        free(scratch), free(shared);                                                                                           \
        return !scratch || !shared;                                                                                            \
    }
ATTEND(float, 0)
ATTEND(half, 1)
