/* The weight at one precision, in float32 or bfloat16: (code - offset) * scale, the reference's values bit for bit (then
   rounded once). Included by nested.c. */

typedef void (*BlockFn)(const Job *, const uint8_t *const *, int, int64_t, float, float, float *, uint16_t *);

/* Block b of a row whose parts begin at part[]: into f, or, for bfloat16, into h; the other is not touched. */
INLINE void dequantise_float(const Job *j, const uint8_t *const *part, int parts, int64_t b, float scale, float offset,
                             float f[BLOCK], uint16_t h[BLOCK]) {
    uint64_t words[8];
    uint8_t codes[BLOCK];
    unpack_block(j->w.layout, part, parts, b, words);
    memcpy(codes, words, BLOCK);
    if (j->dtype == FLOAT32)
        for (int i = 0; i < BLOCK; i++) f[i] = ((float)codes[i] - offset) * scale;
    else
        for (int i = 0; i < BLOCK; i++) h[i] = to_bfloat16(((float)codes[i] - offset) * scale);
}

#ifdef X86
TARGET_AVX512 INLINE void dequantise_avx512(const Job *j, const uint8_t *const *part, int parts, int64_t b, float scale,
                                            float offset, float f[BLOCK], uint16_t h[BLOCK]) {
    const Recipe *r = &j->recipe[j->index];
    __m512i codes = _mm512_setzero_si512();
    for (int p = 0; p < parts; p++) {
        const Step *s = &r->step[p];
        __m512i v = load_part(part[p] + b * 8 * s->width, s, s->width, ANY);
        v = _mm512_rolv_epi64(v, _mm512_loadu_si512(s->rotate));
        codes = _mm512_ternarylogic_epi64(_mm512_set1_epi64((int64_t)s->mask), v, codes, 0xEA); /* (mask & v) | codes */
    }
    codes = _mm512_sll_epi64(codes, _mm_cvtsi32_si128(8 - j->w.layout->precision[j->index])); /* to the top of the byte */
    const __m512 o = _mm512_set1_ps(offset), s = _mm512_set1_ps(scale);
    const __m128i quarter[4] = {_mm512_extracti32x4_epi32(codes, 0), _mm512_extracti32x4_epi32(codes, 1),
                                _mm512_extracti32x4_epi32(codes, 2), _mm512_extracti32x4_epi32(codes, 3)};
    for (int q = 0; q < 4; q++) {
        const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarter[q]));
        const __m512 v = _mm512_mul_ps(_mm512_sub_ps(c, o), s);
        if (j->dtype == FLOAT32) _mm512_storeu_ps(f + 16 * q, v);
        else _mm256_storeu_si256((__m256i *)(h + 16 * q), (__m256i)_mm512_cvtneps_pbh(v));
    }
}
#endif

INLINE void dequantise_chunks(Jobs *jobs, BlockFn dequantise) {
    Job *j = jobs->job;
    const Weight *w = &j->w;
    const int parts = parts_of(w->layout, w->layout->precision[j->index]);
    float *scale = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;
    float *offset = scale + j->chunk * w->groups;
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (;;) {
        const int64_t n0 = j->n0 + atomic_fetch_add(&j->next, j->chunk), last = j->n0 + j->rows;
        if (n0 >= last) return;
        const int64_t n1 = n0 + j->chunk < last ? n0 + j->chunk : last;
        decode_meta(w, n0, n1, j->index, scale, offset);
        for (int64_t n = n0; n < n1; n++) {
            const uint8_t *part[8];
            for (int p = 0; p < parts; p++) part[p] = part_row(w, p, n);
            for (int64_t b = 0; b * BLOCK < j->k; b++) {
                const int64_t g = (n - n0) * w->groups + b / blocks, at = (n - j->n0) * j->k + b * BLOCK;
                const int64_t left = j->k - b * BLOCK;
                float f[BLOCK], *fs = (float *)j->y + at;
                uint16_t h[BLOCK], *hs = (uint16_t *)j->y + at;
                if (left >= BLOCK) {
                    dequantise(j, part, parts, b, scale[g], offset[g], fs, hs);
                    continue;
                }
                dequantise(j, part, parts, b, scale[g], offset[g], f, h);
                if (j->dtype == FLOAT32) memcpy(fs, f, (size_t)left * sizeof *f);
                else memcpy(hs, h, (size_t)left * sizeof *h);
            }
        }
    }
}
