// Codes of keys and values become operands of the tensor cores: bytes, four in a word.

// The codes of a field of four bytes. Unless EXACT, those of odd fields are 16 times as large (4 bits) or 4 times (2
// bits), which spares a shift: what they are multiplied with is that much less, and 4 or 2 of its 16 bits are lost.
template <int BITS, bool EXACT>
DEVICE u32 field_of(u32 word, int field) {
    if (BITS == 8) return word;
    if (EXACT) return word >> BITS * field & (BITS == 4 ? 0x0F0F0F0F : 0x03030303);
    if (BITS == 4) return word & (field ? 0xF0F0F0F0 : 0x0F0F0F0F);
    return (field & 2 ? word >> 4 : word) & (field & 1 ? 0x0C0C0C0C : 0x03030303);
}

template <bool EXACT>
DEVICE float odd_field(int bits) {
    return EXACT || bits == 8 ? 1 : bits == 4 ? 1.0f / 16 : 1.0f / 4;
}

// Turbo keys: levels of a field of codes, and the signs of their sketches (1 or -1), as signed bytes.
template <int BITS>
DEVICE u32 turbo_levels(u32 word, int field) {
    u32 x = word >> BITS * field;
    if (BITS == 2) return (~x & 0x01010101) * 255 | 0x01010101;
    x &= 0x07070707, x |= x >> 4;
    return bytes_of(0xC1D9EAF9, 0x3F271607, bytes_of(x, 0, 0x4420));  // 7, 22, 39, 63, the negative ones first
}

template <int BITS>
DEVICE u32 turbo_signs(u32 word, int field) {
    return (~word >> (BITS * field + BITS - 1) & 0x01010101) * 255 | 0x01010101;
}

// Numbers of 16 bits become two bytes, the higher and the lower one, in columns of their own: x = 256 high + low, both
// signed. A float is rounded and shifted into its own lowest bits by what is added to it; half a low byte too, so that
// the high one is the nearest.
constexpr float TO_BYTES = 12582912 + 128;
constexpr u32 SIGNS = 0x80808080;
constexpr int LARGEST = 32512;    // whose bytes are still signed ones
constexpr float NOTHING = 1e-30f;  // numbers up to this are left out: their reciprocals would be infinite

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
        x[0] = w.x, x[COUNT - 1] = w.y;
    } else {
        words4 w = load16(at);
        x[0] = w.x, x[COUNT > 1 ? 1 : 0] = w.y, x[COUNT > 2 ? 2 : 0] = w.z, x[COUNT - 1] = w.w;
    }
}

template <bool SOFTCAP>
DEVICE float capped(float score, float softcap) {
    if (!SOFTCAP) return score;
    float e = power2((score < 0 ? score : -score) * (2 * LOG2E) / softcap);
    float bent = softcap * (1 - e) / (1 + e);
    return score < 0 ? -bent : bent;
}
