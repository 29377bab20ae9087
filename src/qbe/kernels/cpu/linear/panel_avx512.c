/* Panels: the codes of a tile as products of many rows read them. Included by nested.c.

   4 inputs of TILE outputs fill a register, a dword for each output. A block of a part of width W holds 2 * W dwords of an
   output, and each of them those inputs of 8 / W registers: dwords change places first, and are spread into codes only then,
   all outputs at once. */

/* The dwords of one block of TILE outputs: t[d], the d-th of each. row: where each output's block begins, in bytes from `from`. */
TARGET_AVX512 INLINE void turn_block(const uint8_t *from, const int64_t *row, const int width, __m512i *t) {
    __m512i v[8];
    if (width == 1) { /* two dwords of 8 outputs in each register */
        for (int i = 0; i < 2; i++) v[i] = _mm512_i64gather_epi64(_mm512_loadu_si512(row + 8 * i), from, 1);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        t[0] = _mm512_permutex2var_epi32(v[0], even, v[1]);
        t[1] = _mm512_permutex2var_epi32(v[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), v[1]);
        return;
    }
    if (width == 2) { /* four dwords of 4 outputs: i, 4 + i, 8 + i, 12 + i */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(from + row[i])));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(from + row[4 + i])), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(from + row[8 + i])), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(from + row[12 + i])), 3);
        }
    } else { /* eight dwords of the outputs i and 8 + i */
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(from + row[i]))),
                                      _mm256_loadu_si256((const __m256i *)(from + row[8 + i])), 1);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2 * width; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        v[i] = _mm512_unpacklo_epi64(a, c), v[i + 1] = _mm512_unpackhi_epi64(a, c);
        v[i + 2] = _mm512_unpacklo_epi64(b, d), v[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = width == 2 ? v[i] : _mm512_permutex2var_epi64(v[i], low, v[i + 4]);
        if (width == 4) t[i + 4] = _mm512_permutex2var_epi64(v[i], high, v[i + 4]);
    }
}

typedef uint32_t Dwords __attribute__((vector_size(64)));

/* A part's bits of the codes of 4 inputs, the s-th of the 16 that a block has, in their place; others beside them. */
TARGET_AVX512 INLINE __m512i field_of(const __m512i *t, int s, const int width, int up) {
    const int left = up - s / (2 * width) * width;
    const Dwords v = (Dwords)t[s % (2 * width)];
    return (__m512i)(left > 0 ? v << left : v >> -left); /* not the intrinsics: they want to know by how much */
}

/* The p-th part's bits of the codes of a block's TILE outputs, beside those in `panel` of the parts before it. */
TARGET_AVX512 static void add_bits(const Step *step, const __m512i *t, int width, int p, char *panel) {
    const __m512i mask = _mm512_set1_epi64((int64_t)step->mask);
    for (int s = 0; s < 16; s++) {
        const __m512i bits = _mm512_and_si512(mask, field_of(t, s, width, step->up));
        void *const to = panel + s * 64;
        _mm512_store_si512(to, p == 0 ? bits : _mm512_or_si512(bits, _mm512_load_si512(to)));
    }
}

/* The codes of TILE outputs for `blocks` blocks: uint8 [16 * blocks, TILE, 4], input by input. part: of the first output;
   `last`: the last of them that exists. */
TARGET_AVX512 INLINE void unpack_panel(const Recipe *r, const uint8_t *const *part, const int64_t *row_bytes, int last,
                                       int64_t blocks, const int SHAPE, char *panel) {
    const int parts = SHAPE == ANY ? r->count : SHAPE;
    int64_t row[8][TILE];
    for (int p = 0; p < parts; p++) rows_of(row[p], last + 1, row_bytes[p]);
    for (int64_t b = 0; b < blocks; b++, panel += 16 * 64) {
        __m512i t[3][8];
#pragma GCC unroll 3
        for (int p = 0; p < parts; p++) {
            const int width = SHAPE == ANY ? r->step[p].width : p == 0 ? 4 : 2;
            const uint8_t *from = part[p] + b * 8 * width;
            __m512i *to = t[SHAPE == ANY ? 0 : p];
            if (width == 4) turn_block(from, row[p], 4, to);
            else if (width == 2) turn_block(from, row[p], 2, to);
            else turn_block(from, row[p], 1, to);
            if (SHAPE == ANY) add_bits(&r->step[p], to, width, p, panel);
        }
        if (SHAPE != ANY)
#pragma GCC unroll 16
            for (int s = 0; s < 16; s++) {
                const __m512i f = field_of(t[0], s, 4, 4), of2 = _mm512_set1_epi8(0x0C), of3 = _mm512_set1_epi8(0x03);
                __m512i codes = _mm512_and_si512(_mm512_set1_epi8((char)0xF0), f);
                if (SHAPE > W4) codes = _mm512_ternarylogic_epi64(of2, field_of(t[1], s, 2, 2), codes, 0xEA); /* of2 & .. | codes */
                if (SHAPE > W42) codes = _mm512_ternarylogic_epi64(of3, field_of(t[2], s, 2, 0), codes, 0xEA);
                _mm512_store_si512(panel + s * 64, codes);
            }
    }
}
