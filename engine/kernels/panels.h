/* What products with weights packed in panels share: sizes, one multiplication, the results. */

#include <omp.h>

#include "vectors.h"

#define WIDE 64 /* outputs of a panel, which are summed at a time */
#define VECS (WIDE / LANES)
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
#include <immintrin.h>
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

/* weights [outs][ins] of `size` bytes each to panels, zeros behind the last of outs; ins is a multiple of DEPTH. */
INLINE void pack_panels(const char *weights, char *packed, int64_t outs, int64_t ins, const long size) {
    const long depth = ins / DEPTH, panels = (outs + WIDE - 1) / WIDE;
#pragma omp parallel for
    for (long panel = 0; panel < panels; panel++)
        for (long k = 0; k < depth; k++)
            for (long n = 0; n < WIDE; n++) {
                const long out = panel * WIDE + n;
                char *to = packed + ((panel * depth + k) * WIDE + n) * DEPTH * size;
                if (out < outs)
                    memcpy(to, weights + (out * ins + k * DEPTH) * size, DEPTH * size);
                else
                    memset(to, 0, DEPTH * size);
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

/* out [rows][stride] = sums [rows][WIDE] * scales (0 = 1) + bias (0 = 0); `wide` outputs of the panel are real. */
static void finish(const float *sums, const float *scales, const elem *bias, elem *out, long rows, long stride,
                   long wide) {
    for (long r = 0; r < rows; r++) {
        elem line[WIDE], offset[WIDE] = {0};
        elem *to = wide == WIDE ? out + r * stride : line;
        if (bias) memcpy(offset, bias, wide * sizeof(elem));
        for (int v = 0; v < WIDE; v += LANES) {
            vec sum = get_float(sums + r * WIDE + v);
            put(to + v, (scales ? sum * get_float(scales + v) : sum) + load(offset + v));
        }
        if (wide < WIDE) memcpy(out + r * stride, line, wide * sizeof(elem));
    }
}

/* Rows of a band: bands of about one size, so that threads get equal shares; whole passes in all but the last. */
INLINE long band_of(long rows) {
    const long least = (rows + BAND - 1) / BAND, even = least ? (rows + least - 1) / least : 1;
    return (even + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
}
