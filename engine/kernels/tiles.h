/* Scores and weighted sums of attention by the matrix unit of a CPU (AMX), for bfloat16. Included by attention.c.
 *
 * One instruction multiplies 16 rows by 32 features of 16 tokens, in an order that is the same for every row, and sums
 * in fp32. Two neighbouring features of a key, and two neighbouring tokens of a value, lie side by side: keys as
 * [HEAD_DIM / 2][BLOCK][2], values as [BLOCK / 2][HEAD_DIM][2]. Rows are taken `side` at a time, 16 at most, and filled
 * up with zeros. Weights are rounded to bfloat16, and summed as they were rounded.
 */

#include <immintrin.h>

typedef elem given; /* queries and weights as they are used */

#define SIDE 16               /* most rows of a tile, and its tokens or features */
#define STEPS (HEAD_DIM / 32) /* tiles of features of a key */
#define GROUPS 4              /* tiles of sums that run side by side, to hide the latency of one */
#define KEY_AT(d, t) ((d) / 2 * BLOCK * 2 + (t) * 2 + (d) % 2)
#define VALUE_AT(t, d) ((t) / 2 * HEAD_DIM * 2 + (d) * 2 + (t) % 2)

/* Registers 0 to 3: sums [side][16] of fp32. 4, 5: queries [side][32] and keys [16 pairs][16][2]. 6, 7: weights [side][16]
 * and values [8 pairs][16][2]. */
static void begin_tiles(int side) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 32, 64}, {side, side, side, side, side, 16, side, 8}};
    _tile_loadconfig(&shapes);
}
INLINE void end_tiles(void) { _tile_release(); }
INLINE long padded(long rows, long side) { return (rows + side - 1) / side * side; }

/* Write a weight as values are multiplied by it, and return it as it was rounded. */
INLINE vec put_weight(given *to, vec weight) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)weight);
    _mm256_storeu_si256((__m256i *)to, half);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

/* Ask for the keys or values of a block and head. */
INLINE void fetch_block(const elem *from) {
    for (long at = 0; at < HEAD_BLOCK; at += 64 / sizeof(elem)) __builtin_prefetch(from + at, 0, 2);
}

/* scores, `stride` floats from row to row, of `side` queries [side][HEAD_DIM] with 16 tokens of each of `count` groups; keys:
 * where each group begins. */
INLINE void score_groups(const int count, const elem *queries, const elem *const *keys, float *const *scores,
                         long stride) {
    _tile_zero(0);
    if (count > 1) _tile_zero(1);
    if (count > 2) _tile_zero(2);
    if (count > 3) _tile_zero(3);
    for (int k = 0; k < STEPS; k++) {
        const long at = k * 32 * BLOCK;
        _tile_loadd(4, queries + k * 32, HEAD_DIM * sizeof(elem));
        _tile_loadd(5, keys[0] + at, 2 * BLOCK * sizeof(elem));
        _tile_dpbf16ps(0, 4, 5);
        if (count > 1) {
            _tile_loadd(5, keys[1] + at, 2 * BLOCK * sizeof(elem));
            _tile_dpbf16ps(1, 4, 5);
        }
        if (count > 2) {
            _tile_loadd(5, keys[2] + at, 2 * BLOCK * sizeof(elem));
            _tile_dpbf16ps(2, 4, 5);
        }
        if (count > 3) {
            _tile_loadd(5, keys[3] + at, 2 * BLOCK * sizeof(elem));
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, scores[0], stride * sizeof(float));
    if (count > 1) _tile_stored(1, scores[1], stride * sizeof(float));
    if (count > 2) _tile_stored(2, scores[2], stride * sizeof(float));
    if (count > 3) _tile_stored(3, scores[3], stride * sizeof(float));
}

/* scores [padded rows][span.count * BLOCK] of queries [padded rows][HEAD_DIM] with all keys of the span, whose values come
 * next */
static void score_span(const elem *queries, long rows, long side, const elem *keys, const elem *values, long heads,
                       Span span, float *scores) {
    const long width = (long)span.count * BLOCK, groups = width / SIDE;
    for (long r = 0; r < rows; r += side)
        for (long g = 0; g < groups; g += GROUPS) {
            const elem *from[GROUPS];
            float *to[GROUPS];
            const int count = groups - g < GROUPS ? groups - g : GROUPS;
            for (int i = 0; i < count; i++) {
                const long token = (g + i) * SIDE, next = token / BLOCK + GROUPS * SIDE / BLOCK;
                from[i] = keys + span.blocks[token / BLOCK] * heads * HEAD_BLOCK + token % BLOCK * 2;
                to[i] = scores + r * width + token;
                if (r == 0 && token % BLOCK == 0)
                    fetch_block(next < span.count ? keys + span.blocks[next] * heads * HEAD_BLOCK
                                                  : values + span.blocks[next - span.count < span.count ? next - span.count : 0] * heads * HEAD_BLOCK);
            }
            if (count == GROUPS)
                score_groups(GROUPS, queries + r * HEAD_DIM, from, to, width);
            else
                for (int i = 0; i < count; i++) score_groups(1, queries + r * HEAD_DIM, from + i, to + i, width);
        }
}

/* Copy the values of tokens [first, last) of a block, and zeros in the place of the others. */
static void copy_values(const elem *from, int first, int last, elem *to) {
    for (int pair = 0; pair < BLOCK / 2; pair++) {
        const int here = 2 * pair >= first && 2 * pair < last, next = 2 * pair + 1 >= first && 2 * pair + 1 < last;
        const uint32_t mask = (here ? 0xffffu : 0) | (next ? 0xffff0000u : 0);
        for (int d = 0; d < HEAD_DIM; d++) {
            uint32_t both;
            memcpy(&both, from + 2 * (pair * HEAD_DIM + d), sizeof both);
            both &= mask;
            memcpy(to + 2 * (pair * HEAD_DIM + d), &both, sizeof both);
        }
    }
}

/* out [side][16] of up to GROUPS groups of features, HEAD_DIM from row to row. begins, ends: in the place of the first and
 * the last block, 0 = the block itself. fetches: whether to ask for the blocks before they are needed. */
INLINE void mix_groups(const int fetches, const elem *weights, long stride, const elem *values, long heads, Span span, const elem *begins,
                       const elem *ends, int count, float *out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < span.count; b++) {
        const elem *from = values + span.blocks[b] * heads * HEAD_BLOCK;
        if (ends && b == span.count - 1) from = ends;
        if (begins && b == 0) from = begins;
        if (fetches && b + GROUPS < span.count) fetch_block(values + span.blocks[b + GROUPS] * heads * HEAD_BLOCK);
        for (int t = 0; t < BLOCK; t += SIDE) {
            const elem *pairs = from + t * HEAD_DIM;
            _tile_loadd(6, weights + b * BLOCK + t, stride * sizeof(elem));
            _tile_loadd(7, pairs, 2 * HEAD_DIM * sizeof(elem));
            _tile_dpbf16ps(0, 6, 7);
            if (count > 1) {
                _tile_loadd(7, pairs + 2 * SIDE, 2 * HEAD_DIM * sizeof(elem));
                _tile_dpbf16ps(1, 6, 7);
            }
            if (count > 2) {
                _tile_loadd(7, pairs + 4 * SIDE, 2 * HEAD_DIM * sizeof(elem));
                _tile_dpbf16ps(2, 6, 7);
            }
            if (count > 3) {
                _tile_loadd(7, pairs + 6 * SIDE, 2 * HEAD_DIM * sizeof(elem));
                _tile_dpbf16ps(3, 6, 7);
            }
        }
    }
    _tile_stored(0, out, HEAD_DIM * sizeof(float));
    if (count > 1) _tile_stored(1, out + SIDE, HEAD_DIM * sizeof(float));
    if (count > 2) _tile_stored(2, out + 2 * SIDE, HEAD_DIM * sizeof(float));
    if (count > 3) _tile_stored(3, out + 3 * SIDE, HEAD_DIM * sizeof(float));
}

/* out [padded rows][HEAD_DIM] = weights, `stride` from row to row, times the values of all tokens in the span, and of
 * no other: what was never written is no number. */
static void mix_span(const elem *weights, long stride, long rows, long side, const elem *values, long heads, Span span,
                     float *out) {
    _Alignas(64) elem begins[HEAD_BLOCK], ends[HEAD_BLOCK];
    const int first = span.begin - span.first * BLOCK, last = span.end - (span.count - 1 + span.first) * BLOCK;
    const elem *block = values + span.blocks[0] * heads * HEAD_BLOCK;
    if (first > 0 || span.count == 1) copy_values(block, first, span.count == 1 ? last : BLOCK, begins);
    if (last < BLOCK && span.count > 1)
        copy_values(values + span.blocks[span.count - 1] * heads * HEAD_BLOCK, 0, last, ends);
    const elem *begin = first > 0 || span.count == 1 ? begins : 0, *end = last < BLOCK && span.count > 1 ? ends : 0;
    for (long r = 0; r < rows; r += side)
        for (int d = 0; d < HEAD_DIM; d += GROUPS * SIDE)
            mix_groups(r == 0 && d == 0, weights + r * stride, stride, values + 2 * d, heads, span, begin ? begin + 2 * d : 0,
                       end ? end + 2 * d : 0, (HEAD_DIM - d) / SIDE, out + r * HEAD_DIM + d);
}
