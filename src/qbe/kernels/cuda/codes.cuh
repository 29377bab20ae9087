// Codes of keys and values become operands of the tensor cores, two 16-bit numbers in a word.

template <int BITS>
struct Codes {
    static constexpr int FIELDS = 8 / BITS;
    static constexpr float CENTRE = 1 << (BITS - 1);
};

// Codes of 2 and 4 bits become this + code: the lowest bits of a mantissa, or, because they are nearer to 0 there, the
// highest. `offset_pair` is what takes it and the centre off again, in products of its own.
template <int BITS, bool F16>
DEVICE constexpr int offset_of(int field, int e) {
    return !F16 && field + e == 0 ? 128 : 1 << BITS;
}

// Two codes of this field of a word: of bytes 0 and 2 for e = 0, of 1 and 3 for e = 1.
template <int BITS, bool F16>
DEVICE u32 pair_of(u32 word, int field, int e) {
    if constexpr (BITS == 8) {  // less the centre, exactly
        u32 x = e ? word >> 8 : word;
        if (F16) return add2<true>(and_or(x, 0x00FF00FF, 0x64006400), 0xE480E480);  // 1024 + code - 1152
        return add2<false>(and_or(x, 0x007F007F, 0x43004300), and_not_or(x, 0x00800080, 0xC300C300));
    } else {
        const bool lowest = !F16 && field + e == 0;
        const int to = lowest ? 0 : (F16 ? 10 : 7) - BITS, from = 8 * e + BITS * field;
        const u32 one = lowest ? 0x4300 : F16 ? (BITS == 4 ? 0x4C00 : 0x4400) : (BITS == 4 ? 0x4180 : 0x4080);
        const u32 mask = ((1u << BITS) - 1) << to;
        u32 x = from > to ? word >> (from - to) : word << (to - from);
        return and_or(x, mask | mask << 16, one | one << 16);
    }
}

template <int BITS, bool F16>
DEVICE u32 offset_pair(int field, int e) {
    const float off = -offset_of<BITS, F16>(field, e) - Codes<BITS>::CENTRE;
    return pack<F16>(off, off);
}

// Turbo keys: levels of the codes that `pair_of` would take, and the signs of their sketches.
template <int BITS, bool F16>
DEVICE u32 turbo_levels(u32 word, int field, int e) {
    u32 x = word >> (8 * e + BITS * field);
    const u32 one = F16 ? 0x3C003C00 : 0x3F803F80;
    if (BITS == 2) return one ^ ((~x & 0x00010001) << 15);
    // 7, 22, 39, 63: the high and the low bytes of each, the negative ones first
    u32 at = x & 0x00070007;
    at |= at >> 12;
    u32 high = F16 ? bytes_of(0xD3D0CDC7, 0x53504D47, at) : bytes_of(0xC2C2C1C0, 0x42424140, at);
    u32 low = F16 ? bytes_of(0xE0E08000, 0xE0E08000, at) : bytes_of(0x7C1CB0E0, 0x7C1CB0E0, at);
    return bytes_of(low, high, 0x5140);
}

template <int BITS, bool F16>
DEVICE u32 turbo_signs(u32 word, int field, int e) {
    u32 x = word >> (8 * e + BITS * field + BITS - 1);
    return (F16 ? 0x3C003C00 : 0x3F803F80) ^ ((~x & 0x00010001) << 15);
}

// Kinds of blocks in the order of a list.
DEVICE constexpr int kind_of(int n) {
    return n == 0 ? 16 : n == 1 ? 8 : n == 2 ? 4 : n == 3 ? 2 : n == 4 ? TURBO | 4 : TURBO | 2;
}

DEVICE u64 load_u64(int at) {
    const words2 x = load8(at);
    return (u64)x.y << 32 | x.x;
}

DEVICE int sum_of_bytes(u64 x) {  // each at most 32
    return ((u32)x * 0x01010101u >> 24) + ((u32)(x >> 32) * 0x01010101u >> 24);
}

template <bool F16>
DEVICE float float_of(u32 x) {  // of the low 16 bits
    return F16 ? float_of_f16(x & 0xFFFF) : float_of_bits(x << 16);
}

template <int COUNT>
DEVICE void load_words(u32 (&x)[COUNT], int at) {
    if (COUNT == 1) x[0] = load4(at);
    else if (COUNT == 2) {
        words2 w = load8(at);
        x[0] = w.x, x[1] = w.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            words4 w = load16(at + 4 * i);
            x[i] = w.x, x[i + 1 < COUNT ? i + 1 : 0] = w.y, x[i + 2 < COUNT ? i + 2 : 0] = w.z,
            x[i + 3 < COUNT ? i + 3 : 0] = w.w;
        }
    }
}

template <bool SOFTCAP>
DEVICE float capped(float score, float softcap) {
    if (!SOFTCAP) return score;
    float e = power2((score < 0 ? score : -score) * (2 * LOG2E) / softcap);
    float bent = softcap * (1 - e) / (1 + e);
    return score < 0 ? -bent : bent;
}
