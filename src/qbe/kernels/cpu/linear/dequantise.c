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

/* Row n of the weight, given scale and offset of its groups. */
typedef void (*RowFn)(const Job *j, int64_t n, const float *scale, const float *offset, void *to);

INLINE void dequantise_row(const Job *j, int64_t n, const float *scale, const float *offset, void *to) {
    const Weight *w = &j->w;
    const int parts = parts_of(w->layout, w->layout->precision[j->index]);
    const int64_t blocks = w->kp / w->groups / BLOCK;
    const uint8_t *part[8];
    for (int p = 0; p < parts; p++) part[p] = part_row(w, p, n);
    for (int64_t b = 0; b * BLOCK < j->k; b++) {
        const int64_t g = b / blocks, left = j->k - b * BLOCK;
        float f[BLOCK], *fs = (float *)to + b * BLOCK;
        uint16_t h[BLOCK], *hs = (uint16_t *)to + b * BLOCK;
        if (left >= BLOCK) {
            dequantise_block(j, part, parts, b, scale[g], offset[g], fs, hs);
            continue;
        }
        dequantise_block(j, part, parts, b, scale[g], offset[g], f, h);
        if (j->dtype == FLOAT32) memcpy(fs, f, (size_t)left * sizeof *f);
        else memcpy(hs, h, (size_t)left * sizeof *h);
    }
}

static void dequantise_chunks(Jobs *jobs, RowFn row) {
    Job *j = jobs->job;
    const Weight *w = &j->w;
    float *scale = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;
    float *offset = scale + j->chunk * w->groups;
    const int64_t bytes = j->k * (j->dtype == FLOAT32 ? 4 : 2);
    for (;;) {
        const int64_t n0 = j->n0 + atomic_fetch_add(&j->next, j->chunk), last = j->n0 + j->rows;
        if (n0 >= last) return;
        const int64_t n1 = n0 + j->chunk < last ? n0 + j->chunk : last;
        decode_meta(w, n0, n1, j->index, scale, offset);
        for (int64_t n = n0; n < n1; n++)
            row(j, n, scale + (n - n0) * w->groups, offset + (n - n0) * w->groups, (char *)j->y + (n - j->n0) * bytes);
    }
}

static void scalar_row(const Job *j, int64_t n, const float *scale, const float *offset, void *to) {
    dequantise_row(j, n, scale, offset, to);
}

static void scalar_dequantise(void *arg) { dequantise_chunks(arg, scalar_row); }

#ifdef X86
TARGET_AVX2 static void avx2_row(const Job *j, int64_t n, const float *scale, const float *offset, void *to) {
    dequantise_row(j, n, scale, offset, to);
}

static void avx2_dequantise(void *arg) { dequantise_chunks(arg, avx2_row); }

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

/* dequantise_row of bfloat16, two blocks at a time. */
TARGET_AVX512 INLINE void widen_row(const Job *j, int64_t n, const float *scale, const float *offset, const int SHAPE,
                                    uint16_t *to) {
    const Recipe *recipe = &j->recipe[j->index];
    const int64_t blocks = j->w.kp / BLOCK, each = blocks / j->w.groups;
    const uint8_t *part[8];
    for (int p = 0; p < recipe->count; p++) part[p] = part_row(&j->w, p, n);
    for (int64_t b = 0; b * BLOCK < j->k; b += 2) {
        const int both = b + 1 < blocks;
        const __m512i low = unpack_two(recipe, part, b, both, SHAPE, 0);
        const __m512i high = unpack_two(recipe, part, b, both, SHAPE, 1);
        for (int64_t i = b; i < b + 2 && i * BLOCK < j->k; i++) {
            const int64_t left = j->k - i * BLOCK, g = i / each;
            uint16_t last[BLOCK], *own = left < BLOCK ? last : to + i * BLOCK;
            if (i == b) widen_0(low, high, offset[g], scale[g], own);
            else widen_2(low, high, offset[g], scale[g], own);
            if (left < BLOCK) memcpy(to + i * BLOCK, last, (size_t)left * 2);
        }
    }
}

TARGET_AVX512 static void avx512_row(const Job *j, int64_t n, const float *scale, const float *offset, void *to) {
    switch (j->recipe[j->index].shape) {
    case W4: widen_row(j, n, scale, offset, W4, to); break;
    case W42: widen_row(j, n, scale, offset, W42, to); break;
    case W422: widen_row(j, n, scale, offset, W422, to); break;
    default: widen_row(j, n, scale, offset, ANY, to);
    }
}

static void avx512_dequantise(void *arg) {
    dequantise_chunks(arg, ((Jobs *)arg)->job->dtype == FLOAT32 || !has_bf16() ? avx2_row : avx512_row);
}
#endif
