/* Codes and scales in AVX-512 registers. Included by nested.c.

   Codes come two blocks of the layout at a time, because one load then fills a register: `low` holds inputs 0..31 of
   both, `high` inputs 32..63. They are unsigned bytes at the top of which lie the bits of the precision (store.c). */

#define TILE 16    /* outputs that lie in the lanes of one register */
#define AHEAD 4096 /* bytes of a 4-bit part asked for in advance */

/* How a part reaches its place: which 64-bit words of the two blocks go to which lane, and by how much they rotate. */
typedef struct {
    int64_t spread[8], low[8], high[8];
    uint64_t mask;
    int32_t width, up;
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
        s->width = l->width[p], s->up = up;
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

/* A part's bits of the codes of blocks b and b + 1 (b alone unless `both`; the rest is then zero) beside those in `codes` of the
   parts before it: `low`, or, if HIGH, `high`. WIDTH: of the part, 0 if only the recipe knows. Asks for memory that lies AHEAD. */
TARGET_AVX512 INLINE __m512i add_slice(const Step *s, const uint8_t *part, int64_t b, const int both, const int WIDTH, const int HIGH,
                                      const int FIRST, __m512i codes) {
    const int width = WIDTH ? WIDTH : s->width;
    const uint8_t *from = part + b * 8 * width;
    if (!HIGH) _mm_prefetch((const char *)from + AHEAD / 4 * width, _MM_HINT_T0);
    __m512i v;
    if (WIDTH == 4)
        v = both ? _mm512_loadu_si512(from) : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)from));
    else if (WIDTH)
        v = _mm512_zextsi256_si512(both ? _mm256_loadu_si256((const __m256i *)from)
                                        : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)from)));
    else
        v = _mm512_maskz_loadu_epi64((__mmask8)((1 << (both ? 2 : 1) * width) - 1), from);
    if (WIDTH != 4) v = _mm512_permutexvar_epi64(_mm512_loadu_si512(s->spread), v);
    if (!WIDTH || !FIRST || !HIGH) v = _mm512_rolv_epi64(v, _mm512_loadu_si512(HIGH ? s->high : s->low));
    const __m512i mask = _mm512_set1_epi64((int64_t)s->mask);
    return FIRST ? _mm512_and_si512(mask, v) : _mm512_ternarylogic_epi64(v, mask, codes, 0xEA); /* (v & mask) | codes */
}

/* All parts of a row that begin at part[]. */
TARGET_AVX512 INLINE __m512i unpack_two(const Recipe *r, const uint8_t *const *part, int64_t b, const int both,
                                        const int SHAPE, const int HIGH) {
    __m512i codes = add_slice(&r->step[0], part[0], b, both, SHAPE == ANY ? 0 : 4, HIGH, 1, _mm512_setzero_si512());
    for (int p = 1; p < (SHAPE == ANY ? r->count : SHAPE); p++)
        codes = add_slice(&r->step[p], part[p], b, both, SHAPE == ANY ? 0 : 2, HIGH, 0, codes);
    return codes;
}

/* Where the rows of TILE outputs begin, `bytes` apart; the last of them, number left - 1, stands for those behind it. */
INLINE void rows_of(int64_t *row, int64_t left, int64_t bytes) {
    int64_t at = 0;
    for (int i = 0; i < TILE; i++) {
        row[i] = at;
        if (i + 1 < left) at += bytes;
        __asm__("" : "+r"(at)); /* unknown here, or the compiler would fill the table by a hundred permutations */
    }
}

/* 16 groups of a plane of scales, from `from` on: one byte of TILE outputs for each, to `to` [16, TILE]; `some` of them exist,
   four lines are written for every four. row: where each output's begin, in bytes from `from`. */
TARGET_AVX512 INLINE void turn_bytes(const uint8_t *from, const int64_t *row, int some, char *to) {
    const __mmask16 in = some < 16 ? (__mmask16)((1 << some) - 1) : 0xFFFF;
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* the outputs i, 4 + i, 8 + i, 12 + i */
        v[i] = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(in, from + row[i]));
        v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi8(in, from + row[4 + i]), 1);
        v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi8(in, from + row[8 + i]), 2);
        v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi8(in, from + row[12 + i]), 3);
    }
    const __m512i a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi16(a, c)));
    if (some > 4) _mm512_storeu_si512(to + 4 * TILE, _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi16(a, c)));
    if (some > 8) _mm512_storeu_si512(to + 8 * TILE, _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi16(b, d)));
    if (some > 12) _mm512_storeu_si512(to + 12 * TILE, _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi16(b, d)));
}

/* The p-th plane of scales and offsets (store.c), of TILE outputs from n on: int8 [groups, TILE], and room for 3 groups more. */
TARGET_AVX512 INLINE void turn_plane(const Weight *w, int64_t n, int p, char *bytes) {
    const int64_t groups = w->groups;
    int64_t row[TILE];
    rows_of(row, w->n - n, groups);
    const uint8_t *from = w->meta + (p * w->n + n) * groups;
    for (int64_t i = 0; i < TILE * groups; i += 64) _mm_prefetch((const char *)from + 2 * TILE * groups + i, _MM_HINT_T0);
    for (int64_t g = 0; g < groups; g += 16)
        turn_bytes(from + g, row, (int)(groups - g < 16 ? groups - g : 16), bytes + g * TILE);
}

/* Bytes of a plane that has been turned. */
INLINE int64_t turned_bytes(const Weight *w) { return (w->groups + 3) / 4 * 4 * TILE; }

/* scale8 and offset8 of TILE outputs from n on: float32 [groups, TILE] each, as `decode_meta` has them. bytes: the first two
   planes, turned, and room for two more. */
TARGET_AVX512 INLINE void decode_tile(const Weight *w, int64_t n, int at, char *bytes, float *scale, float *offset) {
    const Layout *l = w->layout;
    const int64_t groups = w->groups, each = turned_bytes(w);
    const int shift = l->total_bits - l->precision[at], up = 8 - l->precision[at];
    for (int p = 2; p < 4 && shift; p++) turn_plane(w, n, 2 * at + p, bytes + p * each);
    const float top = (float)(1 << up), per = top / (float)(1 << shift);
    const __m512 widest = _mm512_set1_ps(1.0f / (float)(1 << (8 - l->total_bits)));
    const __m512 middle = _mm512_set1_ps((float)((1 << shift) - 1) / 2);
    const __m512i bias = _mm512_set1_epi32(w->exponent << 23);
    for (int64_t g = 0; g < groups; g++, bytes += TILE) {
        const __m512i s = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)bytes));
        const __m512 z = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(bytes + each))));
        __m512 of = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(s, 19), bias));
        __m512 zero = _mm512_mul_ps(_mm512_sub_ps(z, middle), _mm512_set1_ps(per));
        of = _mm512_mul_ps(of, widest);
        if (shift) {
            const __m512 r = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(bytes + 2 * each))));
            const __m512 o = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(bytes + 3 * each))));
            of = _mm512_mul_ps(of, _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 256), _mm512_set1_ps(1.0f)));
            zero = _mm512_fmadd_ps(o, _mm512_set1_ps(top / 64), zero);
        }
        _mm512_store_ps(scale + g * TILE, of);
        _mm512_store_ps(offset + g * TILE, zero);
    }
}
