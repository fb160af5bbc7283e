/* Computes the probabilities of relative attention from its scores. */
#include "common.h"

/* ---- softmax(content + apart + gain for keys of another segment), then dropout ----
 *
 * `apart` is read from the column in `starts`, that of the row's first key. Heads are the first dimension: row r belongs to
 * query r % asked of the batch, with `asked` = B * Q. `relation` of each key to each query: 0 hidden, 1 in the same segment,
 * 2 in another; null: all are 1. A row that sees no key gets zeros.
 */

typedef uint8_t bvec __attribute__((vector_size(LANES)));

INLINE ivec relations(const uint8_t *from, int count) {
    bvec b = {0};
    if (count == LANES) memcpy(&b, from, LANES);
#ifdef __AVX512BW__
    else b = (bvec)_mm_maskz_loadu_epi8((__mmask16)~(~0u << count), from);
#else
    else memcpy(&b, from, (size_t)count);
#endif
    return __builtin_convertvector(b, ivec);
}

INLINE int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE void relative_rows(const void *content, const void *apart, const float *gain, const uint8_t *relation, const int64_t *starts,
                          void *probabilities, void *dropped, float *scratch, int64_t first, int64_t last, int64_t asked,
                          int64_t keys, int64_t width, const Drop *drop, int half) {
    float *own = scratch + omp_get_thread_num() * rounded(keys);
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * keys), shifted = (size_t)(r * width + starts[r % asked]);
        const uint8_t *seen = relation ? relation + (r % asked) * keys : NULL;
        vec high = splat(-INFINITY);
        for (int64_t c = 0; c < keys; c += LANES) {
            int n = some(c, keys);
            vec s = load(content, row + c, n, half) + load(apart, shifted + c, n, half);
            ivec hidden = (ivec)LANE >= n;
            if (seen) {
                ivec which = relations(seen + c, n);
                if (gain) s += choose(which == 2, splat(gain[r]), (vec){0});
                hidden |= which == 0;
            }
            s = choose(hidden, splat(-INFINITY), s);
            *(vec_u *)(own + c) = s;
            high = maximum(s, high);
        }
        float top = largest(high);
        vec sum = {0};
        /* -INFINITY minus itself would be NaN: the sum of a row that sees no key stays 0. */
        float base = top == -INFINITY ? 0.0f : top;
        for (int64_t c = 0; c < keys; c += LANES) {
            vec e = exponential(*(vec_u *)(own + c) - base, 0);
            *(vec_u *)(own + c) = e;
            sum += e;
        }
        float whole = total(sum);
        float inverse = top == -INFINITY ? 0.0f : 1.0f / whole;
        for (int64_t c = 0; c < keys; c += 32) {
            vec mask[32 / LANES];
            factors(drop, (uint64_t)(r * blocks(keys) + c / 32), mask);
            for (int k = 0; k < 32 / LANES && c + LANES * k < keys; k++) {
                int64_t at = c + LANES * k;
                int n = some(at, keys);
                vec p = *(vec_u *)(own + at) * inverse;
                store(probabilities, row + at, n, half, p);
                if (drop->threshold) store(dropped, row + at, n, half, p * mask[k]);
            }
        }
    }
}

INLINE void relative_back_rows(const void *probabilities, const void *gradient, const uint8_t *relation, const int64_t *starts,
                               void *dcontent, void *dapart, float *dgain, float *scratch, int64_t first, int64_t last,
                               int64_t asked, int64_t keys, int64_t width, const Drop *drop, int half) {
    const size_t size = half ? 2 : 4;
    float *own = scratch + omp_get_thread_num() * rounded(keys);
    for (int64_t r = first; r < last; r++) {
        const size_t row = (size_t)(r * keys), start = (size_t)starts[r % asked], shifted = (size_t)(r * width) + start;
        const uint8_t *seen = relation ? relation + (r % asked) * keys : NULL;
        vec sum = {0};
        for (int64_t c = 0; c < keys; c += 32) {
            vec mask[32 / LANES];
            factors(drop, (uint64_t)(r * blocks(keys) + c / 32), mask);
            for (int k = 0; k < 32 / LANES && c + LANES * k < keys; k++) {
                int64_t at = c + LANES * k;
                int n = some(at, keys);
                vec g = load(gradient, row + at, n, half) * mask[k];
                *(vec_u *)(own + at) = g;
                sum += g * load(probabilities, row + at, n, half); /* zero after the last key */
            }
        }
        float mean = total(sum);
        vec other = {0};
        memset((char *)dapart + (size_t)(r * width) * size, 0, start * size);
        for (int64_t c = 0; c < keys; c += LANES) {
            int n = some(c, keys);
            vec d = load(probabilities, row + c, n, half) * (*(vec_u *)(own + c) - mean);
            store(dcontent, row + c, n, half, d);
            store(dapart, shifted + c, n, half, d);
            if (dgain) other += choose(relations(seen + c, n) == 2, d, (vec){0});
        }
        memset((char *)dapart + (shifted + (size_t)keys) * size, 0, ((size_t)(width - keys) - start) * size);
        if (dgain) dgain[r] = total(other);
    }
}

#define RELATIVE(name, half)                                                                                                       \
    int relative_##name(const void *content, const void *apart, const float *gain, const uint8_t *relation,                        \
                        const int64_t *starts, void *probabilities, void *dropped, int64_t rows, int64_t asked, int64_t columns,   \
                        int64_t width, int64_t seed, int64_t threshold) {                                                          \
        const Drop drop = make_drop(seed, threshold);                                                                              \
        float *scratch = malloc((size_t)(omp_get_max_threads() * rounded(columns)) * sizeof(float));                               \
        if (!scratch) return 1;                                                                                                    \
        PARALLEL(relative_rows(content, apart, gain, relation, starts, probabilities, dropped, scratch, first, last, asked,        \
                               columns, width, &drop, half))                                                                       \
        free(scratch);                                                                                                             \
        return 0;                                                                                                                  \
    }                                                                                                                              \
    int relative_back_##name(const void *probabilities, const void *gradient, const uint8_t *relation, const int64_t *starts,      \
                             void *dcontent, void *dapart, float *dgain, int64_t rows, int64_t asked, int64_t columns,             \
                             int64_t width, int64_t seed, int64_t threshold) {                                                     \
        const Drop drop = make_drop(seed, threshold);                                                                              \
        float *scratch = malloc((size_t)(omp_get_max_threads() * rounded(columns)) * sizeof(float));                               \
        if (!scratch) return 1;                                                                                                    \
        PARALLEL(relative_back_rows(probabilities, gradient, relation, starts, dcontent, dapart, dgain, scratch, first, last,      \
                                    asked, columns, width, &drop, half))                                                           \
        free(scratch);                                                                                                             \
        return 0;                                                                                                                  \
    }
RELATIVE(float, 0)
RELATIVE(half, 1)
