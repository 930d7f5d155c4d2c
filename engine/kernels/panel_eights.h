/* Panels of weights in eight bits, fp8 (e4m3) or int8, each times a scale that a group of inputs of an output shares.
 *
 * Where groups are not scaled whole (panel_groups.h), weights are made plain in registers for few rows, a strip at a time for
 * many: the same sums as with the plain weight, bit for bit, which is not rounded where bfloat16 is widened. Included by
 * panels.h.
 *
 * Packed: bytes in the order of the plain panel. Scales as in panel_scales.h; those of e4m3 times E4M3_UNIT.
 */

/* RUN weights as they are multiplied. scales: of their outputs. */
INLINE run eights(const int kind, const uint8_t *from, const vec *scales) {
    vec found[DEPTH];
    for (int d = 0; d < DEPTH; d++) {
        const uint8_t *lanes = from + d * LANES;
        found[d] = (kind == EIGHT_FLOATS ? e4m3_lanes(lanes) : widened_lanes((const int8_t *)lanes)) * scales[d];
    }
    return rounded(found);
}

/* The scales of a vector of outputs in a step, as its weights lie. */
INLINE void scales_of(const Codes *panel, long step, int vector, vec *to) {
    vec of_outputs;
    get_scales(panel->scales, panel->held, step / panel->per_group * WIDE + vector * LANES, 1, &of_outputs);
    spread(of_outputs, to);
}

/* sums [rows][WIDE] (from 0 if `start` is 0) += x [rows][stride] times `steps` from step `start` of the panel on. kept: as of
 * multiply_rows4. */
INLINE void multiply_rows8(const int rows, const int kind, const input *x, long stride, const Codes *panel, long start,
                           long steps, made *kept, float *sums) {
    const int cols = columns(rows) < MOST_COLS ? columns(rows) : MOST_COLS;
    for (int c = 0; c < VECS; c += cols) {
        vec sum[MAX_ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) sum[r][v] = start ? get_float(sums + r * WIDE + (c + v) * LANES) : splat(0);
        for (long k = 0, next; k < steps; k = next) {
            const long left = panel->per_group - (start + k) % panel->per_group; /* of the group */
            next = k + left < steps ? k + left : steps;
            vec scales[MOST_COLS][DEPTH];
            for (int v = 0; v < cols; v++) scales_of(panel, start + k, c + v, scales[v]);
            for (long step = k; step < next; step++) {
                const uint8_t *from = (const uint8_t *)panel->words + (start + step) * STEP + c * RUN;
                __builtin_prefetch(from + FAR, 0, 2);
                LEFT_IN_MEMORY(scales);
                run weights[MOST_COLS]; /* before the rows, so that each input is spread over a register once */
#pragma GCC unroll 8
                for (int v = 0; v < cols; v++) {
                    weights[v] = eights(kind, from + v * RUN, scales[v]);
                    if (kept) put_made(kept + step * STEP + (c + v) * RUN, weights[v]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < cols; v++)
                        sum[r][v] = times(x + r * stride + step * DEPTH, weights[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (c + v) * LANES, sum[r][v]);
    }
}

/* The plain strip of `steps` from step `start` of a panel on. */
INLINE void widen8(const int kind, const Codes *panel, long start, long steps, made *strip) {
    const uint8_t *from = (const uint8_t *)panel->words + start * STEP;
    vec scales[VECS][DEPTH];
    for (long k = 0, left = 0; k < steps; k++, left--, from += STEP, strip += STEP) { /* left: of the group */
        if (left == 0) {
            left = panel->per_group - (start + k) % panel->per_group;
            for (int v = 0; v < VECS; v++) scales_of(panel, start + k, v, scales[v]);
        }
        for (long at = 0; at < STEP; at += LINE) __builtin_prefetch(from + at + FAR, 0, 2);
        for (int v = 0; v < VECS; v++) put_made(strip + v * RUN, eights(kind, from + v * RUN, scales[v]));
    }
}
