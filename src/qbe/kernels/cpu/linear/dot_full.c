/* Rows at 16 bits: products with the 16-bit original, float32 sums. Included by nested.c.

   Each row of the weight goes through the same operations whatever its neighbours; products are exact (bfloat16) or
   rounded once (float32), and a result is rounded once to y's dtype. */

#define FULL_TILE 4   /* rows of x served by one reading */
#define FULL_BLOCK 16 /* rows of the weight that stay in the first cache for more rows of x than that */

/* y[m] = weight row . x[m], of DTYPE and XTYPE; both k numbers long. */
INLINE void dot_full_floats(const char *weight, const char *const *x, int64_t k, float *y, const int M, const int DTYPE,
                            const int XTYPE) {
    const int64_t number = DTYPE == FLOAT32 ? 4 : 2, whole = k / (2 * LANES) * (2 * LANES);
    Floats sum[FULL_TILE][2] = {{{0}}};
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        _Static_assert(LANES == 16, "two vectors are a cache line of bfloat16");
        __builtin_prefetch(weight + number * i + 2048);
        for (int h = 0; h < 2; h++) {
            const Floats w = load_lanes(weight, DTYPE, k, i + h * LANES);
            for (int m = 0; m < M; m++) sum[m][h] += w * load_lanes(x[m], XTYPE, k, i + h * LANES);
        }
    }
    for (int64_t i = whole; i < k; i += LANES) {
        const Floats w = load_lanes(weight, DTYPE, k, i);
        for (int m = 0; m < M; m++) sum[m][0] += w * load_lanes(x[m], XTYPE, k, i);
    }
    for (int m = 0; m < M; m++) y[m] = sum_lanes(sum[m][0] + sum[m][1]);
}

#ifdef X86
/* bfloat16 alone: 32 products an instruction. */
TARGET_AVX512 INLINE void dot_full_bf16(const char *weight, const char *const *x, int64_t k, float *y, const int M) {
    __m512 sum[FULL_TILE][2];
    for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 64 <= k; i += 64) {
        _mm_prefetch(weight + 2 * i + 2048, _MM_HINT_T0);
        _mm_prefetch(weight + 2 * i + 2112, _MM_HINT_T0);
        const __m512bh a = (__m512bh)_mm512_loadu_si512(weight + 2 * i), b = (__m512bh)_mm512_loadu_si512(weight + 2 * i + 64);
        for (int m = 0; m < M; m++) {
            sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, (__m512bh)_mm512_loadu_si512(x[m] + 2 * i));
            sum[m][1] = _mm512_dpbf16_ps(sum[m][1], b, (__m512bh)_mm512_loadu_si512(x[m] + 2 * i + 64));
        }
    }
    for (; i < k; i += 32) {
        const __mmask32 in = k - i < 32 ? (1u << (k - i)) - 1 : 0xFFFFFFFFu;
        const __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(in, weight + 2 * i);
        for (int m = 0; m < M; m++)
            sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, (__m512bh)_mm512_maskz_loadu_epi16(in, x[m] + 2 * i));
    }
    for (int m = 0; m < M; m++) y[m] = _mm512_reduce_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]));
}
#endif

/* Rows [n0, n1) of the original times the rows [r0, r1) of those that ask for it, x_bytes apart at x if they are not
   read where they are given. */
#define DEFINE_FULL(NAME, TARGET, BF16)                                                                              \
    TARGET static void full_rows_##NAME(const Job *j, int64_t n0, int64_t n1, int64_t r0, int64_t r1, const char *own) { \
        const int64_t bytes = j->k * (j->dtype == FLOAT32 ? 4 : 2);                                                  \
        const int64_t block = r1 - r0 > FULL_BLOCK ? FULL_BLOCK : 1;                                                 \
        for (int64_t first = n0; first < n1; first += block)                                                         \
            for (int64_t r = r0; r < r1; r += FULL_TILE)                                                             \
                for (int64_t n = first; n < n1 && n < first + block; n++) {                                          \
                    const int m = r1 - r < FULL_TILE ? (int)(r1 - r) : FULL_TILE;                                    \
                    const char *x[FULL_TILE], *weight = j->original + n * bytes;                                     \
                    float y[FULL_TILE];                                                                              \
                    for (int i = 0; i < m; i++)                                                                      \
                        x[i] = own ? own + (r + i - r0) * j->w.kp * 4 : given_row(j, j->row_full[r + i]);            \
                    /* constants: sums stay in registers */                                                          \
                    switch (m + FULL_TILE * (j->dtype == FLOAT32 ? 0 : own ? 1 : 2)) {                               \
                    case 1: dot_full_floats(weight, x, j->k, y, 1, FLOAT32, FLOAT32); break;                         \
                    case 2: dot_full_floats(weight, x, j->k, y, 2, FLOAT32, FLOAT32); break;                         \
                    case 3: dot_full_floats(weight, x, j->k, y, 3, FLOAT32, FLOAT32); break;                         \
                    case 4: dot_full_floats(weight, x, j->k, y, 4, FLOAT32, FLOAT32); break;                         \
                    case 5: dot_full_floats(weight, x, j->k, y, 1, BFLOAT16, FLOAT32); break;                        \
                    case 6: dot_full_floats(weight, x, j->k, y, 2, BFLOAT16, FLOAT32); break;                        \
                    case 7: dot_full_floats(weight, x, j->k, y, 3, BFLOAT16, FLOAT32); break;                        \
                    case 8: dot_full_floats(weight, x, j->k, y, 4, BFLOAT16, FLOAT32); break;                        \
                    case 9: BF16(1); break;                                                                          \
                    case 10: BF16(2); break;                                                                         \
                    case 11: BF16(3); break;                                                                         \
                    default: BF16(4);                                                                                \
                    }                                                                                                    \
                    for (int i = 0; i < m; i++) store(j, j->row_full[r + i], n, y[i]);                               \
                }                                                                                                    \
    }                                                                                                                \
    TARGET static void full_##NAME(const Job *j, int64_t n0, int64_t n1) {                                           \
        full_rows_##NAME(j, n0, n1, 0, j->full - j->full_eight, NULL);                                               \
        full_rows_##NAME(j, n0, n1, j->full - j->full_eight, j->full, (const char *)j->x_eight);                     \
    }

#define BY_FLOATS(M) dot_full_floats(weight, x, j->k, y, M, BFLOAT16, BFLOAT16)
DEFINE_FULL(scalar, , BY_FLOATS)
#ifdef X86
DEFINE_FULL(avx2, TARGET_AVX2, BY_FLOATS)
#define BY_BF16(M) \
    if (has_bf16()) dot_full_bf16(weight, x, j->k, y, M); \
    else BY_FLOATS(M)
DEFINE_FULL(avx512, TARGET_AVX512, BY_BF16)
#endif
