/* Rows of logits as draw.c reads them: by runs of RUN neighbouring ids. */

#include <math.h>

#include "vectors.h"

#define RUN 64
#define PARTS (RUN / LANES)
#define AHEAD 16 /* runs that are fetched before they are read */

typedef double wide_vec __attribute__((vector_size(BYTES)));
typedef float narrow_vec __attribute__((vector_size(BYTES / 2)));

typedef struct {
    const char *logits, *next; /* and those of the row that comes next */
    int64_t half;              /* whether they are bfloat16; else fp32 */
    int64_t vocab, runs;
    float temperature;
} Row;

typedef struct { /* what a thread works in; sizes in floats */
    float *peaks; /* [runs, rounded up to LANES] + LANES, -inf beyond */
    float *far, *bound; /* as many */
    int32_t *alive;     /* as many */
    float *found, *found_weights; /* [runs, RUN] + LANES; from here on only where a row is filtered */
    float *inner, *inner_weights; /* [HEAVY + SAMPLED, RUN] + LANES */
} Room;

INLINE int64_t whole(int64_t runs) { return (runs + LANES - 1) / LANES * LANES; }

#if LANES == 16 /* told in steps that the compiler would not find: there are thousands of runs in a row */
typedef int32_t narrow_ivec __attribute__((vector_size(32)));
typedef float small_vec __attribute__((vector_size(16)));
typedef int32_t small_ivec __attribute__((vector_size(16)));

/* The larger of narrower vectors. */
#define LARGER(whole_numbers, a, b) \
    (((whole_numbers)(a) & ((a) > (b))) | ((whole_numbers)(b) & ~((a) > (b))))

INLINE float largest(vec x) {
    narrow_vec halves[2];
    small_vec quarters[2];
    memcpy(halves, &x, sizeof x);
    narrow_vec half = (narrow_vec)LARGER(narrow_ivec, halves[0], halves[1]);
    memcpy(quarters, &half, sizeof half);
    small_vec quarter = (small_vec)LARGER(small_ivec, quarters[0], quarters[1]);
    float first = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
    float last = quarter[2] > quarter[3] ? quarter[2] : quarter[3];
    return first > last ? first : last;
}

INLINE float sum(vec x) {
    narrow_vec halves[2];
    small_vec quarters[2];
    memcpy(halves, &x, sizeof x);
    narrow_vec half = halves[0] + halves[1];
    memcpy(quarters, &half, sizeof half);
    small_vec quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}
#else
INLINE float largest(vec x) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
}

INLINE float sum(vec x) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}
#endif

/* Masks of lanes: `between` is of those from `low` on, below `high`; `pack` writes those of a vector side by side and
 * returns how many, and may write LANES beyond them. */
#ifdef __AVX512F__
typedef __mmask16 Mask;
INLINE int any(Mask mask) { return mask != 0; }
INLINE Mask unordered(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }
INLINE Mask between(vec x, float low, float high) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(low), _CMP_GE_OQ) &
           _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(high), _CMP_LT_OQ);
}
INLINE int64_t pack(float *to, Mask mask, vec x) {
    put_float(to, (vec)_mm512_maskz_compress_ps(mask, (__m512)x));
    return __builtin_popcount(mask);
}
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
#else
typedef ivec Mask;
INLINE int any(Mask mask) {
    int bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= mask[lane];
    return bits != 0;
}
INLINE Mask unordered(vec a, vec b) { return (a != a) | (b != b); }
INLINE Mask between(vec x, float low, float high) { return (x >= splat(low)) & (x < splat(high)); }
INLINE int64_t pack(float *to, Mask mask, vec x) {
    int64_t count = 0;
    if (any(mask))
        for (int lane = 0; lane < LANES; lane++) {
            to[count] = x[lane];
            count += mask[lane] & 1;
        }
    return count;
}
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); } /* b where either is NaN */
#endif

typedef struct { wide_vec low, high; } Total; /* a sum of vectors in fp64 */

INLINE void add(Total *total, vec x) {
    narrow_vec halves[2];
    memcpy(halves, &x, sizeof x);
    total->low += __builtin_convertvector(halves[0], wide_vec);
    total->high += __builtin_convertvector(halves[1], wide_vec);
}

INLINE double sum_up(const Total *total) {
    wide_vec x = total->low + total->high;
    for (int step = LANES / 4; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

/* Read a run's logits in fp32, -inf beyond the vocabulary. */
INLINE void read_run(const Row *row, int64_t run, vec x[PARTS]) {
    const int64_t size = row->half ? sizeof(uint16_t) : sizeof(float);
    const char *from = row->logits + run * RUN * size;
    float padded[RUN];
    if ((run + 1) * RUN > row->vocab) {
        const int64_t left = row->vocab - run * RUN;
        for (int64_t i = 0; i < RUN; i++) {
            uint32_t bits = 0xff800000; /* -inf */
            if (i < left && row->half) bits = (uint32_t)((const uint16_t *)from)[i] << 16;
            if (i < left && !row->half) bits = ((const uint32_t *)from)[i];
            memcpy(padded + i, &bits, sizeof bits);
        }
        for (int i = 0; i < PARTS; i++) x[i] = get_float(padded + i * LANES);
    } else if (row->half) {
        const uint16_t *halves = (const uint16_t *)from;
        for (int i = 0; i < PARTS; i++)
            x[i] = (vec)(__builtin_convertvector(*(const half_vec *)(halves + i * LANES), uvec) << 16);
    } else {
        for (int i = 0; i < PARTS; i++) x[i] = get_float((const float *)from + i * LANES);
    }
}

/* Let a run come from memory before it is read. */
INLINE void fetch(const char *logits, int64_t half, int64_t run) {
    const int64_t size = RUN * (half ? sizeof(uint16_t) : sizeof(float));
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(logits + run * size + at);
}

/* Write the peaks; return the row's best logit, NaN where any is NaN. */
static float scan(const Row *row, Room room) {
    vec best = splat(-INFINITY);
    Mask broken = {0};
    for (int64_t run = 0; run < row->runs; run++) {
        vec x[PARTS];
        fetch(row->logits, row->half, run + AHEAD);
        read_run(row, run, x);
        for (int i = 0; i < PARTS; i += 2) broken |= unordered(x[i], x[i + 1]);
        for (int step = 1; step < PARTS; step *= 2)
            for (int i = 0; i < PARTS; i += 2 * step) x[i] = larger(x[i], x[i + step]);
        best = larger(x[0], best);
        room.peaks[run] = largest(x[0]);
    }
    for (int64_t run = row->runs; run < whole(row->runs); run++) room.peaks[run] = -INFINITY;
    return any(broken) ? NAN : largest(best);
}
