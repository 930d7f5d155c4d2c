/* x W^T for weights in int8 with a scale per output, packed once: a quarter of float32's bytes, which is what a
 * single row costs. Whole numbers up to 127 are exact in float32 and bfloat16, so that the sums are those of the
 * plain product with such weights, and are scaled once.
 *
 * Packed as in multiply.c: [ceil(outs / WIDE)][ceil(ins / DEPTH)][WIDE][DEPTH]. Few rows widen the weights in
 * registers; for many a strip is widened once and then multiplied as a plain one: the same sums, bit for bit.
 */

#include "panels.h"

#define FEW (2 * MAX_ROWS) /* rows up to which widening again in each pass costs less than a strip does */

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES x DEPTH weights as elem. */
#if BF16 && SUPPORTED
INLINE void widen(const int8_t *from, elem *to) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + LANES))));
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#elif SUPPORTED
INLINE void widen(const int8_t *from, elem *to) {
    put_float(to, (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from))));
}
#else
INLINE void widen(const int8_t *from, elem *to) {
    for (int part = 0; part < DEPTH; part++)
        put(to + part * LANES, __builtin_convertvector(*(const bytes *)(from + part * LANES), vec));
}
#endif

/* weights [outs][ins] to packed; ins is a multiple of DEPTH. */
void pack8(const int8_t *weights, int8_t *packed, int64_t outs, int64_t ins) {
    pack_panels((const char *)weights, (char *)packed, outs, ins, sizeof(int8_t));
}

/* As multiply_rows, for at most MAX_ROWS rows and a whole panel of int8. */
INLINE void multiply_few(const int rows, const elem *x, long stride, const int8_t *panel, long depth, float *sums) {
    vec sum[MAX_ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = splat(0);
    for (long k = 0; k < depth; k++)
        for (int v = 0; v < VECS; v++) {
            elem weights[LANES * DEPTH];
            widen(panel + (k * WIDE + v * LANES) * DEPTH, weights);
            for (int r = 0; r < rows; r++) sum[r][v] = times(x + r * stride + k * DEPTH, weights, sum[r][v]);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) put_float(sums + r * WIDE + v * LANES, sum[r][v]);
}

/* A band of more rows: strip by strip. */
static void multiply_many(const elem *x, long x_stride, const int8_t *panel, long rows, long depth, float *sums) {
    elem strip[STRIP * WIDE * DEPTH];
    for (long start = 0; start < depth; start += STRIP) {
        const long steps = depth - start < STRIP ? depth - start : STRIP;
        for (long at = 0; at < steps * WIDE * DEPTH; at += LANES * DEPTH)
            widen(panel + start * WIDE * DEPTH + at, strip + at);
        int size;
        for (long r = 0; r < rows; r += size)
            BY_ROWS(rows - r, size,
                    multiply_rows(ROWS, x + r * x_stride + start * DEPTH, x_stride, strip, steps, start == 0,
                                  sums + r * WIDE, strip, 0, 0))
    }
}

/* out [rows][outs] = x [rows][ins] (rows x_stride apart) times the packed weights * scales + bias (0 = none).
 * scales: [ceil(outs / WIDE) * WIDE]. */
void multiply8(const elem *x, int64_t x_stride, const int8_t *packed, const float *scales, const elem *bias, elem *out,
               int64_t rows, int64_t outs, int64_t ins, int64_t threads) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
    const long band = band_of(rows), bands = (rows + band - 1) / band;
#pragma omp parallel for collapse(2) schedule(static) num_threads(team(rows *outs *ins, WORTH, threads))
    for (long b = 0; b < bands; b++)
        for (long p = 0; p < panels; p++) {
            const long row = b * band, left = rows - row, count = left < band ? left : band, at = p * WIDE;
            const int8_t *panel = packed + at * depth * DEPTH;
            const elem *from = x + row * x_stride;
            float sums[(BAND + MAX_ROWS) * WIDE];
            int size;
            if (count <= FEW)
                for (long r = 0; r < count; r += size)
                    BY_ROWS(count - r, size,
                            multiply_few(ROWS, from + r * x_stride, x_stride, panel, depth, sums + r * WIDE))
            else
                multiply_many(from, x_stride, panel, count, depth, sums);
            finish(sums, scales + at, bias ? bias + at : 0, out + row * outs + at, count, outs,
                   outs - at < WIDE ? outs - at : WIDE);
        }
}
