/* Products of rows in 16 bits by Winograd's inner product. Included by nested.c.

   Two products cost one multiplication where additions are free (S. Winograd, "A new algorithm for inner product", IEEE
   Transactions on Computers C-17, 1968):

       x1 w1 + x2 w2 = (x1 + w2) (x2 + w1) - x1 x2 - w1 w2

   What is taken off belongs to x alone or to the weight alone, and is found once for all of the other's rows. A Zen 4 multiplies
   in two of its four vector pipes and adds in all of them: 64 products of 16-bit numbers keep them busy for 1.5 cycles, where two
   instructions on planes (dot_vnni.c) or on bfloat16 take 2 (docs/performance.md).

   Sums wrap around at 32 bits, but what is left in the end fits: it is the exact integer of dot_vnni.c, and a row comes out the
   same, bit for bit. Numbers of x are at most 32512 (activations.c), codes 255: their sums fit int16. */

#define INT16_ROWS 7    /* that pay for it where weights come from memory, as in a decode step (docs/performance.md) */
#define INT16_GROUP 256 /* inputs whose sum fits 32 bits */
#define INT16_MOST 24   /* rows whose sums fit the registers */
#define CHUNK_TILES (CHUNK / BLOCK / TILE) /* in a chunk at most */

/* sum += (x1 + w2) (x2 + w1) + (x3 + w4) (x4 + w3) in each lane. odd: w1, w3; even: w2, w4; x: x1, x3, x2, x4, for all lanes. */
#define ADD_PRODUCTS_OF_SUMS(SUM, ODD, EVEN, X)                                                            \
    do {                                                                                                   \
        __m512i first, second;                                                                             \
        __asm__("vpbroadcastd %3, %1\n\tvpbroadcastd %4, %2\n\tvpaddw %6, %1, %1\n\tvpaddw %5, %2, %2\n\t" \
                "vpdpwssd %2, %1, %0"                                                                      \
                : "+v"(SUM), "=&v"(first), "=&v"(second)                                                   \
                : "m"(((const Four *)(X))[0]), "m"(((const Four *)(X))[1]), "v"(ODD), "v"(EVEN));           \
    } while (0)

/* y[r] for R rows of x through the panel (unpack_panel). taken: w1 w2 + w3 w4 + ... of TILE outputs in each group; the FIRST rows
   find it and ask for the next tile. */
TARGET_AVX512 INLINE void winograd_rows(const Tile *t, const char *panel, const char *x, int64_t x_bytes, const OfGroup *of_group,
                                        int64_t rows, __m512i *taken, __m512 *y, const int R, const int FIRST) {
    const int64_t groups = t->w->groups, each = t->w->kp / groups / BLOCK;
    const __m512i low = _mm512_set1_epi16(255);
    __m512 zero = _mm512_setzero_ps();
    for (int r = 0; r < R; r++) {
        __asm__("" : "+v"(zero)); /* as in panel_rows */
        y[r] = zero;
    }
    for (int64_t g = 0; g < groups; g++, of_group += rows) {
        if (FIRST) ask_for_next(t, g);
        __m512i sum[INT16_MOST], own = _mm512_setzero_si512();
#pragma GCC unroll 24
        for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(of_group[r].taken);
        for (int64_t b = 0; b < each; b++, x += 2 * BLOCK) {
            const char *of[INT16_MOST / 3];
            for (int i = 0; i < INT16_MOST / 3; i++) of[i] = x + 3 * i * x_bytes;
            for (int64_t i = 0; i < BLOCK; i += 4, panel += 64) {
                const __m512i codes = _mm512_load_si512(panel);
                const __m512i odd = _mm512_and_si512(codes, low), even = _mm512_srli_epi16(codes, 8);
                int64_t one = x_bytes;
                __asm__("" : "+r"(one)); /* as there */
                if (FIRST) __asm__("vpdpwssd %2, %1, %0" : "+v"(own) : "v"(odd), "v"(even));
#pragma GCC unroll 24
                for (int r = 0; r < R; r++) ADD_PRODUCTS_OF_SUMS(sum[r], odd, even, of[r / 3] + r % 3 * one);
#pragma GCC unroll 8
                for (int r = 0; r < R; r += 3) of[r / 3] += 8;
            }
        }
        if (FIRST) taken[g] = own;
        else own = taken[g];
        const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
        __asm__("" ::: "memory"); /* y stays there: sums fill the registers */
#pragma GCC unroll 24
        for (int r = 0; r < R; r++)
            y[r] = add_group(y[r], _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r], own)), offset, scale, of_group + r);
    }
}

typedef void (*WinogradFn)(const Tile *, const char *, const char *, int64_t, const OfGroup *, int64_t, __m512i *, __m512 *);
#define WINOGRAD(R, FIRST)                                                                                             \
    TARGET_AVX512 static void winograd_##R##_##FIRST(const Tile *t, const char *panel, const char *x, int64_t x_bytes, \
                                                     const OfGroup *of_group, int64_t rows, __m512i *taken, __m512 *y) { \
        winograd_rows(t, panel, x, x_bytes, of_group, rows, taken, y, R, FIRST);                                       \
    }
#define WINOGRADS(R) WINOGRAD(R, 0) WINOGRAD(R, 1)
WINOGRADS(24) WINOGRADS(12) WINOGRADS(10) WINOGRADS(8) WINOGRADS(7) WINOGRADS(6) WINOGRADS(5) WINOGRADS(4) WINOGRADS(3)
WINOGRADS(2) WINOGRADS(1)
#define BY_ROWS(R) {R, {winograd_##R##_0, winograd_##R##_1}}
static const struct { int rows; WinogradFn first[2]; } WINOGRAD_FNS[] = {
    BY_ROWS(24), BY_ROWS(12), BY_ROWS(10), BY_ROWS(8), BY_ROWS(7), BY_ROWS(6), BY_ROWS(5), BY_ROWS(4), BY_ROWS(3), BY_ROWS(2),
    BY_ROWS(1)};

/* Floats of scratch for one tile, and tiles that are in scratch together. More rows than one call takes pass by all tiles of a
   chunk: their own numbers stay in the first cache meanwhile, panels in the second, and what they write of y is contiguous. */
static int64_t int16_floats(const Weight *w) { return tile_floats(w) + TILE * w->groups; }
static int64_t int16_tiles(int64_t chunk, int64_t rows) { return rows > INT16_MOST ? chunk / TILE : 1; }

/* The same as multiply_integers, for rows of int16. */
TARGET_AVX512 static void multiply_int16(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    const int64_t floats = int16_floats(&j->w), step = int16_tiles(j->chunk, r1 - r0) * TILE;
    Tile t[CHUNK_TILES];
    for (int64_t first = n0; first < n1; first += step) {
        const int64_t end = first + step < n1 ? first + step : n1;
        for (int64_t n = first, i = 0; n < end; n += TILE, i++) {
            t[i] = tile_of(j, at, n, scratch + i * floats);
            make_panel(&t[i], (char *)(scratch + i * floats));
        }
        int kind = 0;
        for (int64_t r = r0; r < r1; r += WINOGRAD_FNS[kind].rows) {
            while (WINOGRAD_FNS[kind].rows > r1 - r) kind++;
            for (int64_t n = first, i = 0; n < end; n += TILE, i++) {
                __m512 y[INT16_MOST];
                float *const panel = scratch + i * floats;
                WINOGRAD_FNS[kind].first[r == r0](&t[i], (const char *)panel, j->x + r * j->x_bytes, j->x_bytes, j->of_group + r,
                                                  j->rows, (__m512i *)(panel + tile_floats(&j->w)), y);
                for (int m = 0; m < WINOGRAD_FNS[kind].rows; m++) store_tile(j, j->row[r + m], n, y[m]);
            }
        }
    }
}
