/* Dot products in float32 without AVX-512: a scalar path that compilers vectorise, and AVX2. Included by nested.c.

   A code at the top of a byte (store.c), put into the top mantissa bits of 256.0, is the float 256 + code8; subtracting
   256 + offset8 is exact (at most 17 significant bits), so the only rounding is that of the float32 sums. */

#define MAX_TILE 4   /* rows of x served by one unpacking */
#define MAGIC 256.0f /* its mantissa has room for a byte below the leading one */

/* y[m] = dot(weight row, x[m]) for M rows of x that read the same precision; x float32 [kp], as load_float leaves it. */

INLINE void dot_scalar(const Weight *w, const uint8_t *const *rows, int parts, const float *scale,
                       const float *offset, const float *const *x, float *y, const int M) {
    float total[MAX_TILE][16] = {{0}};
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (int64_t g = 0, b = 0; g < w->groups; g++) {
        float sum[MAX_TILE][16] = {{0}};
        for (int64_t end = b + blocks; b < end; b++) {
            uint64_t words[8];
            uint8_t codes[BLOCK];
            unpack_block(w->layout, rows, parts, b, words);
            memcpy(codes, words, BLOCK);
            for (int t = 0; t < 4; t++) {
                float d[16];
                for (int i = 0; i < 16; i++) d[i] = (float)codes[16 * t + i] - offset[g];
                for (int m = 0; m < M; m++)
                    for (int i = 0; i < 16; i++) sum[m][i] += d[i] * x[m][b * BLOCK + 16 * t + i];
            }
        }
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 16; i++) total[m][i] += sum[m][i] * scale[g];
    }
    for (int m = 0; m < M; m++) {
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) total[m][i] += total[m][i + width];
        y[m] = total[m][0];
    }
}

#ifdef X86
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
TARGET_AVX2 INLINE void dot_avx2(const Weight *w, const uint8_t *const *rows, int parts, const float *scale,
                                 const float *offset, const float *const *x, float *y, const int M) {
    const __m256i mask = _mm256_set1_epi32(0x7f8000), magic = _mm256_set1_epi32(0x43800000);
    __m256 total[MAX_TILE];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (int64_t g = 0, b = 0; g < w->groups; g++) {
        const __m256 off = _mm256_set1_ps(MAGIC + offset[g]);
        __m256 sum[MAX_TILE];
        for (int m = 0; m < M; m++) sum[m] = _mm256_setzero_ps();
        for (int64_t end = b + blocks; b < end; b++) {
            uint64_t words[8] __attribute__((aligned(32)));
            unpack_block(w->layout, rows, parts, b, words);
            for (int h = 0; h < 2; h++) {
                const __m256i codes = _mm256_load_si256((const __m256i *)words + h);
#define STEP(T, SHIFTED)                                                                                        \
    {                                                                                                           \
        __m256i u = _mm256_or_si256(_mm256_and_si256(SHIFTED, mask), magic);                                    \
        __m256 d = _mm256_sub_ps(_mm256_castsi256_ps(u), off);                                                  \
        for (int m = 0; m < M; m++)                                                                             \
            sum[m] = _mm256_fmadd_ps(d, _mm256_loadu_ps(x[m] + b * BLOCK + h * 32 + T * 8), sum[m]);            \
    }
                STEP(0, _mm256_slli_epi32(codes, 15))
                STEP(1, _mm256_slli_epi32(codes, 7))
                STEP(2, _mm256_srli_epi32(codes, 1))
                STEP(3, _mm256_srli_epi32(codes, 9))
#undef STEP
            }
        }
        for (int m = 0; m < M; m++) total[m] = _mm256_fmadd_ps(sum[m], _mm256_set1_ps(scale[g]), total[m]);
    }
    for (int m = 0; m < M; m++) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(total[m]), _mm256_extractf128_ps(total[m], 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        y[m] = _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
}
#endif

#define DOT_ROWS(DOT)                                                  \
    switch (m) { /* constant M: the compiler keeps the sums in registers */ \
    case 1: DOT(w, part, parts, s, o, x, y, 1); break;                 \
    case 2: DOT(w, part, parts, s, o, x, y, 2); break;                 \
    case 3: DOT(w, part, parts, s, o, x, y, 3); break;                 \
    default: DOT(w, part, parts, s, o, x, y, 4); break;                \
    }

/* Rows [n0, n1) of the weight times rows [r0, r1) of x, which read the same precision. */
#define DEFINE_MULTIPLY(NAME, TARGET)                                                                              \
    TARGET static void multiply_##NAME(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1,       \
                                       float *scale) {                                                             \
        const Weight *w = &j->w;                                                                                   \
        float *offset = scale + (n1 - n0) * w->groups;                                                             \
        const int parts = parts_of(w->layout, w->layout->precision[at]);                                           \
        decode_meta(w, n0, n1, at, scale, offset);                                                                 \
        for (int64_t n = n0; n < n1; n++) {                                                                        \
            const uint8_t *part[8];                                                                                \
            const float *s = scale + (n - n0) * w->groups, *o = offset + (n - n0) * w->groups;                     \
            for (int p = 0; p < parts; p++) part[p] = part_row(w, p, n);                                           \
            for (int64_t r = r0; r < r1; r += MAX_TILE) {                                                          \
                const int m = r1 - r < MAX_TILE ? (int)(r1 - r) : MAX_TILE;                                        \
                const float *x[MAX_TILE];                                                                          \
                float y[MAX_TILE];                                                                                 \
                for (int i = 0; i < m; i++) x[i] = (const float *)j->x + (r + i) * w->kp;                          \
                DOT_ROWS(dot_##NAME)                                                                               \
                for (int i = 0; i < m; i++) store(j, j->row[r + i], n, y[i]);                                      \
            }                                                                                                      \
        }                                                                                                          \
    }

DEFINE_MULTIPLY(scalar, )
#ifdef X86
DEFINE_MULTIPLY(avx2, TARGET_AVX2)
#endif

/* A row of x in float32, padded. For AVX2, lane i of step t of each half of a block reads byte t of the half's i-th
   32-bit word: input 4i + t. */
static void load_float(const char *x, int dtype, int64_t k, const Weight *w, int eight, int permuted, float *out) {
    if (eight) round_to_eight(x, dtype, k, w->kp, w->groups, out);
    for (int64_t b = 0; b * BLOCK < w->kp; b++, out += BLOCK) {
        float block[BLOCK];
        if (eight) memcpy(block, out, sizeof block);
        else load_block(x, dtype, k, b, block);
        for (int i = 0; i < BLOCK; i++) out[i] = block[permuted ? i / 32 * 32 + i % 8 * 4 + i / 8 % 4 : i];
    }
}
