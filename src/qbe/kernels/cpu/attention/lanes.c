/* Arithmetic of 16 floats at once. Included by attention.c. */

/* Numbers [i, i + LANES) of a row of `dim`; zero past its end. */
INLINE Floats load_lanes(const char *row, int dtype, int64_t dim, int64_t i) {
    const int64_t left = dim - i < LANES ? dim - i : LANES;
    if (dtype == FLOAT32) {
        Floats f = {0};
        if (left == LANES) memcpy(&f, row + 4 * i, sizeof f);
        else memcpy(&f, row + 4 * i, (size_t)left * 4);
        return f;
    }
    Halves h = {0};
    if (left == LANES) memcpy(&h, row + 2 * i, sizeof h);
    else memcpy(&h, row + 2 * i, (size_t)left * 2);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

INLINE float sum_lanes(Floats f) {
    float lanes[LANES];
    memcpy(lanes, &f, sizeof f);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* The same of LANES vectors. */
static void sum_each(const Floats *f, float *to) {
    for (int i = 0; i < LANES; i++) to[i] = sum_lanes(f[i]);
}

#ifdef X86
/* In the same order, all at once: each step puts parts of two vectors beside each other and adds to them the other parts. */
TARGET_AVX512 static void sum_each_avx512(const Floats *f, float *to) {
    __m512 v[LANES];
    for (int i = 0; i < LANES; i++) v[i] = (__m512)f[i];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xDD));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[i], v[i + 2], 0x44), _mm512_shuffle_ps(v[i], v[i + 2], 0xEE));
    v[0] = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xDD));
    /* where each vector's sum has come to */
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(order, v[0]));
}
#endif

/* e^x for x <= 88; below -87 that of -87. Cody and Waite's reduction, Taylor's polynomial of degree 7. */
INLINE Floats exp_lanes(Floats x) {
    x = pick(x < splat(-87.0f), splat(-87.0f), x);
    const Floats magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    const Floats whole = (x * 1.44269504f + magic) - magic;
    const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((__builtin_convertvector(whole, Integers) + 127) << 23);
}
