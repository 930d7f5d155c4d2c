/* Rows times a strip of a panel in vectors, on any CPU: as many sums at a time as its registers hold. Included by panels.h.
 *
 * A sum runs over the inputs in their order. Where the CPU has dot products of bfloat16 they are taken in pairs, which
 * take numbers below 2^-126 for 0; where it has none, inputs and weights are widened to fp32.
 */

#define VECS (WIDE / LANES)
#define MAX_ROWS 6 /* rows of a pass at most */
#define STRIP 1024 /* steps of a panel that stay in the cache while all rows pass */
#define WIDENS (BF16 && DEPTH == 1)
#define RUN (LANES * DEPTH) /* weights of a vector of outputs */

#if DEPTH == 2
typedef elem input; /* what rows are given as */
typedef __m512i run; /* RUN weights as they are multiplied */
typedef int32_t pair __attribute__((aligned(2), may_alias));
INLINE run get_weights(const elem *from) { return _mm512_loadu_si512(from); }
/* Numbers that bfloat16 holds exactly, those of two inputs side by side. */
INLINE run paired(vec first, vec second) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, (run)((uvec)first >> 16), (run)second);
}
INLINE vec times(const input *x, run weights, vec sum) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*(const pair *)x), (__m512bh)weights);
}
#else
typedef float input;
typedef vec run;
INLINE run get_weights(const elem *from) { return load(from); }
INLINE vec times(const input *x, run weights, vec sum) { return fused(splat(*x), weights, sum); }
#endif

/* LANES weights in int8. */
#if LANES == 16
INLINE vec widened_lanes(const int8_t *from) {
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#elif defined(__AVX2__)
INLINE vec widened_lanes(const int8_t *from) {
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
#else
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE vec widened_lanes(const int8_t *from) { return __builtin_convertvector(*(const bytes *)from, vec); }
#endif

/* RUN weights in int8, [DEPTH][LANES]. Whole numbers of eight bits are the upper half of their fp32, as bfloat16. */
INLINE run widened(const int8_t *from) {
#if DEPTH == 2
    return paired(widened_lanes(from), widened_lanes(from + LANES));
#else
    return widened_lanes(from);
#endif
}

/* Weights that are made plain are kept as they are multiplied: widened, where all are. */
#if WIDENS
typedef float made;
INLINE run get_made(const made *from) { return get_float(from); }
INLINE void put_made(made *to, run weights) { put_float(to, weights); }
#else
typedef elem made;
INLINE run get_made(const made *from) { return get_weights(from); }
INLINE void put_made(made *to, run weights) {
#if DEPTH == 2
    _mm512_storeu_si512(to, weights);
#else
    put(to, weights);
#endif
}
#endif

/* What a strip holds: weights as they were packed, in int8, or made plain. */
enum { PACKED, INT8, MADE };

/* Vectors of outputs for which as many rows have their sums in registers at once. */
INLINE int columns(const int rows) {
    const int most = (REGISTERS == 32 ? 24 : 12) / rows;
    const int fit = most >= 16 ? 16 : most >= 8 ? 8 : most >= 4 ? 4 : 2;
    return fit < VECS ? fit : VECS;
}

/* sums [rows][WIDE] (from 0 if `fresh`) += x [rows][stride] times `steps` of a panel, which holds weights as `form` says.
 * kept: where they are put as they are multiplied; 0 = nowhere.
 * `ahead` bytes of what is wanted after this are fetched at each step; behind the last panel that is beyond the weights,
 * where a fetch does nothing. */
INLINE void multiply_rows(const int rows, const int form, const input *x, long stride, const void *strip, made *kept,
                          long steps, int fresh, float *sums, const char *next, long ahead) {
    const int cols = columns(rows);
    for (int c = 0; c < VECS; c += cols) {
        vec sum[MAX_ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++)
                sum[r][v] = fresh ? splat(0) : get_float(sums + r * WIDE + (c + v) * LANES);
        for (long k = 0; k < steps; k++) {
            const long at = k * STEP + c * RUN;
            if (c == 0)
                for (long byte = 0; byte < ahead; byte += LINE) __builtin_prefetch(next + k * ahead + byte, 0, 2);
            run weights[VECS]; /* before the rows, so that each input is spread over a register once */
            for (int v = 0; v < cols; v++)
                weights[v] = form == INT8   ? widened((const int8_t *)strip + at + v * RUN)
                             : form == MADE ? get_made((const made *)strip + at + v * RUN)
                                            : get_weights((const elem *)strip + at + v * RUN);
            for (int v = 0; v < cols && kept; v++) put_made(kept + at + v * RUN, weights[v]);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < cols; v++) sum[r][v] = times(x + r * stride + k * DEPTH, weights[v], sum[r][v]);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < cols; v++) put_float(sums + r * WIDE + (c + v) * LANES, sum[r][v]);
    }
}

/* Rows of x as they are multiplied: where they are, or widened to `room` [rows][steps]. */
INLINE const input *rows_as_input(const int rows, const elem *x, long *stride, long steps, float *room) {
#if WIDENS
    for (int r = 0; r < rows; r++) {
        long k = 0;
        for (; k + LANES <= steps; k += LANES) put_float(room + r * steps + k, load(x + r * *stride + k));
        for (; k < steps; k++) {
            const uint32_t bits = (uint32_t)x[r * *stride + k] << 16;
            memcpy(room + r * steps + k, &bits, sizeof bits);
        }
    }
    *stride = steps;
    return room;
#else
    return x;
#endif
}

/* The same for all rows of a band, a pass at a time: the first keeps weights for the others, unless `kept` is 0. Of `next`,
 * `bytes` a step are fetched, shared out among the first passes. */
INLINE void multiply_strip(const int form, const elem *x, long stride, long rows, const void *strip, made *kept, long steps,
                           int fresh, float *sums, const char *next, long bytes) {
    const long lines = bytes / LINE, passes = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const long share = passes ? (lines + passes - 1) / passes * LINE : 0; /* bytes a step of each pass */
    float room[WIDENS ? MAX_ROWS * STRIP : 1];
    long fetched = 0;
    int size;
    for (long r = 0; r < rows; r += size) {
        const long ahead = fetched < bytes ? share : 0;
        long apart = stride;
        float *to = sums + r * WIDE;
        const char *wanted = next + fetched * steps;
        BY_ROWS(rows - r, size, {
            const input *from = rows_as_input(ROWS, x + r * stride, &apart, steps, room);
            if (form == INT8 && kept && r)
                multiply_rows(ROWS, MADE, from, apart, kept, 0, steps, fresh, to, wanted, ahead);
            else if (form == INT8 && kept)
                multiply_rows(ROWS, form, from, apart, strip, kept, steps, fresh, to, wanted, ahead);
            else
                multiply_rows(ROWS, form, from, apart, strip, 0, steps, fresh, to, wanted, ahead);
        })
        fetched += ahead;
    }
}
