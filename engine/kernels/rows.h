/* Scores and weighted sums of attention in vectors of floats, for any CPU and dtype. Included by attention.c.
 *
 * Keys lie as [HEAD_DIM][BLOCK], so that one vector is one feature of neighbouring tokens, values as [BLOCK][HEAD_DIM].
 */

#define MAX_ROWS 6 /* rows that are summed at a time */
#define PARTS 2 /* sums over the features that run side by side, to hide the latency of an addition */
/* Vectors of an output row that are summed at a time: all sums in registers, and a cache line at least. */
#define SLICES(rows) ((rows) * 4 < REGISTERS - 4 ? 4 : (rows) * 2 < REGISTERS - 2 ? 2 : 1)
#define FITS(slices) (HEAD_DIM % ((slices) * LANES) == 0)
#define SLICE(rows) (FITS(SLICES(rows)) ? SLICES(rows) : SLICES(rows) >= 2 && FITS(2) ? 2 : 1)
#define AHEAD 2 /* blocks that are fetched before they are needed: pages lie anywhere, so no hardware foresees them */

#define SIDE 1
#define KEY_AT(d, t) ((d) * BLOCK + (t))
#define VALUE_AT(t, d) ((t) * HEAD_DIM + (d))
typedef float given;
INLINE void begin_tiles(int side) { (void)side; }
INLINE void end_tiles(void) {}
INLINE long padded(long rows, long side) { return (void)side, rows; }

/* Write a weight, and return it. */
INLINE vec put_weight(given *to, vec weight) {
    put_float(to, weight);
    return weight;
}

/* Ask for the cache line of an element that is the first of one, or near enough. */
INLINE void fetch(const elem *from, long index) {
    if (index % (64 / sizeof(elem)) == 0) __builtin_prefetch(from + index, 0, 2);
}

/* scores [rows][stride] of `rows` queries, [rows][HEAD_DIM], with one block of keys; `next` is wanted soon */
INLINE void score_rows(const int rows, const float *query, const elem *keys, const elem *next, float *scores,
                       long stride) {
    for (int at = 0; at < BLOCK; at += LANES) {
        vec sum[MAX_ROWS][PARTS];
        for (int r = 0; r < rows; r++)
            for (int part = 0; part < PARTS; part++) sum[r][part] = (vec){0};
        for (int d = 0; d < HEAD_DIM; d += PARTS)
            for (int part = 0; part < PARTS; part++) {
                vec key = load(keys + (d + part) * BLOCK + at);
                fetch(next, (d + part) * BLOCK + at);
                for (int r = 0; r < rows; r++) sum[r][part] = fused(splat(query[r * HEAD_DIM + d + part]), key, sum[r][part]);
            }
        for (int r = 0; r < rows; r++) {
            for (int part = 1; part < PARTS; part++) sum[r][0] += sum[r][part];
            put_float(scores + r * stride + at, sum[r][0]);
        }
    }
}

#if LATENT
#define FEATURES (REGISTERS < 32 ? 2 : 4) /* of all rows, that are summed at a time */

INLINE vec from_to(vec x, int first, int last) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return choose((lane >= first) & (lane < last), x, splat(0));
}

/* out [rows][LATENT] = weights [rows][stride] times the values of all tokens in the span, which are the first features
 * of the keys: a vector is one feature of several tokens, and its lanes are summed at the end */
INLINE void mix_rows(const int rows, const float *weights, long stride, const elem *keys, long heads, Span span,
                     float *out) {
    for (int d = 0; d < LATENT; d += FEATURES) {
        vec sum[MAX_ROWS][FEATURES];
        for (int r = 0; r < rows; r++)
            for (int f = 0; f < FEATURES; f++) sum[r][f] = splat(0);
        for (int b = 0; b < span.count; b++) {
            const elem *block = keys + span.blocks[b] * heads * HEAD_BLOCK + d * BLOCK;
            const elem *next = keys + span.blocks[b + AHEAD < span.count ? b + AHEAD : b] * heads * HEAD_BLOCK + d * BLOCK;
            for (int at = 0; at < BLOCK; at += LANES) {
                const int before = (span.first + b) * BLOCK + at;
                const int first = span.begin - before, last = span.end - before;
                if (last <= 0 || first >= LANES) continue;
                for (int f = 0; f < FEATURES; f++) {
                    vec value = load(block + f * BLOCK + at);
                    fetch(next, f * BLOCK + at);
                    if (first > 0 || last < LANES) value = from_to(value, first, last);
                    for (int r = 0; r < rows; r++)
                        sum[r][f] = fused(get_float(weights + r * stride + b * BLOCK + at), value, sum[r][f]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int f = 0; f < FEATURES; f++) {
                float total = 0;
                for (int i = 0; i < LANES; i++) total += sum[r][f][i];
                out[r * LATENT + d + f] = total;
            }
    }
}
#else
/* out [rows][HEAD_DIM] = weights [rows][stride] times the values of all tokens in the span */
INLINE void mix_rows(const int rows, const float *weights, long stride, const elem *values, long heads, Span span,
                     float *out) {
    const int slice = SLICE(rows);
    for (int d = 0; d < HEAD_DIM; d += slice * LANES) {
        vec sum[MAX_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < slice; s++) sum[r][s] = (vec){0};
        for (int b = 0; b < span.count; b++) {
            const elem *block = values + span.blocks[b] * heads * HEAD_BLOCK + d;
            const elem *next = values + span.blocks[b + AHEAD < span.count ? b + AHEAD : b] * heads * HEAD_BLOCK + d;
            const float *weight = weights + b * BLOCK;
            const int before = (span.first + b) * BLOCK, last = smaller(span.end - before, BLOCK);
            for (int t = larger(span.begin - before, 0); t < last; t++)
                for (int s = 0; s < slice; s++) {
                    vec value = load(block + t * HEAD_DIM + s * LANES);
                    fetch(next, t * HEAD_DIM + s * LANES);
                    for (int r = 0; r < rows; r++) sum[r][s] = fused(splat(weight[r * stride + t]), value, sum[r][s]);
                }
        }
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < slice; s++) put_float(out + r * HEAD_DIM + d + s * LANES, sum[r][s]);
    }
}
#endif

/* scores [rows][span.count * BLOCK] of queries [rows][HEAD_DIM] with all keys of the span, whose values come next */
static void score_span(const float *queries, long rows, long side, const elem *keys, const elem *values, long heads,
                       Span span, float *scores) {
    const long width = (long)span.count * BLOCK;
    for (int b = 0; b < span.count; b++) {
        const elem *block = keys + span.blocks[b] * heads * HEAD_BLOCK;
        const int more = b + AHEAD - span.count; /* after the last keys come the first values */
        const elem *next = more < 0 ? keys + span.blocks[b + AHEAD] * heads * HEAD_BLOCK
                                    : values + span.blocks[more < span.count ? more : 0] * heads * HEAD_BLOCK;
        int size;
        for (long r = 0; r < rows; r += size)
            BY_ROWS(rows - r, size,
                    score_rows(ROWS, queries + r * HEAD_DIM, block, next, scores + r * width + b * BLOCK, width))
    }
}

/* out [rows][VALUE_DIM] = weights, `stride` from row to row, times the values of the span */
static void mix_span(const float *weights, long stride, long rows, long side, const elem *values, long heads, Span span,
                     float *out) {
    int size;
    for (long r = 0; r < rows; r += size)
        BY_ROWS(rows - r, size, mix_rows(ROWS, weights + r * stride, stride, values, heads, span, out + r * VALUE_DIM))
}
