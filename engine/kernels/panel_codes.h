/* Rows times panels of codes, in four bits or eight: which of the ways is taken. Included by multiply.c.
 *
 * By tiles a strip is made plain first. Elsewhere codes are read in registers: again for each pass of few rows; of many the
 * first pass keeps what it has read, a strip at a time, for the others. With dot products of bfloat16 the sums of groups are
 * scaled (panel_groups.h); without, each weight is.
 */

#define READ_AGAIN (REGISTERS == 32 ? FEW : 5)               /* as FEW, for codes that are not scaled by groups */
#define READ_FLOATS_AGAIN (REGISTERS == 32 ? MAX_ROWS : 5) /* e4m3 costs more to read */

/* The plain strip of `steps` from step `start` of a panel on. */
static NOINLINE void widen(int kind, const Codes *panel, long start, long steps, made *strip) {
    if (kind == EIGHT_FLOATS)
        widen8(EIGHT_FLOATS, panel, start, steps, strip);
    else if (kind == EIGHT_WHOLE)
        widen8(EIGHT_WHOLE, panel, start, steps, strip);
    else if (kind == FLOATS)
        widen4(FLOATS, panel, start, steps, strip);
    else if (kind == OFFSET)
        widen4(OFFSET, panel, start, steps, strip);
    else
        widen4(WHOLE, panel, start, steps, strip);
}

/* As multiply_panel, by tiles: the panel is made plain a strip at a time. A function of its own, as `widen` is: of too much
 * at once the compiler loses sight. */
static NOINLINE void multiply_widened(int kind, Band band, const Codes *panel, const elem *bias, long outs, long wide) {
    ALIGNED float sums[(BAND + TILE_ROWS) * WIDE];
    ALIGNED made wider[WIDE_STRIP * STEP];
    begin_panel(band.rows);
    for (long start = 0; start < panel->steps; start += WIDE_STRIP) {
        const long steps = panel->steps - start < WIDE_STRIP ? panel->steps - start : WIDE_STRIP;
        widen(kind, panel, start, steps, wider);
        multiply_tiles(band.x + start * DEPTH, band.stride, band.rows, (const elem *)wider, steps, start == 0, sums, 0, 0);
    }
    end_panel();
    finish_tiles(sums, panel->of_outputs, bias, band.out, band.rows, outs, wide);
}

#if !BY_GROUP
/* As multiply_rows4, for codes of either size. */
INLINE void multiply_codes(const int rows, const int kind, const input *x, long stride, const Codes *panel, long start,
                           long steps, made *kept, float *sums) {
    if (kind == EIGHT_FLOATS || kind == EIGHT_WHOLE)
        multiply_rows8(rows, kind, x, stride, panel, start, steps, kept, sums);
    else
        multiply_rows4(rows, kind, x, stride, panel, start, steps, kept, sums);
}

/* As multiply_panel, for a panel of codes. keep: the first pass over the rows keeps what it reads for the others, a strip at
 * a time; otherwise each pass reads again. */
INLINE void multiply_read(const int kind, const int keep, Band band, const Codes *panel, const elem *bias, long outs,
                          long wide) {
    const long strip = keep ? WIDE_STRIP : STRIP;
    ALIGNED float sums[(BAND + TILE_ROWS) * WIDE], room[WIDENS ? MAX_ROWS * STRIP : 1];
    ALIGNED made kept[keep ? WIDE_STRIP * STEP : 1];
    int size;
    for (long start = 0; start < panel->steps; start += strip) {
        const long steps = panel->steps - start < strip ? panel->steps - start : strip;
        const elem *x = band.x + start * DEPTH;
        for (long r = 0; r < band.rows; r += size) {
            long apart = band.stride;
            float *to = sums + r * WIDE;
            BY_ROWS(band.rows - r, size, {
                const input *from = rows_as_input(ROWS, x + r * band.stride, &apart, steps, room);
                if (keep && r)
                    multiply_rows(ROWS, MADE, from, apart, kept, 0, steps, start == 0, to, 0, 0);
                else
                    multiply_codes(ROWS, kind, from, apart, panel, start, steps, keep ? kept : 0, to);
            })
        }
    }
    finish(sums, panel->of_outputs, bias, band.out, band.rows, outs, wide);
}

#define KEPT(name, kind)                                                                                            \
    static NOINLINE void name(Band band, const Codes *panel, const elem *bias, long outs, long wide) {              \
        multiply_read(kind, 1, band, panel, bias, outs, wide);                                                      \
    }
KEPT(keep_floats, EIGHT_FLOATS)
KEPT(keep_bytes, EIGHT_WHOLE)
KEPT(keep_e2m1, FLOATS)
KEPT(keep_offset, OFFSET)
KEPT(keep_whole, WHOLE)
#endif

#if BY_GROUP
/* As multiply_panel, for a panel whose groups are scaled whole. eight: as of multiply_group. keep: the first pass over the
 * rows keeps what it looks up for the others, a piece at a time; otherwise each pass looks up again. */
INLINE void multiply_coded(const int eight, const int keep, Band band, const Codes *panel, const elem *bias, long outs,
                           long wide) {
    ALIGNED float sums[(BAND + TILE_ROWS) * WIDE];
    ALIGNED elem strip[keep ? PIECE * STEP : 1];
    int size;
    for (long start = 0; start < panel->steps; start += PIECE) {
        const long steps = panel->steps - start < PIECE ? panel->steps - start : PIECE;
        for (long r = 0; r < band.rows; r += size) {
            const elem *x = band.x + r * band.stride + start * DEPTH;
            float *to = sums + r * WIDE;
            if (keep && r)
                BY_ROWS(band.rows - r, size, multiply_groups(ROWS, eight, KEPT, x, band.stride, panel, strip, start, steps, to))
            else
                BY_ROWS(band.rows - r, size,
                        multiply_groups(ROWS, eight, keep ? KEEP : WORDS, x, band.stride, panel, strip, start, steps, to))
        }
    }
    finish(sums, panel->of_outputs, bias, band.out, band.rows, outs, wide);
}

/* Functions of their own, as multiply_widened is. */
#define CODED(name, eight, keep)                                                                                    \
    static NOINLINE void name(Band band, const Codes *panel, const elem *bias, long outs, long wide) {              \
        multiply_coded(eight, keep, band, panel, bias, outs, wide);                                                 \
    }
CODED(look_up_fours, 0, 0)
CODED(keep_fours, 0, 1)
CODED(look_up_floats, EIGHT_FLOATS, 0)
CODED(keep_floats, EIGHT_FLOATS, 1)
CODED(look_up_bytes, EIGHT_WHOLE, 0)
CODED(keep_bytes, EIGHT_WHOLE, 1)
#endif

/* A band with a panel in four bits. */
INLINE void multiply_fours(const int kind, int tiled, Band band, const Codes *fours, const elem *bias, long outs, long wide) {
    if (tiled) {
        multiply_widened(kind, band, fours, bias, outs, wide);
        return;
    }
#if BY_GROUP
    if (band.rows <= FEW)
        look_up_fours(band, fours, bias, outs, wide);
    else
        keep_fours(band, fours, bias, outs, wide);
#else
    if (band.rows <= READ_AGAIN)
        multiply_read(kind, 0, band, fours, bias, outs, wide);
    else
        (kind == FLOATS ? keep_e2m1 : kind == OFFSET ? keep_offset : keep_whole)(band, fours, bias, outs, wide);
#endif
}

/* A band with a panel in eight bits. */
INLINE void multiply_eights(const int kind, int tiled, Band band, const Codes *eights, const elem *bias, long outs, long wide) {
    if (tiled) {
        multiply_widened(kind, band, eights, bias, outs, wide);
        return;
    }
#if BY_GROUP
    const int few = band.rows <= MAX_ROWS;
    if (kind == EIGHT_FLOATS)
        (few ? look_up_floats : keep_floats)(band, eights, bias, outs, wide);
    else
        (few ? look_up_bytes : keep_bytes)(band, eights, bias, outs, wide);
#else
    if (band.rows <= (kind == EIGHT_FLOATS ? READ_FLOATS_AGAIN : READ_AGAIN))
        multiply_read(kind, 0, band, eights, bias, outs, wide);
    else
        (kind == EIGHT_FLOATS ? keep_floats : keep_bytes)(band, eights, bias, outs, wide);
#endif
}

/* All rows with all panels of codes, in eight bits or four. */
INLINE void multiply_by_codes(const int eight, Band all, const Codes *weight, const elem *bias, int64_t outs, int64_t ins,
                              int64_t threads, int tiles) {
    const int tiled = by_tiles(ins, tiles);
    const long size = band_of(all.rows, tiled ? TILE_ROWS : MAX_ROWS), bands = (all.rows + size - 1) / size;
    const long of_panel = weight->steps * STEP / (eight ? 1 : 2), of_groups = weight->steps / weight->per_group * WIDE;
#pragma omp parallel for collapse(2) schedule(static) num_threads(team(all.rows * outs * ins, WORTH, threads))
    for (long b = 0; b < bands; b++)
        for (long at = 0; at < outs; at += WIDE) {
            const long row = b * size, left = all.rows - row, panel = at / WIDE, wide = outs - at < WIDE ? outs - at : WIDE;
            const Band band = {all.x + row * all.stride, all.out + row * outs + at, left < size ? left : size, all.stride};
            Codes codes = *weight;
            codes.words += panel * of_panel;
            codes.scales += panel * of_groups * size_of_scale(codes.held);
            if (codes.zeros) codes.zeros += panel * of_groups;
            if (codes.of_outputs) codes.of_outputs += at;
            const elem *own = bias ? bias + at : 0;
            if (eight && weight->floats)
                multiply_eights(EIGHT_FLOATS, tiled, band, &codes, own, outs, wide);
            else if (eight)
                multiply_eights(EIGHT_WHOLE, tiled, band, &codes, own, outs, wide);
            else if (weight->floats)
                multiply_fours(FLOATS, tiled, band, &codes, own, outs, wide);
            else if (weight->zeros)
                multiply_fours(OFFSET, tiled, band, &codes, own, outs, wide);
            else
                multiply_fours(WHOLE, tiled, band, &codes, own, outs, wide);
        }
}
