/* What products with weights packed in panels share: sizes, how rows meet a strip of a panel, the results.
 *
 * Rows are taken by panel_rows.h, in vectors, or by panel_tiles.h, where the CPU has a matrix unit for bfloat16.
 */

#include <omp.h>

#include "vectors.h"

#define WIDE 64       /* outputs of a panel, which are summed at a time */
#define BAND 256      /* most rows that share a panel while it is in the cache */
#define WORTH (1 << 19) /* products from which on other threads pay */
#define LINE 64       /* bytes of the cache */
#define ALIGNED _Alignas(LINE) /* vectors of it lie in one line each */

#if BF16 && defined(__AVX512BF16__)
#define DEPTH 2 /* inputs that one instruction sums */
#else
#define DEPTH 1
#endif
#define STEP (WIDE * DEPTH) /* weights of a panel for DEPTH inputs */

/* Rows of x, `stride` apart, and where their results go, `outs` apart. */
typedef struct {
    const elem *x;
    elem *out;
    long rows, stride;
} Band;

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

#include "panel_rows.h"
#include "panel_tiles.h"
#include "panel_scales.h"
#include "panel_fours.h"
#include "panel_eights.h"
#include "panel_groups.h"

#define FEW (2 * MAX_ROWS) /* rows up to which widening again in each pass costs less than a strip does */
#define WIDE_STRIP 128     /* steps of a strip that is made plain: it stays in the nearest caches */

/* Rows of a band: bands of about one size, so that threads get equal shares; whole passes in all but the last. A band may
 * have a pass more than BAND, less a row. */
INLINE long band_of(long rows, long pass) {
    const long least = (rows + BAND - 1) / BAND, even = least ? (rows + least - 1) / least : 1;
    return (even + pass - 1) / pass * pass;
}
