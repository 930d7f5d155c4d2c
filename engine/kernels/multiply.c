/* x W^T for weights packed once, at any number of rows. In bfloat16 by the CPU's own dot products, summed in fp32:
 * they take numbers below 2^-126 for 0.
 *
 * Packed: panels of WIDE outputs, [ceil(outs / WIDE)][ceil(ins / DEPTH)][WIDE][DEPTH], zeros in the padding, where
 * DEPTH is how many products one instruction sums. Each result is one sum over the inputs in their order, whatever
 * the number of rows or threads.
 */

#include <omp.h>

#include "vectors.h"

#define VECS 4 /* vectors of outputs that are summed at a time */
#define WIDE (VECS * LANES)
#define MAX_ROWS 6    /* rows that are: MAX_ROWS x VECS sums fill the registers */
#define BAND 256      /* most rows that share a panel while it is in the cache */
#define STRIP_BYTES (256 << 10) /* of a panel that stay there */
#define WORTH (1 << 19) /* products from which on other threads pay */

#if BF16
#define DEPTH 2
#else
#define DEPTH 1
#endif
#define STRIP (STRIP_BYTES / (WIDE * DEPTH * (long)sizeof(elem))) /* steps of DEPTH inputs */

#if !BF16 && defined(__AVX512F__)
#define SUPPORTED 1
INLINE vec times(const elem *x, const elem *weights, vec sum) { return sum + *x * get_float(weights); }
#elif BF16 && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>
#define SUPPORTED 1
typedef int32_t pair __attribute__((aligned(2), may_alias));
INLINE vec times(const elem *x, const elem *weights, vec sum) {
    __m512i both = _mm512_set1_epi32(*(const pair *)x), many = _mm512_loadu_si512(weights);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)many);
}
#else /* other CPUs have other means, which oneDNN knows */
#define SUPPORTED 0
INLINE vec times(const elem *x, const elem *weights, vec sum) { return sum + load(x) * load(weights); }
#endif

/* Whether this CPU is one that `multiply` is written for. */
int multiplies(void) { return SUPPORTED; }

/* weights [outs][ins] to packed; ins is a multiple of DEPTH. */
void pack(const elem *weights, elem *packed, int64_t outs, int64_t ins) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
#pragma omp parallel for
    for (long panel = 0; panel < panels; panel++)
        for (long k = 0; k < depth; k++)
            for (long n = 0; n < WIDE; n++)
                for (long j = 0; j < DEPTH; j++) {
                    const long out = panel * WIDE + n;
                    packed[((panel * depth + k) * WIDE + n) * DEPTH + j] =
                        out < outs ? weights[out * ins + k * DEPTH + j] : 0;
                }
}

/* sums [rows][WIDE] (from 0 if `fresh`) += x [rows][stride] times `depth` steps of a panel. Vectors [from, to) of each
 * step of `next`, which is wanted after this, are fetched meanwhile; after the last panel that is beyond the weights,
 * where a fetch does nothing. */
INLINE void multiply_rows(const int rows, const elem *x, long stride, const elem *panel, long depth, int fresh,
                          float *sums, const elem *next, int from, int to) {
    vec sum[MAX_ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = fresh ? splat(0) : get_float(sums + r * WIDE + v * LANES);
    for (long k = 0; k < depth; k++) {
        const elem *weights = panel + k * WIDE * DEPTH;
        for (int v = from; v < to; v++) __builtin_prefetch(next + k * WIDE * DEPTH + v * LANES * DEPTH, 0, 2);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECS; v++)
                sum[r][v] = times(x + r * stride + k * DEPTH, weights + v * LANES * DEPTH, sum[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) put_float(sums + r * WIDE + v * LANES, sum[r][v]);
}

/* out [rows][stride] = sums [rows][WIDE] + bias; `wide` outputs of the panel are real. */
static void finish(const float *sums, const elem *bias, elem *out, long rows, long stride, long wide) {
    for (long r = 0; r < rows; r++) {
        elem line[WIDE], offset[WIDE] = {0};
        elem *to = wide == WIDE ? out + r * stride : line;
        if (bias) memcpy(offset, bias, wide * sizeof(elem));
        for (int v = 0; v < WIDE; v += LANES) put(to + v, get_float(sums + r * WIDE + v) + load(offset + v));
        if (wide < WIDE) memcpy(out + r * stride, line, wide * sizeof(elem));
    }
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
    finish(sums, bias, out, rows, outs, wide);
}

/* out [rows][outs] = x [rows][ins] (rows x_stride apart) times the packed weights + bias (0 = none). */
void multiply(const elem *x, int64_t x_stride, const elem *packed, const elem *bias, elem *out, int64_t rows,
              int64_t outs, int64_t ins, int64_t threads) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE, least = (rows + BAND - 1) / BAND;
    /* Bands of about one size, so that threads get equal shares; whole passes in all but the last. */
    const long even = least ? (rows + least - 1) / least : 1, band = (even + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
    const long bands = (rows + band - 1) / band;
#pragma omp parallel for collapse(2) schedule(static) num_threads(team(rows *outs *ins, WORTH, threads))
    for (long b = 0; b < bands; b++)
        for (long p = 0; p < panels; p++) {
            const long row = b * band, left = rows - row, at = p * WIDE;
            multiply_panel(x + row * x_stride, x_stride, packed + at * depth * DEPTH, bias ? bias + at : 0,
                           out + row * outs + at, left < band ? left : band, outs,
                           outs - at < WIDE ? outs - at : WIDE, depth);
        }
}
