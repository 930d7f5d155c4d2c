/* x W^T for weights packed once, at any number of rows; weights are of the dtype of x, or int8 with a scale per output.
 *
 * Packed: panels of WIDE outputs, [ceil(outs / WIDE)][ceil(ins / DEPTH)][WIDE][DEPTH], zeros in the padding, where
 * DEPTH is how many products one instruction sums; int8 as [..][..][WIDE / LANES][DEPTH][LANES]. Each result is one sum
 * over the inputs in their order, or in that of the matrix unit, whatever the number of rows or threads.
 *
 * int8 is a quarter of float32's bytes, which is what a single row costs. Whole numbers up to 128 are exact in float32
 * and bfloat16, so that the sums are those of the plain product with such weights, and are scaled once. Few rows widen
 * the weights in registers; for many, and for the matrix unit, a strip is widened once and then multiplied as a plain
 * one: the same sums, bit for bit.
 */

#include "panels.h"

#define FEW (2 * MAX_ROWS) /* rows up to which widening again in each pass costs less than a strip does */
#define WIDE_STRIP 128     /* steps of a strip of int8: what it is widened to stays in the nearest cache */

/* A weight as it is packed. */
typedef struct {
    const void *panels;
    const float *scales; /* of int8, [ceil(outs / WIDE) * WIDE] */
    const elem *bias;    /* 0 = none */
    long outs, ins;
} Weight;

/* Rows of x, `stride` apart, and where their results go, `outs` apart. */
typedef struct {
    const elem *x;
    elem *out;
    long rows, stride;
} Band;

/* Whether this process may use all that the products are compiled for. */
int may_multiply_by_tiles(void) { return may_use_tiles(); }

/* Inputs that are packed side by side: a weight has a multiple of it. */
int64_t packing_depth(void) { return DEPTH; }

/* Where input d of output n is among the weights of a step. */
INLINE long place(const int eight, long n, long d) {
    return eight ? n / LANES * RUN + d * LANES + n % LANES : n * DEPTH + d;
}

/* weights [outs][ins] of `size` bytes each to packed, zeros behind the last of outs. */
INLINE void pack_panels(const int eight, const char *weights, char *packed, int64_t outs, int64_t ins, const long size) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
#pragma omp parallel for
    for (long panel = 0; panel < panels; panel++)
        for (long k = 0; k < depth; k++)
            for (long n = 0; n < WIDE; n++)
                for (long d = 0; d < DEPTH; d++) {
                    const long out = panel * WIDE + n;
                    char *to = packed + ((panel * depth + k) * STEP + place(eight, n, d)) * size;
                    if (out < outs)
                        memcpy(to, weights + (out * ins + k * DEPTH + d) * size, size);
                    else
                        memset(to, 0, size);
                }
}

void pack(const elem *weights, elem *packed, int64_t outs, int64_t ins) {
    pack_panels(0, (const char *)weights, (char *)packed, outs, ins, sizeof(elem));
}

void pack8(const int8_t *weights, int8_t *packed, int64_t outs, int64_t ins) {
    pack_panels(1, (const char *)weights, (char *)packed, outs, ins, sizeof(int8_t));
}

/* A band with the panel that begins at output `at`. */
INLINE void multiply_panel(const int tiled, const int eight, Band band, const Weight *weight, long at) {
    float sums[(BAND + TILE_ROWS) * WIDE];
    elem wider[eight ? WIDE_STRIP * STEP : 1];
    const long size = eight ? 1 : sizeof(elem), depth = weight->ins / DEPTH, bytes = STEP * size;
    const int few = !tiled && band.rows <= FEW;
    const long length = eight && !few ? WIDE_STRIP : tiled ? TILE_STRIP : STRIP;
    if (tiled) begin_panel(band.rows);
    for (long start = 0; start < depth; start += length) {
        const long steps = depth - start < length ? depth - start : length;
        const elem *x = band.x + start * DEPTH;
        const void *strip = (const char *)weight->panels + (at * depth * DEPTH + start * STEP) * size;
        const char *next = (const char *)strip + steps * bytes;
        if (eight && !few) {
            const int8_t *from = strip;
            for (long w = 0; w < steps * STEP; w += RUN) {
                if (w % LINE == 0) __builtin_prefetch(next + w, 0, 2);
                put_weights(wider + w, widened(from + w));
            }
            strip = wider;
        }
        const long ahead = strip == wider ? 0 : bytes;
        if (tiled)
            multiply_tiles(x, band.stride, band.rows, strip, steps, start == 0, sums, next, ahead);
        else if (few)
            multiply_strip(eight, x, band.stride, band.rows, strip, steps, start == 0, sums, next, ahead);
        else
            multiply_strip(0, x, band.stride, band.rows, strip, steps, start == 0, sums, next, ahead);
    }
    const float *scales = eight ? weight->scales + at : 0;
    const elem *bias = weight->bias ? weight->bias + at : 0;
    const long wide = weight->outs - at < WIDE ? weight->outs - at : WIDE;
    if (tiled) {
        end_panel();
        finish_tiles(sums, scales, bias, band.out + at, band.rows, weight->outs, wide);
    } else
        finish(sums, scales, bias, band.out + at, band.rows, weight->outs, wide);
}

INLINE void multiply_by(const int eight, Band all, const Weight *weight, int64_t threads, int tiles) {
    const int tiled = by_tiles(weight->ins, tiles);
    const long size = band_of(all.rows, tiled ? TILE_ROWS : MAX_ROWS), bands = (all.rows + size - 1) / size;
#pragma omp parallel for collapse(2) schedule(static) num_threads(team(all.rows * weight->outs * weight->ins, WORTH, threads))
    for (long b = 0; b < bands; b++)
        for (long at = 0; at < weight->outs; at += WIDE) {
            const long row = b * size, left = all.rows - row;
            const Band band = {all.x + row * all.stride, all.out + row * weight->outs, left < size ? left : size, all.stride};
            if (tiled)
                multiply_panel(1, eight, band, weight, at);
            else
                multiply_panel(0, eight, band, weight, at);
        }
}

/* out [rows][outs] = x [rows][ins] (rows x_stride apart) times the packed weights + bias (0 = none). tiles: what
 * may_multiply_by_tiles said. */
void multiply(const elem *x, int64_t x_stride, const elem *packed, const elem *bias, elem *out, int64_t rows,
              int64_t outs, int64_t ins, int64_t threads, int tiles) {
    const Weight weight = {packed, 0, bias, outs, ins};
    multiply_by(0, (Band){x, out, rows, x_stride}, &weight, threads, tiles);
}

void multiply8(const elem *x, int64_t x_stride, const int8_t *packed, const float *scales, const elem *bias, elem *out,
               int64_t rows, int64_t outs, int64_t ins, int64_t threads, int tiles) {
    const Weight weight = {packed, scales, bias, outs, ins};
    multiply_by(1, (Band){x, out, rows, x_stride}, &weight, threads, tiles);
}
