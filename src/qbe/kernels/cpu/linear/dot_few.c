/* Few rows of x, of whatever precisions. Included by nested.c.

   Codes stay as they are unpacked, and are for all rows at once: those of the lowest precision first; when its rows have been
   multiplied, the next slices make them those of the next one. 16 sums are added up across lanes at once. A row comes out as it
   does in dot_vnni.c, bit for bit. */

/* [a, b, c, d] in each quarter: the sums of theirs. */
TARGET_AVX512 INLINE __m512i add_up(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

TARGET_AVX512 INLINE __m512i halves_of(const char *x, int64_t next, const int both) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)x);
    if (!both) return _mm512_zextsi256_si512(first);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256((const __m256i *)(x + next)), 1);
}

/* Products of a row of x, over the blocks b and b + 1 (b alone unless `both`), with the codes of four outputs, added up but for the
   quarters of a register. x: its block b, of P planes. */
TARGET_AVX512 INLINE __m512i four_products(const __m512i *low, const __m512i *high, const char *x, const int both, const int P) {
    __m512i s[4], xl[2], xh[2];
    for (int p = 0; p < P; p++) {
        xl[p] = halves_of(x + p * BLOCK, P * BLOCK, both);
        xh[p] = halves_of(x + p * BLOCK + BLOCK / 2, P * BLOCK, both);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i d[2];
        for (int p = 0; p < P; p++) {
            d[p] = _mm512_setzero_si512();
            ADD_PRODUCTS(d[p], low[i], xl[p]);
            ADD_PRODUCTS(d[p], high[i], xh[p]);
        }
        s[i] = P == 1 ? d[0] : _mm512_add_epi32(_mm512_slli_epi32(d[0], 8), d[1]);
    }
    return add_up(s[0], s[1], s[2], s[3]);
}

/* The p-th part of four outputs, and the products of the rows that read no further. to: as four_outputs has it; what is left. */
TARGET_AVX512 INLINE __m512i *add_slice_of_four(const Job *j, const Step *s, const uint8_t *const *from, int64_t b, __m512i *to,
                                                int64_t stride, const int both, const int WIDTH, int p, const int FIRST,
                                                __m512i *low, __m512i *high) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        low[i] = add_slice(s, from[i], b, both, WIDTH, 0, FIRST, low[i]);
        high[i] = add_slice(s, from[i], b, both, WIDTH, 1, FIRST, high[i]);
    }
    const Rows *two = &j->few[p].planes[1], *one = &j->few[p].planes[0];
    const char *x = two->x + 2 * BLOCK * b;
    for (int64_t r = two->count; r > 0; r--, x += j->x_bytes, to += stride) *to = four_products(low, high, x, both, 2);
    x = one->x + BLOCK * b;
    for (int64_t r = one->count; r > 0; r--, x += j->x_bytes, to += stride) *to = four_products(low, high, x, both, 1);
    return to;
}

/* The same of all few rows, with outputs whose parts begin at `from`. to: one for each row, `stride` apart. */
TARGET_AVX512 INLINE void four_outputs(const Job *j, const Recipe *recipe, const uint8_t *const (*from)[4], int64_t b, __m512i *to,
                                       int64_t stride, const int both, const int SHAPE) {
    __m512i low[4], high[4];
    for (int i = 0; i < 4; i++) low[i] = high[i] = _mm512_setzero_si512();
#define ADD_SLICE(P, FIRST, WIDTH) \
    to = add_slice_of_four(j, &recipe->step[P], from[P], b, to, stride, both, WIDTH, P, FIRST, low, high)
    ADD_SLICE(0, 1, SHAPE == ANY ? 0 : 4);
    if (SHAPE >= W42) ADD_SLICE(1, 0, 2);
    if (SHAPE >= W422) ADD_SLICE(2, 0, 2);
    for (int p = 1; SHAPE == ANY && p < recipe->count; p++) ADD_SLICE(p, 0, 0);
}

/* Registers of sums that a row has, four for every two blocks. */
INLINE int64_t few_sums(const Weight *w) { return (w->kp / BLOCK + 1) / 2 * 4; }

/* Floats of scratch that a tile needs: sums, scales and offsets, and these as they are decoded. */
static int64_t few_floats(const Weight *w) { return TILE * (FEW * few_sums(w) + 2 * w->groups + turned_bytes(w) / 16); }

/* Those of TILE outputs from n on, for every row; the last output that exists stands for those behind it. */
TARGET_AVX512 INLINE void few_products(const Job *j, const Recipe *recipe, int64_t n, __m512i *sums, const int SHAPE) {
    const Weight *w = &j->w;
    const int64_t blocks = w->kp / BLOCK, stride = few_sums(w), last = w->n - n < TILE ? w->n - n - 1 : TILE - 1;
    for (int q = 0; q < 4; q++) { /* four runs of memory at a time */
        const uint8_t *from[8][4];
        for (int p = 0; p < (SHAPE == ANY ? recipe->count : SHAPE); p++)
            for (int i = 0; i < 4; i++) from[p][i] = part_row(w, p, n + (4 * q + i < last ? 4 * q + i : last));
        for (int64_t b = 0; b + 1 < blocks; b += 2) four_outputs(j, recipe, from, b, sums + b * 2 + q, stride, 1, SHAPE);
        if (blocks % 2) four_outputs(j, recipe, from, blocks - 1, sums + (blocks - 1) * 2 + q, stride, 0, SHAPE);
    }
}

/* y of a row out of its sums. These are 32 bits wide: no group above 256 inputs where there are two planes. */
TARGET_AVX512 INLINE __m512 few_total(const Weight *w, const __m512i *sums, const float *scale, const float *offset,
                                      const OfGroup *of_group, int64_t rows) {
    const int64_t blocks = w->kp / BLOCK, each = blocks / w->groups;
    __m512i group = _mm512_setzero_si512();
    __m512 total = _mm512_setzero_ps();
    int64_t left = each;
    for (int64_t b = 0; b < blocks; b += 2, sums += 4) {
        __m512i sum[2];
        for (int i = 0; i < 2; i++)
            sum[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(sums[2 * i], sums[2 * i + 1], 0x88),
                                      _mm512_shuffle_i32x4(sums[2 * i], sums[2 * i + 1], 0xDD));
        for (int i = 0; i < 2 && b + i < blocks; i++) {
            group = _mm512_add_epi32(group, _mm512_shuffle_i32x4(sum[0], sum[1], i ? 0xDD : 0x88));
            if (--left) continue;
            total = add_group(total, _mm512_cvtepi32_ps(group), _mm512_load_ps(offset), _mm512_load_ps(scale), of_group);
            group = _mm512_setzero_si512();
            offset += TILE, scale += TILE, of_group += rows, left = each;
        }
    }
    return total;
}

/* Rows [n0, n1) of the weight times the few rows of x. */
TARGET_AVX512 static void multiply_few(const Job *j, int64_t n0, int64_t n1, float *scratch) {
    const Weight *w = &j->w;
    const Recipe *recipe = &j->recipe[j->few_highest];
    float *const scale = scratch + TILE * FEW * few_sums(w), *const offset = scale + TILE * w->groups;
    char *const bytes = (char *)(offset + TILE * w->groups);
    for (int64_t n = n0; n < n1; n += TILE) {
        const __m512i *sums = (const __m512i *)scratch;
        switch (recipe->shape) {
        case W4: few_products(j, recipe, n, (__m512i *)scratch, W4); break;
        case W42: few_products(j, recipe, n, (__m512i *)scratch, W42); break;
        case W422: few_products(j, recipe, n, (__m512i *)scratch, W422); break;
        default: few_products(j, recipe, n, (__m512i *)scratch, ANY);
        }
        for (int p = 0; p < 2; p++) turn_plane(w, n, p, bytes + p * turned_bytes(w));
        for (int at = 0; at <= j->few_highest; at++) {
            const Few *few = &j->few[j->recipe[at].count - 1];
            if (few->planes[0].count + few->planes[1].count == 0) continue;
            decode_tile(w, n, at, bytes, scale, offset);
            for (int p = 1; p >= 0; p--)
                for (int64_t r = few->planes[p].first; r < few->planes[p].first + few->planes[p].count; r++, sums += few_sums(w))
                    store_tile(j, j->row[r], n, few_total(w, sums, scale, offset, j->of_group + r, j->rows));
        }
    }
}
