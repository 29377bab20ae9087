/* Integer dot products by tiles (AMX). Included by nested.c.

   A block of a panel (panel_avx512.c) is what the instruction takes as it is: 4 inputs of TILE outputs in each of 16 lines.
   A group's sums are the exact integers of dot_vnni.c and its scales act on them by the same code, so that a row comes out
   the same, bit for bit, as there.

   The registers: 0 a block of the panel, 1 a plane of the rows' numbers for it, 2 to 5 sums of two groups' planes. */

#define TILED 5       /* rows that pay for tiles (benchmarks/cpu_crossover.py) */

#if defined(__clang__) || __GNUC__ > 10
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET_TILES \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,amx-tile,amx-int8")))

/* Whether the processor multiplies tiles of bytes and of bfloat16, and the system lets this process use them. */
static int has_tiles(void) {
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* XGETBV */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) + (d >> 24 & 1) + (d >> 25 & 1) < 3) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return 0;
#ifdef SYS_arch_prctl
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* the tiles' data */) == 0;
#else
    return 0;
#endif
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a line of each register */
    uint8_t lines[16];
} Shapes;

/* Registers for so many rows. */
TARGET_TILES static void shape_tiles(int rows) {
    Shapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.lines[i] = (uint8_t)(i == 0 ? 16 : rows);
    _tile_loadconfig(&s);
}

/* A group's products with P planes of the rows, in the registers SUM0 and on. */
#define ADD_PLANE(SUM, PLANE)                            \
    do {                                                 \
        _tile_loadd(1, x + (PLANE) * BLOCK, x_bytes);    \
        _tile_dpbsud(SUM, 1, 0);                         \
    } while (0)
#define MULTIPLY_GROUP(SUM0, SUM1)                                      \
    do {                                                                \
        _tile_zero(SUM0);                                               \
        if (P > 1) _tile_zero(SUM1);                                    \
        for (int64_t b = 0; b < each; b++, panel += 1024, x += P * BLOCK) { \
            _tile_loadd(0, panel, 64);                                  \
            ADD_PLANE(SUM0, 0);                                         \
            if (P > 1) ADD_PLANE(SUM1, 1);                              \
        }                                                               \
        _tile_stored(SUM0, sums[0], 64);                                \
        if (P > 1) _tile_stored(SUM1, sums[1], 64);                     \
    } while (0)

/* As panel_rows, for a count of up to TILE_LINES rows that the registers are shaped for. */
TARGET_TILES INLINE void tile_rows(const Tile *t, const char *panel, const char *x, int64_t x_bytes, const OfGroup *of_group,
                                   int64_t rows, int first, __m512 *y, int count, const int P) {
    const int64_t groups = t->w->groups, each = t->w->kp / groups / BLOCK;
    __m512i sums[MAX_PLANES][TILE_LINES];
    for (int r = 0; r < count; r++) y[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        if (first) ask_for_next(t, g);
        if (g % 2) MULTIPLY_GROUP(2, 3); /* a group need not wait for the one before */
        else MULTIPLY_GROUP(4, 5);
        const __m512 offset = _mm512_load_ps(t->offset + g * TILE), scale = _mm512_load_ps(t->scale + g * TILE);
        for (int r = 0; r < count; r++) {
            const __m512 total = P == 1 ? _mm512_cvtepi32_ps(sums[0][r]) : of_planes(sums[0][r], sums[1][r], each);
            y[r] = add_group(y[r], total, offset, scale, of_group + g * rows + r);
        }
    }
}

/* The same as multiply_integers, for TILED rows and more. */
TARGET_TILES static void multiply_tiles(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    int shaped = 0;
    for (int64_t n = n0; n < n1; n += TILE) {
        const Tile t = tile_of(j, at, n, scratch);
        make_panel(&t, (char *)scratch);
        for (int64_t r = r0; r < r1; r += TILE_LINES) {
            const int rows = r1 - r < TILE_LINES ? (int)(r1 - r) : TILE_LINES;
            const char *x = j->x + r * j->x_bytes, *panel = (const char *)scratch;
            const OfGroup *of_group = j->of_group + r;
            __m512 y[TILE_LINES];
            if (rows != shaped) shape_tiles(shaped = rows);
            if (j->planes[r0] == 1) tile_rows(&t, panel, x, j->x_bytes, of_group, j->rows, r == r0, y, rows, 1);
            else tile_rows(&t, panel, x, j->x_bytes, of_group, j->rows, r == r0, y, rows, 2);
            for (int i = 0; i < rows; i++) store_tile(j, j->row[r + i], n, y[i]);
        }
    }
    _tile_release(); /* a thread that keeps them has all of them saved whenever it is interrupted */
}
#else /* a compiler that does not know tiles */
static int has_tiles(void) { return 0; }
static void multiply_tiles(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    multiply_integers(j, at, n0, n1, r0, r1, scratch);
}
#endif
