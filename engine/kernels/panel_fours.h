/* Panels of weights in four bits, where a group of inputs shares a scale, and a zero where there are any. Codes are whole
 * numbers, less their zero, or numbers of E2M1, as in MXFP4 and NVFP4.
 *
 * Where the CPU has dot products of bfloat16 and rows are not taken by tiles, whole groups are scaled (panel_groups.h).
 * Elsewhere they multiply as the weights do that they stand for, in the dtype of x, to the same bits; where bfloat16 is
 * widened to fp32 (panel_rows.h) they are not rounded to bfloat16 first. Included by panels.h.
 *
 * Packed: for WORD steps of a panel, [WIDE * DEPTH / LANES] vectors of words of 32 bits, a code of each step in each word,
 * that of the first in the lowest bits. Lanes are outputs; where a step is two inputs, [outputs][2], as a step of the
 * plain panel. Scales and zeros as in panel_scales.h.
 */

#define WORD 8                      /* codes of a word, each of another step */
#define WORD_BYTES (STEP * WORD / 2) /* of a panel, for WORD steps */
#define MOST_COLS 4                 /* vectors of outputs at a time: their words are in registers, too */
#define FAR 16384                    /* bytes ahead that weights are fetched */

/* What a code stands for: less 8, less its zero besides, a number of E2M1; in eight bits a number of e4m3, or itself. */
enum { WHOLE, OFFSET, FLOATS, EIGHT_FLOATS, EIGHT_WHOLE };

/* A panel of codes. */
typedef struct {
    const char *words;
    const char *scales;
    const int8_t *zeros;   /* less the 8 that codes are counted from; 0 = all 0 */
    const float *of_outputs; /* what sums of an output are multiplied by; 0 = all 1 */
    long steps, per_group; /* of the panel, of a group */
    int held;              /* what scales are held in */
    int floats;            /* whether codes of four bits are numbers of E2M1 */
} Codes;

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

/* Where registers are few, those of sums are worth more than those of what is in memory as well. */
#if REGISTERS == 16
#define LEFT_IN_MEMORY(what) __asm__("" : "+m"(what))
#else
#define LEFT_IN_MEMORY(what)
#endif

/* What a group of a vector of outputs has in common. */
typedef struct {
    vec scales[DEPTH], zeros[DEPTH];
} Shared;

INLINE Shared shared_by(const int kind, const Codes *panel, long step, int vector) {
    const long at = step / panel->per_group * WIDE + vector * LANES;
    Shared found;
    vec scales;
    get_scales(panel->scales, panel->held, at, 1, &scales);
    spread(scales, found.scales);
    if (kind == OFFSET) spread(widened_lanes(panel->zeros + at), found.zeros);
    return found;
}

/* The weights of a vector of outputs in step `at`. words: of the vector's LANES * DEPTH lanes. */
INLINE run weights_of(const int kind, const uvec *words, int at, const Shared *shared) {
    vec found[DEPTH];
    for (int d = 0; d < DEPTH; d++) {
        const vec code = fours(kind, words[d], at);
        found[d] = (kind == OFFSET ? code - shared->zeros[d] : code) * shared->scales[d];
    }
    return rounded(found);
}

INLINE void get_words(const char *from, uvec *words) {
    for (int d = 0; d < DEPTH; d++) {
        __builtin_prefetch(from + d * BYTES + FAR, 0, 2);
        memcpy(words + d, from + d * BYTES, BYTES);
    }
}

/* sums [rows][WIDE] (from 0 if `start` is 0) += x [rows][stride] times `steps` from step `start` of the panel on. kept: where
 * weights are put as they are multiplied, [steps][STEP]; 0 = nowhere. */
INLINE void multiply_rows4(const int rows, const int kind, const input *x, long stride, const Codes *panel, long start,
                           long steps, made *kept, float *sums) {
    const int cols = columns(rows) < MOST_COLS ? columns(rows) : MOST_COLS;
    for (int c = 0; c < VECS; c += cols) {
        vec sum[MAX_ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) sum[r][v] = start ? get_float(sums + r * WIDE + (c + v) * LANES) : splat(0);
        for (long k = 0, next; k < steps; k = next) {
            const long left = panel->per_group - (start + k) % panel->per_group; /* of the group */
            next = k + left < steps ? k + left : steps;
            Shared shared[MOST_COLS];
#pragma GCC unroll 8
            for (int v = 0; v < cols; v++) shared[v] = shared_by(kind, panel, start + k, c + v);
            for (long word = k; word < next; word += WORD) {
                const char *from = panel->words + (start + word) / WORD * WORD_BYTES + c * RUN * 4;
                uvec words[MOST_COLS][DEPTH];
#pragma GCC unroll 8
                for (int v = 0; v < cols; v++) get_words(from + v * RUN * 4, words[v]);
#pragma GCC unroll 8
                for (int at = 0; at < WORD; at++) {
                    LEFT_IN_MEMORY(shared);
                    run weights[MOST_COLS]; /* before the rows, so that each input is spread over a register once */
#pragma GCC unroll 8
                    for (int v = 0; v < cols; v++) {
                        weights[v] = weights_of(kind, words[v], at, &shared[v]);
                        if (kept) put_made(kept + (word + at) * STEP + (c + v) * RUN, weights[v]);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                        for (int v = 0; v < cols; v++)
                            sum[r][v] = times(x + r * stride + (word + at) * DEPTH, weights[v], sum[r][v]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (c + v) * LANES, sum[r][v]);
    }
}

/* The plain strip of `steps` from step `start` of a panel on. */
INLINE void widen4(const int kind, const Codes *panel, long start, long steps, made *strip) {
    for (long k = 0; k < steps; k += WORD) {
        const char *words = panel->words + (start + k) / WORD * WORD_BYTES;
        for (int v = 0; v < VECS; v++) {
            uvec word[DEPTH];
            get_words(words + v * RUN * 4, word);
            const Shared shared = shared_by(kind, panel, start + k, v);
#pragma GCC unroll 8
            for (int at = 0; at < WORD; at++)
                put_made(strip + (k + at) * STEP + v * RUN, weights_of(kind, word, at, &shared));
        }
    }
}
