/* Norms, rotation and gating: one pass over memory each, computed in fp32 and rounded once.
 *
 * Every row is computed alone and in one order, so its bits do not depend on its company or on the threads.
 */

#include <math.h>

#include "vectors.h"

#define HALF (HEAD_DIM / 2)
#define PARTS 4   /* sums that run side by side */
#define WORTH 32768 /* elements from which on other threads pay */

#define TEAM(elements, threads) num_threads(team(elements, WORTH, threads))

/* x [rows][size], size a multiple of LANES: 1 / sqrt(mean of squares + eps) */
static float scale_of(const elem *x, long size, float eps) {
    vec sum[PARTS] = {{0}};
    float total = 0;
    for (long i = 0; i < size; i += PARTS * LANES)
        for (int part = 0; part < PARTS; part++) /* told apart by a constant, so that all are in registers */
            if (i + part * LANES < size) {
                const vec each = load(x + i + part * LANES);
                sum[part] = fused(each, each, sum[part]);
            }
    vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int i = 0; i < LANES; i++) total += all[i];
    return 1.0f / sqrtf(total / (float)size + eps);
}

/* out = x / rms(x) * weight; x and out [rows][size], weight [size]. x is first added to `residual`, unless that is 0. */
void rms_norm(const elem *x, elem *residual, const elem *weight, elem *out, int64_t rows, int64_t size,
              float eps, int64_t threads) {
#pragma omp parallel for TEAM(rows *size, threads)
    for (long row = 0; row < rows; row++) {
        const elem *from = x + row * size;
        if (residual) {
            elem *sum = residual + row * size;
            for (long i = 0; i < size; i += LANES) put(sum + i, load(sum + i) + load(from + i));
            from = sum;
        }
        const float scale = scale_of(from, size, eps);
        for (long i = 0; i < size; i += LANES)
            put(out + row * size + i, load(from + i) * scale * load(weight + i));
    }
}

/* out [HEAD_DIM] = in, whose halves are turned by HALF angles. */
INLINE void rotate(const float *in, const float *cosine, const float *sine, float *out) {
#if HALF % LANES
    for (int d = 0; d < HALF; d++) {
        out[d] = in[d] * cosine[d] - in[d + HALF] * sine[d];
        out[d + HALF] = in[d + HALF] * cosine[d] + in[d] * sine[d];
    }
#else
    for (int d = 0; d < HALF; d += LANES) {
        const vec first = get_float(in + d), second = get_float(in + d + HALF), s = get_float(sine + d);
        put_float(out + d, fused(first, get_float(cosine + d), -(second * s)));
        put_float(out + d + HALF, fused(second, get_float(cosine + d), first * s));
    }
#endif
}

/* Norm each head (weights [heads][HEAD_DIM], 0 = no norm), then rotate its halves by the token's cosines and sines
 * (rotation [tokens][2][HALF], 0 = none). In place: x is [tokens][heads][HEAD_DIM], tokens `stride` apart. */
void norm_rotate(elem *x, const elem *weights, const float *rotation, int64_t tokens, int64_t heads,
                 int64_t stride, float eps, int64_t threads) {
#pragma omp parallel for TEAM(tokens *heads *HEAD_DIM, threads)
    for (long token = 0; token < tokens; token++) {
        const float *cosine = rotation ? rotation + token * HEAD_DIM : 0, *sine = rotation ? cosine + HALF : 0;
        for (long h = 0; h < heads; h++) {
            elem *head = x + token * stride + h * HEAD_DIM;
            const float scale = weights ? scale_of(head, HEAD_DIM, eps) : 1;
            float in[HEAD_DIM], out[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d += LANES) {
                vec each = load(head + d);
                put_float(in + d, weights ? each * scale * load(weights + h * HEAD_DIM + d) : each);
            }
            if (rotation) rotate(in, cosine, sine, out);
            for (int d = 0; d < HEAD_DIM; d += LANES) put(head + d, get_float((rotation ? out : in) + d));
        }
    }
}

/* out [rows][size] = silu(gate) * up; x [rows][2][size] holds both, size a multiple of LANES. */
void silu_gate(const elem *x, elem *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for TEAM(rows *size, threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += LANES) {
            vec gate = load(x + row * 2 * size + i), up = load(x + (row * 2 + 1) * size + i);
            vec least = choose(gate < splat(-87.0f), splat(-87.0f), gate);
            put(out + row * size + i, gate / (1.0f + exponential(-least)) * up);
        }
}

/* The same with gelu(gate) by tanh: gate * (1 + tanh(u)) / 2 = gate / (1 + exp(-2 u)) with u as below. */
void gelu_gate(const elem *x, elem *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for TEAM(rows *size, threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += LANES) {
            vec gate = load(x + row * 2 * size + i), up = load(x + (row * 2 + 1) * size + i);
            vec twice = 1.5957691216057308f * fused(0.044715f * gate * gate, gate, gate); /* 2 sqrt(2 / pi) */
            vec least = choose(twice < splat(-87.0f), splat(-87.0f), twice);
            put(out + row * size + i, gate / (1.0f + exponential(-least)) * up);
        }
}
