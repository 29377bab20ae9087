/* Pages of the KV cache as C sees them (qbe/kernels/kv_blocks.py): finding, unpacking, sealing and reading blocks.
   Included by attention.c. Written in vectors of 16 floats, which the compiler maps to what each path has. */

#define LANES 16
#define PAGE 64
#define ALIGN 256

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

INLINE Floats splat(float f) { return f - (Floats){0}; }
INLINE Floats pick(Integers mask, Floats a, Floats b) { return (Floats)((mask & (Integers)a) | (~mask & (Integers)b)); }

/* Where the parts of a block are, in bytes. */
typedef struct { int64_t key_row, value_row, values, key_scales, value_scales, nbytes; } Block;

INLINE Block block_layout(int bits, int64_t key_dim, int64_t value_dim, int64_t number) {
    Block b = {.key_row = key_dim * number, .value_row = value_dim * number, .values = PAGE * key_dim * number};
    b.key_scales = b.value_scales = b.values + PAGE * b.value_row;
    int64_t size = b.key_scales;
    if (bits != FULL_BITS) {
        b.key_row = PAGE * bits / 8, b.value_row = (value_dim * bits + 7) / 8, b.values = PAGE * ((key_dim * bits + 7) / 8);
        b.key_scales = b.values + PAGE * b.value_row, b.value_scales = b.key_scales + 4 * key_dim;
        size = b.value_scales + 4 * PAGE;
    }
    b.nbytes = (size + ALIGN - 1) / ALIGN * ALIGN;
    return b;
}

/* The address of a head's block in a page, and its bits; words are those of one layer. */
INLINE int64_t find_block(const int32_t *words, int64_t word_row, int64_t entry, int64_t head, int *bits) {
    const int32_t word = words[entry % ALIGN * word_row + head];
    *bits = word % ALIGN;
    return entry - entry % ALIGN + word - word % ALIGN;
}

/* 16 codes of 4 or 2 bits that begin at a whole byte: every lane shifts its own out of a 32-bit word (little endian). */
INLINE Floats unpack_lanes(const uint8_t *from, const int BITS) {
    Integers codes;
    if (BITS == 4) {
        const Words shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
        const Words first = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
        uint32_t word[2];
        memcpy(word, from, sizeof word);
        codes = (Integers)((((word[0] & first) | (word[1] & ~first)) >> shift) & 15);
    } else {
        const Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        uint32_t word;
        memcpy(&word, from, sizeof word);
        codes = (Integers)((word - (Words){0}) >> shift & 3);
    }
    return __builtin_convertvector(codes, Floats);
}

/* `count` codes, a multiple of 16. */
INLINE void unpack_codes(const uint8_t *from, int bits, int64_t count, float *to) {
#define UNPACK_ALL(BITS)                                                \
    for (int64_t i = 0; i < count; i += LANES) {                        \
        const Floats codes = unpack_lanes(from + i * BITS / 8, BITS);   \
        memcpy(to + i, &codes, sizeof codes);                           \
    }
    if (bits == 8) for (int64_t i = 0; i < count; i++) to[i] = from[i];
    else if (bits == 4) { UNPACK_ALL(4) }
    else { UNPACK_ALL(2) }
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

static void seal_block(const uint8_t *from, uint8_t *to, int bits, int64_t key_dim, int64_t value_dim, int dtype,
                       float *row) {
    const Block b = block_layout(bits, key_dim, value_dim, dtype == FLOAT32 ? 4 : 2);
    const int64_t values = PAGE * key_dim;
    uint16_t *scales = (uint16_t *)(to + b.key_scales);
    for (int64_t d = 0; d < key_dim; d++) {
        for (int64_t t = 0; t < PAGE; t++) row[t] = number_at(from, t * key_dim + d, dtype);
        seal_row(row, PAGE, bits, to + d * b.key_row, scales + d, scales + key_dim + d);
    }
    scales = (uint16_t *)(to + b.value_scales);
    for (int64_t t = 0; t < PAGE; t++) {
        for (int64_t d = 0; d < value_dim; d++) row[d] = number_at(from, values + t * value_dim + d, dtype);
        seal_row(row, value_dim, bits, to + b.values + t * b.value_row, scales + t, scales + PAGE + t);
    }
}

/* `seal_pages` of qbe/kernels/kv_pages.py, words int32 [layers, ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_seal_pages(uint8_t *memory, const int32_t *words, const int64_t *sources, const int64_t *targets,
                       int64_t layers, int64_t pages, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                       int32_t dtype) {
    const Block full = block_layout(FULL_BITS, key_dim, value_dim, dtype == FLOAT32 ? 4 : 2);
    float *row = malloc(sizeof *row * (size_t)(value_dim > PAGE ? value_dim : PAGE));
    if (!row) return -2;
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t page = 0; page < pages; page++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int32_t *own = words + layer * ALIGN * kv_heads;
                int bits;
                const uint8_t *from = memory + find_block(own, kv_heads, sources[page], head, &bits);
                uint8_t *to = memory + find_block(own, kv_heads, targets[page], head, &bits);
                if (bits == FULL_BITS) memcpy(to, from, (size_t)full.nbytes);
                else seal_block(from, to, bits, key_dim, value_dim, dtype, row);
            }
    free(row);
    return 0;
}

static void put(uint8_t *to, int64_t i, float f, int dtype) {
    if (dtype == FLOAT32) ((float *)to)[i] = f;
    else ((uint16_t *)to)[i] = to_bfloat16(f);
}

static void read_block(const uint8_t *from, int bits, int64_t key_dim, int64_t value_dim, int dtype, uint8_t *keys,
                       uint8_t *values) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    const Block b = block_layout(bits, key_dim, value_dim, number);
    if (bits == FULL_BITS) {
        memcpy(keys, from, (size_t)(PAGE * key_dim * number));
        memcpy(values, from + b.values, (size_t)(PAGE * value_dim * number));
        return;
    }
    const int mask = (1 << bits) - 1;
    const uint16_t *scales = (const uint16_t *)(from + b.key_scales);
    for (int64_t d = 0; d < key_dim; d++) {
        const float scale = from_half(scales[d]), low = from_half(scales[key_dim + d]);
        for (int64_t t = 0; t < PAGE; t++) {
            const int code = from[d * b.key_row + t * bits / 8] >> t * bits % 8 & mask;
            put(keys, t * key_dim + d, (float)code * scale + low, dtype);
        }
    }
    scales = (const uint16_t *)(from + b.value_scales);
    for (int64_t t = 0; t < PAGE; t++) {
        const float scale = from_half(scales[t]), low = from_half(scales[PAGE + t]);
        for (int64_t d = 0; d < value_dim; d++) {
            const int code = from[b.values + t * b.value_row + d * bits / 8] >> d * bits % 8 & mask;
            put(values, t * value_dim + d, (float)code * scale + low, dtype);
        }
    }
}

/* `read_pages` of qbe/kernels/kv_pages.py, words int32 [ALIGN, kv_heads]. */
void qbe_read_pages(const uint8_t *memory, const int32_t *words, const int64_t *entries, int64_t pages,
                    int64_t kv_heads, int64_t key_dim, int64_t value_dim, int32_t dtype, uint8_t *keys,
                    uint8_t *values) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t page = 0; page < pages; page++) {
            int bits;
            const int64_t at = find_block(words, kv_heads, entries[page], head, &bits);
            const int64_t row = (head * pages + page) * PAGE;
            read_block(memory + at, bits, key_dim, value_dim, dtype, keys + row * key_dim * number,
                       values + row * value_dim * number);
        }
}
