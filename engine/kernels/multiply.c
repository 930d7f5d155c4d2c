/* x W^T for weights packed once, at any number of rows. In bfloat16 by the CPU's own dot products, summed in fp32:
 * they take numbers below 2^-126 for 0.
 *
 * Packed: panels of WIDE outputs, [ceil(outs / WIDE)][ceil(ins / DEPTH)][WIDE][DEPTH], zeros in the padding, where
 * DEPTH is how many products one instruction sums. Each result is one sum over the inputs in their order, whatever
 * the number of rows or threads.
 */

#include "panels.h"

/* Whether this CPU is one that `multiply` is written for. */
int multiplies(void) { return SUPPORTED; }

/* weights [outs][ins] to packed; ins is a multiple of DEPTH. */
void pack(const elem *weights, elem *packed, int64_t outs, int64_t ins) {
    pack_panels((const char *)weights, (char *)packed, outs, ins, sizeof(elem));
}

/* One band of rows with one panel. */
static void multiply_panel(const elem *x, long x_stride, const elem *panel, const elem *bias, elem *out, long rows,
                           long outs, long wide, long depth) {
    float sums[(BAND + MAX_ROWS) * WIDE];
    const long passes = (rows + MAX_ROWS - 1) / MAX_ROWS, spread = passes < VECS ? passes : VECS;
    for (long start = 0; start < depth; start += STRIP) {
        const long steps = depth - start < STRIP ? depth - start : STRIP;
        const elem *strip = panel + start * WIDE * DEPTH, *next = strip + steps * WIDE * DEPTH;
        long pass = 0;
        int size;
        for (long r = 0; r < rows; r += size, pass++) {
            const int from = pass < spread ? pass * VECS / spread : 0;
            const int to = pass < spread ? (pass + 1) * VECS / spread : 0;
            BY_ROWS(rows - r, size,
                    multiply_rows(ROWS, x + r * x_stride + start * DEPTH, x_stride, strip, steps, start == 0,
                                  sums + r * WIDE, next, from, to))
        }
    }
    finish(sums, 0, bias, out, rows, outs, wide);
}

/* out [rows][outs] = x [rows][ins] (rows x_stride apart) times the packed weights + bias (0 = none). */
void multiply(const elem *x, int64_t x_stride, const elem *packed, const elem *bias, elem *out, int64_t rows,
              int64_t outs, int64_t ins, int64_t threads) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
    const long band = band_of(rows), bands = (rows + band - 1) / band;
#pragma omp parallel for collapse(2) schedule(static) num_threads(team(rows *outs *ins, WORTH, threads))
    for (long b = 0; b < bands; b++)
        for (long p = 0; p < panels; p++) {
            const long row = b * band, left = rows - row, at = p * WIDE;
            multiply_panel(x + row * x_stride, x_stride, packed + at * depth * DEPTH, bias ? bias + at : 0,
                           out + row * outs + at, left < band ? left : band, outs,
                           outs - at < WIDE ? outs - at : WIDE, depth);
        }
}
