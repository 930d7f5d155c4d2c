/* Log-probabilities: of a token per row, and the best of each row. */

#include <omp.h>

#include "thresholds.h"

static float logit_at(const Row *row, int64_t id) {
    vec x[PARTS];
    read_run(row, id / RUN, x);
    return x[id % RUN / LANES][id % LANES];
}

/* How many logits are at least `least`. */
static int64_t ranked(const Row *row, Room room, float least) {
    int64_t count = 0;
    if (least == -INFINITY) return row->vocab;
    for (int64_t run = 0; run < row->runs; run++) {
        if (room.peaks[run] < least) continue;
        vec x[PARTS];
        ivec inside = {0};
        read_run(row, run, x);
        for (int part = 0; part < PARTS; part++) inside -= x[part] >= splat(least);
        for (int lane = 0; lane < LANES; lane++) count += inside[lane];
    }
    return count;
}

/* Write the `count` best logits and their ids, the lowest of equals first. */
static void best_of(const Row *row, Room room, float most, int64_t count, float *values, int32_t *ids) {
    if (!count) return;
    const float least = count == 1 ? most : kth_best(row, room, most, -INFINITY, count);
    int64_t found = 0;
    for (int64_t run = 0; run < row->runs; run++) {
        if (room.peaks[run] < least || (found == count && room.peaks[run] <= values[count - 1])) continue;
        vec x[PARTS];
        float logits[RUN];
        read_run(row, run, x);
        for (int part = 0; part < PARTS; part++) put_float(logits + part * LANES, x[part]);
        for (int64_t i = 0; i < RUN && run * RUN + i < row->vocab; i++) {
            if (logits[i] < least || (found == count && logits[i] <= values[count - 1])) continue;
            int64_t at = found < count ? found++ : count - 1;
            for (; at > 0 && values[at - 1] < logits[i]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = logits[i], ids[at] = (int32_t)(run * RUN + i);
        }
    }
}

/* Write of each row the log-probability of its token, those of its `count` best and their ids, [rows, count], and the
 * token's rank, unless `ranks` is NULL. All are NaN where the best logit is NaN or infinite, and their ids the first.
 * logits, room: as draw_tokens, with filters. */
void score_tokens(const char *logits, int64_t stride, int64_t half, int64_t rows, int64_t vocab, const int64_t *tokens,
                  int64_t count, float *chosen, float *best, int32_t *ids, int32_t *ranks, float *room,
                  int64_t threads) {
    const int64_t runs = (vocab + RUN - 1) / RUN, size = room_size(vocab, 1);
#pragma omp parallel for schedule(dynamic) num_threads(team(rows *vocab, WORTH, threads))
    for (int64_t at = 0; at < rows; at++) {
        const Row row = {logits + at * stride, logits + at * stride, half, vocab, runs, 1};
        const Room mine = room_of(room + omp_get_thread_num() * size, runs);
        float most = scan(&row, mine), total = NAN;
        const float own = logit_at(&row, tokens[at]);
        if (isfinite(most)) {
            const Scale scale = {1, 1, most, most - 86 > -FLT_MAX ? most - 86 : -FLT_MAX};
            total = (float)(most + log(weigh_all(&row, mine, scale, INFINITY, INFINITY).total));
            best_of(&row, mine, most, count, best + at * count, ids + at * count);
        } else {
            for (int64_t i = 0; i < count; i++) ids[at * count + i] = (int32_t)i;
        }
        chosen[at] = own - total;
        for (int64_t i = 0; i < count; i++) best[at * count + i] -= total;
        if (ranks) ranks[at] = (int32_t)ranked(&row, mine, own);
    }
}
