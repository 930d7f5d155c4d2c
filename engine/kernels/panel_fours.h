/* Panels of weights in four bits, where a group of inputs shares a scale, and a zero where there are any. Codes are whole
 * numbers, less their zero, or numbers of E2M1, as in MXFP4 and NVFP4.
 *
 * Where the CPU has dot products of bfloat16 and rows are not taken by tiles, whole groups are scaled (BY_GROUP, below).
 * Elsewhere they multiply as the weights do that they stand for, in the dtype of x, to the same bits; where bfloat16 is
 * widened to fp32 (panel_rows.h) they are not rounded to bfloat16 first. Included by panels.h.
 *
 * Packed: for WORD steps of a panel, [WIDE * DEPTH / LANES] vectors of words of 32 bits, a code of each step in each word,
 * that of the first in the lowest bits. Lanes are outputs; where a step is two inputs, [outputs][2], as a step of the
 * plain panel. Scales and zeros are in lanes likewise, [groups][WIDE * DEPTH].
 */

#define WORD 8                      /* codes of a word, each of another step */
#define LANE_VECS (WIDE * DEPTH / LANES)
#define WORD_BYTES (STEP * WORD / 2) /* of a panel, for WORD steps */
#define MOST_COLS 4                 /* vectors of outputs at a time: their words are in registers, too */
#define FAR 16384                    /* bytes ahead that weights are fetched */

/* What a code stands for: less 8, less its zero besides, or a number of E2M1. */
enum { WHOLE, OFFSET, FLOATS };

typedef struct {
    const char *words;    /* of a panel */
    const float *scales;  /* of a panel, [groups][STEP]; where groups are scaled whole [groups][WIDE] */
    const float *zeros;   /* likewise, less the 8 that codes are counted from; 0 = all 0 */
    long steps, per_group; /* of the panel, of a group */
    int floats;            /* whether codes are numbers of E2M1 */
} Fours;

/* The numbers of step `at` of a word, zeros apart. */
INLINE vec fours(const int kind, uvec words, int at) {
#if LANES == 16
    static const float whole[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    static const float e2m1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
    const __m512 numbers = _mm512_loadu_ps(kind == FLOATS ? e2m1 : whole);
    return (vec)_mm512_permutexvar_ps((__m512i)(words >> (4 * at)), numbers); /* by the lowest bits */
#else
    if (kind != FLOATS) return __builtin_convertvector(((ivec)(words << (28 - 4 * at)) >> 28) ^ -8, vec);
    const uvec codes = words >> (4 * at), sign = codes << 28 & 0x80000000u;
#if defined(__AVX2__)
    static const float sizes[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    const vec size = (vec)_mm256_permutevar8x32_ps(_mm256_loadu_ps(sizes), (__m256i)codes); /* by the lowest bits */
#else
    const uvec exponent = codes >> 1 & 3, normal = (uvec)(exponent != 0) & 1;
    const vec size = __builtin_convertvector((normal << 1 | (codes & 1)) << (exponent - normal), vec) * 0.5f;
#endif
    return (vec)((uvec)size | sign);
#endif
}

/* RUN weights in fp32, in the order of lanes, as they are multiplied. */
INLINE run rounded(const vec *found) {
#if DEPTH == 2
    return (run)_mm512_cvtne2ps_pbh((__m512)found[1], (__m512)found[0]);
#else
    return found[0];
#endif
}

/* The weights of vector v of outputs in step `at`. words: of the vector's LANES * DEPTH lanes. */
INLINE run weights_of(const int kind, const uvec *words, int at, const float *scales, const float *zeros) {
    vec found[DEPTH];
    for (int d = 0; d < DEPTH; d++) {
        const vec code = fours(kind, words[d], at);
        found[d] = (kind == OFFSET ? code - get_float(zeros + d * LANES) : code) * get_float(scales + d * LANES);
    }
    return rounded(found);
}

INLINE void get_words(const char *from, uvec *words) {
    for (int d = 0; d < DEPTH; d++) {
        __builtin_prefetch(from + d * BYTES + FAR, 0, 2);
        memcpy(words + d, from + d * BYTES, BYTES);
    }
}

/* sums [rows][WIDE] (from 0 if `start` is 0) += x [rows][stride] times `steps` from step `start` of the panel on. */
INLINE void multiply_rows4(const int rows, const int kind, const input *x, long stride, const Fours *panel, long start,
                           long steps, float *sums) {
    const int cols = columns(rows) < MOST_COLS ? columns(rows) : MOST_COLS;
    for (int c = 0; c < VECS; c += cols) {
        vec sum[MAX_ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) sum[r][v] = start ? get_float(sums + r * WIDE + (c + v) * LANES) : splat(0);
        for (long k = 0; k < steps; k += WORD) {
            const long group = (start + k) / panel->per_group * STEP + c * RUN;
            const char *from = panel->words + (start + k) / WORD * WORD_BYTES + c * RUN * 4;
            uvec words[MOST_COLS][DEPTH];
#pragma GCC unroll 8
            for (int v = 0; v < cols; v++) get_words(from + v * RUN * 4, words[v]);
#pragma GCC unroll 8
            for (int at = 0; at < WORD; at++)
#pragma GCC unroll 8
                for (int v = 0; v < cols; v++) {
                    const long lane = group + v * RUN;
                    const run weights = weights_of(kind, words[v], at, panel->scales + lane, panel->zeros + lane);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        sum[r][v] = times(x + r * stride + (k + at) * DEPTH, weights, sum[r][v]);
                }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (c + v) * LANES, sum[r][v]);
    }
}

/* The plain strip of `steps` from step `start` of a panel on. */
INLINE void widen4(const int kind, const Fours *panel, long start, long steps, elem *strip) {
    for (long k = 0; k < steps; k += WORD) {
        const long group = (start + k) / panel->per_group * STEP;
        const char *words = panel->words + (start + k) / WORD * WORD_BYTES;
        for (int v = 0; v < VECS; v++) {
            uvec word[DEPTH];
            get_words(words + v * RUN * 4, word);
#pragma GCC unroll 8
            for (int at = 0; at < WORD; at++)
                put_weights(strip + (k + at) * STEP + v * RUN,
                            weights_of(kind, word, at, panel->scales + group + v * RUN, panel->zeros + group + v * RUN));
        }
    }
}

#define BY_GROUP (DEPTH == 2) /* unless by tiles */

#if BY_GROUP
/* Whole groups: rows multiply with code - 8, or what E2M1 says, which bfloat16 holds exactly, and the sum of a group is
 * scaled. So no weight is rounded, and one costs a shift and a look-up. With X for the sum of the group's inputs,
 * sum((code - zero) * x) * scale = (sum((code - 8) * x) - (zero - 8) * X) * scale. Where all codes are their zero, what
 * is left are the roundings of two sums, not 0.
 *
 * Packed: for HALF_WORD steps of a panel, [VECS] vectors of words of 16 bits, [outputs][2], a code of each step in each
 * word. Scales and zeros [groups][WIDE]. The sum of a group ends at each multiple of PIECE steps, too: rows
 * share what is looked up of so many.
 */
#define HALF_WORD 4
#define PIECE 256
#define LONG_GROUP 64 /* steps */

/* What codes stand for, zeros apart, in bfloat16; twice, since the lowest five bits look up. */
INLINE run numbers_of(const int floats) {
    static const uint16_t whole[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    };
    static const uint16_t e2m1[32] = {
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    };
    return _mm512_loadu_si512(floats ? e2m1 : whole);
}

/* The numbers of step `at` of a vector of words. */
INLINE run halves(run words, int at, run numbers) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * at), numbers);
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

/* What was read of a panel: words of steps at a multiple of PIECE on, and the strip that they were widened to. */
typedef struct {
    const char *words;
    elem *strip; /* [PIECE][STEP] */
    run numbers;
} Piece;

/* part [rows][cols] = x [rows][stride] times `steps` of a group from step `start` of the piece on, for vectors of outputs
 * from `first` on. */
INLINE void multiply_group(const int rows, const int cols, const int source, const elem *x, long stride, const Piece *piece,
                           long start, long steps, int first, vec part[MAX_ROWS][VECS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < cols; v++) part[r][v] = splat(0);
    for (long k = start; k < start + steps; k += HALF_WORD) {
        run words[VECS];
        for (int v = 0; v < cols && source != KEPT; v++) {
            const char *from = piece->words + (k / HALF_WORD * VECS + first + v) * LINE;
            __builtin_prefetch(from + FAR, 0, 2);
            words[v] = _mm512_loadu_si512(from);
        }
#pragma GCC unroll 4
        for (int at = 0; at < HALF_WORD; at++) {
            elem *strip = piece->strip + (k + at) * STEP + first * RUN;
            run weights[VECS]; /* before the rows, so that each input is spread over a register once */
            for (int v = 0; v < cols; v++) {
                weights[v] = source == KEPT ? get_weights(strip + v * RUN) : halves(words[v], at, piece->numbers);
                if (source == KEEP) put_weights(strip + v * RUN, weights[v]);
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
INLINE void multiply_columns(const int rows, const int cols, const int source, const elem *x, long stride,
                             const Fours *panel, elem *strip, long start, long steps, float *sums) {
    const Piece piece = {panel->words + start * STEP / 2, strip, numbers_of(panel->floats)};
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
            multiply_group(rows, cols, source, x, stride, &piece, k - start, next - k, first, part);
            const long lane = k / group * WIDE + first * LANES;
            /* Told, not left to the compiler: a row's bits must not depend on the rows that it is taken with. */
            for (int v = 0; v < cols && panel->zeros; v++) {
                const __m512 zeros = _mm512_loadu_ps(panel->zeros + lane + v * LANES);
                for (int r = 0; r < rows; r++)
                    part[r][v] = (vec)_mm512_fnmadd_ps(_mm512_set1_ps(inputs[r][g]), zeros, (__m512)part[r][v]);
            }
            for (int v = 0; v < cols; v++) {
                const __m512 scales = _mm512_loadu_ps(panel->scales + lane + v * LANES);
                for (int r = 0; r < rows; r++)
                    whole[r][v] = (vec)_mm512_fmadd_ps((__m512)part[r][v], scales, (__m512)whole[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (first + v) * LANES, whole[r][v]);
    }
}

/* The same, with the sums of a group and of all before it in registers side by side, unless groups are long: then those
 * of all before are seldom wanted, and all vectors of outputs share an input that is spread over a register. */
INLINE void multiply_groups(const int rows, const int source, const elem *x, long stride, const Fours *panel, elem *strip,
                            long start, long steps, float *sums) {
    if (rows <= 3 || (source == WORDS && panel->per_group >= LONG_GROUP))
        multiply_columns(rows, VECS, source, x, stride, panel, strip, start, steps, sums);
    else
        multiply_columns(rows, VECS / 2, source, x, stride, panel, strip, start, steps, sums);
}
#endif
