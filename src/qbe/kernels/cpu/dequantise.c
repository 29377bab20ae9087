/* The weight at one precision, in float32 or bfloat16: (code - offset) * scale, the reference's values bit for bit (then
   rounded once). For many rows where torch's product is faster than the kernels here: where there is no AVX-512, and in
   bfloat16 where torch has tiles (AMX), for which codes become numbers at AVX-512's pace. Included by nested.c. */

/* Block b of a row whose parts begin at part[]: into f, or, for bfloat16, into h; the other is not touched. */
INLINE void dequantise_block(const Job *j, const uint8_t *const *part, int parts, int64_t b, float scale, float offset,
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

INLINE void dequantise_chunks(Jobs *jobs) {
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
                    dequantise_block(j, part, parts, b, scale[g], offset[g], fs, hs);
                    continue;
                }
                dequantise_block(j, part, parts, b, scale[g], offset[g], f, h);
                if (j->dtype == FLOAT32) memcpy(fs, f, (size_t)left * sizeof *f);
                else memcpy(hs, h, (size_t)left * sizeof *h);
            }
        }
    }
}

static void scalar_dequantise(void *arg) { dequantise_chunks(arg); }

#ifdef X86
TARGET_AVX2 static void avx2_dequantise(void *arg) { dequantise_chunks(arg); }

/* 16 codes, in the lanes [16 * AT, 16 * AT + 16) of a register of bytes. */
#define SIXTEEN(CODES, AT) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(CODES, AT)))

/* 32 inputs of a block: the lanes [16 * AT, 16 * AT + 32) of `codes`. */
#define PAIR_OF(CODES, AT)                                                                                            \
    (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_sub_ps(SIXTEEN(CODES, (AT) + 1), offset), scale),                 \
                                 _mm512_mul_ps(_mm512_sub_ps(SIXTEEN(CODES, AT), offset), scale))

/* The first (AT 0) or the second (AT 2) of the two blocks that unpack_two has unpacked. */
#define DEFINE_WIDEN(AT)                                                                                              \
    TARGET_AVX512 INLINE void widen_##AT(__m512i low, __m512i high, float o, float s, uint16_t *to) {                 \
        const __m512 offset = _mm512_set1_ps(o), scale = _mm512_set1_ps(s);                                           \
        _mm512_storeu_si512(to, PAIR_OF(low, AT));                                                                    \
        _mm512_storeu_si512(to + 32, PAIR_OF(high, AT));                                                              \
    }
DEFINE_WIDEN(0)
DEFINE_WIDEN(2)

/* Row n of the weight in bfloat16: part[] and row_bytes[] as unpack_two takes them, scale and offset of its groups. */
TARGET_AVX512 INLINE void widen_row(const Job *j, const Recipe *recipe, const uint8_t *const *part, const int64_t *row_bytes,
                                    int64_t n, const float *scale, const float *offset, const int SHAPE, uint16_t *to) {
    const int64_t blocks = j->w.kp / BLOCK, each = blocks / j->w.groups;
    for (int64_t b = 0; b * BLOCK < j->k; b += 2) {
        const int both = b + 1 < blocks;
        const __m512i low = unpack_two(recipe, part, row_bytes, n, b, both, SHAPE, 0, 1);
        const __m512i high = unpack_two(recipe, part, row_bytes, n, b, both, SHAPE, 1, 1);
        for (int64_t i = b; i < b + 2 && i * BLOCK < j->k; i++) {
            const int64_t left = j->k - i * BLOCK, g = i / each;
            uint16_t last[BLOCK], *own = left < BLOCK ? last : to + i * BLOCK;
            if (i == b) widen_0(low, high, offset[g], scale[g], own);
            else widen_2(low, high, offset[g], scale[g], own);
            if (left < BLOCK) memcpy(to + i * BLOCK, last, (size_t)left * 2);
        }
    }
}

TARGET_AVX512 static void avx512_dequantise(void *arg) {
    Jobs *jobs = arg;
    Job *j = jobs->job;
    const Weight *w = &j->w;
    if (j->dtype == FLOAT32) {
        avx2_dequantise(arg);
        return;
    }
    const Recipe *recipe = &j->recipe[j->index];
    float *scale = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;
    float *offset = scale + j->chunk * w->groups;
    const uint8_t *part[8];
    int64_t row_bytes[8];
    for (int p = 0; p < recipe->count; p++) {
        part[p] = part_row(w, p, 0);
        row_bytes[p] = w->kp * w->layout->width[p] / 8;
    }
    for (;;) {
        const int64_t n0 = j->n0 + atomic_fetch_add(&j->next, j->chunk), last = j->n0 + j->rows;
        if (n0 >= last) return;
        const int64_t n1 = n0 + j->chunk < last ? n0 + j->chunk : last;
        decode_meta(w, n0, n1, j->index, scale, offset);
        for (int64_t n = n0; n < n1; n++) {
            uint16_t *to = (uint16_t *)j->y + (n - j->n0) * j->k;
            const float *s = scale + (n - n0) * w->groups, *o = offset + (n - n0) * w->groups;
            if (recipe->shape == W4) widen_row(j, recipe, part, row_bytes, n, s, o, W4, to);
            else if (recipe->shape == W42) widen_row(j, recipe, part, row_bytes, n, s, o, W42, to);
            else if (recipe->shape == W422) widen_row(j, recipe, part, row_bytes, n, s, o, W422, to);
            else widen_row(j, recipe, part, row_bytes, n, s, o, ANY, to);
        }
    }
}
#endif
