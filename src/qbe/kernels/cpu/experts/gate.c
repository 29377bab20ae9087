/* The activations of gated feed-forward networks (qbe/kernels/ops/experts/nested.py). Included by experts.c.

   Each number is computed from its gate and its up alone, in float32, and rounded once. */

enum { SILU, GELU, GELU_TANH, SWIGLU_OAI }; /* ACTIVATIONS of the op */

typedef struct {
    int32_t activation, interleaved;
    float alpha, limit; /* no limit: 0 */
} Gate;

INLINE Floats at_most(Floats v, float limit) { return pick(v > splat(limit), splat(limit), v); }

INLINE Floats sigmoid(Floats v) { return 1.0f / (1.0f + exp_lanes(at_most(-v, 80.0f))); }

INLINE Floats activated(const Gate *of, Floats gate, Floats up) {
    if (of->limit != 0) {
        gate = at_most(gate, of->limit);
        up = -at_most(-at_most(up, of->limit), of->limit);
    }
    switch (of->activation) {
    case SILU: return gate * sigmoid(gate) * up;
    case SWIGLU_OAI: return gate * sigmoid(of->alpha * gate) * (up + 1.0f);
    case GELU_TANH: /* (1 + tanh z) / 2 is the sigmoid of 2 z */
        return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
    default: {
        float each[LANES];
        Floats share;
        memcpy(each, &gate, sizeof each);
        for (int i = 0; i < LANES; i++) each[i] = 0.5f + 0.5f * erff(each[i] * 0.70710678f);
        memcpy(&share, each, sizeof share);
        return gate * share * up;
    }
    }
}

/* [2 * inner] numbers of gate and up, [inner] of both in turns or one behind the other; `inner` results to `to`. */
INLINE void gate_row(const Gate *of, const float *both, int64_t inner, int dtype, char *to) {
    for (int64_t i = 0; i < inner; i += LANES) {
        const int64_t some = inner - i < LANES ? inner - i : LANES;
        float gate[LANES] = {0}, up[LANES] = {0}, out[LANES];
        if (of->interleaved)
            for (int64_t n = 0; n < some; n++) gate[n] = both[2 * (i + n)], up[n] = both[2 * (i + n) + 1];
        else
            memcpy(gate, both + i, (size_t)some * 4), memcpy(up, both + inner + i, (size_t)some * 4);
        Floats g, u;
        memcpy(&g, gate, sizeof g), memcpy(&u, up, sizeof u);
        g = activated(of, g, u);
        memcpy(out, &g, sizeof out);
        if (dtype == FLOAT32) memcpy(to + 4 * i, out, (size_t)some * 4);
        else for (int64_t n = 0; n < some; n++) ((uint16_t *)to)[i + n] = to_bfloat16(out[n]);
    }
}

#ifdef X86
/* The same, of float16 too. */
TARGET_AVX512 INLINE void gate_row_avx512(const Gate *of, const float *both, int64_t inner, int dtype, char *to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t i = 0; i < inner; i += LANES) {
        const __mmask16 in = inner - i >= LANES ? 0xFFFF : (__mmask16)((1 << (inner - i)) - 1);
        __m512 gate, up;
        if (of->interleaved) {
            const char *from = (const char *)(both + 2 * i);
            const __m512 a = load_sixteen(from, FLOAT32, 2 * (inner - i), 0), b = load_sixteen(from, FLOAT32, 2 * (inner - i), 16);
            gate = _mm512_permutex2var_ps(a, even, b), up = _mm512_permutex2var_ps(a, odd, b);
        } else {
            gate = _mm512_maskz_loadu_ps(in, both + i), up = _mm512_maskz_loadu_ps(in, both + inner + i);
        }
        store_sixteen(to + i * (dtype == FLOAT32 ? 4 : 2), dtype, in, (__m512)activated(of, (Floats)gate, (Floats)up));
    }
}
#endif
