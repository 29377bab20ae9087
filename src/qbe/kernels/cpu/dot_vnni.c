/* Integer dot products by AVX-512 VNNI. Included by nested.c.

   A tile is TILE outputs, one in each lane. A group's sum of codes times bytes is an exact integer, whichever way it is
   taken; then, group after group,

       y += (sum - offset8 * sum(q)) * unit * scale8

   so that a row comes out the same, bit for bit, from both ways below and whatever rows it shares the call with. Few rows:
   codes stay as they are unpacked, 16 sums are added up across lanes at once. More rows: the codes of the tile are
   transposed into a panel, and every instruction multiplies 4 inputs of all outputs with those of one row. */

#define FEW 4 /* rows that do not pay for a panel (benchmarks/cpu_crossover.py) */

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

/* Products of M rows over the blocks b and b + 1 (b alone unless `both`) with four outputs whose parts begin at `from`, added up
   but for the quarters of a register. to: one for each row, `stride` apart. */
TARGET_AVX512 INLINE void four_outputs(const Recipe *recipe, const uint8_t *const (*from)[8], const char *x, int64_t x_bytes,
                                       int64_t b, __m512i *to, int64_t stride, const int both, const int M, const int P,
                                       const int SHAPE) {
    __m512i low[FEW * 2], high[FEW * 2], s[FEW][4];
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) {
            const char *row = x + m * x_bytes + (b * P + p) * BLOCK;
            low[m * P + p] = halves_of(row, P * BLOCK, both);
            high[m * P + p] = halves_of(row + BLOCK / 2, P * BLOCK, both);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i l = unpack_two(recipe, from[i], b, both, SHAPE, 0);
        const __m512i h = unpack_two(recipe, from[i], b, both, SHAPE, 1);
        for (int m = 0; m < M; m++) {
            __m512i d[2];
            for (int p = 0; p < P; p++) {
                d[p] = _mm512_setzero_si512();
                ADD_PRODUCTS(d[p], l, low[m * P + p]);
                ADD_PRODUCTS(d[p], h, high[m * P + p]);
            }
            s[m][i] = P == 1 ? d[0] : _mm512_add_epi32(_mm512_slli_epi32(d[0], 8), d[1]);
        }
    }
    for (int m = 0; m < M; m++) to[m * stride] = add_up(s[m][0], s[m][1], s[m][2], s[m][3]);
}

/* y[m] for M rows of x in P planes. Sums are 32 bits wide: no group above 256 inputs at P = 2. work: FEW * 4 registers for
   every two blocks. */
TARGET_AVX512 INLINE void few_rows(const Tile *t, const char *x, int64_t x_bytes, const OfGroup *of_group, int64_t rows,
                                   __m512i *work, __m512 *y, const int M, const int P, const int SHAPE) {
    const int64_t groups = t->w->groups, blocks = t->w->kp / BLOCK, each = blocks / groups, stride = (blocks + 1) / 2 * 4;
    for (int q = 0; q < 4; q++) { /* four runs of memory at a time */
        const uint8_t *from[4][8];
        for (int i = 0; i < 4; i++)
            for (int p = 0; p < (SHAPE == ANY ? t->recipe->count : SHAPE); p++)
                from[i][p] = t->part[p] + (4 * q + i < t->last ? 4 * q + i : t->last) * t->row_bytes[p];
        for (int64_t b = 0; b + 1 < blocks; b += 2)
            four_outputs(t->recipe, from, x, x_bytes, b, work + b * 2 + q, stride, 1, M, P, SHAPE);
        if (blocks % 2)
            four_outputs(t->recipe, from, x, x_bytes, blocks - 1, work + (blocks - 1) * 2 + q, stride, 0, M, P, SHAPE);
    }
    for (int m = 0; m < M; m++, work += stride, of_group++) {
        __m512i group = _mm512_setzero_si512();
        __m512 total = _mm512_setzero_ps();
        int64_t g = 0, left = each;
        for (int64_t b = 0; b < blocks; b += 2) {
            __m512i sum[2];
            for (int i = 0; i < 2; i++) {
                const __m512i a = work[b * 2 + 2 * i], c = work[b * 2 + 2 * i + 1];
                sum[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xDD));
            }
            for (int i = 0; i < 2 && b + i < blocks; i++) {
                group = _mm512_add_epi32(group, _mm512_shuffle_i32x4(sum[0], sum[1], i ? 0xDD : 0x88));
                if (--left) continue;
                const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
                total = add_group(total, _mm512_cvtepi32_ps(group), offset, scale, of_group + g * rows);
                group = _mm512_setzero_si512();
                g++, left = each;
            }
        }
        y[m] = total;
    }
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

typedef void (*FewFn)(const Tile *, const char *, int64_t, const OfGroup *, int64_t, __m512i *, __m512 *);
typedef void (*PanelFn)(const Tile *, const char *, const char *, int64_t, const OfGroup *, int64_t, int, __m512 *);

#define FEW_ROWS(M, P, SHAPE)                                                                                          \
    TARGET_AVX512 static void few_##M##_##P##_##SHAPE(const Tile *t, const char *x, int64_t x_bytes,                   \
                                                      const OfGroup *of_group, int64_t rows, __m512i *work, __m512 *y) { \
        few_rows(t, x, x_bytes, of_group, rows, work, y, M, P, SHAPE);                                                 \
    }
#define FEW_SHAPES(M, P) FEW_ROWS(M, P, ANY) FEW_ROWS(M, P, W4) FEW_ROWS(M, P, W42) FEW_ROWS(M, P, W422)
#define LISTED(M, P) {few_##M##_##P##_ANY, few_##M##_##P##_W4, few_##M##_##P##_W42, few_##M##_##P##_W422}
FEW_SHAPES(1, 1) FEW_SHAPES(2, 1) FEW_SHAPES(3, 1) FEW_SHAPES(4, 1)
FEW_SHAPES(1, 2) FEW_SHAPES(2, 2) FEW_SHAPES(3, 2) FEW_SHAPES(4, 2)
static const FewFn FEW_FNS[2][FEW][4] = {{LISTED(1, 1), LISTED(2, 1), LISTED(3, 1), LISTED(4, 1)},
                                         {LISTED(1, 2), LISTED(2, 2), LISTED(3, 2), LISTED(4, 2)}};

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
    decode_tile(w, n, at, (char *)(offset + TILE * w->groups), scale, offset);
    return t;
}

/* Rows [n0, n1) of the weight times rows [r0, r1) of x, which read the same precision in as many planes. */
TARGET_AVX512 static void multiply_integers(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1,
                                            float *scratch) {
    const int64_t groups = j->w.groups;
    const int planes = j->planes[r0], shape = j->recipe[at].shape;
    const int few = r1 - r0 <= FEW && (planes == 1 || j->w.kp / groups <= 256);
    for (int64_t n = n0; n < n1; n += TILE) {
        const Tile t = tile_of(j, at, n, scratch);
        if (!few) make_panel(&t, (char *)scratch);
        __m512 y[12];
        int kind = 0;
        for (int64_t r = r0, many; r < r1; r += many) {
            const char *x = j->x + r * j->x_bytes;
            const OfGroup *of_group = j->of_group + r;
            if (few) {
                many = r1 - r0;
                FEW_FNS[planes - 1][many - 1][shape](&t, x, j->x_bytes, of_group, j->rows, (__m512i *)scratch, y);
            } else {
                while (PANEL_FNS[kind].rows > r1 - r) kind++;
                many = PANEL_FNS[kind].rows;
                PANEL_FNS[kind].planes[planes - 1](&t, (const char *)scratch, x, j->x_bytes, of_group, j->rows, r == r0, y);
            }
            for (int64_t i = 0; i < many; i++) store_tile(j, j->row[r + i], n, y[i]);
        }
    }
}
