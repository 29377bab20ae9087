/* Many rows (prefill) of bfloat16: tiles of the weight rounded to bfloat16, products of pairs. Included by nested.c.

   From PLAIN_ROWS rows on the sums and scales of every group cost more than a rounded weight. A chunk's tiles are
   dequantised together and stay in the second cache while all rows pass by. A row's result does not depend on the others. */

#define PLAIN_ROWS 48 /* of one precision (benchmarks/cpu_crossover.py) */

/* From the codes of a tile (unpack_panel): bfloat16 [kp / 2, TILE, 2], the reference's values rounded once. */
TARGET_AVX512 static void round_panel(const Tile *t, const char *codes, char *panel) {
    const int64_t groups = t->w->groups, each = t->w->kp / groups / 4;
    const __m512i byte = _mm512_set1_epi32(255);
    uint16_t words[32]; /* neighbours: the words i and 16 + i */
    for (int i = 0; i < 32; i++) words[i] = (uint16_t)(i % 2 * 16 + i / 2);
    const __m512i order = _mm512_loadu_si512(words);
    for (int64_t g = 0; g < groups; g++) {
        const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
        for (int64_t i = 0; i < each; i++, codes += 64, panel += 128) {
            const __m512i four = _mm512_load_si512(codes);
            __m512 f[4];
            f[0] = _mm512_cvtepi32_ps(_mm512_and_si512(four, byte));
            f[1] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 8), byte));
            f[2] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 16), byte));
            f[3] = _mm512_cvtepi32_ps(_mm512_srli_epi32(four, 24));
            for (int j = 0; j < 4; j++) f[j] = _mm512_mul_ps(_mm512_sub_ps(f[j], offset), scale);
            for (int j = 0; j < 4; j += 2) {
                const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(f[j + 1], f[j]);
                _mm512_store_si512(panel + 32 * j, _mm512_permutexvar_epi16(order, two));
            }
        }
    }
}

#define ADD_PAIRS(SUM, PANEL, X) __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(SUM) : "v"(PANEL), "m"(*(const Four *)(X)))

/* y[r] for R rows of bfloat16, padded with zeros to kp. */
TARGET_AVX512 INLINE void plain_rows(int64_t kp, const char *panel, const char *x, int64_t x_bytes, __m512 *y, const int R) {
    const char *of[8];
    __m512 sum[24];
    for (int i = 0; i < 8; i++) of[i] = x + 3 * i * x_bytes;
#pragma GCC unroll 24
    for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
    for (const char *end = panel + kp * 32; panel < end; panel += 64) {
        const __m512i pairs = _mm512_load_si512(panel);
        int64_t one = x_bytes;
        __asm__("" : "+r"(one)); /* as in panel_rows */
#pragma GCC unroll 24
        for (int r = 0; r < R; r++) ADD_PAIRS(sum[r], pairs, of[r / 3] + r % 3 * one);
#pragma GCC unroll 8
        for (int r = 0; r < R; r += 3) of[r / 3] += 4;
    }
#pragma GCC unroll 24
    for (int r = 0; r < R; r++) y[r] = sum[r];
}

typedef void (*PlainFn)(int64_t, const char *, const char *, int64_t, __m512 *);
#define PLAIN(R)                                                                                                     \
    TARGET_AVX512 static void plain_##R(int64_t kp, const char *panel, const char *x, int64_t x_bytes, __m512 *y) {  \
        plain_rows(kp, panel, x, x_bytes, y, R);                                                                     \
    }
PLAIN(24) PLAIN(16) PLAIN(8) PLAIN(4) PLAIN(2) PLAIN(1)
static const struct { int rows; PlainFn run; } PLAIN_FNS[] = {
    {24, plain_24}, {16, plain_16}, {8, plain_8}, {4, plain_4}, {2, plain_2}, {1, plain_1}};

/* Rows [n0, n1) of the weight times rows [r0, r1) of x, which read the same precision. */
TARGET_AVX512 static void multiply_plain(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    const int64_t tile_bytes = j->w.kp * TILE * 2;
    char *panels = (char *)(scratch + tile_floats(&j->w));
    for (int64_t n = n0; n < n1; n += TILE) {
        const Tile t = tile_of(j, at, n, scratch);
        make_panel(&t, (char *)scratch, 1);
        round_panel(&t, (const char *)scratch, panels + (n - n0) / TILE * tile_bytes);
    }
    int kind = 0;
    for (int64_t r = r0; r < r1; r += PLAIN_FNS[kind].rows) {
        while (PLAIN_FNS[kind].rows > r1 - r) kind++;
        for (int64_t n = n0; n < n1; n += TILE) {
            __m512 y[24];
            PLAIN_FNS[kind].run(j->w.kp, panels + (n - n0) / TILE * tile_bytes, j->x + r * j->x_bytes, j->x_bytes, y);
            for (int i = 0; i < PLAIN_FNS[kind].rows; i++) store_tile(j, j->row[r + i], n, y[i]);
        }
    }
}

/* A row of bfloat16 as it is, padded. */
static void load_plain(const char *x, int64_t k, int64_t kp, char *out) {
    memcpy(out, x, (size_t)k * 2);
    memset(out + k * 2, 0, (size_t)(kp - k) * 2);
}
