/* What the threads of one call share. Included by nested.c. */

#include <stdatomic.h>

#define CHUNK 65536 /* weights that a thread takes at a time, at most */

#define INT16 0 /* in the place of a number of planes: all 16 bits in one number */
#define IN_TILES 3 /* likewise: x as it is, in tiles of bfloat16 (dot_bfloat16.c) */

/* What products need to know of a row of x and a group (activations.c). */
typedef struct {
    float unit, sum; /* the value of the last plane's unit; the sum of the group in it */
    int32_t taken;   /* with INT16: -(x1 x2 + x3 x4 + ...), modulo 2^32 (dot_winograd.c) */
} OfGroup;

#define TILE_LINES 16 /* rows that a register of AMX holds at most */

#define FEW 16      /* rows that share unpacked codes (dot_few.c) */
#define FEW_ALIKE 8 /* of one precision; more pay for a panel of their own (benchmarks/cpu_crossover.py) */

/* Rows of x from `first` on, the first of them at x. */
typedef struct {
    int64_t first, count;
    const char *x;
} Rows;

/* Rows that read so many parts of the weight, by their planes less one. */
typedef struct {
    Rows planes[2];
} Few;

/* One weight to multiply with or to dequantise; its rows are taken in chunks from the counter `next`. To multiply, callers set w,
   dtype, y_dtype, y, y_stride, words, given, x_row, given_rows, k, bias, bias_dtype and original. */
typedef struct {
    Weight w;
    atomic_llong next, loading; /* rows of the weight, rows of x */
    int64_t chunk;
    int dtype, y_dtype;
    void *y;
    int64_t y_stride;        /* numbers from one row of y to the next */
    int64_t rows;            /* of x, those at 16 bits not among them; or of the weight, from n0, to dequantise */
    const struct Recipe *recipe; /* per precision (AVX-512) */
    /* multiply: the rows of x in the order of their precisions, those of 8-bit activations behind the others */
    const int32_t *words;    /* of all rows, in their own order */
    int32_t *row, *precision; /* number in x and y, index of the precision */
    int32_t *planes;         /* of activations.c, INT16 or IN_TILES */
    int64_t tiled_rows;      /* from so many of one precision on they are IN_TILES; 0: none are */
    Rows by_tiles[8];        /* those rows, by their precision */
    Few few[8];              /* rows that are multiplied together (AVX-512), by the parts that they read less one */
    int64_t few_rows, few_first; /* how many, and the first of them */
    int few_highest;         /* of their precisions */
    char *x;                 /* one row every x_bytes, as the backend's load function leaves it */
    int64_t x_bytes;
    OfGroup *of_group;       /* [groups, rows] (AVX-512) */
    int shares;              /* x is another job's */
    int tiles;               /* use AMX */
    const char *given;       /* x itself, [.., k] of `dtype` */
    const int32_t *x_row;    /* which of its rows are multiplied, or NULL: the first ones */
    int64_t given_rows;      /* how many */
    const void *bias;
    int bias_dtype;
    /* multiply, the rows of x at 16 bits */
    const char *original;    /* [n, k] of `dtype` */
    const int32_t *row_full; /* their numbers in x and y, those of 8-bit activations behind the others */
    int64_t full, full_eight; /* how many; how many of them with 8-bit activations */
    float *x_eight;          /* [full_eight, kp] */
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
    float *scratch;          /* per thread: scales and offsets, and the like */
    int64_t scratch_floats;
} Jobs;

/* A row of x by its number among those that are multiplied. */
INLINE const char *given_row(const Job *j, int64_t row) {
    return (const char *)j->given + (j->x_row ? j->x_row[row] : row) * j->k * (j->dtype == FLOAT32 ? 4 : 2);
}

INLINE void store(const Job *j, int64_t row, int64_t n, float value) {
    if (j->bias)
        value += j->bias_dtype == FLOAT32 ? ((const float *)j->bias)[n]
                                          : bits_to_float((uint32_t)((const uint16_t *)j->bias)[n] << 16);
    if (j->y_dtype == FLOAT32) ((float *)j->y)[row * j->y_stride + n] = value;
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
