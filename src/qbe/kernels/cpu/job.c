/* What the threads of one call share. Included by nested.c. */

#include <stdatomic.h>

/* One per part of a precision, for dot_avx512.c. */
typedef struct {
    int64_t spread[8], rotate[8];      /* part -> 64-bit lane: which of its words, rotated left by how much */
    uint64_t mask;                     /* the part's bits in the digit's bytes */
    int32_t width, starts, ends;       /* starts, ends: first, last part of its digit */
    uint16_t table[32];                /* of the digit, where `ends` */
} Step;

typedef struct {
    int32_t count;
    Step step[8];
} Recipe;

/* One weight to multiply with or to dequantise; its rows are taken in chunks from the counter `next`. */
typedef struct {
    Weight w;
    atomic_llong next;
    int64_t chunk;
    int dtype;
    void *y;
    int64_t y_stride;        /* numbers from one row of y to the next */
    int64_t rows;            /* of x; or of the weight, from n0, to dequantise */
    const Recipe *recipe;    /* per precision (AVX-512) */
    /* multiply */
    const void *x;           /* one row every x_bytes, as the backend's load function leaves it */
    int64_t x_bytes;
    const float *sums;       /* [rows of x, groups]: sums of x over groups (AVX-512) */
    int32_t *row, *precision; /* the rows in the order of their precisions: number in x and y, index of the precision */
    const void *bias;
    int bias_dtype;
    /* multiply, the rows of x at 16 bits */
    const char *original, *x_full; /* [n, k] and x itself, both of `dtype` */
    const int32_t *row_full;       /* their numbers in x and y */
    int64_t full;
    int64_t k;
    /* dequantise: from the row n0 on, at the precision `index` */
    int64_t n0;
    int index;
} Job;

/* The jobs of one call. */
typedef struct {
    Job *job;
    int64_t count;
    atomic_int slot;         /* hands each thread its part of `scratch` */
    float *scratch;          /* per thread: scale and offset of one chunk */
    int64_t scratch_floats;
} Jobs;

INLINE void store(const Job *j, int64_t row, int64_t n, float value) {
    if (j->bias)
        value += j->bias_dtype == FLOAT32 ? ((const float *)j->bias)[n]
                                          : bits_to_float((uint32_t)((const uint16_t *)j->bias)[n] << 16);
    if (j->dtype == FLOAT32) ((float *)j->y)[row * j->y_stride + n] = value;
    else ((uint16_t *)j->y)[row * j->y_stride + n] = to_bfloat16(value);
}

/* Block b of a row of x in float32; zero in padding. */
INLINE void load_block(const void *x, int dtype, int64_t k, int64_t b, float block[BLOCK]) {
    const int64_t from = b * BLOCK, count = k - from >= BLOCK ? BLOCK : k > from ? k - from : 0;
    if (count < BLOCK) memset(block, 0, BLOCK * sizeof *block);
    if (dtype == FLOAT32) {
        memcpy(block, (const float *)x + from, (size_t)count * sizeof *block);
    } else {
        for (int64_t i = 0; i < count; i++) block[i] = bits_to_float((uint32_t)((const uint16_t *)x)[from + i] << 16);
    }
}
