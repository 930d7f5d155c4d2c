/* Panels of weights in four bits or in eight whose groups of inputs are scaled whole: for CPUs with dot products of
 * bfloat16, where rows are not taken by tiles. Included by panels.h.
 *
 * Rows multiply with code - 8, or with the number of E2M1, e4m3 or int8, which bfloat16 holds exactly, and the sum of a group is
 * scaled. So no weight is rounded, and one of four bits costs a shift and a look-up. With X for the sum of the group's
 * inputs, sum((code - zero) * x) * scale = (sum((code - 8) * x) - (zero - 8) * X) * scale. Where all codes are their zero,
 * what is left are the roundings of two sums, not 0.
 *
 * Packed: for as many steps of a panel as codes fit into 16 bits, [VECS] vectors of such words, [outputs][2], a code of each
 * step in each word, that of the first in the lowest bits. Scales and zeros as in panel_scales.h.
 * The sum of a group ends at each multiple of PIECE steps, too: rows share what is looked up of so many.
 */

#define BY_GROUP (DEPTH == 2) /* unless by tiles */

#if BY_GROUP
#define STEPS_OF_WORD(eight) ((eight) ? 2 : 4)
#define PIECE 256
#define LONG_GROUP 64 /* steps */

/* What codes stand for, zeros apart, in bfloat16; of four bits twice, since the lowest five bits look up. Of e4m3 those
 * below its least exponent. */
INLINE run numbers_of(const int eight, int floats) {
    static const uint16_t whole[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    };
    static const uint16_t e2m1[32] = {
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    };
    static const uint16_t e4m3[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
    return _mm512_loadu_si512(eight ? e4m3 : floats ? e2m1 : whole);
}

/* The numbers of int8 of step `at` of a vector of words: two inputs of an output are the lowest or highest byte of each half
 * of 32 bits. Whole numbers of eight bits are the upper half of their fp32, as bfloat16. */
INLINE run halves_of_bytes(run words, int at) {
    const run first = _mm512_srai_epi32(_mm512_slli_epi32(words, at ? 16 : 24), 24);
    const run second = _mm512_srai_epi32(at ? words : _mm512_slli_epi32(words, 8), 24);
    return paired((vec)_mm512_cvtepi32_ps(first), (vec)_mm512_cvtepi32_ps(second));
}

/* The numbers of step `at` of a vector of words. Those of e4m3 are divided by E4M3_UNIT: an exponent of four bits read as
 * one of eight, those of bfloat16. */
INLINE run halves(const int eight, run words, int at, run numbers) {
    if (!eight) return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * at), numbers);
    if (eight == EIGHT_WHOLE) return halves_of_bytes(words, at);
    const run size = _mm512_and_si512(at ? _mm512_srli_epi16(words, 8) : words, _mm512_set1_epi16(0x7f));
    const run found = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16((127 - 7 - 8) << 7));
    const __mmask32 least = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8)); /* an exponent of 0 */
    const run number = _mm512_mask_permutexvar_epi16(found, least, size, numbers);
    const run sign = at ? words : _mm512_slli_epi16(words, 8);
    return _mm512_ternarylogic_epi32(number, sign, _mm512_set1_epi16((short)0x8000), 0xf8); /* number | (sign & ..) */
}

/* The sum of `steps` pairs of x. */
INLINE float sum_of_inputs(const elem *x, long steps) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sum = _mm512_setzero_ps();
    for (long k = 0; k < 2 * steps; k += 32) {
        const __mmask32 there = 2 * steps - k < 32 ? (1u << (2 * steps - k)) - 1 : ~0u;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(there, x + k), ones);
    }
    return _mm512_reduce_add_ps(sum);
}

/* Where weights come from: words, words of which the strip is kept for the rows to come, or the kept strip. */
enum { WORDS, KEEP, KEPT };

/* PIECE steps of a panel, or those that are left. strip: [PIECE][STEP], what was looked up. */
typedef struct {
    const char *words;
    elem *strip;
    run numbers;
} Piece;

/* part [rows][cols] = x [rows][stride] times `steps` of a group from step `start` of the piece on, for vectors of outputs
 * from `first` on. eight: EIGHT_FLOATS or EIGHT_WHOLE; 0 = codes are of four bits. */
INLINE void multiply_group(const int rows, const int cols, const int eight, const int source, const elem *x, long stride,
                           const Piece *piece, long start, long steps, int first, vec part[MAX_ROWS][VECS]) {
    const int of_word = STEPS_OF_WORD(eight);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < cols; v++) part[r][v] = splat(0);
    for (long k = start; k < start + steps; k += of_word) {
        run words[VECS];
        for (int v = 0; v < cols && source != KEPT; v++) {
            const char *from = piece->words + (k / of_word * VECS + first + v) * LINE;
            __builtin_prefetch(from + FAR, 0, 2);
            words[v] = _mm512_loadu_si512(from);
        }
#pragma GCC unroll 4
        for (int at = 0; at < of_word; at++) {
            elem *strip = piece->strip + (k + at) * STEP + first * RUN;
            run weights[VECS]; /* before the rows, so that each input is spread over a register once */
            for (int v = 0; v < cols; v++) {
                weights[v] = source == KEPT ? get_made(strip + v * RUN) : halves(eight, words[v], at, piece->numbers);
                if (source == KEEP) put_made(strip + v * RUN, weights[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < cols; v++) part[r][v] = times(x + r * stride + (k + at) * 2, weights[v], part[r][v]);
        }
    }
}

/* sums [rows][WIDE] (from 0 if `start` is 0) += x [rows][stride] times `steps`, PIECE at most, of the panel, from step
 * `start` on, where a piece begins; as many vectors of outputs at a time as `cols` says. */
INLINE void multiply_columns(const int rows, const int cols, const int eight, const int source, const elem *x, long stride,
                             const Codes *panel, elem *strip, long start, long steps, float *sums) {
    const char *words = panel->words + start / STEPS_OF_WORD(eight) * VECS * LINE;
    const Piece piece = {words, strip, numbers_of(eight, panel->floats)};
    const long group = panel->per_group, end = start + steps;
    float inputs[MAX_ROWS][PIECE / WORD]; /* the sum of each group's */
    for (long k = start, g = 0, next; k < end && panel->zeros; k = next, g++) {
        next = k - k % group + group < end ? k - k % group + group : end;
        for (int r = 0; r < rows; r++) inputs[r][g] = sum_of_inputs(x + r * stride + (k - start) * 2, next - k);
    }
    for (int first = 0; first < VECS; first += cols) {
        vec whole[MAX_ROWS][VECS], part[MAX_ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) whole[r][v] = start ? get_float(sums + r * WIDE + (first + v) * LANES) : splat(0);
        for (long k = start, g = 0, next; k < end; k = next, g++) {
            next = k - k % group + group < end ? k - k % group + group : end;
            multiply_group(rows, cols, eight, source, x, stride, &piece, k - start, next - k, first, part);
            const long lane = k / group * WIDE + first * LANES;
            /* Told, not left to the compiler: a row's bits must not depend on the rows that it is taken with. */
            for (int v = 0; v < cols && panel->zeros; v++) {
                const __m512 zeros = (__m512)widened_lanes(panel->zeros + lane + v * LANES);
                for (int r = 0; r < rows; r++)
                    part[r][v] = (vec)_mm512_fnmadd_ps(_mm512_set1_ps(inputs[r][g]), zeros, (__m512)part[r][v]);
            }
            vec scales[VECS];
            get_scales(panel->scales, panel->held, lane, cols, scales);
            for (int v = 0; v < cols; v++)
                for (int r = 0; r < rows; r++)
                    whole[r][v] = (vec)_mm512_fmadd_ps((__m512)part[r][v], (__m512)scales[v], (__m512)whole[r][v]);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (first + v) * LANES, whole[r][v]);
    }
}

/* The same, with the sums of a group and of all before it in registers side by side, unless groups are long: then those
 * of all before are seldom wanted, and all vectors of outputs share an input that is spread over a register. */
INLINE void multiply_groups(const int rows, const int eight, const int source, const elem *x, long stride,
                            const Codes *panel, elem *strip, long start, long steps, float *sums) {
    if (rows <= 3 || (source == WORDS && panel->per_group >= LONG_GROUP))
        multiply_columns(rows, VECS, eight, source, x, stride, panel, strip, start, steps, sums);
    else
        multiply_columns(rows, VECS / 2, eight, source, x, stride, panel, strip, start, steps, sums);
}
#endif
