/* Scales of codes in few bits, and zeros in int8: of outputs in the order of lanes, [groups][WIDE]. Included by panels.h.
 *
 * A scale is held as narrow as it can be without a rounding, and widened once for a group of inputs.
 */

/* What scales are held in. */
enum { IN_FLOAT32, IN_BFLOAT16, IN_FLOAT16, IN_EXPONENTS, IN_E4M3 };

#define E4M3_UNIT 256 /* what numbers of e4m3 are read as a share of */

/* Whether scales in float16 are widened here. */
#if LANES == 16 || (defined(__AVX2__) && defined(__F16C__))
#define HALVES 1
#else
#define HALVES 0
#endif

INLINE vec half_lanes(const uint16_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif HALVES
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return splat(0); /* never called */
#endif
}

/* Powers of two, whose exponents are counted from -127; the least is below the normal numbers. */
INLINE vec power_lanes(const uint8_t *from) {
#if LANES == 16
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)), 23);
    return (vec)_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)), 23);
    return (vec)_mm256_max_epu32(bits, _mm256_set1_epi32(0x400000));
#else
    uvec bits;
    for (int lane = 0; lane < LANES; lane++) bits[lane] = from[lane] ? (uint32_t)from[lane] << 23 : 0x400000;
    return (vec)bits;
#endif
}

/* LANES numbers, divided by E4M3_UNIT: an exponent of four bits read as one of five, those of float16, is eight less. None
 * of them is NaN. The sign is shifted along, twice, and once of these masked. */
INLINE vec e4m3_lanes(const uint8_t *from) {
#if LANES == 16
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from)), 8);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16((short)0xbf80)));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from)), 8);
    return (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16((short)0xbf80)));
#else
    vec found;
    for (int lane = 0; lane < LANES; lane++) {
        const int exponent = from[lane] >> 3 & 15, eighths = from[lane] & 7;
        const float size = exponent ? (8 + eighths) * (float)(1 << exponent) : 2 * eighths; /* in units of 2^-10 */
        found[lane] = (from[lane] & 0x80 ? -size : size) / (1024 * E4M3_UNIT);
    }
    return found;
#endif
}

INLINE long size_of_scale(int held) { return held == IN_FLOAT32 ? 4 : held == IN_BFLOAT16 || held == IN_FLOAT16 ? 2 : 1; }

/* to [count]: scales of as many vectors of outputs, from scale `at` on. Those of e4m3 are divided by E4M3_UNIT. */
INLINE void get_scales(const char *scales, int held, long at, const int count, vec *to) {
    const char *from = scales + at * size_of_scale(held);
    switch (held) {
        case IN_FLOAT32:
            for (int v = 0; v < count; v++) to[v] = get_float((const float *)from + v * LANES);
            break;
        case IN_BFLOAT16:
            for (int v = 0; v < count; v++) to[v] = bfloat_lanes((const uint16_t *)from + v * LANES);
            break;
        case IN_FLOAT16:
            for (int v = 0; v < count; v++) to[v] = half_lanes((const uint16_t *)from + v * LANES);
            break;
        case IN_EXPONENTS:
            for (int v = 0; v < count; v++) to[v] = power_lanes((const uint8_t *)from + v * LANES);
            break;
        default:
            for (int v = 0; v < count; v++) to[v] = e4m3_lanes((const uint8_t *)from + v * LANES);
    }
}

/* Numbers of LANES outputs, each for all inputs of a step: [DEPTH], in the order of the weights of a panel. */
INLINE void spread(vec numbers, vec *to) {
#if DEPTH == 2
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    to[0] = (vec)_mm512_permutexvar_ps(first, (__m512)numbers);
    to[1] = (vec)_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), (__m512)numbers);
#else
    to[0] = numbers;
#endif
}
