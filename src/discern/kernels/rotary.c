/* Rotary position embeddings. */
#include "common.h"

/* ---- each head's first half x1 and second half x2 become x1 cos - x2 sin and x2 cos + x1 sin ----
 *
 * A row has `stride` elements: `heads` heads of `size` are rotated, the rest is copied. The angles of row r are in row
 * positions[r] of the tables; with sign -1, as in the backward pass, they are negated.
 */

INLINE int rotary_any(const void *from, void *to, int64_t rows, int64_t stride, int64_t heads, int64_t size,
                      const float *cosine, const float *sine, const int64_t *positions, int64_t count, float sign, int half) {
    const int64_t middle = size / 2, rotated = heads * size, bytes = half ? 2 : 4;
    for (int64_t r = 0; r < rows; r++)
        if (positions[r] < 0 || positions[r] >= count) return 3;
#pragma omp parallel if (rows * stride > SMALL)
    {
        int64_t first, last;
        share(rows, &first, &last);
        for (int64_t r = first; r < last; r++) {
            const size_t table = (size_t)(positions[r] * middle);
            for (int64_t h = 0; h < heads; h++) {
                const size_t at = (size_t)(r * stride + h * size);
                for (int64_t c = 0; c < middle; c += LANES) {
                    int n = some(c, middle);
                    vec x1 = load(from, at + c, n, half), x2 = load(from, at + middle + c, n, half);
                    vec cos = load(cosine, table + c, n, 0), sin = load(sine, table + c, n, 0) * sign;
                    store(to, at + c, n, half, x1 * cos - x2 * sin);
                    store(to, at + middle + c, n, half, x2 * cos + x1 * sin);
                }
            }
            const size_t rest = (size_t)((r * stride + rotated) * bytes);
            memcpy((char *)to + rest, (const char *)from + rest, (size_t)((stride - rotated) * bytes));
        }
    }
    return 0;
}

#define ROTARY(name, half)                                                                                                     \
    int rotary_##name(const void *from, void *to, int64_t rows, int64_t stride, int64_t heads, int64_t size,                   \
                      const float *cosine, const float *sine, const int64_t *positions, int64_t count, float sign) {           \
        return rotary_any(from, to, rows, stride, heads, size, cosine, sine, positions, count, sign, half);                    \
    }
ROTARY(float, 0)
ROTARY(half, 1)
