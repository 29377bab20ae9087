/* What a transformer does around its linear layers, in bfloat16 with AVX-512: RMS norm and rotary embeddings (qbe/kernels/ops/
   rms_norm.py, rotary.py). Every operation is rounded as torch rounds it. Included by nested.c. */

#ifdef X86
TARGET_AVX512 INLINE __m512 widen(const uint16_t *from, __mmask16 in) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(in, from)), 16));
}

/* To bfloat16; the instruction for it would lose what is below 2^-126. */
TARGET_AVX512 INLINE __m512 to_nearest(__m512 v) {
    const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i whole = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(_mm512_and_si512(whole, _mm512_set1_epi32((int)0xFFFF0000)));
}

TARGET_AVX512 INLINE void put(uint16_t *to, __mmask16 in, __m512 rounded) {
    _mm256_mask_storeu_epi16(to, in, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rounded), 16)));
}

INLINE __mmask16 up_to(int64_t left) { return left >= 16 ? 0xFFFF : (__mmask16)((1 << left) - 1); }

TARGET_AVX512 void qbe_square(const uint16_t *x, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 v = widen(x + i, up_to(count - i));
        _mm512_mask_storeu_ps(to + i, up_to(count - i), _mm512_mul_ps(v, v));
    }
}

/* y[r] = x[r] / sqrt(means[r] + eps), times weight; [rows, k]. */
TARGET_AVX512 void qbe_norm(const uint16_t *x, const float *means, float eps, const uint16_t *weight, uint16_t *y, int64_t rows,
                            int64_t k) {
    for (int64_t r = 0; r < rows; r++, x += k, y += k) {
        const __m512 root = _mm512_sqrt_ps(_mm512_set1_ps(means[r] + eps)), by = _mm512_div_ps(_mm512_set1_ps(1.0f), root);
        for (int64_t i = 0; i < k; i += 16) {
            const __mmask16 in = up_to(k - i);
            const __m512 normed = to_nearest(_mm512_mul_ps(widen(x + i, in), by));
            put(y + i, in, to_nearest(_mm512_mul_ps(normed, widen(weight + i, in))));
        }
    }
}

/* y [tokens, heads, 2 * half] = x * cos + (-second half of x, first half) * sin, with cos and sin [tokens, 2 * half]. */
TARGET_AVX512 void qbe_rotate(const uint16_t *x, int64_t x_token, int64_t x_head, const uint16_t *cos, const uint16_t *sin,
                              uint16_t *y, int64_t tokens, int64_t heads, int64_t half) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (int64_t t = 0; t < tokens; t++, cos += 2 * half, sin += 2 * half)
        for (int64_t h = 0; h < heads; h++, y += 2 * half)
            for (int64_t d = 0; d < half; d += 16) {
                const __mmask16 in = up_to(half - d);
                const uint16_t *from = x + t * x_token + h * x_head + d;
                const __m512 a = widen(from, in), b = widen(from + half, in);
                const __m512 along = to_nearest(_mm512_mul_ps(a, widen(cos + d, in)));
                const __m512 across = to_nearest(_mm512_mul_ps(_mm512_xor_ps(b, sign), widen(sin + d, in)));
                put(y + d, in, to_nearest(_mm512_add_ps(along, across)));
                const __m512 after = to_nearest(_mm512_mul_ps(b, widen(cos + half + d, in)));
                const __m512 turned = to_nearest(_mm512_mul_ps(a, widen(sin + half + d, in)));
                put(y + half + d, in, to_nearest(_mm512_add_ps(after, turned)));
            }
}
#endif
