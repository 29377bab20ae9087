// Weights become the first operand of wgmma in registers: two 16-bit floats of a register from two codes of one lane.

// In which numbers the codes appear when they are put into the mantissa of this one.
template <bool F16>
struct Magic {
    static constexpr u32 PAIR = F16 ? 0x64006400 : 0x43004300;
    static constexpr float VALUE = F16 ? 1024 : 128;
};

DEVICE float float_of_byte(u32 x) { return float_of_bits(0x4B000000 | x) - 8388608.0f; }

template <bool F16>
DEVICE u32 add2(u32 a, u32 b) {
    u32 d;
    if (F16) asm("add.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("add.rn.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

template <bool F16>
DEVICE u32 mul2(u32 a, u32 b) {
    u32 d;
    if (F16) asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

template <bool F16>
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    if (F16) asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (a & mask) | b
DEVICE u32 and_or(u32 a, u32 mask, u32 b) {
    u32 d;
    asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
    return d;
}

// The bits of a where the mask has ones, those of b elsewhere.
DEVICE u32 either(u32 a, u32 b, u32 mask) {
    u32 d;
    asm("lop3.b32 %0,%1,%2,%3,0xE4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}

// Scale and offset of one output and group; the scale as if the matrix's exponent were 117.
//   wide, low: the pairs of `qbe.store.scales`, in the lower halves; low is not used where all three planes are read
DEVICE void scale_of(u32 wide, u32 low, int planes, float &scale, float &offset) {
    scale = float_of_bits(((wide & 255) << 19) + (117u << 23));
    offset = float_of_byte(wide >> 8 & 255);
    if (planes < 3) {
        const bool six = planes == 2;
        const float ratio = float_of_byte((low & 255) ^ 128) - 128;
        scale *= (six ? 4.0f : 16.0f) * (1 + ratio * (1.0f / 256));
        offset = (offset - (six ? 1.5f : 7.5f)) * (six ? 0.25f : 0.0625f) + (float_of_byte((low >> 8 & 255) ^ 128) - 128) * (1.0f / 64);
    }
}

// The same as the kernels take it: word 0 has the scale and what the offset's fraction contributes, word 1 what is added
// to a code so that it is exact: its magic number and its offset's integer. At 8 bits bfloat16 holds no code beside a
// magic number: the upper and the lower four bits are added up.
//   more: what the scale is multiplied by
template <bool F16>
DEVICE void decode_scale(u32 wide, u32 low, int planes, u32 &scale_word, u32 &offset_word, float more = 1) {
    float scale, offset;
    scale_of(wide, low, planes, scale, offset);
    scale *= more;
    const float whole = rintf(offset);
    scale_word = pack<F16>(scale, (whole - offset) * scale);
    if (!F16 && planes == 3) {
        const float lower = whole - 16 * floorf(whole * (1.0f / 16));
        offset_word = pack<F16>(-(Magic<F16>::VALUE + lower), -(16 * Magic<F16>::VALUE + whole - lower));
    } else {
        offset_word = pack<F16>(-(Magic<F16>::VALUE + whole), 0.0f);
    }
}

// One output's numbers of a group, twice in a register.
struct Group {
    u32 scale, rest, offset, high;
    DEVICE void set(u32 scale_word, u32 offset_word) {
        scale = bytes_of(scale_word, 0, 0x1010), rest = bytes_of(scale_word, 0, 0x3232);
        offset = bytes_of(offset_word, 0, 0x1010), high = bytes_of(offset_word, 0, 0x3232);
    }
};

// What a lane has of 64 inputs of 64 outputs: four steps of 16 inputs.
template <int BITS>
struct Codes {
    u32 high[4], low[BITS == 6 ? 2 : 1], nibbles[BITS == 8 ? 4 : 1];
    u32 scales[4];

    // The two low planes at 8 bits: their four bits beside each other, those of even pairs and those of odd ones.
    DEVICE void join(const u32 (&p)[2], const u32 (&q)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (BITS == 6) low[BITS == 6 ? i : 0] = p[i];
            if (BITS == 8) {
                nibbles[BITS == 8 ? 2 * i : 0] = either(p[i] << 2, q[i], 0xCCCCCCCC);
                nibbles[BITS == 8 ? 2 * i + 1 : 0] = either(p[i], q[i] >> 2, 0xCCCCCCCC);
            }
        }
    }
};

// A step of 16 inputs: the fragment of wgmma's first operand, a register for each pair.
template <bool F16, int BITS>
DEVICE void convert(u32 (&a)[4], const Codes<BITS> &codes, const Group (&group)[2], const int s) {
    constexpr u32 MAGIC = Magic<F16>::PAIR;
    const u32 w = codes.high[s];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Group &of = group[j & 1];
        u32 x;
        if (BITS == 4) {
            x = and_or(w >> 4 * j, 0x000F000F, MAGIC);
        } else if (BITS == 6) {
            x = and_or(j ? w >> (4 * j - 2) : w << 2, 0x003C003C, MAGIC);
            x = and_or(codes.low[BITS == 6 ? s / 2 : 0] >> 2 * (4 * (s % 2) + j), 0x00030003, x);
        } else {
            const u32 low = codes.nibbles[BITS == 8 ? 2 * (s / 2) + (j & 1) : 0] >> 4 * (2 * (s % 2) + j / 2);
            if (F16) {
                x = and_or(low, 0x000F000F, and_or(j ? w >> (4 * j - 4) : w << 4, 0x00F000F0, MAGIC));
            } else {
                x = fma2<F16>(and_or(w >> 4 * j, 0x000F000F, MAGIC), 0x41804180, of.high);  // 16 times the upper four bits
                a[j] = mul2<F16>(add2<F16>(x, add2<F16>(and_or(low, 0x000F000F, MAGIC), of.offset)), of.scale);
                continue;
            }
        }
        a[j] = fma2<F16>(add2<F16>(x, of.offset), of.scale, of.rest);
    }
}

// Sums as they travel.
DEVICE u32 as_word(float x) { return bits_of_float(x); }
DEVICE u32 as_word(int x) { return x; }
DEVICE Number of_word(u32 x) { return EIGHT ? (Number)(int)x : (Number)float_of_bits(x); }

constexpr bool HALF = EIGHT || F16;  // what codes become first

// Rounded to whole numbers: of 1024 to 2048 float16 has no others, and the lowest byte is the number's.
DEVICE u32 bytes_of_pairs(u32 a, u32 b) { return bytes_of(add2<true>(a, 0x66006600), add2<true>(b, 0x66006600), 0x6240); }

// Step s of four of 16 inputs: a fragment of 16-bit floats, or half of one of int8.
template <int BITS>
DEVICE void convert_for(u32 (&a)[4][4], const Codes<BITS> &codes, const Group (&group)[2], const int s) {
    if (EIGHT) {
        u32 w[4];
        convert<HALF, BITS>(w, codes, group, s);
        a[s / 2][2 * (s % 2)] = bytes_of_pairs(w[0], w[2]), a[s / 2][2 * (s % 2) + 1] = bytes_of_pairs(w[1], w[3]);
    } else {
        convert<HALF, BITS>(a[s], codes, group, s);
    }
}

struct Turn {
    int slot = 0;
    u32 parity = 0;
    DEVICE void next(int count) {
        if (++slot == count) slot = 0, parity ^= 1;
    }
};

DEVICE int planes_of(int word, int kinds) {
    const int bits = word & 255, planes = bits >= 8 ? 3 : bits >= 6 ? 2 : 1;
    return planes < kinds ? planes : kinds;
}

// Of the highest bits that any thread of the block has; all of its threads call it.
DEVICE int most_planes(int bits, int kinds) {
    const bool eight = __syncthreads_or(bits >= 8), six = __syncthreads_or(bits >= 6);
    return planes_of(eight ? 8 : six ? 6 : 4, kinds);
}

// That a tile of rows reads; 0: it has none. order: null, or which row each place has.
DEVICE int planes_of_tile(const int *order, const int *words, int tile, int most, int kinds) {
    if (!order) return most;
    const int row = order[tile * ROWS];
    return row < 0 ? 0 : planes_of(words[row], kinds);
}

// Where data lie in a stage, and how many stages there are, if no more planes than so many are read.
template <int INPUTS, int LOW, int RAW, int DECODED, int MOST>  // INPUTS: bytes of x and of the plane of 4 bits
struct StageOf {
    int raw, decoded, bytes, count;
    DEVICE void set(int most, int room) {
        raw = INPUTS + LOW * (most - 1);
        decoded = raw + 2 * RAW;
        bytes = (decoded + DECODED + 1023) & ~1023;
        count = room / bytes < MOST ? room / bytes : MOST;
    }
};

// What the fragments of 64 outputs have in a stage: planes of so many blocks of 64 inputs, and pairs of so many groups.
DEVICE int bytes_of_tile(int inputs, int groups, int planes) {
    return inputs * (2048 + 1024 * (planes - 1)) + groups * 128 * (planes < 3 ? 2 : 1);
}

// What one lane brings of a weight for 64 outputs: a plane (kind 0 to 2), scale and zero of the first group (3), the
// ratio (4), or those of the second group (5, 6).
struct Brought {
    const u8 *from;
    bool wanted;

    template <int GROUPS>  // of a stage
    DEVICE void set(const u8 *packed, int plane1, int plane2, int scales, int tile, int kind, int each, int planes, int blocks, int pairs) {
        if (kind < 3) {
            from = packed + (kind == 0 ? 0 : kind == 1 ? plane1 * 16ll : plane2 * 16ll) + (i64)tile * blocks * each;
            wanted = kind < planes;
        } else {
            const int groups = blocks * 64 / GROUP, ratio = (kind - 3) & 1;
            from = packed + scales * 16ll + (i64)tile * groups * pairs * 128 + (ratio ? planes * 128 : 0) + (kind > 4 ? pairs * 128 : 0);
            wanted = kind < 3 + 2 * GROUPS && (!ratio || planes < 3);
        }
    }
};

// Codes of 64 inputs of 64 outputs as four steps of 16: high in registers, the planes of 2 bits at `low_at`, LOW apart.
template <int BITS, int LOW>
DEVICE void load_fragments(u32 (&a)[4][4], const u32 (&high)[4], u32 low_at, const Group (&group)[2]) {
    Codes<BITS> codes;
    u32 p[2] = {}, q[2] = {};
    if (BITS > 4) load_pair(p, low_at);
    if (BITS > 6) load_pair(q, low_at + LOW);
#pragma unroll
    for (int i = 0; i < 4; i++) codes.high[i] = high[i];
    codes.join(p, q);
    wgmma_wait<1>();  // the products that had these registers are made
#pragma unroll
    for (int s = 0; s < 4; s++) convert_for<BITS>(a, codes, group, s);
}

// By what the scales of outputs g and g + 8 are multiplied, whose codes become int8; 1 where they do not.
struct ToEight {
    float factor[2] = {1, 1};

    DEVICE void set(const float *bounds, int column, int columns) {
        for (int h = 0; h < 2; h++) factor[h] = column + 8 * h < columns ? __fdividef(127.0f, bounds[column + 8 * h]) : 0;
    }
};

// Scales of a group of two outputs, as a thread of the warp that decodes them.
DEVICE void decode_scales(u32 to, u32 raw, u32 raw_ratio, int planes, const ToEight &eight) {
    const u32 wide = load_word(raw), low = load_word(raw_ratio);
    u32 s0, o0, s1, o1;
    decode_scale<HALF>(wide, low, planes, s0, o0, eight.factor[0]);
    decode_scale<HALF>(wide >> 16, low >> 16, planes, s1, o1, eight.factor[1]);
    store_words(to, s0, o0, s1, o1);
}

// Four sums of a thread: outputs g and g + 8 of 16, each of rows 2 t and 2 t + 1 of 8.
struct Results {
    void *y;
    const u16 *bias;
    const int *order;
    int rows, columns, lane;
    float factor;

    DEVICE int row_of(int place) const {
        const int row = order ? order[place] : place;
        return row < rows ? row : -1;
    }

    // column: of the first of 16 outputs; place: of the first of 8 rows
    DEVICE void put(int column, int place, const float (&x)[4]) const {
        const int g = lane >> 2, t = lane & 3;
        const float b0 = column + g < columns ? bias_of(column + g) : 0, b8 = column + g + 8 < columns ? bias_of(column + g + 8) : 0;
        const float v[4] = {x[0] * factor + b0, x[1] * factor + b0, x[2] * factor + b8, x[3] * factor + b8};
        if (WIDE) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = row_of(place + 2 * t + i);
                if (row < 0) continue;
                float *to = (float *)y + (i64)row * columns + column + g;
                if (column + g < columns) to[0] = v[i];
                if (column + g + 8 < columns) to[8] = v[2 + i];
            }
        } else {
            // transposed, a thread has row g and outputs 2 t, 2 t + 1 of the first and of the second eight
            const u32 low = transposed(pack<F16>(v[0], v[1])), high = transposed(pack<F16>(v[2], v[3]));
            const int row = row_of(place + g);
            if (row < 0) return;
            u16 *to = (u16 *)y + (i64)row * columns + column + 2 * t;
            if (column + 16 <= columns && !(columns & 1)) {
                *(u32 *)to = low, *(u32 *)(to + 8) = high;
            } else {
                if (column + 2 * t < columns) to[0] = low;
                if (column + 2 * t + 1 < columns) to[1] = low >> 16;
                if (column + 2 * t + 8 < columns) to[8] = high;
                if (column + 2 * t + 9 < columns) to[9] = high >> 16;
            }
        }
    }

    DEVICE float bias_of(int column) const {
        if (!bias) return 0;
        const u32 x = bias[column];
        return F16 ? float_of_f16(x) : float_of_bits(x << 16);
    }
};

// Sums of 8-bit products times the scales of their rows, which others have none of.
struct Four {
    float x[4];
};

DEVICE Four scaled_sums(const Number (&sums)[4], const float *x_scales, const float *bounds, int column, int columns, int place,
                        int places, int lane) {
    const int g = lane >> 2, at = place + 2 * (lane & 3);
    if (!EIGHT) return {{(float)sums[0], (float)sums[1], (float)sums[2], (float)sums[3]}};
    const float even = at < places ? x_scales[at] : 0, odd = at + 1 < places ? x_scales[at + 1] : 0;
    const float low = column + g < columns ? bounds[column + g] * (1.0f / 127) : 0;
    const float high = column + g + 8 < columns ? bounds[column + g + 8] * (1.0f / 127) : 0;
    return {{(float)sums[0] * (even * low), (float)sums[1] * (odd * low), (float)sums[2] * (even * high), (float)sums[3] * (odd * high)}};
}
