/* Dot products by AVX-512 with bfloat16 products and float32 sums. Included by nested.c.

   A code is one to four digits of at most 5 bits: runs of consecutive parts, each brought into the low bits of its
   byte by a broadcast load and a rotation per 64-bit lane. A table lookup (vpermw reads 5 bits of every word) turns a
   digit into its exact bfloat16 value, the first one centred; vdpbf16ps multiplies it with x. Bits above the digit need
   no mask: the table repeats. x in bfloat16 is exact; float32 x is the exact sum of three bfloat16 terms. So, as on
   the other paths, the only rounding is that of the float32 sums:

       y = sum over groups of scale8 * (sum((code8 - 128) * x) - (offset8 - 128) * sum(x)) */

#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512bf16,avx2,fma")))
#define CENTRE 128.0f
#define AHEAD 4096 /* bytes of a 4-bit part asked for in advance (measured: a fifth of a decode step) */

/* The steps that read `bits`, in digits of at most `most` bits (a table has 5: 8, for dequantise.c, needs none). */
static Recipe recipe_of(const Layout *l, int bits, int most) {
    Recipe r = {.count = parts_of(l, bits)};
    for (int p = 0, from = 0; p < r.count; p = from) {
        int digit = 0;
        for (from = p; from < r.count && digit + l->width[from] <= most; from++) digit += l->width[from];
        for (int q = p, left = digit; q < from; q++) {
            Step *s = &r.step[q];
            left -= l->width[q];
            s->width = l->width[q], s->starts = q == p, s->ends = q == from - 1;
            s->mask = 0x0101010101010101u * (((1u << s->width) - 1) << left);
            for (int i = 0; i < 8; i++) {
                s->spread[i] = i % s->width;
                s->rotate[i] = (left - i / s->width * s->width) & 63;
            }
            for (int i = 0; s->ends && i < 32; i++) {
                const int value = (i & ((1 << digit) - 1)) - (p == 0 ? 1 << (digit - 1) : 0);
                s->table[i] = to_bfloat16((float)(value * (1 << (8 - l->first[p] - digit))));
            }
        }
    }
    return r;
}

/* Widths of the parts of the default layout (4, 2, 2), known to the compiler; ANY takes them from the recipe. */
enum { ANY, W4, W42, W422 };
#define STEPS(SHAPE, R) ((SHAPE) == ANY ? (R)->count : (SHAPE))
#define WIDTH(SHAPE, R, P) ((SHAPE) == ANY ? (R)->step[P].width : (P) == 0 ? 4 : 2)
#define STARTS(SHAPE, R, P) ((SHAPE) == ANY ? (R)->step[P].starts : (P) < 2)
#define ENDS(SHAPE, R, P) ((SHAPE) == ANY ? (R)->step[P].ends : (P) != 1 || (SHAPE) == W42)

static int shape_of(const Recipe *r) {
    const int w = r->count <= 3 && r->step[0].width == 4;
    for (int p = 1; w && p < r->count; p++)
        if (r->step[p].width != 2) return ANY;
    return w ? r->count : ANY;
}

TARGET_AVX512 INLINE __m512i load_part(const uint8_t *from, const Step *s, const int width, const int shape) {
    if (shape != ANY && width == 4) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)from));
    if (shape != ANY && width == 2) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
    const __m512i v = _mm512_maskz_loadu_epi64((__mmask8)((1 << width) - 1), from);
    return _mm512_permutexvar_epi64(_mm512_loadu_si512(s->spread), v);
}

/* y[m * stride + i] for M rows of x and N consecutive rows of the weight, which read the same precision.

   part[p]: the first of these rows in part p. scale [N, groups]: scale8; shift [N, groups]: scale8 * (offset8 - 128).
   x[m]: bfloat16 [blocks, TERMS, 2, 32], the even and the odd inputs of a block; sums[m]: float32 [groups]. */
TARGET_AVX512 INLINE void dot_avx512(const Weight *w, const Recipe *r, const uint8_t *const *part, const float *scale,
                                     const float *shift, const uint16_t *const *x, const float *const *sums, float *y,
                                     const int M, const int N, const int TERMS, const int SHAPE) {
    __m512 total[4 * 4];
    for (int i = 0; i < M * N; i++) total[i] = _mm512_setzero_ps();
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (int64_t g = 0, b = 0; g < w->groups; g++) {
        __m512 sum[4 * 4];
        for (int i = 0; i < M * N; i++) sum[i] = _mm512_setzero_ps();
        for (int64_t end = b + blocks; b < end; b++)
            for (int n = 0; n < N; n++) {
                __m512i digit = _mm512_setzero_si512();
                for (int p = 0; p < STEPS(SHAPE, r); p++) {
                    const Step *s = &r->step[p];
                    const int width = WIDTH(SHAPE, r, p);
                    const int64_t at = (n * (w->kp / BLOCK) + b) * 8 * width;
                    _mm_prefetch((const char *)part[p] + at + AHEAD * width / 4, _MM_HINT_T0);
                    __m512i v = load_part(part[p] + at, s, width, SHAPE);
                    v = _mm512_rolv_epi64(v, _mm512_loadu_si512(s->rotate));
                    const __m512i mask = _mm512_set1_epi64((int64_t)s->mask);
                    digit = STARTS(SHAPE, r, p) ? v : _mm512_ternarylogic_epi64(mask, v, digit, 0xCA); /* mask ? v : digit */
                    if (!ENDS(SHAPE, r, p)) continue;
                    const __m512i table = _mm512_loadu_si512(s->table);
                    const __m512bh even = (__m512bh)_mm512_permutexvar_epi16(digit, table);
                    const __m512bh odd = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(digit, 8), table);
                    for (int m = 0; m < M; m++)
                        for (int t = 0; t < TERMS; t++) {
                            const uint16_t *xs = x[m] + (b * TERMS + t) * BLOCK;
                            __m512 *to = &sum[m * N + n];
                            *to = _mm512_dpbf16_ps(*to, even, (__m512bh)_mm512_loadu_si512(xs));
                            *to = _mm512_dpbf16_ps(*to, odd, (__m512bh)_mm512_loadu_si512(xs + 32));
                        }
                }
            }
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                total[m * N + n] = _mm512_fmadd_ps(sum[m * N + n], _mm512_set1_ps(scale[n * w->groups + g]), total[m * N + n]);
    }
    for (int64_t g = 0; g < w->groups; g += 16) {
        const __mmask16 in = w->groups - g < 16 ? (__mmask16)((1 << (w->groups - g)) - 1) : 0xFFFF;
        for (int n = 0; n < N; n++) {
            const __m512 c = _mm512_maskz_loadu_ps(in, shift + n * w->groups + g);
            for (int m = 0; m < M; m++)
                total[m * N + n] = _mm512_fnmadd_ps(c, _mm512_maskz_loadu_ps(in, sums[m] + g), total[m * N + n]);
        }
    }
    for (int i = 0; i < M * N; i++) y[i] = _mm512_reduce_add_ps(total[i]);
}

typedef void (*DotFn)(const Weight *, const Recipe *, const uint8_t *const *, const float *, const float *,
                      const uint16_t *const *, const float *const *, float *);

#define DOT(M, N, TERMS, SHAPE)                                                                                        \
    TARGET_AVX512 static void dot_##M##_##N##_##TERMS##_##SHAPE(                                                       \
        const Weight *w, const Recipe *r, const uint8_t *const *part, const float *scale, const float *shift,          \
        const uint16_t *const *x, const float *const *sums, float *y) {                                                \
        dot_avx512(w, r, part, scale, shift, x, sums, y, M, N, TERMS, SHAPE);                                          \
    }
#define DOTS(M, N)                                                                                                     \
    DOT(M, N, 1, ANY) DOT(M, N, 1, W4) DOT(M, N, 1, W42) DOT(M, N, 1, W422)                                            \
    DOT(M, N, 3, ANY) DOT(M, N, 3, W4) DOT(M, N, 3, W42) DOT(M, N, 3, W422)
#define LISTED(M, N)                                                                                                   \
    {{dot_##M##_##N##_1_ANY, dot_##M##_##N##_1_W4, dot_##M##_##N##_1_W42, dot_##M##_##N##_1_W422},                     \
     {dot_##M##_##N##_3_ANY, dot_##M##_##N##_3_W4, dot_##M##_##N##_3_W42, dot_##M##_##N##_3_W422}}

/* Sums and totals of a tile fill half of the registers. */
DOTS(1, 1) DOTS(2, 1) DOTS(4, 1) DOTS(1, 4) DOTS(2, 4) DOTS(4, 2)
static const struct { int m, n; DotFn one[2][4], many[2][4]; } TILES[] = {
    {4, 2, LISTED(4, 1), LISTED(4, 2)}, {2, 4, LISTED(2, 1), LISTED(2, 4)}, {1, 4, LISTED(1, 1), LISTED(1, 4)}};

/* Rows [n0, n1) of the weight times rows [r0, r1) of x: tiles as large as the rows fill. `scale` is overwritten. */
TARGET_AVX512 static void multiply_avx512(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1,
                                          float *scale, float *shift) {
    const Weight *w = &j->w;
    const Recipe *recipe = &j->recipe[at];
    const int shape = shape_of(recipe), three = j->dtype == FLOAT32;
    decode_meta(w, n0, n1, at, scale, shift);
    for (int64_t i = 0; i < (n1 - n0) * w->groups; i++) shift[i] = scale[i] * (shift[i] - CENTRE);
    for (int kind = 0; kind < 3; kind++) {
        const int m = TILES[kind].m;
        const int64_t last = r0 + (r1 - r0) / m * m;
        for (int64_t n = n0, many; n < n1; n += many) {
            many = n1 - n >= TILES[kind].n ? TILES[kind].n : 1;
            const DotFn dot = many > 1 ? TILES[kind].many[three][shape] : TILES[kind].one[three][shape];
            const uint8_t *part[8];
            for (int p = 0; p < recipe->count; p++) part[p] = part_row(w, p, n);
            for (int64_t r = r0; r < last; r += m) {
                const uint16_t *x[4];
                const float *sums[4];
                float y[4 * 4];
                for (int i = 0; i < m; i++) {
                    x[i] = (const uint16_t *)((const char *)j->x + j->row[r + i] * j->x_bytes);
                    sums[i] = j->sums + j->row[r + i] * w->groups;
                }
                dot(w, recipe, part, scale + (n - n0) * w->groups, shift + (n - n0) * w->groups, x, sums, y);
                for (int i = 0; i < m; i++)
                    for (int k = 0; k < many; k++) store(j, j->row[r + i], n + k, y[i * many + k]);
            }
        }
        r0 = last;
    }
}

/* One row of x as the even and the odd inputs of each block in bfloat16 (float32: three terms that add up to it), and
   its sums over groups. */
TARGET_AVX512 static void load_avx512(const void *x, int dtype, int64_t k, const Weight *w, uint16_t *out, float *sums) {
    const int terms = dtype == FLOAT32 ? 3 : 1;
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (int64_t g = 0, b = 0; g < w->groups; g++) {
        float lanes[16] = {0};
        for (int64_t end = b + blocks; b < end; b++, out += terms * BLOCK) {
            float block[BLOCK];
            load_block(x, dtype, k, b, block);
            for (int i = 0; i < BLOCK; i++) lanes[i % 16] += block[i];
            for (int t = 0; t < terms; t++)
                for (int s = 0; s < 2; s++)
                    for (int i = 0; i < 32; i++) {
                        const uint32_t top = float_to_bits(block[2 * i + s]) & 0xFFFF0000u; /* the first 8 digits */
                        out[t * BLOCK + s * 32 + i] = (uint16_t)(top >> 16);
                        if (terms > 1) block[2 * i + s] -= bits_to_float(top);
                    }
        }
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
        sums[g] = lanes[0];
    }
}
