/* Products of bfloat16 by tiles (AMX). Included by nested.c.

   Codes become weights of bfloat16 as a panel is made, so that nothing is left to do with a group's sums: they stay in the
   tiles from the first input to the last. A weight is (code - offset) * scale rounded once, as a checkpoint's is, where the
   integers of dot_vnni.c multiply the weight itself: which of the two a row meets depends on how many read its precision.

   An output tile of the panel holds, for 32 inputs, 16 lines: a pair of inputs of TILE outputs in each. x lies in the order in
   which tiles take it (load_tile_row): 32 inputs of up to TILE_LINES rows, one behind the other.

   The registers: 0 to 3 sums (2 * rows + outputs), 4 and 5 two tiles of rows, 6 and 7 two of outputs. */

#define TILE_INPUTS 32
#define TILED_GROUP 1024 /* inputs of a group at most: a row is loaded group by group */

#if defined(__clang__) || __GNUC__ > 10
#define TARGET_BFLOAT16 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,amx-tile,amx-bf16")))

/* Where the row r of x lies. */
INLINE char *tile_line(const Job *j, int64_t r) {
    const int64_t first = j->by_tiles[j->precision[r]].first, at = (r - first) % TILE_LINES;
    return j->x + (r - at) * j->x_bytes + at * 64;
}

/* The row r of x to its place, zero in padding. */
TARGET_AVX512 static void load_tile_row(const Job *j, int64_t r) {
    const int32_t row = j->row[r];
    const int64_t group = j->w.kp / j->w.groups;
    const int eight = has_eight(j->words[row]);
    uint16_t rounded[TILED_GROUP];
    const Rows *run = &j->by_tiles[j->precision[r]];
    const int64_t left = run->count - (r - run->first) / TILE_LINES * TILE_LINES;
    const int64_t lines = left < TILE_LINES ? left : TILE_LINES; /* of its tile */
    char *to = tile_line(j, r);
    for (int64_t g = 0; g < j->w.groups; g++) {
        const int64_t inputs = j->k - g * group, count = inputs < group ? inputs : group;
        const char *from = given_row(j, row) + g * group * 2;
        if (eight) round_row_avx512(from, BFLOAT16, count, group, 1, (char *)rounded), from = (const char *)rounded;
        for (int64_t i = 0; i < group; i += TILE_INPUTS, to += lines * 64) {
            const int64_t in = count - i;
            const __mmask32 mask = in >= TILE_INPUTS ? ~0u : in > 0 ? (1u << in) - 1 : 0;
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(mask, from + 2 * i));
        }
    }
}

/* The weights of a tile in bfloat16, out of its codes (make_panel). */
TARGET_BFLOAT16 static void widen_panel(const Tile *t, const char *codes, char *panel) {
    const int64_t groups = t->w->groups, lines = t->w->kp / groups / 4;
    const __m512i byte = _mm512_set1_epi32(255);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16)); /* i, 16 + i */
#define WEIGHTS(SHIFTED) \
    _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_and_si512(byte, SHIFTED)), offset), scale)
#define PAIR(FIRST, SECOND) _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(WEIGHTS(SECOND), WEIGHTS(FIRST)))
    for (int64_t g = 0; g < groups; g++) {
        const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
        for (int64_t i = 0; i < lines; i++, codes += 64, panel += 128) {
            const __m512i four = _mm512_load_si512(codes);
            _mm512_store_si512(panel, PAIR(four, _mm512_srli_epi32(four, 8)));
            _mm512_store_si512(panel + 64, PAIR(_mm512_srli_epi32(four, 16), _mm512_srli_epi32(four, 24)));
        }
    }
#undef PAIR
#undef WEIGHTS
}

/* Registers for one tile of rows, or two. */
TARGET_BFLOAT16 static void shape_bfloat16(int first, int second) {
    Shapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.lines[i] = (uint8_t)(i > 5 ? 16 : i == 2 || i == 3 || i == 5 ? second : first);
    _tile_loadconfig(&s);
}

/* Asks for part g of `groups` of the two tiles behind these, as ask_for_next. */
TARGET_BFLOAT16 INLINE void ask_for_pair(const Tile *t, int64_t g) {
    for (int p = 0; p < t->recipe->count; p++) {
        const int64_t bytes = 2 * TILE * t->row_bytes[p], share = bytes / t->w->groups;
        const char *next = (const char *)t->part[p] + bytes + g * share;
        for (int64_t i = 0; i < share; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
    }
}

/* One tile of rows or two (TWO_ROWS) times one tile of outputs or two. x, panel: of the first; x_tile, panel_tile: bytes to the
   second; lines: of the first tile of rows, and of the second. */
TARGET_BFLOAT16 INLINE void multiply_pair(const Tile *t, const char *x, int64_t x_tile, const int *lines, const char *panel,
                                          int64_t panel_tile, int ask, float (*sums)[TILE_LINES][TILE], const int TWO_ROWS,
                                          const int TWO_OUTPUTS) {
    const int64_t blocks = t->w->kp / TILE_INPUTS, each = blocks / t->w->groups;
    const char *x2 = x + x_tile, *panel2 = panel + panel_tile;
    _tile_zero(0);
    if (TWO_OUTPUTS) _tile_zero(1);
    if (TWO_ROWS) _tile_zero(2);
    if (TWO_ROWS && TWO_OUTPUTS) _tile_zero(3);
    for (int64_t b = 0; b < blocks; b++, x += lines[0] * 64, panel += 1024) {
        if (ask && b % each == 0) ask_for_pair(t, b / each);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_OUTPUTS) {
            _tile_loadd(7, panel2, 64);
            _tile_dpbf16ps(1, 4, 7);
            panel2 += 1024;
        }
        if (TWO_ROWS) {
            _tile_loadd(5, x2, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_OUTPUTS) _tile_dpbf16ps(3, 5, 7);
            x2 += lines[1] * 64;
        }
    }
    _tile_stored(0, sums[0], 64);
    if (TWO_OUTPUTS) _tile_stored(1, sums[1], 64);
    if (TWO_ROWS) _tile_stored(2, sums[2], 64);
    if (TWO_ROWS && TWO_OUTPUTS) _tile_stored(3, sums[3], 64);
}

/* Floats of scratch that two tiles of outputs need, behind those of a tile. */
static int64_t bfloat16_floats(const Weight *w) { return TILE * w->kp; }

/* Rows [n0, n1) of the weight times rows [r0, r1) of x: a run of choose_tiles, or a part of it in whole pairs of tiles. */
TARGET_BFLOAT16 static void multiply_bfloat16(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1,
                                              float *scratch) {
    const int64_t panel_tile = 2 * TILE * j->w.kp, x_tile = TILE_LINES * j->x_bytes;
    char *const panel = (char *)(scratch + tile_floats(&j->w));
    __attribute__((aligned(64))) float sums[4][TILE_LINES][TILE];
    int shaped[2] = {0, 0};
    for (int64_t n = n0; n < n1; n += 2 * TILE) {
        const int outputs = n + TILE < n1 ? 2 : 1;
        Tile t;
        for (int o = outputs - 1; o >= 0; o--) {
            t = tile_of(j, at, n + o * TILE, scratch);
            make_panel(&t, (char *)scratch);
            widen_panel(&t, (const char *)scratch, panel + o * panel_tile);
        }
        for (int64_t r = r0; r < r1; r += 2 * TILE_LINES) {
            const int64_t left = r1 - r;
            const int lines[2] = {(int)(left < TILE_LINES ? left : TILE_LINES),
                                  (int)(left < TILE_LINES ? 0 : left < 2 * TILE_LINES ? left - TILE_LINES : TILE_LINES)};
            if (lines[0] != shaped[0] || lines[1] != shaped[1])
                shape_bfloat16(shaped[0] = lines[0], (shaped[1] = lines[1]) ? lines[1] : 1);
            const char *x = tile_line(j, r);
            if (outputs == 2) {
                if (lines[1]) multiply_pair(&t, x, x_tile, lines, panel, panel_tile, r == r0, sums, 1, 1);
                else multiply_pair(&t, x, x_tile, lines, panel, panel_tile, r == r0, sums, 0, 1);
            } else {
                if (lines[1]) multiply_pair(&t, x, x_tile, lines, panel, panel_tile, r == r0, sums, 1, 0);
                else multiply_pair(&t, x, x_tile, lines, panel, panel_tile, r == r0, sums, 0, 0);
            }
            for (int i = 0; i < lines[0] + lines[1]; i++)
                for (int o = 0; o < outputs; o++)
                    store_tile(j, j->row[r + i], n + o * TILE,
                               _mm512_load_ps(sums[i / TILE_LINES * 2 + o][i % TILE_LINES]));
        }
    }
    _tile_release(); /* as in multiply_tiles */
}
#else
static void load_tile_row(const Job *j, int64_t r) {}
static int64_t bfloat16_floats(const Weight *w) { return 0; }
static void multiply_bfloat16(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {}
#endif
