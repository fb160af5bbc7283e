/* The tile instructions of Intel's AMX as functions, for processors without them. Included before the source that uses them.
 *
 * Reference: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3: a tile has up to 16 rows of 64
 * bytes; TDPBF16PS adds to the float m, n of a tile the products of pairs m, k of the second with pairs k, n of the third.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

static _Thread_local TileShapes shapes; /* palette 0: not configured, using a tile is an error */
static _Thread_local uint32_t tiles[8][16][16];

static void model_configure(const void *from) {
    memcpy(&shapes, from, sizeof shapes);
    if (shapes.palette != 1 || sizeof shapes != 64) abort();
    memset(tiles, 0, sizeof tiles);
}

static void model_used(int tile) {
    if (!shapes.palette || shapes.rows[tile] > 16 || !shapes.rows[tile] || shapes.row_bytes[tile] > 64) abort();
}

static void model_load(int tile, const void *from, long stride) {
    model_used(tile);
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int r = 0; r < shapes.rows[tile]; r++) memcpy(tiles[tile][r], (const char *)from + r * stride, shapes.row_bytes[tile]);
}

static void model_store(int tile, void *to, long stride) {
    model_used(tile);
    for (int r = 0; r < shapes.rows[tile]; r++) memcpy((char *)to + r * stride, tiles[tile][r], shapes.row_bytes[tile]);
}

static float model_number(uint32_t high_half) {
    float x;
    memcpy(&x, &high_half, 4);
    return x;
}

static void model_products(int to, int left, int right) {
    model_used(to), model_used(left), model_used(right);
    if (shapes.row_bytes[left] / 4 != shapes.rows[right]) abort();
    for (int m = 0; m < shapes.rows[to]; m++)
        for (int n = 0; n < shapes.row_bytes[to] / 4; n++) {
            float sum = model_number(tiles[to][m][n]);
            for (int k = 0; k < shapes.rows[right]; k++) {
                uint32_t a = tiles[left][m][k], b = tiles[right][k][n];
                sum += model_number(a << 16) * model_number(b << 16);
                sum += model_number(a & 0xffff0000u) * model_number(b & 0xffff0000u);
            }
            memcpy(&tiles[to][m][n], &sum, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) model_configure(from)
#define _tile_release() memset(&shapes, 0, sizeof shapes)
#define _tile_loadd(tile, from, stride) model_load(tile, from, stride)
#define _tile_stored(tile, to, stride) model_store(tile, to, stride)
#define _tile_zero(tile) (model_used(tile), (void)memset(tiles[tile], 0, sizeof tiles[tile]))
#define _tile_dpbf16ps(to, left, right) model_products(to, left, right)
#define has_tiles() 1
