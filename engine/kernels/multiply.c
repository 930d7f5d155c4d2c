/* x W^T for weights packed once, at any number of rows; weights are of the dtype of x, int8 with a scale per output, of
 * four bits by groups of inputs (panel_fours.h), or fp8 or int8 likewise (panel_eights.h).
 *
 * Packed: panels of WIDE outputs, [ceil(outs / WIDE)][ceil(ins / DEPTH)][WIDE][DEPTH], zeros in the padding, where
 * DEPTH is how many products one instruction sums; int8 as [..][..][WIDE / LANES][DEPTH][LANES]. Each result is one sum
 * over the inputs in their order, or in that of the matrix unit, or of the sums of groups (BY_GROUP in panel_groups.h),
 * whatever the number of rows or threads.
 *
 * int8 is a quarter of float32's bytes, which is what a single row costs. Whole numbers up to 128 are exact in float32
 * and bfloat16, so that the sums are those of the plain product with such weights, and are scaled once. Few rows widen
 * the weights in registers; for many, and for the matrix unit, a strip is widened once and then multiplied as a plain
 * one: the same sums, bit for bit.
 */

#include "panels.h"
#include "panel_codes.h"

/* A weight as it is packed. */
typedef struct {
    const void *panels;
    const float *scales; /* of int8, [ceil(outs / WIDE) * WIDE] */
    const elem *bias;    /* 0 = none */
    long outs, ins;
} Weight;

/* Whether this process may use all that the products are compiled for. */
int may_multiply_by_tiles(void) { return may_use_tiles(); }

/* Whether a weight of as many inputs is multiplied by tiles; tiles: as of `multiply`. */
int multiplies_by_tiles(int64_t ins, int tiles) { return by_tiles(ins, tiles); }

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

/* Weights of eight bits for `multiply8_by_groups`. tiles: as of `multiply`. */
void pack8_by_groups(const uint8_t *weights, uint8_t *packed, int64_t outs, int64_t ins, int tiles) {
    if (!BY_GROUP || by_tiles(ins, tiles)) {
        pack_panels(0, (const char *)weights, (char *)packed, outs, ins, sizeof(uint8_t));
        return;
    }
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
#pragma omp parallel for
    for (long panel = 0; panel < panels; panel++)
        for (long k = 0; k < depth; k++)
            for (long lane = 0; lane < STEP; lane++) {
                const long out = panel * WIDE + lane / DEPTH;
                const uint8_t code = out < outs ? weights[out * ins + k * DEPTH + lane % DEPTH] : 0;
                packed[(panel * depth + k - k % 2) * STEP + lane * 2 + k % 2] = code; /* as in panel_groups.h */
            }
}

void pack8(const int8_t *weights, int8_t *packed, int64_t outs, int64_t ins) {
    pack_panels(1, (const char *)weights, (char *)packed, outs, ins, sizeof(int8_t));
}

/* Whether sums of groups are scaled as a whole, not each weight. tiles: as of `multiply`. */
int scales_sums(int64_t ins, int tiles) { return BY_GROUP && !by_tiles(ins, tiles); }

/* Whether scales may be held in float16. */
int holds_halves(void) { return HALVES; }

/* codes [outs][ins / 2], the code of the first of two inputs in the lower bits, to packed, 0 behind the last of outs. */
void pack4(const uint8_t *codes, char *packed, int64_t outs, int64_t ins, int tiles) {
    const long length = BY_GROUP && !by_tiles(ins, tiles) ? WORD / 2 : WORD; /* codes of a word */
    const long words = ins / (DEPTH * length), panels = (outs + WIDE - 1) / WIDE;
#pragma omp parallel for
    for (long panel = 0; panel < panels; panel++)
        for (long w = 0; w < words; w++)
            for (long lane = 0; lane < STEP; lane++) {
                const long out = panel * WIDE + lane / DEPTH;
                uint32_t word = 0;
                for (long at = 0; at < length && out < outs; at++) {
                    const long in = (w * length + at) * DEPTH + lane % DEPTH;
                    word |= (uint32_t)(codes[(out * ins + in) / 2] >> in % 2 * 4 & 15) << 4 * at;
                }
                memcpy(packed + ((panel * words + w) * STEP + lane) * length / 2, &word, length / 2);
            }
}

/* A band with the panel that begins at output `at`. */
INLINE void multiply_panel(const int tiled, const int eight, Band band, const Weight *weight, long at) {
    ALIGNED float sums[(BAND + TILE_ROWS) * WIDE];
    ALIGNED made wider[eight ? WIDE_STRIP * STEP : 1];
    const long size = eight ? 1 : sizeof(elem), depth = weight->ins / DEPTH, bytes = STEP * size;
    const int few = !tiled && band.rows <= FEW;
    const long length = eight && !few ? WIDE_STRIP : tiled ? TILE_STRIP : STRIP;
    if (tiled) begin_panel(band.rows);
    for (long start = 0; start < depth; start += length) {
        const long steps = depth - start < length ? depth - start : length;
        const elem *x = band.x + start * DEPTH;
        const void *strip = (const char *)weight->panels + (at * depth * DEPTH + start * STEP) * size;
        const char *next = (const char *)strip + steps * bytes;
        if (eight && tiled) {
            const int8_t *from = strip;
            for (long w = 0; w < steps * STEP; w += RUN) {
                if (w % LINE == 0) __builtin_prefetch(next + w, 0, 2);
                put_made(wider + w, widened(from + w));
            }
            multiply_tiles(x, band.stride, band.rows, (const elem *)wider, steps, start == 0, sums, next, 0);
        } else if (tiled)
            multiply_tiles(x, band.stride, band.rows, strip, steps, start == 0, sums, next, bytes);
        else if (few)
            multiply_strip(eight ? INT8 : PACKED, x, band.stride, band.rows, strip, 0, steps, start == 0, sums, next, bytes);
        else
            multiply_strip(eight ? INT8 : PACKED, x, band.stride, band.rows, strip, eight ? wider : 0, steps, start == 0, sums,
                           next, bytes);
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

/* As multiply, with weights of pack4. scales: [ceil(outs / WIDE)][ins / group][WIDE], held in `held`; zeros likewise, less 8,
 * 0 = all are 8, or there are none. of_outputs: [ceil(outs / WIDE) * WIDE], what sums are multiplied by, 0 = all 1.
 * group: a multiple of DEPTH * WORD, and ins of that. floats: whether codes are numbers of E2M1. */
void multiply4(const elem *x, int64_t x_stride, const char *packed, const char *scales, const int8_t *zeros,
               const float *of_outputs, const elem *bias, elem *out, int64_t rows, int64_t outs, int64_t ins, int64_t group,
               int64_t held, int64_t floats, int64_t threads, int tiles) {
    const Band all = {x, out, rows, x_stride};
    const Codes weight = {packed, scales, zeros, of_outputs, ins / DEPTH, group / DEPTH, (int)held, (int)floats};
    multiply_by_codes(0, all, &weight, bias, outs, ins, threads, tiles);
}

/* As multiply4, with weights of pack8_by_groups. group: a multiple of 2 * DEPTH, and ins of that. floats: whether weights are
 * of e4m3, none of them NaN, and scales times E4M3_UNIT; else they are int8. */
void multiply8_by_groups(const elem *x, int64_t x_stride, const char *packed, const char *scales, const elem *bias, elem *out,
                         int64_t rows, int64_t outs, int64_t ins, int64_t group, int64_t held, int64_t floats, int64_t threads,
                         int tiles) {
    const Band all = {x, out, rows, x_stride};
    const Codes weight = {packed, scales, 0, 0, ins / DEPTH, group / DEPTH, (int)held, (int)floats};
    multiply_by_codes(1, all, &weight, bias, outs, ins, threads, tiles);
}
