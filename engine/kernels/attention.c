/* Attention over paged keys and values on a CPU.
 *
 * Compiled when a model is loaded, for this machine and for the model's HEAD_DIM, BLOCK (tokens per cache block, a
 * multiple of 16) and dtype (BF16: 1 or 0), and LATENT, the first features of a key that are its value (MLA), 0 where
 * values are apart; AMX: whether the matrix unit may be used where there is one.
 *
 * Keys are taken in pieces of PIECE tokens, counted from the first token of the sequence. Each piece has a softmax of
 * its own, and the pieces are put together in their order, as in FlashAttention (arXiv:2205.14135). Everything is summed
 * in fp32, in an order that depends on nothing but a query's own position: its result has the same bits in any company,
 * chunk of a prompt, tile or thread, also where the pieces of one query are different threads' (arXiv:2311.01282).
 *
 * A cache block holds, for each KV head, keys by feature and values by token, as rows.h or tiles.h says. With LATENT
 * there is one KV head and there are no values.
 */

#include <math.h>
#include <omp.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

#define HEAD_BLOCK ((long)BLOCK * HEAD_DIM)
#define VALUE_DIM (LATENT ? LATENT : HEAD_DIM)
#define PIECE ((512 + BLOCK - 1) / BLOCK * BLOCK) /* keys: scores of a tile with them stay in the cache */

/* Queries [offset, offset + count) of a sequence's part in this step; `sequence` is its row in the tables. */
typedef struct {
    int32_t sequence, offset, count;
} Tile;

/* What all layers of a step share. starts: [sequences + 1], lens: [sequences], tables: [sequences][table_width],
 * slots: [tokens]; scratch: [threads][room] floats; parts: [tiles][kv_heads][pieces][`part_of` rows] floats where the
 * pieces of one tile are different threads', else null. kv_heads: with LATENT the parts in which the heads are attended,
 * each of `group` heads; side: rows that the matrix unit takes at a time; rows: most of a tile. */
typedef struct {
    const Tile *tiles;
    const int32_t *starts, *lens, *tables;
    const int64_t *slots;
    float *scratch, *parts;
    int64_t num_tiles, num_tokens, table_width, room, threads, kv_heads, group, side, pieces, rows;
    float scale, softcap;
} Step;

/* The keys that a query or a tile sees: tokens [begin, end) of its sequence, in blocks [first, first + count). */
typedef struct {
    const int32_t *blocks;
    int first, count, begin, end;
} Span;

INLINE int larger(int a, int b) { return a > b ? a : b; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

#if AMX && BF16 && !LATENT && HEAD_DIM % 32 == 0 && defined(__AMX_BF16__)
#define TILES 1
#include "tiles.h"
#else
#define TILES 0
#include "rows.h"
#endif

/* What is known of a query after some of its keys: the largest score, -INFINITY where there is none, and the sum of the
 * weights, which are exp(score - most). */
typedef struct {
    float most, sum;
} Mass;

/* x where it is of lanes [low, high), else -INFINITY. */
INLINE vec only(vec x, int low, int high) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return choose((lane >= low) & (lane < high), x, splat(-INFINITY));
}

/* Turn scores [width] of the keys [low, high), times `scale`, into weights that are not normed yet, 0 of all other keys.
 * weights may be scores. */
static Mass soften(float *scores, given *weights, int low, int high, int width, float scale, float softcap) {
    vec most = splat(-INFINITY), total = splat(0);
    Mass mass = {-INFINITY, 0};
    const int first = low < high ? low / LANES * LANES : width;
    const int last = low < high ? (high + LANES - 1) / LANES * LANES : width;
    for (int i = first; i < last; i += LANES) {
        vec score = get_float(scores + i) * scale;
        if (softcap > 0) score = softcap * hyperbolic_tangent(score / softcap);
        if (i < low || i + LANES > high) score = only(score, low - i, high - i);
        put_float(scores + i, score);
        most = choose(score > most, score, most);
    }
    for (int i = 0; i < LANES; i++) mass.most = most[i] > mass.most ? most[i] : mass.most;
    for (int i = first; i < last; i += LANES)
        total += put_weight(weights + i, exponential(get_float(scores + i) - mass.most));
    memset(weights, 0, first * sizeof(given));
    memset(weights + last, 0, (width - last) * sizeof(given));
    for (int i = 0; i < LANES; i++) mass.sum += total[i];
    return mass;
}

/* What the query at `position` of the span's sequence sees of it. */
INLINE Span seen_from(int position, int window, Span span) {
    span.begin = window && position >= window ? position - window + 1 : 0;
    span.end = position + 1;
    return span;
}

/* What a tile sees: all that its first query does, up to its last. */
INLINE Span span_of(const Step *step, Tile tile, int window) {
    const int computed = step->lens[tile.sequence] - (step->starts[tile.sequence + 1] - step->starts[tile.sequence]);
    Span span = seen_from(computed + tile.offset, window, (Span){0});
    span.end += tile.count - 1;
    return span;
}

/* The part of a span, with its blocks, that lies in piece `number` of the sequence's keys. */
INLINE Span piece_of(const Step *step, Tile tile, Span span, int number) {
    span.begin = larger(span.begin, number * PIECE);
    span.end = smaller(span.end, (number + 1) * PIECE);
    span.first = span.begin / BLOCK;
    span.count = (span.end + BLOCK - 1) / BLOCK - span.first;
    span.blocks = step->tables + tile.sequence * step->table_width + span.first;
    return span;
}

INLINE int first_piece(Span span) { return span.begin / PIECE; }
INLINE int pieces_of(Span span) { return (span.end + PIECE - 1) / PIECE - first_piece(span); }

/* Whether no NaN and no infinity is among these, a multiple of LANES. */
static int is_finite(const float *numbers, long count) {
    vec zeros = splat(0);
    for (long i = 0; i < count; i += LANES) zeros = fused(get_float(numbers + i), splat(0), zeros);
    for (int i = 1; i < LANES; i++) zeros[0] += zeros[i];
    return zeros[0] == 0;
}

/* out [rows][VALUE_DIM] = weights [rows][span.count * BLOCK] times the values. Rows share a pass over all that one of
 * them sees, at a weight of 0 where another does not: where that meets a NaN or an infinity, the row goes alone.
 * last: the position of the tile's last query. */
static void mix_tile(const given *weights, long rows, long side, long group, const elem *values, long heads, Span span, int last,
                     int window, float *out, float *room) {
    const long width = (long)span.count * BLOCK, queries = rows / group;
    mix_span(weights, width, rows, side, values, heads, span, out);
    if (is_finite(out, rows * VALUE_DIM)) return;
    for (long r = 0; r < rows; r++)
        if (!is_finite(out + r * VALUE_DIM, VALUE_DIM)) {
            Span own = seen_from(last - queries + 1 + r / group, window, span);
            own.begin = larger(own.begin, span.begin);
            own.end = smaller(own.end, span.end);
            if (own.begin >= own.end) continue; /* it has no mass here, and is left out */
            const int skip = own.begin / BLOCK - own.first;
            own.first += skip;
            own.blocks += skip;
            own.count = (own.end + BLOCK - 1) / BLOCK - own.first;
            mix_span(weights + r * width + skip * BLOCK, TILES ? 0 : width, 1, side, values, heads, own, room);
            memcpy(out + r * VALUE_DIM, room, VALUE_DIM * sizeof(float));
        }
}

/* What a tile takes of memory: queries [rows][HEAD_DIM], scores and weights [rows][PIECE], and the results of a piece and
 * of all pieces so far, [rows][VALUE_DIM] with masses [rows]; `spare` is for one more row, or tile. */
typedef struct {
    given *queries, *weights;
    float *scores, *mixed, *out, *spare;
    Mass *masses, *out_masses;
} Room;

INLINE Room room_at(float *memory, long rows, long side) {
    Room room = {(given *)memory};
    rows = padded(rows, side);
    room.scores = memory + rows * HEAD_DIM;
    room.weights = TILES ? (given *)(room.scores + rows * PIECE) : (given *)room.scores;
    room.mixed = room.scores + (1 + TILES) * rows * PIECE;
    room.out = room.mixed + rows * VALUE_DIM;
    room.spare = room.out + rows * VALUE_DIM;
    room.masses = (Mass *)(room.spare + SIDE * VALUE_DIM);
    room.out_masses = room.masses + rows;
    return room;
}

/* Floats that one thread needs for tiles of so many rows. */
int64_t room_of(int64_t rows) {
    rows = padded(rows, SIDE);
    return rows * (HEAD_DIM + (1 + TILES) * PIECE + 2 * VALUE_DIM + 4) + SIDE * VALUE_DIM;
}

/* Floats of the result of one piece for tiles of so many rows. */
int64_t part_of(int64_t rows) { return rows * (VALUE_DIM + sizeof(Mass) / sizeof(float)); }

/* Keys of a piece. */
int64_t piece_size(void) { return PIECE; }

/* Rows of a tile that there had best be. */
int64_t best_rows(void) { return TILES ? 32 : 24; }

/* Take in the queries of a tile with one KV head. */
static void take_queries(const Step *step, Tile tile, int head, const elem *query, long stride, given *queries) {
    const long group = step->group, rows = tile.count * group, token = step->starts[tile.sequence] + tile.offset;
    for (long r = 0; r < rows; r++) {
        const elem *from = query + (token + r / group) * stride + (head * group + r % group) * HEAD_DIM;
#if TILES
        memcpy(queries + r * HEAD_DIM, from, HEAD_DIM * sizeof(elem));
#else
        for (int d = 0; d < HEAD_DIM; d += LANES) put_float(queries + r * HEAD_DIM + d, load(from + d));
#endif
    }
    memset(queries + rows * HEAD_DIM, 0, (padded(rows, step->side) - rows) * HEAD_DIM * sizeof(given));
}

/* Attend to one piece of the keys: mixed [rows][VALUE_DIM] and masses [rows]. span: the tile's, whole. */
static void attend_piece(const Step *step, Tile tile, Span span, int number, const elem *keys, const elem *values,
                         int window, Room room) {
    const long heads = LATENT ? 1 : step->kv_heads, rows = tile.count * step->group;
    const Span piece = piece_of(step, tile, span, number);
    const int width = piece.count * BLOCK, before = piece.first * BLOCK, last = span.end - 1;
    score_span(room.queries, rows, step->side, keys, values, heads, piece, room.scores);
    for (long r = 0; r < rows; r++) {
        const Span own = seen_from(last - tile.count + 1 + r / step->group, window, piece);
        const int low = larger(larger(own.begin, piece.begin) - before, 0), high = smaller(own.end - before, width);
        room.masses[r] = soften(room.scores + r * width, room.weights + r * width, low, high, width, step->scale,
                                step->softcap);
    }
    memset(room.weights + rows * width, 0, (padded(rows, step->side) - rows) * width * sizeof(given));
    mix_tile(room.weights, rows, step->side, step->group, values, heads, piece, last, window, room.mixed, room.spare);
}

/* Add the result of the next piece to that of all before it. */
static void add_piece(long rows, const float *mixed, const Mass *masses, float *out, Mass *out_masses) {
    for (long r = 0; r < rows; r++) {
        const Mass one = masses[r], all = out_masses[r];
        if (one.most == -INFINITY && one.sum == 0) continue; /* it sees nothing of this piece */
        const float most = all.most > one.most ? all.most : one.most;
        const float kept = all.most == -INFINITY ? 0 : exponential(splat(all.most - most))[0];
        const float added = exponential(splat(one.most - most))[0];
        for (int d = 0; d < VALUE_DIM; d += LANES) {
            const vec sum = get_float(mixed + r * VALUE_DIM + d) * added;
            put_float(out + r * VALUE_DIM + d, kept ? fused(get_float(out + r * VALUE_DIM + d), splat(kept), sum) : sum);
        }
        out_masses[r] = (Mass){most, (kept ? all.sum * kept : 0) + one.sum * added};
    }
}

/* Norm what was mixed, with the score of no key beside the others, and write it out. */
static void put_out(const Step *step, Tile tile, int head, const float *mixed, const Mass *masses, const float *sinks,
                    elem *out) {
    const long group = step->group, rows = tile.count * group, token = step->starts[tile.sequence] + tile.offset;
    for (long r = 0; r < rows; r++) {
        float sum = masses[r].sum, kept = 1;
        if (sinks) {
            const float sink = sinks[head * group + r % group], most = masses[r].most > sink ? masses[r].most : sink;
            kept = exponential(splat(masses[r].most - most))[0];
            sum = sum * kept + exponential(splat(sink - most))[0];
        }
        elem *to = out + (((token + r / group) * step->kv_heads + head) * group + r % group) * VALUE_DIM;
        for (int d = 0; d < VALUE_DIM; d += LANES) put(to + d, get_float(mixed + r * VALUE_DIM + d) * kept / sum);
    }
}

/* One tile with one KV head, all pieces one after the other. */
static void attend_tile(const Step *step, Tile tile, int head, const elem *query, long query_stride, elem *out,
                        const elem *keys, const elem *values, int window, const float *sinks, float *memory) {
    const long rows = tile.count * step->group;
    const Span span = span_of(step, tile, window);
    const Room room = room_at(memory, rows, step->side);
    take_queries(step, tile, head, query, query_stride, room.queries);
    for (long r = 0; r < rows; r++) room.out_masses[r] = (Mass){-INFINITY, 0};
    for (int p = 0; p < pieces_of(span); p++) {
        attend_piece(step, tile, span, first_piece(span) + p, keys, values, window, room);
        add_piece(rows, room.mixed, room.masses, room.out, room.out_masses);
    }
    put_out(step, tile, head, room.out, room.out_masses, sinks, out);
}

/* Where the result of a piece of a tile is left for who puts them together. */
INLINE float *part_at(const Step *step, long tile, long head, long piece) {
    return step->parts + ((tile * step->kv_heads + head) * step->pieces + piece) * part_of(step->rows);
}

/* Piece `number` of those that a tile sees, alone. */
static void attend_part(const Step *step, long tile, int head, int number, const elem *query, long query_stride,
                        const elem *keys, const elem *values, int window, float *memory) {
    const Tile own = step->tiles[tile];
    const long rows = own.count * step->group;
    const Span span = span_of(step, own, window);
    const Room room = room_at(memory, rows, step->side);
    float *part = part_at(step, tile, head, number);
    if (number >= pieces_of(span)) return;
    take_queries(step, own, head, query, query_stride, room.queries);
    attend_piece(step, own, span, first_piece(span) + number, keys, values, window, room);
    memcpy(part, room.mixed, rows * VALUE_DIM * sizeof(float));
    memcpy(part + rows * VALUE_DIM, room.masses, rows * sizeof(Mass));
}

/* Put the pieces of a tile together, in their order. */
static void join_parts(const Step *step, long tile, int head, elem *out, int window, const float *sinks, float *memory) {
    const Tile own = step->tiles[tile];
    const long rows = own.count * step->group;
    const Room room = room_at(memory, rows, step->side);
    const int pieces = pieces_of(span_of(step, own, window));
    for (long r = 0; r < rows; r++) room.out_masses[r] = (Mass){-INFINITY, 0};
    for (int p = 0; p < pieces; p++) {
        const float *part = part_at(step, tile, head, p);
        add_piece(rows, part, (const Mass *)(part + rows * VALUE_DIM), room.out, room.out_masses);
    }
    put_out(step, own, head, room.out, room.out_masses, sinks, out);
}

/* Write the key and the value of one token, [heads][HEAD_DIM] each, to its slot. */
static void store_token(const Step *step, long slot, const elem *key, const elem *value, elem *keys, elem *values) {
    const long heads = LATENT ? 1 : step->kv_heads, block = slot / BLOCK * heads * HEAD_BLOCK, at = slot % BLOCK;
    for (long h = 0; h < heads; h++) {
        const elem *from = key + h * HEAD_DIM;
        elem *to = keys + block + h * HEAD_BLOCK, *value_to = values + block + h * HEAD_BLOCK;
        for (int d = 0; d < HEAD_DIM; d++) to[KEY_AT(d, at)] = from[d];
        if (!LATENT)
            for (int d = 0; d < HEAD_DIM; d++) value_to[VALUE_AT(at, d)] = value[h * HEAD_DIM + d];
    }
}

/* Store the step's keys and values in the layer's cache, then attend. query: [tokens][kv_heads * group][HEAD_DIM], key
 * and value: [tokens][kv_heads][HEAD_DIM], tokens as far apart as the strides say; out: as query, contiguous, but of
 * VALUE_DIM. With LATENT key and value are one, [tokens][1][HEAD_DIM], as are keys and values.
 * window: tokens that a query sees, 0 = all. sinks: [kv_heads * group] scores of no key, null where there are none. */
void attend(const Step *step, const elem *query, int64_t query_stride, const elem *key, int64_t key_stride,
            const elem *value, int64_t value_stride, elem *keys, elem *values, elem *out, int window, const float *sinks) {
#pragma omp parallel num_threads(step->threads)
    {
        float *room = step->scratch + omp_get_thread_num() * step->room;
        begin_tiles(step->side);
#pragma omp for schedule(static)
        for (long token = 0; token < step->num_tokens; token++)
            store_token(step, step->slots[token], key + token * key_stride, value + token * value_stride, keys, values);
        const long skip = LATENT ? 0 : HEAD_BLOCK; /* from head to head */
        if (step->parts) {
#pragma omp for schedule(dynamic) collapse(3)
            for (long tile = 0; tile < step->num_tiles; tile++)
                for (int head = 0; head < step->kv_heads; head++)
                    for (int piece = 0; piece < step->pieces; piece++)
                        attend_part(step, tile, head, piece, query, query_stride, keys + head * skip,
                                    values + head * skip, window, room);
#pragma omp for schedule(dynamic) collapse(2)
            for (long tile = 0; tile < step->num_tiles; tile++)
                for (int head = 0; head < step->kv_heads; head++)
                    join_parts(step, tile, head, out, window, sinks, room);
        } else {
#pragma omp for schedule(dynamic) collapse(2)
            for (long tile = 0; tile < step->num_tiles; tile++)
                for (int head = 0; head < step->kv_heads; head++)
                    attend_tile(step, step->tiles[tile], head, query, query_stride, out, keys + head * skip,
                                values + head * skip, window, sinks, room);
        }
        end_tiles();
    }
}

/* Whether this process may use all that the kernels are compiled for: Linux gives AMX to those who ask. */
int may_attend(void) {
#if TILES
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
#else
    return 1;
#endif
}
