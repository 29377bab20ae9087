/* Integer dot products by AVX-512 VNNI. Included by nested.c.

   A tile is TILE outputs, one in each lane. A group's sum of codes times bytes is an exact integer, whichever way it is
   taken; then, group after group,

       y += (sum - offset8 * sum(q)) * unit * scale8

   so that a row comes out the same, bit for bit, from every way and whatever rows it shares the call with. Here the codes of
   the tile are transposed into a panel, and every instruction multiplies 4 inputs of all outputs with those of one row; few
   rows do not pay for it (dot_few.c). */

/* sum += bytes of `codes`, unsigned, times those of x, signed, four in each lane; x: a vector, or 4 bytes for all lanes.
   In assembler, because GCC 12 copies the sums of the intrinsic to and fro and spills them. */
#define ADD_PRODUCTS(SUM, CODES, X) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(CODES), "v"(X))
#define ADD_PRODUCTS_OF_FOUR(SUM, CODES, X) \
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(SUM) : "v"(CODES), "m"(*(const Four *)(X)))

typedef int32_t __attribute__((may_alias)) Four;

/* TILE outputs from n on at one precision. */
typedef struct {
    const Weight *w;
    const Recipe *recipe;
    const uint8_t *part[8];
    int64_t row_bytes[8], n;
    int last;            /* the last of them that exists */
    const float *scale, *offset; /* [groups, TILE] */
} Tile;

/* A group's sum t, scaled, and the total of those before it. */
TARGET_AVX512 INLINE __m512 add_group(__m512 total, __m512 t, __m512 offset, __m512 scale, const OfGroup *of) {
    t = _mm512_mul_ps(_mm512_fnmadd_ps(offset, _mm512_set1_ps(of->sum), t), _mm512_set1_ps(of->unit));
    return _mm512_fmadd_ps(t, scale, total);
}

/* A group's sum out of those of its two planes, rounded once. blocks: of the group. 256 inputs still fit 32 bits, and whole
   numbers are added where no product waits. */
TARGET_AVX512 INLINE __m512 of_planes(__m512i high, __m512i low, int64_t blocks) {
    if (blocks <= 256 / BLOCK) return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
}

/* Asks for the g-th group's share of the next tile: while products keep a core busy, its memory would have nothing to do, and
   everything asked for while a panel is made has to wait for itself. */
TARGET_AVX512 INLINE void ask_for_next(const Tile *t, int64_t g) {
    for (int p = 0; p < t->recipe->count; p++) {
        const int64_t bytes = TILE * t->row_bytes[p], share = bytes / t->w->groups;
        const char *next = (const char *)t->part[p] + bytes + g * share;
        for (int64_t i = 0; i < share; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
    }
}

/* The same for R rows, of any P, through the panel. `first`: nobody has asked for the next tile yet. */
TARGET_AVX512 INLINE void panel_rows(const Tile *t, const char *panel, const char *x, int64_t x_bytes, const OfGroup *of_group,
                                     int64_t rows, int first, __m512 *y, const int R, const int P) {
    const int64_t groups = t->w->groups, each = t->w->kp / groups / BLOCK;
    __m512 zero = _mm512_setzero_ps();
    for (int r = 0; r < R; r++) {
        __asm__("" : "+v"(zero)); /* unknown here, or the compiler would clear y by `rep stos`, which is slow to begin */
        y[r] = zero;
    }
    for (int64_t g = 0; g < groups; g++) {
        if (first) ask_for_next(t, g);
        __m512i sum[12 * 2];
#pragma GCC unroll 24
        for (int i = 0; i < R * P; i++) sum[i] = _mm512_setzero_si512();
        for (int64_t b = 0; b < each; b++, x += P * BLOCK) {
            const char *of[4] = {x, x + 3 * x_bytes, x + 6 * x_bytes, x + 9 * x_bytes};
            for (int64_t i = 0; i < BLOCK; i += 4, panel += 64) {
                const __m512i codes = _mm512_load_si512(panel);
                int64_t one = x_bytes;
                __asm__("" : "+r"(one)); /* unknown here, or the compiler would keep a pointer for each row */
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < P; p++)
                        ADD_PRODUCTS_OF_FOUR(sum[r * P + p], codes, of[r / 3] + r % 3 * one + p * BLOCK);
#pragma GCC unroll 4
                for (int r = 0; r < R; r += 3) of[r / 3] += 4;
            }
        }
        const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
        __asm__("" ::: "memory"); /* y stays there: sums fill the registers */
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512 total = P == 1 ? _mm512_cvtepi32_ps(sum[r]) : of_planes(sum[r * P], sum[r * P + P - 1], each);
            y[r] = add_group(y[r], total, offset, scale, of_group + g * rows + r);
        }
    }
}

typedef void (*PanelFn)(const Tile *, const char *, const char *, int64_t, const OfGroup *, int64_t, int, __m512 *);

#define PANEL_ROWS(R, P)                                                                                               \
    TARGET_AVX512 static void panel_##R##_##P(const Tile *t, const char *panel, const char *x, int64_t x_bytes,        \
                                              const OfGroup *of_group, int64_t rows, int first, __m512 *y) {           \
        panel_rows(t, panel, x, x_bytes, of_group, rows, first, y, R, P);                                              \
    }
#define PANELS(P) PANEL_ROWS(1, P) PANEL_ROWS(2, P) PANEL_ROWS(4, P) PANEL_ROWS(8, P)
PANELS(1) PANELS(2) PANEL_ROWS(12, 1) PANEL_ROWS(12, 2)
/* By the rows that they take; sums of a tile fill most of the registers. */
static const struct { int rows; PanelFn planes[MAX_PLANES]; } PANEL_FNS[] = {
    {12, {panel_12_1, panel_12_2}}, {8, {panel_8_1, panel_8_2}}, {4, {panel_4_1, panel_4_2}}, {2, {panel_2_1, panel_2_2}},
    {1, {panel_1_1, panel_1_2}}};

/* The outputs from n on of a row. */
TARGET_AVX512 INLINE void store_tile(const Job *j, int64_t row, int64_t n, __m512 y) {
    const __mmask16 in = j->w.n - n >= TILE ? 0xFFFF : (__mmask16)((1 << (j->w.n - n)) - 1);
    if (j->bias) y = _mm512_add_ps(y, load_sixteen((const char *)j->bias, j->bias_dtype, j->w.n, n));
    store_sixteen((char *)j->y + (row * j->y_stride + n) * (j->y_dtype == FLOAT32 ? 4 : 2), j->y_dtype, in, y);
}

TARGET_AVX512 static void make_panel(const Tile *t, char *panel) {
#define MAKE(SHAPE) unpack_panel(t->recipe, t->part, t->row_bytes, t->last, t->w->kp / BLOCK, SHAPE, panel)
    switch (t->recipe->shape) {
    case W4: MAKE(W4); break;
    case W42: MAKE(W42); break;
    case W422: MAKE(W422); break;
    default: MAKE(ANY);
    }
}

/* Floats of scratch that a tile needs: panel or sums, scales and offsets, and these as they are decoded. */
static int64_t tile_floats(const Weight *w) { return TILE * w->kp / 4 + 256 + 2 * TILE * w->groups + TILE * (w->groups + 3); }

/* The tile with its scales decoded, behind the panel in scratch. */
TARGET_AVX512 INLINE Tile tile_of(const Job *j, int at, int64_t n, float *scratch) {
    const Weight *w = &j->w;
    float *scale = scratch + TILE * w->kp / 4 + 256, *offset = scale + TILE * w->groups;
    Tile t = {.w = w, .recipe = &j->recipe[at], .n = n, .last = (int)(w->n - n < TILE ? w->n - n : TILE) - 1,
              .scale = scale, .offset = offset};
    for (int p = 0; p < t.recipe->count; p++)
        t.part[p] = part_row(w, p, n), t.row_bytes[p] = w->kp / 8 * w->layout->width[p];
    char *const bytes = (char *)(offset + TILE * w->groups);
    for (int p = 0; p < 2; p++) turn_plane(w, n, p, bytes + p * turned_bytes(w));
    decode_tile(w, n, at, bytes, scale, offset);
    return t;
}

/* Rows [n0, n1) of the weight times rows [r0, r1) of x, which read the same precision in as many planes. */
TARGET_AVX512 static void multiply_integers(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1,
                                            float *scratch) {
    const int planes = j->planes[r0];
    for (int64_t n = n0; n < n1; n += TILE) {
        const Tile t = tile_of(j, at, n, scratch);
        make_panel(&t, (char *)scratch);
        __m512 y[12];
        int kind = 0;
        for (int64_t r = r0, many; r < r1; r += many) {
            while (PANEL_FNS[kind].rows > r1 - r) kind++;
            many = PANEL_FNS[kind].rows;
            PANEL_FNS[kind].planes[planes - 1](&t, (const char *)scratch, j->x + r * j->x_bytes, j->x_bytes, j->of_group + r,
                                               j->rows, r == r0, y);
            for (int64_t i = 0; i < many; i++) store_tile(j, j->row[r + i], n, y[i]);
        }
    }
}
