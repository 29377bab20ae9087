/* The store as C sees it: layout, scales and offsets, unpacking. Included by nested.c.

   Codes are unpacked to the top of a byte, so that one conversion serves every precision: code8 = code_b << (8-b),
   offset8 = offset_b * 2^(8-b), scale8 = scale_b / 2^(8-b), all exact. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 64 /* inputs per block of the layout */

enum { FLOAT32, BFLOAT16, FLOAT16 }; /* the last one: x and y of nested weights, with AVX-512 */

typedef struct {
    int32_t total_bits, precisions, parts;
    int32_t precision[8];       /* ascending */
    int32_t first[8], width[8]; /* of every part */
} Layout;

/* `_Table` of geometry.py. */
typedef struct {
    Layout layout;
    int32_t exponent;
    int64_t k, n, kp, groups;
} Shape;

typedef struct {
    const uint8_t *packed, *meta;
    int64_t n, kp, groups;
    int32_t exponent;
    const Layout *layout;
} Weight;

INLINE float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

INLINE uint16_t to_bfloat16(float f) {
    uint32_t u = float_to_bits(f);
    uint16_t rounded = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16), nan = (uint16_t)((u >> 16) | 0x40);
    return (u & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

INLINE int parts_of(const Layout *l, int bits) {
    int count = 0;
    while (count < l->parts && l->first[count] < bits) count++;
    return count;
}

INLINE const uint8_t *part_row(const Weight *w, int part, int64_t row) {
    const Layout *l = w->layout;
    return w->packed + l->first[part] * (w->n * w->kp / 8) + row * (w->kp * l->width[part] / 8);
}

/* scale8 and offset8 of the groups of rows [n0, n1) at the i-th precision. */
INLINE void decode_meta(const Weight *w, int64_t n0, int64_t n1, int i, float *scale, float *offset) {
    const Layout *l = w->layout;
    const int64_t plane = w->n * w->groups, count = (n1 - n0) * w->groups;
    const uint8_t *s = w->meta + n0 * w->groups, *z = s + plane;
    const int shift = l->total_bits - l->precision[i], up = 8 - l->precision[i];
    const uint32_t bias = (uint32_t)w->exponent << 23;
    const float top = (float)(1 << up), widest = 1.0f / (float)(1 << (8 - l->total_bits));
    if (shift == 0) {
        for (int64_t g = 0; g < count; g++) {
            scale[g] = bits_to_float(((uint32_t)s[g] << 19) + bias) * widest;
            offset[g] = (float)z[g] * top;
        }
        return;
    }
    const int8_t *r = (const int8_t *)s + (2 + 2 * i) * plane, *o = r + plane;
    const float middle = (float)((1 << shift) - 1) / 2, per = top / (float)(1 << shift);
    for (int64_t g = 0; g < count; g++) {
        scale[g] = bits_to_float(((uint32_t)s[g] << 19) + bias) * widest * (1.0f + (float)r[g] / 256.0f);
        offset[g] = ((float)z[g] - middle) * per + (float)o[g] * (top / 64.0f);
    }
}

/* A part of width W is W words of 8 bytes; field j of them holds the words j*W.. of the block, in order. */
#define UNPACK_PART(W)                                                       \
    for (int q = 0; q < W; q++) {                                            \
        uint64_t word;                                                       \
        memcpy(&word, from + 8 * q, 8);                                      \
        for (int j = 0; j < 8 / W; j++)                                      \
            out[j * W + q] |= ((word >> (j * W)) & (0x0101010101010101u * ((1u << W) - 1))) << up; \
    }

/* One block at `parts` parts: 64 codes, each at the top of its byte. */
INLINE void unpack_block(const Layout *l, const uint8_t *const *rows, int parts, int64_t block, uint64_t out[8]) {
    memset(out, 0, BLOCK);
    for (int p = 0; p < parts; p++) {
        const uint8_t *from = rows[p] + block * 8 * l->width[p];
        const int up = 8 - l->first[p] - l->width[p];
        if (l->width[p] == 4) { UNPACK_PART(4) }
        else if (l->width[p] == 2) { UNPACK_PART(2) }
        else { UNPACK_PART(1) }
    }
}
