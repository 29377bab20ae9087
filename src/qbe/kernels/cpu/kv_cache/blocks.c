/* Blocks of the KV cache's pages as C sees them (qbe/format/kv_blocks.py): where they are, and their numbers unpacked.
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

/* The address of a head's block in a page, and its kind; head_offsets are those of one layer. */
INLINE int64_t find_block(const int32_t *head_offsets, int64_t word_row, int64_t block_id, int64_t head, int *kind) {
    const int32_t head_offset = head_offsets[block_id % ALIGN * word_row + head];
    *kind = head_offset % ALIGN;
    return block_id - block_id % ALIGN + head_offset - head_offset % ALIGN;
}

/* 16 codes of 4 or 2 bits that begin at a whole byte: every lane shifts its own out of a 32-bit head_offset (little endian). */
INLINE Integers unpack_lanes(const uint8_t *from, const int BITS) {
    if (BITS == 4) {
        const Words shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
        const Words first = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
        uint32_t head_offset[2];
        memcpy(head_offset, from, sizeof head_offset);
        return (Integers)((((head_offset[0] & first) | (head_offset[1] & ~first)) >> shift) & 15);
    }
    const Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    uint32_t head_offset;
    memcpy(&head_offset, from, sizeof head_offset);
    return (Integers)((head_offset - (Words){0}) >> shift & 3);
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

INLINE Floats halves_as_floats(Halves h) {
    const Words w = __builtin_convertvector(h, Words);
    const Integers special = (Integers)((w & 0x7c00) == 0x7c00); /* NaN and infinity stay what they are */
    const Floats finite = (Floats)((w & 0x7fff) << 13) * 5.192296858534828e33f; /* 2^112 */
    const Words magnitude = ((Words)special & (((w & 0x7fff) << 13) | 0x7f800000)) | (~(Words)special & (Words)finite);
    return (Floats)(magnitude | ((w & 0x8000) << 16));
}

static void half_numbers(const uint8_t *from, float *to) { /* 16 of them */
    Halves h;
    memcpy(&h, from, sizeof h);
    const Floats f = halves_as_floats(h);
    memcpy(to, &f, sizeof f);
}

INLINE float from_half(uint16_t h) {
    const Halves one = {h};
    return halves_as_floats(one)[0];
}
