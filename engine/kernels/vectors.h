/* Vectors of floats in the compiler's own notation, as long as a register of the machine: longer ones it would keep in
 * memory. REGISTERS: how many there are. */

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#else /* NEON, SSE */
#define LANES 4
#if defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#endif
#define BYTES (4 * LANES)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

typedef float vec __attribute__((vector_size(BYTES)));
typedef int32_t ivec __attribute__((vector_size(BYTES)));
typedef uint32_t uvec __attribute__((vector_size(BYTES)));
typedef float loose_vec __attribute__((vector_size(BYTES), aligned(4), may_alias)); /* in memory: any address */
typedef uint16_t half_vec __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; } /* with a plus the compiler would add, for the sake of -0 */
INLINE vec get_float(const float *from) { return *(const loose_vec *)from; }
INLINE void put_float(float *to, vec x) { *(loose_vec *)to = x; }
INLINE vec bfloat_lanes(const uint16_t *from) {
    return (vec)(__builtin_convertvector(*(const half_vec *)from, uvec) << 16);
}

/* a * b + c, rounded once where the CPU can. Kernels say where they want it, and are compiled without contraction
 * (c_library.py): a compiler contracts as it likes, in the loop for one row otherwise than in that for many. */
INLINE vec fused(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* Threads for this much work: all or none but the caller, because OpenMP ends the threads that a smaller team leaves
 * out. Waiting for others costs most where other processes want the cores. */
INLINE int team(int64_t work, int64_t worth, int64_t threads) { return work < worth ? 1 : (int)threads; }

#if BF16
typedef uint16_t elem;
INLINE vec load(const elem *from) { return bfloat_lanes(from); }
/* Round to nearest, ties to even; a NaN stays one. */
INLINE void put(elem *to, vec x) {
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec kept = (uvec)choose(x == x, (vec)rounded, (vec)((bits >> 16) | 64));
    *(half_vec *)to = __builtin_convertvector(kept, half_vec);
}
#else
typedef float elem;
INLINE vec load(const elem *from) { return get_float(from); }
INLINE void put(elem *to, vec x) { put_float(to, x); }
#endif

/* e^x to 2 units in the last place for x <= 88, 0 below -87; source: the polynomial of Cephes' expf. */
INLINE vec exponential(vec x) {
    vec shifted = fused(x, splat(1.44269504f), splat(12582912.0f)), n = shifted - 12582912.0f; /* + 1.5 x 2^23 rounds */
    vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    vec y = splat(1.9875691500e-4f);
    y = fused(y, r, splat(1.3981999507e-3f));
    y = fused(y, r, splat(8.3334519073e-3f));
    y = fused(y, r, splat(4.1665795894e-2f));
    y = fused(y, r, splat(1.6666665459e-1f));
    y = fused(y, r, splat(5.0000001201e-1f));
    y = fused(y * r, r, r) + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(y * (vec)power) & ~(x < splat(-87.0f)));
}

INLINE vec hyperbolic_tangent(vec x) {
    vec limited = choose(x > splat(15.0f), splat(15.0f), choose(x < splat(-15.0f), splat(-15.0f), x));
    return 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f);
}

/* Do `call` for as many of the rows that are left as it has a version for, ROWS, and set `done` to that. */
#define BY_ROWS(left, done, call)                   \
    switch ((left) >= 6 ? 6 : (left) == 5 ? 4 : (left)) { \
        case 6: { enum { ROWS = 6 }; call; done = 6; break; } \
        case 4: { enum { ROWS = 4 }; call; done = 4; break; } \
        case 3: { enum { ROWS = 3 }; call; done = 3; break; } \
        case 2: { enum { ROWS = 2 }; call; done = 2; break; } \
        default: { enum { ROWS = 1 }; call; done = 1; } \
    }
