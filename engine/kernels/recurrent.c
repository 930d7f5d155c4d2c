/* Layers with a recurrent state, token by token: short convolutions, and states that are sums of outer products.
 *
 * A row is a run of tokens of one sequence. Its state is read once, from slot sources[row] (-1 = zeros), and written
 * once, to targets[row], always in fp32. Tokens are taken one after another in one order of operations, so the bits of
 * a token do not depend on where a sequence is cut, on other rows, or on the threads.
 */

#include <math.h>

#include "vectors.h"

#define MOST_TAPS 8
#define COLUMNS 4   /* vectors of a state's row that are computed side by side */
#define WORTH 16384 /* multiplications from which on other threads pay */

#define TEAM(work, threads) num_threads(team(work, WORTH, threads))

/* out [tokens][size] = sum over k of weight[k] x[t - taps + 1 + k], through silu if asked for. x: tokens `stride`
 * apart; weight [taps][size], bias [size] or 0, state [slots][taps - 1][size]: the inputs before, oldest first. */
void short_conv(const elem *x, int64_t stride, const float *weight, const float *bias, float *state,
                const int32_t *starts, const int32_t *sources, const int32_t *targets, elem *out, int64_t rows,
                int64_t size, int64_t taps, int64_t silu, int64_t threads) {
    const int64_t kept = taps - 1;
#pragma omp parallel for collapse(2) TEAM(starts[rows] *size *taps, threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += LANES) {
            vec window[MOST_TAPS], w[MOST_TAPS];
            const float *from = sources[row] < 0 ? 0 : state + sources[row] * kept * size + i;
            float *to = state + targets[row] * kept * size + i;
            for (long k = 0; k < taps; k++) w[k] = get_float(weight + k * size + i);
            for (long k = 0; k < kept; k++) window[k] = from ? get_float(from + k * size) : splat(0);
            for (long t = starts[row]; t < starts[row + 1]; t++) {
                vec sum = bias ? get_float(bias + i) : splat(0);
                window[kept] = load(x + t * stride + i);
                for (long k = 0; k < taps; k++) sum = fused(w[k], window[k], sum);
                for (long k = 0; k < kept; k++) window[k] = window[k + 1];
                if (silu) {
                    vec least = choose(sum < splat(-87.0f), splat(-87.0f), sum);
                    sum = sum / (1.0f + exponential(-least));
                }
                put(out + t * size + i, sum);
            }
            for (long k = 0; k < kept; k++) put_float(to + k * size, window[k]);
        }
}

/* out [tokens][heads][width] = x / sqrt(sum of squares + eps) * scale over the last dimension; x: tokens `stride`
 * apart, width a multiple of LANES. */
void unit_heads(const elem *x, int64_t stride, float *out, int64_t tokens, int64_t heads, int64_t width, float eps,
                float scale, int64_t threads) {
#pragma omp parallel for TEAM(tokens *heads *width, threads)
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < heads; h++) {
            const elem *from = x + t * stride + h * width;
            float *to = out + (t * heads + h) * width, total = eps;
            vec sum = splat(0);
            for (long i = 0; i < width; i += LANES) sum = fused(load(from + i), load(from + i), sum);
            for (int i = 0; i < LANES; i++) total += sum[i];
            const float factor = scale / sqrtf(total);
            for (long i = 0; i < width; i += LANES) put_float(to + i, load(from + i) * factor);
        }
}

/* One token of one head, for `columns` vectors of the state's rows: state [depth][width]. Always inlined, so that the
 * compiler keeps the sums in registers; a column's operations are the same whatever stands beside it. */
INLINE void one_token(float *state, const float *q, const float *k, const elem *v, elem *out, long depth, long width,
                      float decay, float gain, int delta, const int columns) {
    vec read[COLUMNS], sum[COLUMNS], change[COLUMNS];
    for (int c = 0; c < columns; c++) read[c] = sum[c] = splat(0);
    if (delta)
        for (long d = 0; d < depth; d++)
            for (int c = 0; c < columns; c++)
                read[c] = fused(get_float(state + d * width + c * LANES) * decay, splat(k[d]), read[c]);
    for (int c = 0; c < columns; c++) change[c] = (load(v + c * LANES) - read[c]) * gain;
    for (long d = 0; d < depth; d++)
        for (int c = 0; c < columns; c++) {
            float *at = state + d * width + c * LANES;
            vec now = fused(splat(k[d]), change[c], get_float(at) * decay);
            put_float(at, now);
            sum[c] = fused(splat(q[d]), now, sum[c]);
        }
    for (int c = 0; c < columns; c++) put(out + c * LANES, sum[c]);
}

/* state = decay * state + key (gain * (value - key . decayed state)), the part in front of the dot only where `delta`;
 * out = query . state. q, k [tokens][groups][depth]; v: tokens `stride` apart, [heads][width]; decay, gain
 * [tokens][heads]; out [tokens][heads][width]; state [slots][heads][depth][width]. Heads share groups in order; width
 * is a multiple of LANES. */
void outer_product_state(const float *q, const float *k, const elem *v, int64_t stride, const float *decay,
                         const float *gain, float *state, const int32_t *starts, const int32_t *sources,
                         const int32_t *targets, elem *out, int64_t rows, int64_t groups, int64_t heads,
                         int64_t depth, int64_t width, int64_t delta, int64_t threads) {
    const long each = heads / groups, wide = COLUMNS * LANES, strips = (width + wide - 1) / wide;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) TEAM(starts[rows] *heads *depth *width, threads)
    for (long row = 0; row < rows; row++)
        for (long strip = 0; strip < heads * strips; strip++) {
            const long h = strip / strips, first = strip % strips * wide, end = first + wide < width ? first + wide : width;
            float *to = state + ((targets[row] * heads + h) * depth) * width;
            const float *from = sources[row] < 0 ? 0 : state + ((sources[row] * heads + h) * depth) * width;
            if (from != to)
                for (long d = 0; d < depth; d++)
                    for (long i = first; i < end; i += LANES)
                        put_float(to + d * width + i, from ? get_float(from + d * width + i) : splat(0));
            for (long t = starts[row]; t < starts[row + 1]; t++) {
                const float *query = q + (t * groups + h / each) * depth, *key = k + (t * groups + h / each) * depth;
                const float d = decay[t * heads + h], g = gain[t * heads + h];
                const elem *value = v + t * stride + h * width;
                elem *result = out + (t * heads + h) * width;
                long i = first;
                for (; i + wide <= end; i += wide)
                    one_token(to + i, query, key, value + i, result + i, depth, width, d, g, delta, COLUMNS);
                for (; i < end; i += LANES)
                    one_token(to + i, query, key, value + i, result + i, depth, width, d, g, delta, 1);
            }
        }
}
