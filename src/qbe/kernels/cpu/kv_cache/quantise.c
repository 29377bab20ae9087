/* Pages of 16 bits to pages of fewer. Included by attention.c. */

/* Rounded to nearest even. */
static uint16_t to_half(float f) {
    const uint32_t all = float_to_bits(f), sign = (all >> 16) & 0x8000, u = all & 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) return (uint16_t)(sign | (float_to_bits(bits_to_float(u) + 0.5f) - 0x3f000000)); /* subnormal */
    return (uint16_t)(sign | ((u + 0xc8000fff + ((u >> 13) & 1)) >> 13));
}

static float limited(float f) { return f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f; }

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t TwoBytes __attribute__((vector_size(LANES)));
typedef uint32_t FourBytes __attribute__((vector_size(LANES)));
typedef uint8_t HalfOfBytes __attribute__((vector_size(LANES / 2)));
typedef uint8_t QuarterOfBytes __attribute__((vector_size(LANES / 4)));

/* LANES codes, packed: LANES * bits / 8 bytes. */
INLINE void pack_lanes(Integers codes, int bits, uint8_t *to) {
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    if (bits == 8) memcpy(to, &bytes, sizeof bytes);
    else if (bits == 4) {
        const TwoBytes two = (TwoBytes)bytes;
        const HalfOfBytes packed = __builtin_convertvector((two | two >> 4) & 255, HalfOfBytes);
        memcpy(to, &packed, sizeof packed);
    } else {
        const FourBytes four = (FourBytes)bytes;
        const QuarterOfBytes packed = __builtin_convertvector((four | four >> 6 | four >> 12 | four >> 18) & 255, QuarterOfBytes);
        memcpy(to, &packed, sizeof packed);
    }
}

/* `count` numbers to codes, scale and low: `quantise` and `pack` of reference/kv_pages.py. */
INLINE void quantise_row(const float *x, int64_t count, int bits, uint8_t *codes, uint16_t *scale, uint16_t *low) {
    const float levels = (float)((1 << bits) - 1);
    const int64_t whole = count / LANES * LANES;
    Floats lows = splat(x[0]), highs = lows, poisons = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats v;
        memcpy(&v, x + i, sizeof v);
        lows = pick(v < lows, v, lows);
        highs = pick(v > highs, v, highs);
        poisons += v * 0.0f;
    }
    float least = x[0], most = x[0], poison = sum_lanes(poisons);
    for (int i = 0; i < LANES; i++) {
        least = lows[i] < least ? lows[i] : least;
        most = highs[i] > most ? highs[i] : most;
    }
    for (int64_t i = whole; i < count; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
        poison += x[i] * 0.0f;
    }
    *low = to_half(limited(least));
    const float from = from_half(*low), range = limited(most) - from;
    *scale = to_half((range > 0 ? range : 0) / levels * 1.0009765625f + poison);
    const float step = from_half(*scale);
    if (!(step > 0)) {
        memset(codes, 0, (size_t)((count * bits + 7) / 8));
        return;
    }
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats v;
        memcpy(&v, x + i, sizeof v);
        v = (v - from) / step + 0.5f;
        v = pick(v > splat(0.0f), v, splat(0.0f));
        pack_lanes(__builtin_convertvector(pick(v < splat(levels), v, splat(levels)), Integers), bits, codes + i * bits / 8);
    }
    memset(codes + whole * bits / 8, 0, (size_t)((count * bits + 7) / 8 - whole * bits / 8));
    for (int64_t i = whole; i < count; i++) {
        const float code = (x[i] - from) / step + 0.5f;
        const int c = code >= levels ? (int)levels : code > 0 ? (int)code : 0;
        codes[i * bits / 8] = (uint8_t)(codes[i * bits / 8] | c << i * bits % 8);
    }
}

INLINE float number_at(const uint8_t *from, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)from)[i];
    return bits_to_float((uint32_t)((const uint16_t *)from)[i] << 16);
}

/* Numbers [PAGE, dim] as floats [dim, PAGE], rotated. */
INLINE void load_rotated(const uint8_t *from, int64_t dim, int dtype, float *to) {
    for (int64_t t = 0; t < PAGE; t++)
        for (int64_t d = 0; d < dim; d++) to[d * PAGE + t] = number_at(from, t * dim + d, dtype);
    rotate(to, dim, PAGE, 1);
}

/* The keys y [dim, PAGE] to codes and scales: `turbo_keys` of reference/kv_pages.py. rest: room for as many. */
INLINE void quantise_turbo(float *y, int64_t dim, int bits, uint8_t *codes, uint16_t *scale, float *rest) {
    const float deviation = bits == 4 ? 29.275f : 1.2533f; /* DEVIATION of kv_blocks.py */
    uint16_t *sketch_scale = scale + PAGE, *mean = sketch_scale + PAGE;
    float square[PAGE] = {0}, product[PAGE] = {0}, levels[PAGE] = {0}, left[PAGE] = {0}, sums[PAGE] = {0};
    for (int64_t d = 0; d < dim; d++) {
        float sum = 0;
        for (int t = 0; t < PAGE; t++) sum += y[d * PAGE + t];
        mean[d] = to_half(sum / PAGE);
        for (int t = 0; t < PAGE; t++) {
            y[d * PAGE + t] -= from_half(mean[d]);
            square[t] += y[d * PAGE + t] * y[d * PAGE + t];
        }
    }
    memset(codes, 0, (size_t)(dim * PAGE * bits / 8));
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < PAGE; t++) {
            static const float magnitudes[] = {7, 22, 39, 63};
            const float step = __builtin_sqrtf(square[t] / (float)dim) / deviation, x = y[d * PAGE + t];
            const float size = (x < 0 ? -x : x) / (step == 0 ? 1 : step);
            const int i = bits == 4 ? (size > 14.5f) + (size > 30.5f) + (size > 51.0f) : 0;
            const float level = (x < 0 ? -1.0f : 1.0f) * (bits == 4 ? magnitudes[i] : 1.0f);
            const int code = i | (x < 0 ? 0 : 1 << (bits - 2));
            codes[(d * PAGE + t) * bits / 8] |= (uint8_t)(code << t * bits % 8);
            rest[d * PAGE + t] = level;
            product[t] += x * level, levels[t] += level * level;
        }
    for (int t = 0; t < PAGE; t++) scale[t] = to_half(product[t] / levels[t]);
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < PAGE; t++) {
            rest[d * PAGE + t] = y[d * PAGE + t] - from_half(scale[t]) * rest[d * PAGE + t];
            left[t] += rest[d * PAGE + t] * rest[d * PAGE + t];
        }
    rotate(rest, dim, PAGE, 0);
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < PAGE; t++) {
            const float x = rest[d * PAGE + t];
            sums[t] += x < 0 ? -x : x;
            if (x >= 0) codes[(d * PAGE + t) * bits / 8] |= (uint8_t)(1 << (bits - 1) << t * bits % 8);
        }
    for (int t = 0; t < PAGE; t++) sketch_scale[t] = to_half(left[t] / (sums[t] == 0 ? 1 : sums[t]));
}

/* Floats that quantising or reading a block needs room for. */
static int64_t work_size(int64_t key_dim, int64_t value_dim) {
    return (2 * PAGE + 1) * (key_dim > value_dim ? key_dim : value_dim);
}

INLINE void quantise_block(const uint8_t *from, uint8_t *to, int kind, int64_t key_dim, int64_t value_dim, int dtype,
                       float *work) {
    const Block b = block_layout(kind, key_dim, value_dim, 2);
    const int bits = kind % TURBO;
    uint16_t *scales = (uint16_t *)(to + b.key_scales);
    load_rotated(from, key_dim, dtype, work);
    if (kind > TURBO) quantise_turbo(work, key_dim, bits, to, scales, work + key_dim * PAGE);
    else
        for (int64_t d = 0; d < key_dim; d++)
            quantise_row(work + d * PAGE, PAGE, bits, to + d * b.key_row, scales + d, scales + key_dim + d);
    scales = (uint16_t *)(to + b.value_scales);
    load_rotated(from + PAGE * key_dim * (dtype == FLOAT32 ? 4 : 2), value_dim, dtype, work);
    float *row = work + value_dim * PAGE;
    for (int64_t t = 0; t < PAGE; t++) {
        for (int64_t d = 0; d < value_dim; d++) row[d] = work[d * PAGE + t];
        quantise_row(row, value_dim, bits, to + b.values + t * b.value_row, scales + t, scales + PAGE + t);
    }
}
