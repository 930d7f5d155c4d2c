/* Rows times a strip of a panel by the matrix unit of a CPU (AMX), for bfloat16. Included by panels.h.
 *
 * One instruction multiplies up to 16 rows by 32 inputs of 16 outputs, in an order that is the same for every row, and
 * sums in fp32. The rows of a band are cut into tiles of one height. The last tile may begin before the one before it has
 * ended: the rows that they share are summed in both, to the same bits.
 */

#define SIDE 16        /* most rows of a tile, and its outputs */
#define TILE_ROWS 32   /* rows of a pass at most: two tiles */
#define PAIRS 16       /* steps of a tile: two inputs each */
#define TILE_STRIP 256 /* steps of a panel that stay in the nearest cache, with the rows of a pass */

#if AMX && BF16 && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether this process may use the unit: Linux gives it to those who ask. */
INLINE int may_use_tiles(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
}

/* Whether tiles multiply by a weight of as many inputs; tiles: whether they may. */
INLINE int by_tiles(long ins, int tiles) { return tiles && ins % (2 * PAIRS) == 0; }

INLINE long tiles_of(long rows) { return (rows + SIDE - 1) / SIDE; }
INLINE long side_of(long rows) { return (rows + tiles_of(rows) - 1) / tiles_of(rows); }
INLINE long first_of(long tile, long rows, long side) {
    return tile * side + side <= rows ? tile * side : rows - side;
}

/* Registers 0 to 3: sums [side][16] of fp32; 4, 5: rows [side][32]; 6, 7: weights [16 pairs][16][2]. */
INLINE void begin_panel(long rows) {
    const int side = (int)side_of(rows);
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {side, side, side, side, side, side, PAIRS, PAIRS}};
    _tile_loadconfig(&shapes);
}
INLINE void end_panel(void) { _tile_release(); }

#define TAKE(tile, from) \
    if (fresh)           \
        _tile_zero(tile); \
    else                 \
        _tile_loadd(tile, from, WIDE * sizeof(float))
#define WEIGHTS(tile, from) _tile_loadd(tile, from, STEP * sizeof(elem))

/* Fetch one of four parts of what the steps of a tile ask for ahead: all at once would fill the buffers of the cache. */
INLINE void fetch_quarter(int part, const char *next, long ahead) {
    const long size = ahead * PAIRS / 4;
    for (long at = part * size; at < (part + 1) * size; at += LINE) __builtin_prefetch(next + at, 0, 2);
}

/* Two tiles of rows with half a panel. */
INLINE void two_by_two(const elem *x, const elem *y, long stride, const elem *strip, long steps, int fresh, float *sums,
                       float *their_sums, const char *next, long ahead) {
    TAKE(0, sums);
    TAKE(1, sums + SIDE);
    TAKE(2, their_sums);
    TAKE(3, their_sums + SIDE);
    for (long k = 0; k < steps; k += PAIRS) {
        fetch_quarter(0, next + k * ahead, ahead);
        WEIGHTS(6, strip + k * STEP);
        _tile_loadd(4, x + 2 * k, stride * sizeof(elem));
        _tile_dpbf16ps(0, 4, 6);
        fetch_quarter(1, next + k * ahead, ahead);
        WEIGHTS(7, strip + k * STEP + 2 * SIDE);
        _tile_dpbf16ps(1, 4, 7);
        fetch_quarter(2, next + k * ahead, ahead);
        _tile_loadd(5, y + 2 * k, stride * sizeof(elem));
        _tile_dpbf16ps(2, 5, 6);
        fetch_quarter(3, next + k * ahead, ahead);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, WIDE * sizeof(float));
    _tile_stored(1, sums + SIDE, WIDE * sizeof(float));
    _tile_stored(2, their_sums, WIDE * sizeof(float));
    _tile_stored(3, their_sums + SIDE, WIDE * sizeof(float));
}

/* One tile of rows with a panel. */
INLINE void one_by_four(const elem *x, long stride, const elem *strip, long steps, int fresh, float *sums,
                        const char *next, long ahead) {
    TAKE(0, sums);
    TAKE(1, sums + SIDE);
    TAKE(2, sums + 2 * SIDE);
    TAKE(3, sums + 3 * SIDE);
    for (long k = 0; k < steps; k += PAIRS) {
        const elem *weights = strip + k * STEP;
        _tile_loadd(4, x + 2 * k, stride * sizeof(elem));
        fetch_quarter(0, next + k * ahead, ahead);
        WEIGHTS(6, weights);
        _tile_dpbf16ps(0, 4, 6);
        fetch_quarter(1, next + k * ahead, ahead);
        WEIGHTS(7, weights + 2 * SIDE);
        _tile_dpbf16ps(1, 4, 7);
        fetch_quarter(2, next + k * ahead, ahead);
        WEIGHTS(6, weights + 4 * SIDE);
        _tile_dpbf16ps(2, 4, 6);
        fetch_quarter(3, next + k * ahead, ahead);
        WEIGHTS(7, weights + 6 * SIDE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, WIDE * sizeof(float));
    _tile_stored(1, sums + SIDE, WIDE * sizeof(float));
    _tile_stored(2, sums + 2 * SIDE, WIDE * sizeof(float));
    _tile_stored(3, sums + 3 * SIDE, WIDE * sizeof(float));
}

/* As multiply_strip. sums: of tile after tile, each [side][WIDE]; steps: a multiple of PAIRS. */
static void multiply_tiles(const elem *x, long stride, long rows, const elem *strip, long steps, int fresh, float *sums,
                           const char *next, long bytes) {
    const long tiles = tiles_of(rows), side = side_of(rows), apart = side * WIDE;
    long tile = 0;
    for (; tile + 2 <= tiles; tile += 2)
        for (int half = 0; half < 2; half++)
            two_by_two(x + first_of(tile, rows, side) * stride, x + first_of(tile + 1, rows, side) * stride, stride,
                       strip + half * 4 * SIDE, steps, fresh, sums + tile * apart + half * 2 * SIDE,
                       sums + (tile + 1) * apart + half * 2 * SIDE, next, tile == 0 && half == 0 ? bytes : 0);
    if (tile < tiles)
        one_by_four(x + first_of(tile, rows, side) * stride, stride, strip, steps, fresh, sums + tile * apart, next,
                    tile == 0 ? bytes : 0);
}

/* As finish, of the sums of multiply_tiles. */
static void finish_tiles(const float *sums, const float *scales, const elem *bias, elem *out, long rows, long stride,
                         long wide) {
    const long tiles = tiles_of(rows), side = side_of(rows);
    for (long tile = 0; tile < tiles; tile++)
        finish(sums + tile * side * WIDE, scales, bias, out + first_of(tile, rows, side) * stride, side, stride, wide);
}

#else /* none of it is ever called */
INLINE int may_use_tiles(void) { return 0; }
INLINE int by_tiles(long ins, int tiles) { return 0; }
INLINE void begin_panel(long rows) {}
INLINE void end_panel(void) {}
INLINE void multiply_tiles(const elem *x, long stride, long rows, const elem *strip, long steps, int fresh, float *sums,
                           const char *next, long bytes) {}
INLINE void finish_tiles(const float *sums, const float *scales, const elem *bias, elem *out, long rows, long stride,
                         long wide) {}
#endif
