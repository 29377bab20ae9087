/* Codes and scales in AVX-512 registers. Included by nested.c.

   Codes come two blocks of the layout at a time, because one load then fills a register: `low` holds inputs 0..31 of
   both, `high` inputs 32..63. They are unsigned bytes at the top of which lie the bits of the precision (store.c). */

#define TILE 16    /* outputs that lie in the lanes of one register */
#define AHEAD 4096 /* bytes of a 4-bit part asked for in advance */

/* How a part reaches its place: which 64-bit words of the two blocks go to which lane, and by how much they rotate. */
typedef struct {
    int64_t spread[8], low[8], high[8];
    uint64_t mask;
    int32_t width;
} Step;

typedef struct Recipe {
    int32_t count, shape;
    Step step[8];
} Recipe;

/* Widths of the parts of the default layout (4, 2, 2), known to the compiler; ANY takes them from the recipe. */
enum { ANY, W4, W42, W422 };

INLINE int64_t turn(int lane, int width, int up, int high) { /* rotation to the left; fields lie `width` bits apart */
    const int field = width == 4 ? 0 : width == 2 ? lane % 4 / 2 : lane % 4;
    return (up - field * width - (high ? 4 : 0)) & 63;
}

INLINE int64_t word_at(int lane, int width) { /* of the two blocks' 2 * width words */
    return lane / 4 * width + (width == 4 ? lane % 4 : width == 2 ? lane % 2 : 0);
}

static Recipe recipe_of(const Layout *l, int bits) {
    Recipe r = {.count = parts_of(l, bits)};
    for (int p = 0; p < r.count; p++) {
        Step *s = &r.step[p];
        const int up = 8 - l->first[p] - l->width[p];
        s->width = l->width[p];
        s->mask = 0x0101010101010101u * (((1u << s->width) - 1) << up);
        for (int i = 0; i < 8; i++) {
            s->spread[i] = word_at(i, s->width);
            s->low[i] = turn(i, s->width, up, 0), s->high[i] = turn(i, s->width, up, 1);
        }
    }
    r.shape = r.count <= 3 && r.step[0].width == 4 ? r.count : ANY;
    for (int p = 1; p < r.count; p++)
        if (r.step[p].width != 2) r.shape = ANY;
    return r;
}

/* Blocks b and b + 1 of the n-th row at part[] (b alone unless `both`; the rest is then zero): `low`, or, if HIGH, `high`.
   ASK: for memory that lies AHEAD. */
TARGET_AVX512 INLINE __m512i unpack_two(const Recipe *r, const uint8_t *const *part, const int64_t *row_bytes, int64_t n,
                                        int64_t b, const int both, const int SHAPE, const int HIGH, const int ASK) {
    __m512i codes = _mm512_setzero_si512();
    for (int p = 0; p < (SHAPE == ANY ? r->count : SHAPE); p++) {
        const Step *s = &r->step[p];
        const int width = SHAPE == ANY ? s->width : p == 0 ? 4 : 2;
        const uint8_t *from = part[p] + n * row_bytes[p] + b * 8 * width;
        if (ASK && !HIGH) _mm_prefetch((const char *)from + AHEAD / 4 * width, _MM_HINT_T0);
        __m512i v;
        if (SHAPE != ANY && width == 4)
            v = both ? _mm512_loadu_si512(from) : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)from));
        else if (SHAPE != ANY)
            v = _mm512_zextsi256_si512(both ? _mm256_loadu_si256((const __m256i *)from)
                                            : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)from)));
        else
            v = _mm512_maskz_loadu_epi64((__mmask8)((1 << (both ? 2 : 1) * width) - 1), from);
        if (SHAPE == ANY || width != 4) v = _mm512_permutexvar_epi64(_mm512_loadu_si512(s->spread), v);
        if (SHAPE == ANY || p > 0 || !HIGH) v = _mm512_rolv_epi64(v, _mm512_loadu_si512(HIGH ? s->high : s->low));
        const __m512i mask = _mm512_set1_epi64((int64_t)s->mask);
        codes = p == 0 ? _mm512_and_si512(mask, v) : _mm512_ternarylogic_epi64(mask, v, codes, 0xEA); /* (mask & v) | codes */
    }
    return codes;
}

/* Four outputs of two blocks (of one unless `both`) into a panel, from output 4 * q on: `low` or, if HIGH, `high`. */
TARGET_AVX512 INLINE void unpack_four(const Recipe *r, const uint8_t *const *part, const int64_t *row_bytes, int last, int q,
                                      int64_t b, const int both, const int SHAPE, const int HIGH, const int ASK, char *panel) {
    __m512i v[4], t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = unpack_two(r, part, row_bytes, 4 * q + i < last ? 4 * q + i : last, b, both, SHAPE, HIGH, ASK);
    t[0] = _mm512_unpacklo_epi32(v[0], v[1]), t[1] = _mm512_unpackhi_epi32(v[0], v[1]);
    t[2] = _mm512_unpacklo_epi32(v[2], v[3]), t[3] = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(t[0], t[2]), v[1] = _mm512_unpackhi_epi64(t[0], t[2]);
    v[2] = _mm512_unpacklo_epi64(t[1], t[3]), v[3] = _mm512_unpackhi_epi64(t[1], t[3]);
    char *const to = panel + (b * 16 + 8 * HIGH) * 4 * TILE + 16 * q; /* of a block: 8 times 4 inputs */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        char *const at = to + i * 4 * TILE;
        _mm_store_si128((__m128i *)at, _mm512_castsi512_si128(v[i]));
        _mm_store_si128((__m128i *)(at + 4 * 4 * TILE), _mm512_extracti32x4_epi32(v[i], 1));
        if (!both) continue;
        _mm_store_si128((__m128i *)(at + 16 * 4 * TILE), _mm512_extracti32x4_epi32(v[i], 2));
        _mm_store_si128((__m128i *)(at + 20 * 4 * TILE), _mm512_extracti32x4_epi32(v[i], 3));
    }
}

/* The codes of TILE outputs for the blocks [0, blocks): uint8 [16 * blocks, TILE, 4], input by input. */
TARGET_AVX512 INLINE void unpack_panel(const Recipe *r, const uint8_t *const *part, const int64_t *row_bytes, int last,
                                       int64_t blocks, const int SHAPE, const int ASK, char *panel) {
    for (int q = 0; q < TILE / 4; q++) { /* four runs of memory at a time */
        int64_t b = 0;
        for (; b + 1 < blocks; b += 2) {
            unpack_four(r, part, row_bytes, last, q, b, 1, SHAPE, 0, ASK, panel);
            unpack_four(r, part, row_bytes, last, q, b, 1, SHAPE, 1, ASK, panel);
        }
        if (b == blocks) continue;
        unpack_four(r, part, row_bytes, last, q, b, 0, SHAPE, 0, ASK, panel);
        unpack_four(r, part, row_bytes, last, q, b, 0, SHAPE, 1, ASK, panel);
    }
}

/* scale8 and offset8 of TILE outputs from n on: float32 [groups, TILE] each. flat: room for 2 * (TILE * groups + 16). */
TARGET_AVX512 INLINE void decode_tile(const Weight *w, int64_t n, int at, float *flat, float *scale, float *offset) {
    const int64_t groups = w->groups, room = TILE * groups + 16, left = w->n - n < TILE ? w->n - n : TILE;
    decode_meta(w, n, n + left, at, flat, flat + room);
    for (int p = 0; p < 4; p++) {
        const char *next = (const char *)w->meta + ((p < 2 ? p : 2 * at + p) * w->n + n + 2 * TILE) * groups;
        for (int64_t i = 0; i < TILE * groups; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
    }
    for (int k = 0; k < 2; k++) {
        const float *from = flat + k * room;
        float *to = k == 0 ? scale : offset;
        for (int64_t g = 0; g < groups; g += 8) {
            __m512 v[8], t[8];
            for (int i = 0; i < 8; i++) { /* 8 groups of the outputs i and i + 8 */
                const __m256 low = _mm256_loadu_ps(from + i * groups + g), high = _mm256_loadu_ps(from + (i + 8) * groups + g);
                v[i] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
            }
            for (int i = 0; i < 8; i += 2) {
                t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
                t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
                    v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
            for (int i = 0; i < 8 && g + i < groups; i++) {
                const __m512d a = _mm512_castps_pd(v[i % 4]), b = _mm512_castps_pd(v[i % 4 + 4]);
                _mm512_store_ps(to + (g + i) * TILE, _mm512_castpd_ps(_mm512_permutex2var_pd(a, i < 4 ? first : second, b)));
            }
        }
    }
}
