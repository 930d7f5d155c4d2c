/* The least logit that min-p, top-k and top-p leave of a row.
 *
 * Thresholds are found among logits as they came, whose order division by temperature keeps. Sums of weights are in
 * fp32 over some runs and in fp64 from there on, always in one order. */

#include <float.h>

#include "runs.h"

#define SUMMED 16  /* runs that are summed up in fp32 */
#define HEAVY 64   /* runs with the best peaks that top-p is first looked for in */
#define SAMPLED 64 /* other runs that say where it probably ends */
#define WORTH (1 << 15) /* logits from which on threads are worth their start */

static int64_t room_size(int64_t vocab, int64_t filtered) {
    const int64_t runs = (vocab + RUN - 1) / RUN;
    return 4 * (whole(runs) + LANES) + (filtered ? 2 * (runs + HEAVY + SAMPLED) * RUN + 4 * LANES : 0);
}

static Room room_of(float *from, int64_t runs) {
    const int64_t apart = whole(runs) + LANES;
    float *found = from + 4 * apart, *inner = found + 2 * (runs * RUN + LANES);
    return (Room){from,  from + apart, from + 2 * apart, (int32_t *)(from + 3 * apart),
                  found, found + runs * RUN + LANES,
                  inner, inner + (HEAVY + SAMPLED) * RUN + LANES};
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

static float just_above(float x) { return value(order(x) + 1); }

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

/* Write what those of x that are at least each pivot weigh. x, weights: [size, rounded up to LANES], -inf beyond;
 * without weights each weighs 1. */
static void mass_above(const float *x, const float *weights, int64_t size, const float pivots[3], double masses[3]) {
    Total totals[3] = {0};
    for (int64_t first = 0; first < size; first += SUMMED * RUN) {
        vec sums[3] = {0};
        for (int64_t i = first; i < size && i < first + SUMMED * RUN; i += LANES)
            for (int pivot = 0; pivot < 3; pivot++)
                sums[pivot] += choose(get_float(x + i) >= splat(pivots[pivot]),
                                      weights ? get_float(weights + i) : splat(1), splat(0));
        for (int i = 0; i < 3; i++) add(totals + i, sums[i]);
    }
    for (int i = 0; i < 3; i++) masses[i] = sum_up(totals + i);
}

/* Three values between two, in turns by halves of their difference and by halves of the floats there are. */
static void place(int64_t from, int64_t beyond, int round, int64_t pivots[3]) {
    const float low = value(from), quarter = (value(beyond) - low) / 4;
    const int even = round % 2 || beyond - from < 1 << 24 || !isfinite(quarter);
    for (int i = 0; i < 3; i++)
        pivots[i] = even ? from + (beyond - from) * (i + 1) / 4 : order(low + quarter * (float)(i + 1));
}

/* Return the largest value from `low` on for which those of x at least as large weigh `wanted`; `low` where there is
 * none. x: nothing from `high` on. inner, inner_weights: as large as x, which they may be. */
static float search(const float *x, const float *weights, int64_t size, double wanted, float low, float high,
                    float *inner, float *inner_weights) {
    int64_t from = order(low), beyond = order(high);
    for (int round = 0; beyond - from > 1; round++) {
        const int64_t start = from, stop = beyond;
        int64_t at[3];
        float pivots[3];
        double masses[3], above = 0;
        place(from, beyond, round, at);
        for (int i = 0; i < 3; i++) pivots[i] = value(at[i]);
        mass_above(x, weights, size, pivots, masses);
        for (int i = 0; i < 3; i++) {
            if (at[i] <= start || at[i] >= stop) continue;
            if (masses[i] < wanted) {
                beyond = at[i], above = masses[i];
                break;
            }
            from = at[i];
        }
        if (size <= RUN) continue;
        wanted -= above;
        int64_t count = 0;
        for (int64_t i = 0; i < size; i += LANES) {
            const vec values = get_float(x + i);
            const Mask inside = between(values, value(from), value(beyond));
            if (weights) pack(inner_weights + count, inside, get_float(weights + i));
            count += pack(inner + count, inside, values);
        }
        put_float(inner + count, splat(-INFINITY));
        x = inner, size = count;
        weights = weights ? inner_weights : NULL;
    }
    return value(from);
}

/* Find the runs whose peak is at least `least`; return how many. */
static int64_t survivors(Room room, int64_t runs, float least) {
    int64_t count = 0;
    for (int64_t run = 0; run < runs; run++) {
        room.alive[count] = (int32_t)run;
        count += room.peaks[run] >= least && room.peaks[run] > -INFINITY;
    }
    return count;
}

/* Return the k-th best logit; -inf where fewer than k are at least `least`. */
static float kth_best(const Row *row, Room room, float most, float least, int64_t k) {
    float low = least > -FLT_MAX ? least : -FLT_MAX;
    low = search(room.peaks, NULL, row->runs, (double)k, low, just_above(most), room.far, room.bound);
    const int64_t alive = survivors(room, row->runs, low);
    int64_t count = 0;
    for (int64_t i = 0; i < alive; i++) {
        vec x[PARTS];
        read_run(row, room.alive[i], x);
        for (int part = 0; part < PARTS; part++)
            count += pack(room.found + count, between(x[part], low, INFINITY), x[part]);
    }
    put_float(room.found + count, splat(-INFINITY));
    if (count < k) return -INFINITY;
    return search(room.found, NULL, count, (double)k, low, just_above(most), room.found, room.found_weights);
}

typedef struct { float temperature, inverse, scaled, least; } Scale;

/* Return the weights, relative to the best logit, of what may be drawn. */
INLINE vec weigh(vec x, Scale scale) {
    vec quotient = x * scale.inverse; /* division, rounded right in two more steps */
    quotient = fused(fused(quotient, splat(-scale.temperature), x), splat(scale.inverse), quotient);
    return choose(x >= splat(scale.least), exponential(quotient - scale.scaled), splat(0));
}

/* Append a run's logits and their weights times `factor`; return the sum of these. */
static double take(const Row *row, int64_t run, Scale scale, float factor, float *found, float *weights) {
    vec x[PARTS], sums = {0};
    read_run(row, run, x);
    for (int part = 0; part < PARTS; part++) {
        const vec weight = weigh(x[part], scale) * factor;
        put_float(found + part * LANES, x[part]);
        put_float(weights + part * LANES, weight);
        sums += weight;
    }
    return sum(sums);
}

/* Find pivots that top-p ends between, for certain where the heaviest runs and what the others weigh at least and at
 * most tell, else probably, by some of the others. Return whether it is certain that it ends at `low`. */
static int bracket(const Row *row, Room room, int64_t alive, Scale scale, float top_p, float *low, float *high) {
    float *const found = room.found, *const weights = room.found_weights;
    const float cut = search(room.peaks, NULL, row->runs, HEAVY, *low, *high, room.far, room.bound);
    int64_t count = 0, others = 0;
    double heavy = 0, rest = 0;
    for (int64_t i = 0; i < alive; i++) {
        const int64_t run = room.alive[i];
        if (room.peaks[run] > cut) {
            heavy += take(row, run, scale, 1, found + count, weights + count);
            count += RUN;
        } else {
            room.alive[others++] = (int32_t)run;
        }
    }
    for (int64_t run = 0; run < row->runs; run += LANES) {
        const vec peaks = get_float(room.peaks + run);
        rest += sum(choose(peaks > splat(cut), splat(0), weigh(peaks, scale)));
    }
    const double least = (heavy + rest) * top_p * 0.999999, most = (heavy + RUN * rest) * top_p * 1.000001;
    const float beyond = *high, ends = search(found, weights, count, least, cut, beyond, room.inner, room.inner_weights);
    if (ends > cut && search(found, weights, count, most, cut, beyond, room.inner, room.inner_weights) == ends) {
        *low = ends;
        return 1;
    }
    const int64_t stride = (others + SAMPLED - 1) / SAMPLED, sampled = count;
    double total = heavy;
    for (int64_t i = 0; i < others; i += stride, count += RUN)
        total += take(row, room.alive[i], scale, (float)stride, found + count, weights + count);
    /* What weighs less than an equal share of the rest is hardly needed. */
    const float far = (float)log((1 - (double)top_p) * total / (double)(row->runs * RUN));
    const float first = scale.temperature * (scale.scaled + far);
    if (first > *low && first < beyond) *low = first;
    const double wanted = total * top_p;
    const float middle = search(found, weights, count, wanted, *low, beyond, room.inner, room.inner_weights);
    /* The sample says how far its own mass may be from that of all: here about three standard deviations. */
    vec above = {0}, below = {0};
    for (int64_t i = sampled; i < count; i += LANES) {
        const vec weight = get_float(weights + i), squared = weight * weight;
        const ivec inside = get_float(found + i) >= splat(middle);
        above += choose(inside, squared, splat(0));
        below += choose(inside, splat(0), squared);
    }
    const double rest_p = 1 - (double)top_p;
    const double margin = 3 * sqrt(rest_p * rest_p * sum(above) + top_p * top_p * sum(below)) + 1e-6 * total;
    *low = search(found, weights, count, wanted + margin, *low, beyond, room.inner, room.inner_weights);
    const float last = search(found, weights, count, wanted - margin, middle, beyond, room.inner, room.inner_weights);
    *high = just_above(last);
    return 0;
}

typedef struct { double total, above, inside; int64_t count; } Weighed; /* of all, from `high` on, between the pivots */

/* Weigh all logits that may be drawn, and find those between two pivots. */
static Weighed weigh_all(const Row *row, Room room, Scale scale, float low, float high) {
    Total totals[2] = {0}, inside = {0};
    int64_t count = 0;
    for (int64_t first = 0; first < row->runs; first += SUMMED) {
        vec sums[2] = {0};
        for (int64_t run = first; run < row->runs && run < first + SUMMED; run++) {
            fetch(row->next, row->half, run);
            if (room.peaks[run] < scale.least) continue;
            vec x[PARTS];
            read_run(row, run, x);
            for (int part = 0; part < PARTS; part++) {
                const vec weight = weigh(x[part], scale);
                sums[0] += weight;
                sums[1] += choose(x[part] >= splat(high), weight, splat(0));
                count += pack(room.found + count, between(x[part], low, high), x[part]);
            }
        }
        add(totals, sums[0]);
        add(totals + 1, sums[1]);
    }
    put_float(room.found + count, splat(-INFINITY));
    for (int64_t i = 0; i < count; i += LANES) {
        const vec weight = weigh(get_float(room.found + i), scale);
        put_float(room.found_weights + i, weight);
        add(&inside, weight);
    }
    return (Weighed){sum_up(totals), sum_up(totals + 1), sum_up(&inside), count};
}

/* Return the lowest logit of the smallest set of best ones whose mass reaches top_p of what is at least `least`. */
static float nucleus(const Row *row, Room room, float most, float least, float top_p) {
    const float temperature = row->temperature, lowest = most - 86 * temperature; /* less weighs nothing */
    const Scale scale = {temperature, 1 / temperature, most / temperature, least > lowest ? least : lowest};
    const float first = scale.least > -FLT_MAX ? scale.least : -FLT_MAX, beyond = just_above(most);
    const int64_t alive = survivors(room, row->runs, first);
    float low = first, high = beyond;
    if (alive > HEAVY + SAMPLED && bracket(row, room, alive, scale, top_p, &low, &high)) return low;
    for (int attempt = 0;; attempt++) {
        if (attempt == 2) low = first, high = beyond; /* sums in other orders cannot argue for ever */
        const Weighed all = weigh_all(row, room, scale, low, high);
        const double wanted = all.total * top_p;
        if (!(wanted > 0)) return most;
        if (all.above >= wanted && high < beyond) {
            low = high, high = beyond;
        } else if (all.above + all.inside < wanted && low > first) {
            high = low, low = first;
        } else {
            return search(room.found, room.found_weights, all.count, wanted - all.above, low, high, room.found,
                          room.found_weights);
        }
    }
}

/* Return the least logit that may be drawn. */
INLINE float threshold(const Row *row, Room room, float most, float log_min_p, int64_t top_k, float top_p) {
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
