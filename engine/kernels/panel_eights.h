/* Panels of weights in fp8 (e4m3), each times a scale that a group of inputs of an output shares.
 *
 * Where groups are not scaled whole (panel_groups.h), a strip is made plain, in the dtype of x, and then multiplied as one:
 * the same sums as with the plain weight, bit for bit. Included by panels.h.
 *
 * Packed: bytes in the order of the plain panel. Scales in lanes likewise, [groups][WIDE * DEPTH], and times E4M3_UNIT.
 */

#define E4M3_UNIT 256 /* what numbers of e4m3 are read as a share of */

/* LANES numbers, divided by E4M3_UNIT: an exponent of four bits read as one of five, those of float16, is eight less. None
 * of them is NaN. */
INLINE vec e4m3_lanes(const uint8_t *from) {
#if LANES == 16
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    return (vec)_mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7), sign));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    return (vec)_mm256_cvtph_ps(_mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7), sign));
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

/* The plain strip of `steps` from step `start` of a panel on. */
INLINE void widen_e4m3(const Codes *panel, long start, long steps, elem *strip) {
    const uint8_t *from = (const uint8_t *)panel->words + start * STEP;
    const float *scales = panel->scales + start / panel->per_group * STEP;
    long left = panel->per_group - start % panel->per_group; /* of the group */
    for (long k = 0; k < steps; k++, from += STEP, strip += STEP) {
        if (left == 0) {
            scales += STEP;
            left = panel->per_group;
        }
        left--;
        for (int v = 0; v < VECS; v++) {
            vec found[DEPTH];
            for (int d = 0; d < DEPTH; d++) {
                const long at = v * RUN + d * LANES;
                if (at % LINE == 0) __builtin_prefetch(from + at + FAR, 0, 2);
                found[d] = e4m3_lanes(from + at) * get_float(scales + at);
            }
#if WIDENS
            put(strip + v * RUN, found[0]);
#else
            put_weights(strip + v * RUN, rounded(found));
#endif
        }
    }
}
