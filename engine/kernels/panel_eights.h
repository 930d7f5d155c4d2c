/* Panels of weights in eight bits, fp8 (e4m3) or int8, each times a scale that a group of inputs of an output shares.
 *
 * Where groups are not scaled whole (panel_groups.h), a strip is made plain and then multiplied as one: the same sums as with
 * the plain weight, bit for bit, which is not rounded where bfloat16 is widened. Included by panels.h.
 *
 * Packed: bytes in the order of the plain panel. Scales as in panel_scales.h; those of e4m3 times E4M3_UNIT.
 */

/* The plain strip of `steps` from step `start` of a panel on. */
INLINE void widen8(const int kind, const Codes *panel, long start, long steps, made *strip) {
    const uint8_t *from = (const uint8_t *)panel->words + start * STEP;
    vec scales[VECS][DEPTH];
    for (long k = 0, left = 0; k < steps; k++, left--, from += STEP, strip += STEP) { /* left: of the group */
        if (left == 0) {
            left = panel->per_group - (start + k) % panel->per_group;
            for (int v = 0; v < VECS; v++) {
                vec of_outputs;
                get_scales(panel->scales, panel->held, (start + k) / panel->per_group * WIDE + v * LANES, 1, &of_outputs);
                spread(of_outputs, scales[v]);
            }
        }
        for (int v = 0; v < VECS; v++) {
            vec found[DEPTH];
            for (int d = 0; d < DEPTH; d++) {
                const long at = v * RUN + d * LANES;
                if (at % LINE == 0) __builtin_prefetch(from + at + FAR, 0, 2);
                const vec number = kind == EIGHT_FLOATS ? e4m3_lanes(from + at) : widened_lanes((const int8_t *)from + at);
                found[d] = number * scales[v][d];
            }
            put_made(strip + v * RUN, rounded(found));
        }
    }
}
