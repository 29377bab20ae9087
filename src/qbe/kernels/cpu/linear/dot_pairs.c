/* Products of many rows of 8-bit activations, as of a prompt. Included by nested.c.

   A number of x is read once for two tiles: a core loads two registers in the time of two multiplications, so that one tile
   alone, of which each multiplication loads its own number, waits for loads. Sums are those of dot_vnni.c, taken off and scaled
   in the same order: a row comes out the same, bit for bit. */

#define PAIR_MOST 12 /* rows whose sums fit the registers */

/* y[r] and y[R + r] for R rows of x in one plane through the panels of two tiles: what is read of x serves both. */
TARGET_AVX512 INLINE void pair_rows(const Tile *const t[2], const char *const panels[2], const char *x, int64_t x_bytes,
                                    const OfGroup *of_group, int64_t rows, __m512 *y, const int R) {
    const int64_t groups = t[0]->w->groups, bytes = t[0]->w->kp / groups;
    const char *panel = panels[0];
    const int64_t other = panels[1] - panels[0];
    __m512 zero = _mm512_setzero_ps();
    for (int r = 0; r < 2 * R; r++) {
        __asm__("" : "+v"(zero)); /* as in panel_rows */
        y[r] = zero;
    }
    for (int64_t g = 0; g < groups; g++, x += bytes, of_group += rows) {
        __m512i sum[2][PAIR_MOST];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sum[0][r] = sum[1][r] = _mm512_setzero_si512();
        const char *of[4] = {x, x + 3 * x_bytes, x + 6 * x_bytes, x + 9 * x_bytes};
        for (int64_t i = 0; i < bytes; i += 4, panel += 64) {
            const __m512i codes = _mm512_load_si512(panel), others = _mm512_load_si512(panel + other);
            int64_t one = x_bytes;
            __asm__("" : "+r"(one)); /* as there */
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const __m512i four = _mm512_set1_epi32(*(const Four *)(of[r / 3] + r % 3 * one));
                ADD_PRODUCTS(sum[0][r], codes, four);
                ADD_PRODUCTS(sum[1][r], others, four);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r += 3) of[r / 3] += 4;
        }
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m512 offset = _mm512_load_ps(t[k]->offset + g * TILE), scale = _mm512_load_ps(t[k]->scale + g * TILE);
            __asm__("" ::: "memory"); /* y stays there: sums fill the registers */
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
                y[k * R + r] = add_group(y[k * R + r], _mm512_cvtepi32_ps(sum[k][r]), offset, scale, of_group + r);
        }
    }
}

typedef void (*PairFn)(const Tile *const *, const char *const *, const char *, int64_t, const OfGroup *, int64_t, __m512 *);
#define PAIR_ROWS(R)                                                                                                   \
    TARGET_AVX512 static void pair_##R(const Tile *const t[2], const char *const panels[2], const char *x,             \
                                       int64_t x_bytes, const OfGroup *of_group, int64_t rows, __m512 *y) {            \
        pair_rows(t, panels, x, x_bytes, of_group, rows, y, R);                                                        \
    }
PAIR_ROWS(12) PAIR_ROWS(8) PAIR_ROWS(4) PAIR_ROWS(2) PAIR_ROWS(1)
static const struct { int rows; PairFn multiply; } PAIR_FNS[] = {{12, pair_12}, {8, pair_8}, {4, pair_4}, {2, pair_2}, {1, pair_1}};

/* Asks for what lies from `first` to `last` of `whole` in the chunk that somebody takes next: while products keep a core busy,
   its memory has nothing to do. */
TARGET_AVX512 INLINE void ask_for_chunk(const Job *j, int at, int64_t first, int64_t last, int64_t whole) {
    const int64_t n = j->next, rows = j->w.n - n < j->chunk ? j->w.n - n : j->chunk;
    for (int p = 0; p < j->recipe[at].count && rows > 0; p++) {
        const int64_t bytes = rows * (j->w.kp / 8 * j->w.layout->width[p]);
        const char *const from = (const char *)part_row(&j->w, p, n);
        for (int64_t i = bytes * first / whole / 64 * 64; i < bytes * last / whole; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
    }
}

/* The same as multiply_integers, for more than INT16_MOST rows of one plane. As in multiply_int16 they pass by all tiles of a
   chunk. */
TARGET_AVX512 static void multiply_pairs(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    const int64_t floats = int16_floats(&j->w), count = (n1 - n0 + TILE - 1) / TILE;
    Tile t[CHUNK_TILES];
    for (int64_t i = 0; i < count; i++) {
        t[i] = tile_of(j, at, n0 + i * TILE, scratch + i * floats);
        make_panel(&t[i], (char *)(scratch + i * floats));
    }
    int kind = 0;
    for (int64_t r = r0, many; r < r1; r += many) {
        while (PAIR_FNS[kind].rows > r1 - r) kind++;
        many = PAIR_FNS[kind].rows;
        ask_for_chunk(j, at, r - r0, r - r0 + many, r1 - r0);
        for (int64_t i = 0; i < count; i += 2) {
            const int64_t next = i + 1 < count ? i + 1 : i; /* a tile without another: twice */
            const Tile *const both[2] = {&t[i], &t[next]};
            const char *const panels[2] = {(const char *)(scratch + i * floats), (const char *)(scratch + next * floats)};
            __m512 y[2 * PAIR_MOST];
            PAIR_FNS[kind].multiply(both, panels, j->x + r * j->x_bytes, j->x_bytes, j->of_group + r, j->rows, y);
            for (int64_t m = 0; m < many; m++)
                for (int64_t k = i; k <= next; k++) store_tile(j, j->row[r + m], n0 + k * TILE, y[(k - i) * many + m]);
        }
    }
}
