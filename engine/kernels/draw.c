/* Draws tokens from logits as engine/sampling/sampler.py does, from the noise of engine/sampling/gumbel.py.
 *
 * The vocabulary is looked at in runs of RUN neighbouring ids. One pass over a row leaves the peak of each run, its
 * largest logit. That is all a greedy row needs, and nearly all of a row that is drawn at random:
 *
 * - A run of mass m with uniform number u wins by the least -log(u) / m. Its peak bounds m from both sides, so most
 *   runs are out of the race before any of their logits is looked at again.
 * - The k best logits lie in the runs with the k best peaks; what min-p leaves, in those whose peak it leaves.
 * - Top-p alone needs the mass of the whole row: a second pass, while the row is still in the cache. Its weights are
 *   kept, and the lowest logit of the set is searched by pivots.
 *
 * Thresholds are found among logits as they came, whose order division by temperature keeps; ties with them are kept
 * after that division. A row is computed alone and in one order: its token is the same in any company or thread. */

#include <float.h>
#include <math.h>
#include <omp.h>

#include "vectors.h"

#define RUN 64
#define PARTS (RUN / LANES)
#define RUN_INDEX (1ull << 32) /* where the runs' indices begin in the noise of a row */
#define WORTH (1 << 15)     /* logits from which on threads are worth their start */
#define SLACK 1.001f           /* what bounds have to spare, so that rounding cannot leave out the winner */
#define SUMMED 16              /* runs that are summed up in fp32 */
#define FEW_RUNS 32            /* are collected at once */
#define SMALL_SHARE 0.03125    /* of the mass: what is between two pivots is collected */

typedef double wide_vec __attribute__((vector_size(64)));
typedef float narrow_vec __attribute__((vector_size(32)));
typedef uint64_t any_vec __attribute__((vector_size(64)));

typedef struct {
    const char *logits;
    int64_t half; /* whether they are bfloat16; else fp32 */
    int64_t vocab, runs;
    float temperature;
} Row;

typedef struct { /* what a thread works in; sizes in floats */
    float *peaks;    /* [runs, rounded up to LANES], -inf beyond */
    float *far, *bound; /* as many */
    int32_t *alive;  /* as many */
    float *weights;  /* [runs, RUN]; from here on only where a row is filtered */
    float *found, *found_weights; /* [runs, RUN] + LANES */
} Room;

INLINE int64_t whole(int64_t runs) { return (runs + LANES - 1) / LANES * LANES; }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float largest(vec x) {
    float all[LANES], best = -INFINITY;
    put_float(all, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) all[i] = all[i] > all[i + width] ? all[i] : all[i + width];
    return all[0] > best ? all[0] : best;
}

INLINE float sum(vec x) {
    float all[LANES];
    put_float(all, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) all[i] += all[i + width];
    return all[0];
}

INLINE int any(ivec mask) {
    any_vec bits = (any_vec)mask;
    return ((bits[0] | bits[1]) | (bits[2] | bits[3]) | (bits[4] | bits[5]) | (bits[6] | bits[7])) != 0;
}

typedef struct { wide_vec low, high; } Total; /* a sum of vectors in fp64 */

INLINE void add(Total *total, vec x) {
    narrow_vec halves[2];
    memcpy(halves, &x, sizeof x);
    total->low += __builtin_convertvector(halves[0], wide_vec);
    total->high += __builtin_convertvector(halves[1], wide_vec);
}

INLINE double sum_up(const Total *total) {
    wide_vec x = total->low + total->high;
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
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

/* Write the peaks; return the row's best logit, NaN where any is NaN. */
static float scan(const Row *row, Room room) {
    vec best = splat(-INFINITY);
    ivec broken = {0};
    for (int64_t run = 0; run < row->runs; run++) {
        vec x[PARTS];
        read_run(row, run, x);
        for (int i = 0; i < PARTS; i++) broken |= x[i] != x[i];
        vec most = larger(larger(x[0], x[1]), larger(x[2], x[3]));
        best = larger(most, best);
        room.peaks[run] = largest(most);
    }
    for (int64_t run = row->runs; run < whole(row->runs); run++) room.peaks[run] = -INFINITY;
    return any(broken) ? NAN : largest(best);
}

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
        double mass = sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
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

/* Whole numbers in the order of floats, both zeros alike. */
static int64_t order(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof x);
    return bits < 0 ? -(int64_t)(bits & 0x7fffffff) : bits;
}

static float value(int64_t ordered) {
    uint32_t bits = ordered < 0 ? (uint32_t)-ordered | 0x80000000u : (uint32_t)ordered;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Return the least logit that is at least `least` once it is divided by temperature. */
static float before_division(float least, float temperature) {
    if (least == -INFINITY) return least;
    int64_t low = order(-FLT_MAX), high = order(INFINITY); /* beyond what is too little, not beyond what is enough */
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (value(middle) / temperature >= least) high = middle;
        else low = middle + 1;
    }
    return value(low);
}

INLINE void tally(vec x, vec weight, const float pivots[3], vec sums[3]) {
    for (int i = 0; i < 3; i++) sums[i] += choose(x >= splat(pivots[i]), weight, splat(0));
}

/* Return the largest value from `low` on, below `high`, for which those of x at least as large weigh `wanted`; `low`
 * where there is none. x, weights: [size, rounded up to LANES], -inf beyond; without weights each weighs 1. */
static float search(const float *x, const float *weights, int64_t size, double wanted, float low, float high) {
    int64_t from = order(low), beyond = order(high);
    while (beyond - from > 1) {
        const int64_t step = (beyond - from + 3) / 4;
        float pivots[3];
        Total totals[3] = {0};
        for (int i = 0; i < 3; i++) {
            int64_t at = from + (i + 1) * step;
            pivots[i] = value(at < beyond ? at : beyond);
        }
        for (int64_t first = 0; first < size; first += SUMMED * RUN) {
            vec sums[3] = {0};
            for (int64_t i = first; i < size && i < first + SUMMED * RUN; i += LANES)
                tally(get_float(x + i), weights ? get_float(weights + i) : splat(1), pivots, sums);
            for (int i = 0; i < 3; i++) add(totals + i, sums[i]);
        }
        int64_t start = from;
        for (int i = 0; i < 3 && start + (i + 1) * step < beyond; i++)
            if (sum_up(totals + i) >= wanted) from = start + (i + 1) * step;
        if (from + step < beyond) beyond = from + step;
    }
    return value(from);
}

/* Find the runs, among those in `alive` or all, whose peak is at least `least`. */
static int64_t survivors(Room room, int64_t runs, const int32_t *among, float least) {
    int64_t count = 0;
    for (int64_t i = 0; i < runs; i++) {
        int32_t run = among ? among[i] : (int32_t)i;
        room.alive[count] = run;
        count += room.peaks[run] >= least && room.peaks[run] > -INFINITY;
    }
    return count;
}

/* Write to `found` the logits from `low` on, below `high`, of the runs alive, with their weights if wanted. */
static int64_t collect(const Row *row, Room room, int64_t alive, float low, float high, int weighted) {
    int64_t count = 0;
    for (int64_t i = 0; i < alive; i++) {
        const int64_t run = room.alive[i];
        vec x[PARTS];
        ivec inside[PARTS], some = {0};
        read_run(row, run, x);
        for (int part = 0; part < PARTS; part++) {
            inside[part] = (x[part] >= splat(low)) & (x[part] < splat(high));
            some |= inside[part];
        }
        if (!any(some)) continue;
        for (int part = 0; part < PARTS; part++) {
            if (!any(inside[part])) continue;
            const float *weights = room.weights + run * RUN + part * LANES;
            for (int lane = 0; lane < LANES; lane++) {
                room.found[count] = x[part][lane];
                if (weighted) room.found_weights[count] = weights[lane];
                count += inside[part][lane] & 1;
            }
        }
    }
    put_float(room.found + count, splat(-INFINITY));
    if (weighted) put_float(room.found_weights + count, splat(0));
    return count;
}

static float just_above(float x) { return value(order(x) + 1); }

/* Return the k-th best logit; -inf where fewer than k are at least `least`. */
static float kth_best(const Row *row, Room room, float most, float least, int64_t k) {
    float low = least > -FLT_MAX ? least : -FLT_MAX;
    low = search(room.peaks, NULL, row->runs, (double)k, low, just_above(most));
    const int64_t alive = survivors(room, row->runs, NULL, low);
    const int64_t count = collect(row, room, alive, low, INFINITY, 0);
    return count < k ? -INFINITY : search(room.found, NULL, count, (double)k, low, just_above(most));
}

/* Write the weights of what is at least `least` in the runs alive, relative to the best; return their sum. */
static double weigh(const Row *row, Room room, int64_t alive, float most, float least) {
    const float temperature = row->temperature, inverse = 1 / temperature, scaled = most / temperature;
    /* Less weighs nothing, and must stay finite. */
    const float low = most - 100 * temperature > -FLT_MAX ? most - 100 * temperature : -FLT_MAX;
    Total total = {0};
    for (int64_t first = 0; first < alive; first += SUMMED) {
        vec sums = {0};
        for (int64_t i = first; i < alive && i < first + SUMMED; i++) {
            const int64_t run = room.alive[i];
            vec x[PARTS];
            read_run(row, run, x);
            for (int part = 0; part < PARTS; part++) {
                vec limited = larger(x[part], splat(low));
                vec quotient = limited * inverse; /* division, rounded right in two more steps */
                quotient += (limited - quotient * temperature) * inverse;
                vec weight = choose(x[part] >= splat(least), exponential(quotient - scaled), splat(0));
                put_float(room.weights + run * RUN + part * LANES, weight);
                sums += weight;
            }
        }
        add(&total, sums);
    }
    return sum_up(&total);
}

/* Return the lowest logit of the smallest set of best ones whose mass reaches top_p of what is at least `least`. */
static float nucleus(const Row *row, Room room, float most, float least, float top_p) {
    int64_t alive = survivors(room, row->runs, NULL, least);
    const double total = weigh(row, room, alive, most, least), wanted = total * top_p;
    if (!(wanted > 0)) return most;
    /* Of those that weigh less than an equal share of the rest, none is needed. */
    const double share = 0.99 * (1 - (double)top_p) * total / (double)(alive * RUN);
    double bound = most + row->temperature * log(share) - 1e-5 * (row->temperature + fabs(most));
    float low = bound > least ? (float)bound : least, high = just_above(most);
    if (low < -FLT_MAX) low = -FLT_MAX;
    double inside = total, above = 0; /* masses from `low` on, and from `high` on */
    for (;;) {
        alive = survivors(room, alive, room.alive, low);
        float pivots[3];
        for (int i = 0; i < 3; i++) pivots[i] = low + (high - low) * (0.25f * (float)(i + 1));
        int apart = low < pivots[0] && pivots[0] < pivots[1] && pivots[1] < pivots[2] && pivots[2] < high;
        if (alive <= FEW_RUNS || inside - above < SMALL_SHARE * total || !apart) break;
        Total totals[3] = {0};
        for (int64_t first = 0; first < alive; first += SUMMED) {
            vec sums[3] = {0};
            for (int64_t i = first; i < alive && i < first + SUMMED; i++) {
                const float *weights = room.weights + (int64_t)room.alive[i] * RUN;
                vec x[PARTS];
                read_run(row, room.alive[i], x);
                for (int part = 0; part < PARTS; part++) tally(x[part], get_float(weights + part * LANES), pivots, sums);
            }
            for (int i = 0; i < 3; i++) add(totals + i, sums[i]);
        }
        for (int i = 2; i >= 0; i--) {
            double mass = sum_up(totals + i);
            if (mass >= wanted) {
                low = pivots[i], inside = mass;
                break;
            }
            high = pivots[i], above = mass;
        }
    }
    const int64_t count = collect(row, room, alive, low, high, 1);
    return search(room.found, room.found_weights, count, wanted - above, low, high);
}

/* Return the least logit that may be drawn. */
static float threshold(const Row *row, Room room, float most, float log_min_p, int64_t top_k, float top_p) {
    const float temperature = row->temperature;
    float scaled = most / temperature + log_min_p;
    float least = before_division(scaled, temperature);
    if (top_k > 0 && top_k < row->vocab) {
        float kth = top_k == 1 ? most : kth_best(row, room, most, least, top_k);
        if (kth / temperature > scaled) scaled = kth / temperature, least = before_division(scaled, temperature);
    }
    if (top_p < 1) {
        float last = nucleus(row, room, most, least, top_p);
        if (last / temperature > scaled) least = before_division(last / temperature, temperature);
    }
    return least;
}

/* Return how many floats of room a thread needs. */
int64_t draw_room(int64_t vocab, int64_t filtered) {
    const int64_t runs = (vocab + RUN - 1) / RUN;
    return 4 * whole(runs) + (filtered ? 3 * runs * RUN + 2 * LANES : 0);
}

static Room room_of(float *from, int64_t runs) {
    const int64_t padded = whole(runs);
    float *weights = from + 4 * padded, *found = weights + runs * RUN;
    return (Room){from, from + padded, from + 2 * padded, (int32_t *)(from + 3 * padded),
                  weights, found, found + runs * RUN + LANES};
}

/* Draw a token per row, -1 where its best logit is NaN or infinite.
 *
 * logits: [rows, vocab], rows `stride` bytes apart, of bfloat16 (half) or fp32. log_min_p, top_k, top_p: [rows], NULL
 * where no row is filtered. room: [threads, draw_room()]. */
void draw_tokens(const char *logits, int64_t stride, int64_t half, int64_t rows, int64_t vocab,
                 const float *temperatures, const uint64_t *keys, const float *log_min_p, const int32_t *top_k,
                 const float *top_p, int32_t *tokens, float *room, int64_t threads) {
    const int64_t runs = (vocab + RUN - 1) / RUN, size = draw_room(vocab, log_min_p != NULL);
#pragma omp parallel for schedule(dynamic) num_threads(team(rows *vocab, WORTH, threads))
    for (int64_t at = 0; at < rows; at++) {
        const Row row = {logits + at * stride, half, vocab, runs, temperatures[at]};
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
    const int64_t runs = (share + RUN - 1) / RUN, size = draw_room(share, 0);
#pragma omp parallel for schedule(dynamic) num_threads(team(rows *share, WORTH, threads))
    for (int64_t at = 0; at < rows; at++) {
        const Row row = {logits + at * stride, half, share, runs, temperatures[at]};
        const Room mine = room_of(room + omp_get_thread_num() * size, runs);
        const float least = leasts ? before_division(leasts[at], row.temperature) : -INFINITY;
        Winner winner = {-INFINITY, -1};
        if (isfinite(mosts[at]) && isfinite(scan(&row, mine)))
            winner = race(&row, mine, mosts[at], least, keys[at], first_run);
        scores[at] = winner.score;
        columns[at] = winner.run < 0 ? 0 : race_within(&row, winner.run, least, keys[at], first_run);
    }
}
