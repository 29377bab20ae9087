/* Activations as the kernels read them. Included by nested.c.

   A row whose word asks for 8 bits is rounded as qbe/kernels/reference/activations.py rounds it, operation by operation:
   s = max|x| / 32512 of a group, q = round(x / s), and the byte (q + 128) >> 8 stands for 256 * s * byte.

   For integer products (dot_vnni.c) every row becomes signed bytes: one plane of them at 8 bits; at 16 bits two planes,
   whose value is scale * (256 * first + second), or int16 of the same value (dot_winograd.c). Those scales are powers of
   two, so that most values of 16-bit dtypes are exact: bfloat16 down to 1/64 of its group's largest, float16 down to 1/8. A
   number of float32 becomes one of 16 bits, off by 2^-15 of its group's largest at most. */

#define FULL_BITS 16 /* a row at this width reads the 16-bit original */
#define EIGHT 8      /* the one width of activations below 16 bits */
#define TINY 0x08A6274Cu /* 1e-33f: no division by zero */
#define INFINITE 0x7F800000u
#define MAX_PLANES 2

/* The two halves of a row's word. */
INLINE int weight_bits(int32_t word) { return word & 255; }
INLINE int has_eight(int32_t word) { return word >> 8 == EIGHT; }

/* A row of x as 8 bits hold it, in float32 [kp], padding zero. A group with an infinity or a NaN becomes NaN. */
static void round_to_eight(const void *x, int dtype, int64_t k, int64_t kp, int64_t groups, float *out) {
    const int64_t group = kp / groups;
    for (int64_t g = 0; g < groups; g++, out += group) {
        uint32_t most = TINY;
        for (int64_t b = 0; b < group / BLOCK; b++) load_block(x, dtype, k, g * (group / BLOCK) + b, out + b * BLOCK);
        for (int64_t i = 0; i < group; i++) {
            const uint32_t magnitude = float_to_bits(out[i]) & 0x7FFFFFFFu;
            most = magnitude > most ? magnitude : most;
        }
        const float scale = bits_to_float(most) / 32512.0f;
        for (int64_t i = 0; i < group; i++) {
            const float q = out[i] / scale;
            const int32_t byte = most < INFINITE ? ((int32_t)(q + (q >= 0 ? 0.5f : -0.5f)) + 128) >> 8 : 0;
            out[i] = 256.0f * scale * (float)byte;
        }
    }
}

#ifdef X86
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma")))

/* Cascade Lake and Ice Lake multiply bytes (VNNI) but know no bfloat16. The functions below are compiled with its instructions
   and ask before they use one; no compiler makes them of other code. */
INLINE int has_bf16(void) { return __builtin_cpu_supports("avx512bf16"); }

/* 16 numbers in bfloat16, rounded to nearest even. */
TARGET_AVX512 INLINE __m256i sixteen_bfloat16(__m512 v) {
    if (has_bf16()) return (__m256i)_mm512_cvtneps_pbh(v);
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* Numbers [i, i + 16) of a row of k; zero past its end. */
TARGET_AVX512 INLINE __m512 load_sixteen(const char *x, int dtype, int64_t k, int64_t i) {
    const __mmask16 in = k - i >= 16 ? 0xFFFF : k > i ? (__mmask16)((1 << (k - i)) - 1) : 0;
    if (dtype == FLOAT32) return _mm512_maskz_loadu_ps(in, x + 4 * i);
    const __m256i half = _mm256_maskz_loadu_epi16(in, x + 2 * i);
    if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The first of 16 numbers, to `to`. */
TARGET_AVX512 INLINE void store_sixteen(void *to, int dtype, __mmask16 in, __m512 v) {
    if (dtype == FLOAT32) _mm512_mask_storeu_ps(to, in, v);
    else if (dtype == FLOAT16) _mm256_mask_storeu_epi16(to, in, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    else _mm256_mask_storeu_epi16(to, in, sixteen_bfloat16(v));
}

/* The bytes of 16 numbers, given s of their group. */
TARGET_AVX512 INLINE __m512i eight_of(__m512 v, float scale) {
    const __m512 d = _mm512_div_ps(v, _mm512_set1_ps(scale)), sign = _mm512_and_ps(d, _mm512_set1_ps(-0.0f));
    const __m512i q = _mm512_cvttps_epi32(_mm512_add_ps(d, _mm512_or_ps(sign, _mm512_set1_ps(0.5f))));
    return _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
}

/* The same as round_to_eight, of `dtype`, without padding: to [k]. */
TARGET_AVX512 static void round_row_avx512(const char *x, int dtype, int64_t k, int64_t kp, int64_t groups, char *to) {
    const int64_t group = kp / groups;
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    for (int64_t g = 0; g * group < k; g++) {
        const int64_t end = (g + 1) * group < k ? (g + 1) * group : k;
        __m512i most = _mm512_set1_epi32((int)TINY);
        for (int64_t i = g * group; i < end; i += 16)
            most = _mm512_max_epu32(most, _mm512_and_si512(magnitude, _mm512_castps_si512(load_sixteen(x, dtype, k, i))));
        const uint32_t largest = _mm512_reduce_max_epu32(most);
        const float scale = bits_to_float(largest) / 32512.0f;
        const __m512 unit = _mm512_set1_ps(256.0f * scale);
        for (int64_t i = g * group; i < end; i += 16) {
            const __m512i byte = largest < INFINITE ? eight_of(load_sixteen(x, dtype, k, i), scale) : _mm512_setzero_si512();
            const __m512 v = _mm512_mul_ps(unit, _mm512_cvtepi32_ps(byte));
            const __mmask16 in = end - i >= 16 ? 0xFFFF : (__mmask16)((1 << (end - i)) - 1);
            store_sixteen(to + (dtype == FLOAT32 ? 4 : 2) * i, dtype, in, v);
        }
    }
}

/* fixed_point for one plane and groups of 64 inputs, all of bfloat16: a group stays in registers. */
TARGET_AVX512 static void eight_bit_row(const char *x, int64_t k, int64_t groups, char *bytes, OfGroup *of_group, int64_t rows) {
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    for (int64_t g = 0; g < groups; g++, x += 128, bytes += 64, of_group += rows) {
        const int64_t left = k - 64 * g;
        const __m512i low = _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, x);
        const __m512i high = _mm512_maskz_loadu_epi16(left >= 64 ? ~0u : left > 32 ? (1u << (left - 32)) - 1 : 0, x + 64);
        const __m512i most = _mm512_max_epu16(_mm512_and_si512(low, magnitude), _mm512_and_si512(high, magnitude));
        const __m512i wide = _mm512_max_epu32(_mm512_slli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32((int)0xFFFF0000)));
        const uint32_t found = _mm512_reduce_max_epu32(wide), largest = found > TINY ? found : TINY;
        const float scale = bits_to_float(largest) / 32512.0f;
        __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i half = _mm512_extracti64x4_epi64(i < 2 ? low : high, i % 2);
            __m512i q = eight_of(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)), scale);
            if (largest >= INFINITE) q = _mm512_setzero_si512();
            sum = _mm512_add_epi32(sum, q);
            _mm_storeu_si128((__m128i *)(bytes + 16 * i), _mm512_cvtepi32_epi8(q));
        }
        of_group->unit = largest >= INFINITE ? bits_to_float(largest) : 256.0f * scale;
        of_group->sum = (float)_mm512_reduce_add_epi32(sum);
    }
}

/* One row of x, the only one or one of `rows` that lie beside each other in of_group [groups, rows]. In `planes` planes: int8
   [kp / 64, planes, 64]; as INT16: int16 [kp], of every four inputs the first, the third, the second, the fourth. A group with
   an infinity or a NaN has zeros and that as its unit. */
TARGET_AVX512 static void fixed_point(const char *x, int dtype, int64_t k, int64_t kp, int64_t groups, int planes,
                                      char *bytes, OfGroup *of_group, int64_t rows) {
    const int64_t group = kp / groups;
    if (planes == 1 && group == BLOCK && dtype == BFLOAT16) {
        eight_bit_row(x, k, groups, bytes, of_group, rows);
        return;
    }
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), half = _mm512_set1_epi32(128);
    for (int64_t g = 0; g < groups; g++) { /* of all groups first, so that nothing below waits for it */
        __m512i most = _mm512_set1_epi32((int)TINY);
        for (int64_t i = g * group; i < (g + 1) * group; i += 16)
            most = _mm512_max_epu32(most, _mm512_and_si512(magnitude, _mm512_castps_si512(load_sixteen(x, dtype, k, i))));
        of_group[g * rows].taken = (int32_t)_mm512_reduce_max_epu32(most);
    }
    for (int64_t g = 0; g < groups; g++, of_group += rows) {
        const uint32_t largest = (uint32_t)of_group->taken;
        const int finite = largest < INFINITE;
        /* 2^-14 of the largest's power of two, of the next one where the bytes would have no room for it. */
        const uint32_t least = 24, next = (largest + 0x20000u) >> 23;
        const uint32_t power = (next > least ? next : least) - 14;
        const float unit = planes == 1 ? bits_to_float(largest) / 32512.0f : bits_to_float(power << 23);
        const float inverse = planes == 1 ? 0 : bits_to_float((254 - power) << 23);
        __m512i sum = _mm512_setzero_si512();
        __m256i taken = _mm256_setzero_si256();
        for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
            const __m512 v = load_sixteen(x, dtype, k, i);
            char *const to = bytes + i / BLOCK * planes * BLOCK + i % BLOCK;
            __m512i q = planes == 1 ? eight_of(v, unit) : _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
            if (!finite) q = _mm512_setzero_si512();
            sum = _mm512_add_epi32(sum, q);
            if (planes == INT16) {
                const __m256i words = _mm512_cvtepi32_epi16(_mm512_shuffle_epi32(q, _MM_PERM_DBCA));
                _mm256_storeu_si256((__m256i *)(bytes + 2 * i), words);
                taken = _mm256_sub_epi32(taken, _mm256_madd_epi16(words, _mm256_srli_epi64(words, 32)));
            }
            for (int p = planes - 1; p >= 0; p--) { /* the low byte, signed, then what is left above it */
                _mm_storeu_si128((__m128i *)(to + p * BLOCK), _mm512_cvtepi32_epi8(q));
                q = _mm512_srai_epi32(_mm512_add_epi32(q, half), 8);
            }
        }
        of_group->unit = !finite ? bits_to_float(largest) : planes == 1 ? 256.0f * unit : unit;
        of_group->sum = (float)_mm512_reduce_add_epi32(sum);
        of_group->taken = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(taken));
    }
}
#endif
