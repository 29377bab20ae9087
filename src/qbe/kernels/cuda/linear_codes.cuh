// Codes as operands of matrix products. A number whose lowest bits are a code, and whose highest say BIAS, is BIAS + code.
// In float16 the lowest four bits are left out, so that BIAS is no larger than it must be.

template <bool F16>
struct Codes {
    static constexpr u32 HIGH = F16 ? 0x54005400 : 0x43004300;  // 64, 128
    static constexpr float BIAS = F16 ? 64 : 128;
    static constexpr u32 ONES = F16 ? 0x3C003C00 : 0x3F803F80;
    static constexpr u32 MASK = F16 ? 0x00F000F0 : 0x000F000F;

    // The i-th four bits of both halves of a word where a number has its code.
    static DEVICE u32 field(u32 word, int i) {
        if (F16) return i ? word >> 4 * (i - 1) : word << 4;
        return word >> 4 * i;
    }
};

// A step's four registers of the plane of 4 bits.
template <bool F16>
DEVICE void high_codes(u32 (&a)[4], u32 word) {
    using In = Codes<F16>;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = masked_or(In::field(word, i), In::MASK, In::HIGH);
}

// Of a plane of 2 bits, whose word has two steps; outputs g + 8 come out four times as large, without their BIAS.
template <bool F16>
DEVICE void low_codes(u32 (&a)[4], u32 word, int step) {
    using In = Codes<F16>;
    constexpr u32 LOW = In::MASK / 15 * 3;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = masked_or(In::field(word, 2 * (step & 1) + i / 2), i & 1 ? 4 * LOW : LOW, In::HIGH);
}

// The sums over a plane's products make those over codes: with p[i] of plane i and s the sum of x
//   output g:      p0 - BIAS s;  4 p0 + p1 - 5 BIAS s;   4 (4 p0 + p1) + p2 - 21 BIAS s
//   output g + 8:  p0 - BIAS s;  16 p0 + p1 - 17 BIAS s, 4 (16 p0 + p1) + p2 - 69 BIAS s: the last two four times
DEVICE float joined(float high, float low, int half) { return fmaf(half ? 16.0f : 4.0f, high, low); }

DEVICE float signed_byte(u32 word, int byte) { return (float)((int)(word << (24 - 8 * byte)) >> 24); }

// What one output has at one precision: a weight is scale * (code - offset).
struct Scale { float scale, offset; };

// base: scale and zero point, pair: ratio and offset, of output g and in the upper half of output g + 8 (`half`).
DEVICE Scale scale_of(u32 base, u32 pair, int precision, int half, int exponent) {
    const u32 own = base >> 16 * half;
    const float widest = float_of_bits(((own & 255) << 19) + ((u32)exponent << 23)), zero = (float)(own >> 8 & 255);
    if (precision == 2) return {widest, zero};
    const float ratio = fmaf(signed_byte(pair, 2 * half), 1.0f / 256, 1), more = signed_byte(pair, 2 * half + 1) / 64;
    if (precision == 1) return {4 * widest * ratio, fmaf(zero - 1.5f, 0.25f, more)};
    return {16 * widest * ratio, fmaf(zero - 7.5f, 0.0625f, more)};
}

// The same for the sums of products: y += scale * (sum - offset * s).
template <bool F16>
DEVICE Scale sum_scale_of(Scale of, int precision, int half) {
    constexpr float BIAS = Codes<F16>::BIAS;
    const float g = precision == 2 ? 21 * BIAS : precision == 1 ? 5 * BIAS : BIAS;
    const float more = precision == 2 ? 69 * BIAS : 17 * BIAS;
    return half && precision ? Scale{of.scale / 4, fmaf(4, of.offset, more)} : Scale{of.scale, of.offset + g};
}

template <bool F16>
DEVICE float value_of(u32 half) {
    return F16 ? float_of_f16(half & 0xFFFF) : float_of_bits(half << 16);
}

// 8-bit activations of one row and group (kernels/reference/activations.py): x in steps of `scale`, as signed bytes.
struct Rounding { float factor, scale; };

template <bool F16>
DEVICE Rounding rounding_of(float largest) {
    // A group that has an infinity or a NaN has that as its scale, and it reaches every output.
    const bool finite = bits_of_float(largest) < 0x7F800000;
    const float most = finite && largest < 1e-33f ? 1e-33f : largest;
    return {finite ? 32512.0f / most : 0, most * (256.0f / 32512)};
}

template <bool F16>
DEVICE u32 rounded_pair(u32 pair, float factor) {
    float byte[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float q = value_of<F16>(i ? pair >> 16 : pair) * factor;
        byte[i] = factor == 0 ? 0 : (float)(((int)(q + (q >= 0 ? 0.5f : -0.5f)) + 128) >> 8);
    }
    return pack<F16>(byte[0], byte[1]);
}
