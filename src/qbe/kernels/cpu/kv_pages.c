/* Pages of the KV cache as C sees them (qbe/kernels/kv_blocks.py): finding, unpacking, sealing and reading blocks.
   Included by attention.c. Written in vectors of 16 floats, which the compiler maps to what each path has. */

#define LANES 16
#define PAGE 64
#define ALIGN 256
#define TURBO 64 /* added to the bits of a block with turbo keys */

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

INLINE Floats splat(float f) { return f - (Floats){0}; }
INLINE Floats pick(Integers mask, Floats a, Floats b) { return (Floats)((mask & (Integers)a) | (~mask & (Integers)b)); }

#include "rotation.c"

/* Where the parts of a block are, in bytes. */
typedef struct { int64_t key_row, value_row, values, key_scales, value_scales, nbytes; } Block;

INLINE Block block_layout(int kind, int64_t key_dim, int64_t value_dim, int64_t number) {
    Block b = {.key_row = key_dim * number, .value_row = value_dim * number, .values = PAGE * key_dim * number};
    b.key_scales = b.value_scales = b.values + PAGE * b.value_row;
    int64_t size = b.key_scales;
    if (kind != FULL_BITS) {
        const int bits = kind % TURBO;
        b.key_row = PAGE * bits / 8, b.value_row = (value_dim * bits + 7) / 8, b.values = PAGE * ((key_dim * bits + 7) / 8);
        b.key_scales = b.values + PAGE * b.value_row;
        b.value_scales = b.key_scales + (kind > TURBO ? 4 * PAGE + 2 * (key_dim + key_dim % 2) : 4 * key_dim);
        size = b.value_scales + 4 * PAGE;
    }
    b.nbytes = (size + ALIGN - 1) / ALIGN * ALIGN;
    return b;
}

/* The address of a head's block in a page, and its kind; words are those of one layer. */
INLINE int64_t find_block(const int32_t *words, int64_t word_row, int64_t entry, int64_t head, int *kind) {
    const int32_t word = words[entry % ALIGN * word_row + head];
    *kind = word % ALIGN;
    return entry - entry % ALIGN + word - word % ALIGN;
}

/* 16 codes of 4 or 2 bits that begin at a whole byte: every lane shifts its own out of a 32-bit word (little endian). */
INLINE Integers unpack_lanes(const uint8_t *from, const int BITS) {
    if (BITS == 4) {
        const Words shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
        const Words first = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
        uint32_t word[2];
        memcpy(word, from, sizeof word);
        return (Integers)((((word[0] & first) | (word[1] & ~first)) >> shift) & 15);
    }
    const Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return (Integers)((word - (Words){0}) >> shift & 3);
}

/* `count` codes, a multiple of 16. */
INLINE void unpack_codes(const uint8_t *from, int bits, int64_t count, float *to) {
#define UNPACK_ALL(BITS)                                                \
    for (int64_t i = 0; i < count; i += LANES) {                        \
        const Floats codes = __builtin_convertvector(unpack_lanes(from + i * BITS / 8, BITS), Floats); \
        memcpy(to + i, &codes, sizeof codes);                           \
    }
    if (bits == 8) for (int64_t i = 0; i < count; i++) to[i] = from[i];
    else if (bits == 4) { UNPACK_ALL(4) }
    else { UNPACK_ALL(2) }
}

/* Codes of turbo keys, a multiple of 16, as levels and as signs of their sketches. */
INLINE void unpack_turbo(const uint8_t *from, const int BITS, int64_t count, float *levels, float *signs) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Integers codes = unpack_lanes(from + i * BITS / 8, BITS);
        Integers magnitude = codes - codes + 1;
        if (BITS == 4) /* 7, 22, 39, 63: LEVELS of kv_blocks.py */
            magnitude = (Integers)((0x3f271607u - (Words){0}) >> (Words)((codes & 3) * 8) & 255);
        const Integers plus = (codes >> (BITS - 2) & 1) * 2 - 1, sketch = (codes >> (BITS - 1)) * 2 - 1;
        const Floats level = __builtin_convertvector(plus * magnitude, Floats);
        const Floats sign = __builtin_convertvector(sketch, Floats);
        memcpy(levels + i, &level, sizeof level);
        memcpy(signs + i, &sign, sizeof sign);
    }
}

INLINE Floats half_lanes(const uint8_t *from) {
    Halves h;
    memcpy(&h, from, sizeof h);
    const Words w = __builtin_convertvector(h, Words);
    const Integers special = (Integers)((w & 0x7c00) == 0x7c00); /* NaN and infinity stay what they are */
    const Floats finite = (Floats)((w & 0x7fff) << 13) * 5.192296858534828e33f; /* 2^112 */
    const Words magnitude = ((Words)special & (((w & 0x7fff) << 13) | 0x7f800000)) | (~(Words)special & (Words)finite);
    return (Floats)(magnitude | ((w & 0x8000) << 16));
}

static void half_numbers(const uint8_t *from, float *to) { /* 16 of them */
    const Floats f = half_lanes(from);
    memcpy(to, &f, sizeof f);
}

INLINE float from_half(uint16_t h) {
    uint16_t lanes[LANES] = {h};
    return half_lanes((const uint8_t *)lanes)[0];
}

/* Rounded to nearest even. */
static uint16_t to_half(float f) {
    const uint32_t all = float_to_bits(f), sign = (all >> 16) & 0x8000, u = all & 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) return (uint16_t)(sign | (float_to_bits(bits_to_float(u) + 0.5f) - 0x3f000000)); /* subnormal */
    return (uint16_t)(sign | ((u + 0xc8000fff + ((u >> 13) & 1)) >> 13));
}

static float limited(float f) { return f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f; }

/* `count` numbers to codes, scale and low: `quantise` and `pack` of reference/kv_pages.py. */
static void seal_row(const float *x, int64_t count, int bits, uint8_t *codes, uint16_t *scale, uint16_t *low) {
    const float levels = (float)((1 << bits) - 1);
    float least = x[0], most = x[0], poison = 0;
    for (int64_t i = 0; i < count; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
        poison += x[i] * 0.0f;
    }
    *low = to_half(limited(least));
    const float from = from_half(*low), range = limited(most) - from;
    *scale = to_half((range > 0 ? range : 0) / levels * 1.0009765625f + poison);
    const float step = from_half(*scale);
    memset(codes, 0, (size_t)((count * bits + 7) / 8));
    if (!(step > 0)) return;
    for (int64_t i = 0; i < count; i++) {
        const float code = (x[i] - from) / step + 0.5f;
        const int c = code >= levels ? (int)levels : code > 0 ? (int)code : 0;
        codes[i * bits / 8] = (uint8_t)(codes[i * bits / 8] | c << i * bits % 8);
    }
}

static float number_at(const uint8_t *from, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)from)[i];
    return bits_to_float((uint32_t)((const uint16_t *)from)[i] << 16);
}

/* Numbers [PAGE, dim] as floats [dim, PAGE], rotated. */
static void load_rotated(const uint8_t *from, int64_t dim, int dtype, float *to) {
    for (int64_t t = 0; t < PAGE; t++)
        for (int64_t d = 0; d < dim; d++) to[d * PAGE + t] = number_at(from, t * dim + d, dtype);
    rotate(to, dim, PAGE, 1);
}

/* The keys y [dim, PAGE] to codes and scales: `turbo_keys` of reference/kv_pages.py. rest: room for as many. */
static void seal_turbo(float *y, int64_t dim, int bits, uint8_t *codes, uint16_t *scale, float *rest) {
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

/* Floats that sealing or reading a block needs room for. */
static int64_t work_size(int64_t key_dim, int64_t value_dim) {
    return (2 * PAGE + 1) * (key_dim > value_dim ? key_dim : value_dim);
}

static void seal_block(const uint8_t *from, uint8_t *to, int kind, int64_t key_dim, int64_t value_dim, int dtype,
                       float *work) {
    const Block b = block_layout(kind, key_dim, value_dim, 2);
    const int bits = kind % TURBO;
    uint16_t *scales = (uint16_t *)(to + b.key_scales);
    load_rotated(from, key_dim, dtype, work);
    if (kind > TURBO) seal_turbo(work, key_dim, bits, to, scales, work + key_dim * PAGE);
    else
        for (int64_t d = 0; d < key_dim; d++)
            seal_row(work + d * PAGE, PAGE, bits, to + d * b.key_row, scales + d, scales + key_dim + d);
    scales = (uint16_t *)(to + b.value_scales);
    load_rotated(from + PAGE * key_dim * (dtype == FLOAT32 ? 4 : 2), value_dim, dtype, work);
    float *row = work + value_dim * PAGE;
    for (int64_t t = 0; t < PAGE; t++) {
        for (int64_t d = 0; d < value_dim; d++) row[d] = work[d * PAGE + t];
        seal_row(row, value_dim, bits, to + b.values + t * b.value_row, scales + t, scales + PAGE + t);
    }
}

/* `seal_pages` of qbe/kernels/kv_pages.py, words int32 [layers, ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_seal_pages(uint8_t *memory, const int32_t *words, const int64_t *sources, const int64_t *targets,
                       int64_t layers, int64_t pages, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                       int32_t dtype) {
    const Block full = block_layout(FULL_BITS, key_dim, value_dim, dtype == FLOAT32 ? 4 : 2);
    float *work = malloc(sizeof *work * (size_t)work_size(key_dim, value_dim));
    if (!work) return -2;
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t page = 0; page < pages; page++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int32_t *own = words + layer * ALIGN * kv_heads;
                int kind;
                const uint8_t *from = memory + find_block(own, kv_heads, sources[page], head, &kind);
                uint8_t *to = memory + find_block(own, kv_heads, targets[page], head, &kind);
                if (kind == FULL_BITS) memcpy(to, from, (size_t)full.nbytes);
                else seal_block(from, to, kind, key_dim, value_dim, dtype, work);
            }
    free(work);
    return 0;
}

/* Rotated numbers [dim, PAGE] to [PAGE, dim] as they were. */
static void store_rotated(float *from, int64_t dim, int dtype, uint8_t *to) {
    rotate(from, dim, PAGE, 1);
    for (int64_t t = 0; t < PAGE; t++)
        for (int64_t d = 0; d < dim; d++) {
            if (dtype == FLOAT32) ((float *)to)[t * dim + d] = from[d * PAGE + t];
            else ((uint16_t *)to)[t * dim + d] = to_bfloat16(from[d * PAGE + t]);
        }
}

/* `turbo_numbers` of reference/kv_pages.py: keys [dim, PAGE]. sketch: room for as many. */
static void read_turbo(const uint8_t *from, int64_t dim, int bits, const uint16_t *scale, float *keys, float *sketch) {
    const uint16_t *sketch_scale = scale + PAGE, *mean = sketch_scale + PAGE;
    if (bits == 4) unpack_turbo(from, 4, dim * PAGE, keys, sketch);
    else unpack_turbo(from, 2, dim * PAGE, keys, sketch);
    rotate(sketch, dim, PAGE, 0);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < PAGE; t++)
            keys[d * PAGE + t] = keys[d * PAGE + t] * from_half(scale[t]) + from_half(mean[d]) +
                                 sketch[d * PAGE + t] * from_half(sketch_scale[t]);
}

static void read_block(const uint8_t *from, int kind, int64_t key_dim, int64_t value_dim, int dtype, uint8_t *keys,
                       uint8_t *values, float *work) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    const Block b = block_layout(kind, key_dim, value_dim, number);
    if (kind == FULL_BITS) {
        memcpy(keys, from, (size_t)(PAGE * key_dim * number));
        memcpy(values, from + b.values, (size_t)(PAGE * value_dim * number));
        return;
    }
    const int bits = kind % TURBO, mask = (1 << bits) - 1;
    const uint16_t *scales = (const uint16_t *)(from + b.key_scales);
    if (kind > TURBO) read_turbo(from, key_dim, bits, scales, work, work + key_dim * PAGE);
    else
        for (int64_t d = 0; d < key_dim; d++) {
            const float scale = from_half(scales[d]), low = from_half(scales[key_dim + d]);
            for (int64_t t = 0; t < PAGE; t++)
                work[d * PAGE + t] = (float)(from[d * b.key_row + t * bits / 8] >> t * bits % 8 & mask) * scale + low;
        }
    store_rotated(work, key_dim, dtype, keys);
    scales = (const uint16_t *)(from + b.value_scales);
    for (int64_t t = 0; t < PAGE; t++) {
        const float scale = from_half(scales[t]), low = from_half(scales[PAGE + t]);
        const uint8_t *row = from + b.values + t * b.value_row;
        for (int64_t d = 0; d < value_dim; d++)
            work[d * PAGE + t] = (float)(row[d * bits / 8] >> d * bits % 8 & mask) * scale + low;
    }
    store_rotated(work, value_dim, dtype, values);
}

/* `read_pages` of qbe/kernels/kv_pages.py, words int32 [ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_read_pages(const uint8_t *memory, const int32_t *words, const int64_t *entries, int64_t pages,
                       int64_t kv_heads, int64_t key_dim, int64_t value_dim, int32_t dtype, uint8_t *keys,
                       uint8_t *values) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    float *work = malloc(sizeof *work * (size_t)work_size(key_dim, value_dim));
    if (!work) return -2;
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t page = 0; page < pages; page++) {
            int kind;
            const int64_t at = find_block(words, kv_heads, entries[page], head, &kind);
            const int64_t row = (head * pages + page) * PAGE;
            read_block(memory + at, kind, key_dim, value_dim, dtype, keys + row * key_dim * number,
                       values + row * value_dim * number, work);
        }
    free(work);
    return 0;
}
