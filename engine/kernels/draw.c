/* Draws tokens from logits as engine/sampling/sampler.py does, from the noise of engine/sampling/gumbel.py.
 *
 * The vocabulary is looked at in runs of RUN neighbouring ids. One pass over a row leaves the peak of each run, its
 * largest logit. That is all a greedy row needs, and nearly all of a row that is drawn at random:
 *
 * - A run of mass m with uniform number u wins by the least -log(u) / m. Its peak bounds m from both sides, so most
 *   runs are out of the race before any of their logits is looked at again.
 * - The k best logits lie in the runs with the k best peaks; what min-p leaves, in those whose peak it leaves.
 * - Top-p alone needs the mass of the whole row: a second pass, while the row is still in the cache. It keeps what
 *   lies between two pivots that top-p probably ends between; where the heaviest runs tell the end, it is left out.
 *
 * A row is computed alone and in one order: its token is the same in any company or thread. */

#include <omp.h>

#include "thresholds.h"

#define RUN_INDEX (1ull << 32) /* where the runs' indices begin in the noise of a row */
#define SLACK 1.001f           /* what bounds have to spare, so that rounding cannot leave out the winner */

static int32_t first_best(const Row *row, Room room, float most) {
    int64_t run = 0;
    while (room.peaks[run] != most) run++;
    vec x[PARTS];
    float values[RUN];
    read_run(row, run, x);
    for (int i = 0; i < PARTS; i++) put_float(values + i * LANES, x[i]);
    int at = 0;
    while (values[at] != most) at++;
    return (int32_t)(run * RUN + at);
}

INLINE uint64_t mixed(uint64_t key, uint64_t index) {
    uint64_t x = key + (index + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

INLINE double uniform(uint64_t key, uint64_t index) {
    return ((double)(int64_t)(mixed(key, index) >> 11) + 0.5) * 0x1p-53;
}

static double gumbel(uint64_t key, uint64_t index) { return -log(-log(uniform(key, index))); }

typedef struct { double score; int64_t run; } Winner;

/* Return the run that wins of those with a logit of at least `least`, the first of equals; run -1 where none has mass.
 *
 * most: the best logit of the whole vocabulary, of which the row may be a share that begins with `first_run`. */
static Winner race(const Row *row, Room room, float most, float least, uint64_t key, int64_t first_run) {
    const int64_t padded = whole(row->runs);
    const float inverse = 1 / row->temperature, scaled = most / row->temperature;
    for (int64_t run = 0; run < padded; run++)
        room.far[run] = (float)(1 - uniform(key, (uint64_t)(first_run + run) + RUN_INDEX));
    /* 1 - u <= -log(u) <= (1 - u) / u, and exp(peak) <= mass <= RUN exp(peak) */
    vec lead = splat(-INFINITY);
    for (int64_t run = 0; run < padded; run += LANES) {
        vec peak = get_float(room.peaks + run), far = get_float(room.far + run);
        vec mass = choose(peak >= splat(least), exponential((peak - most) * inverse), splat(0));
        put_float(room.bound + run, mass);
        lead = larger(mass * (1 - far) / far, lead);
    }
    const float limit = SLACK * RUN / largest(lead);
    Winner winner = {-INFINITY, -1};
    for (int64_t run = 0; run < row->runs; run++) {
        if (!(room.far[run] <= limit * room.bound[run]) || room.bound[run] == 0) continue;
        vec x[PARTS], weights[PARTS];
        read_run(row, run, x);
        for (int i = 0; i < PARTS; i++)
            weights[i] = choose(x[i] >= splat(least), exponential(x[i] / row->temperature - scaled), splat(0));
        for (int step = 1; step < PARTS; step *= 2)
            for (int i = 0; i < PARTS; i += 2 * step) weights[i] += weights[i + step];
        double mass = sum(weights[0]);
        double score = log(mass) + gumbel(key, (uint64_t)(first_run + run) + RUN_INDEX);
        if (score > winner.score) winner = (Winner){score, run};
    }
    return winner;
}

/* Return the id that wins within a run, the first of equals. */
static int32_t race_within(const Row *row, int64_t run, float least, uint64_t key, int64_t first_run) {
    vec x[PARTS];
    float values[RUN];
    read_run(row, run, x);
    for (int i = 0; i < PARTS; i++) put_float(values + i * LANES, x[i]);
    double best = -INFINITY;
    int64_t winner = run * RUN;
    for (int i = 0; i < RUN; i++) {
        if (!(values[i] >= least) || values[i] == -INFINITY) continue;
        int64_t id = run * RUN + i;
        double score = (double)(values[i] / row->temperature) + gumbel(key, (uint64_t)(first_run * RUN + id));
        if (score > best) best = score, winner = id;
    }
    return (int32_t)winner;
}

/* Return how many floats of room a thread needs for draw_tokens and score_tokens. */
int64_t draw_room(int64_t vocab, int64_t filtered) { return room_size(vocab, filtered); }

/* Rows that a thread takes at a time: some, because it fetches the next while it weighs one. */
static int in_turn(int64_t rows, int64_t threads) {
    const int64_t few = rows / (4 * threads);
    return few < 1 ? 1 : few > 8 ? 8 : (int)few;
}

/* Draw a token per row, -1 where its best logit is NaN or infinite.
 *
 * logits: [rows, vocab], rows `stride` bytes apart, of bfloat16 (half) or fp32. log_min_p, top_k, top_p: [rows], NULL
 * where no row is filtered. room: [threads, draw_room()]. */
void draw_tokens(const char *logits, int64_t stride, int64_t half, int64_t rows, int64_t vocab,
                 const float *temperatures, const uint64_t *keys, const float *log_min_p, const int32_t *top_k,
                 const float *top_p, int32_t *tokens, float *room, int64_t threads) {
    const int64_t runs = (vocab + RUN - 1) / RUN, size = room_size(vocab, log_min_p != NULL);
#pragma omp parallel for schedule(dynamic, in_turn(rows, threads)) num_threads(team(rows *vocab, WORTH, threads))
    for (int64_t at = 0; at < rows; at++) {
        const char *here = logits + at * stride, *next = at + 1 < rows ? here + stride : here;
        const Row row = {here, next, half, vocab, runs, temperatures[at]};
        const Room mine = room_of(room + omp_get_thread_num() * size, runs);
        const float most = scan(&row, mine);
        tokens[at] = -1;
        if (!isfinite(most)) continue;
        Winner winner = {0, -1};
        float least = -INFINITY;
        if (row.temperature > 0) {
            if (log_min_p) least = threshold(&row, mine, most, log_min_p[at], top_k[at], top_p[at]);
            winner = race(&row, mine, most, least, keys[at], 0);
        }
        tokens[at] = winner.run < 0 ? first_best(&row, mine, most)
                                    : race_within(&row, winner.run, least, keys[at], 0);
    }
}

/* As draw_tokens, from rows that are shares of a vocabulary, which begin with its `first_run`; `mosts`: the best logit
 * of all shares. leasts: the least logit / temperature that may be drawn, NULL where all may. Write the score that
 * each row's run won with, -inf where none has mass, and the id's column. */
void draw_from_shares(const char *logits, int64_t stride, int64_t half, int64_t rows, int64_t share,
                      const float *temperatures, const uint64_t *keys, const float *mosts, const float *leasts,
                      int64_t first_run, double *scores, int64_t *columns, float *room, int64_t threads) {
    const int64_t runs = (share + RUN - 1) / RUN, size = room_size(share, 0);
#pragma omp parallel for schedule(dynamic, in_turn(rows, threads)) num_threads(team(rows *share, WORTH, threads))
    for (int64_t at = 0; at < rows; at++) {
        const Row row = {logits + at * stride, NULL, half, share, runs, temperatures[at]};
        const Room mine = room_of(room + omp_get_thread_num() * size, runs);
        const float least = leasts ? before_division(leasts[at], row.temperature) : -INFINITY;
        Winner winner = {-INFINITY, -1};
        if (isfinite(mosts[at]) && isfinite(scan(&row, mine)))
            winner = race(&row, mine, mosts[at], least, keys[at], first_run);
        scores[at] = winner.score;
        columns[at] = winner.run < 0 ? 0 : race_within(&row, winner.run, least, keys[at], first_run);
    }
}
