/* Attention over quantised pages: their codes are unpacked to floats, a few rows at a time, and added up like any others.
   Included by attention.c. Only unpacking and adding are compiled for each path.
   Queries and sums of values are rotated, as the pages are. */

#define CHANNELS 32 /* channels unpacked at a time */

typedef void Unpack(const uint8_t *from, int bits, int64_t count, float *to);
typedef void UnpackTurbo(const uint8_t *from, int bits, int64_t count, float *levels, float *signs);
typedef void AddRows(const float *rows, int64_t count, const float *weights, int64_t room, Floats *sum, int M, int N);
typedef void SumEach(const Floats *f, float *to);

/* What each path has of its own: to read quantised pages, and sums of many vectors' lanes. */
typedef struct {
    Unpack *unpack;
    UnpackTurbo *unpack_turbo;
    AddRows *add_rows;
    SumEach *sum_each;
} Quantised;

/* sum[m * N + n] += over `count` rows of N vectors, weights[m * room + row] * vector n. */
INLINE void add_floats(const float *rows, int64_t count, const float *weights, int64_t room, Floats *sum, const int M,
                       const int N) {
    Floats own[MAX_QUERIES * 4];
    memcpy(own, sum, sizeof *own * (size_t)(M * N));
    for (int64_t t = 0; t < count; t++)
        for (int n = 0; n < N; n++) {
            Floats v;
            memcpy(&v, rows + (t * N + n) * LANES, sizeof v);
            for (int m = 0; m < M; m++) own[m * N + n] += v * weights[m * room + t];
        }
    memcpy(sum, own, sizeof *own * (size_t)(M * N));
}

/* scores[m * room + t - from] = query[m] . key t, for M queries and the tokens [from, to) of a page. A channel's scale
   goes into the query and its low into a sum of its own, so that codes are only unpacked and multiplied. */
static void quantised_scores(Quantised quantised, const uint8_t *block, int bits, int64_t from, int64_t to, int64_t dim,
                          int64_t value_dim, const float *query, int64_t wide, float *scores, int64_t room, int M) {
    const Block b = block_layout(bits, dim, value_dim, 2);
    Floats sum[MAX_QUERIES * (PAGE / LANES)] = {{0}};
    float base[MAX_QUERIES] = {0}, scaled[MAX_QUERIES * CHANNELS], codes[CHANNELS * PAGE];
    for (int64_t d = 0; d < dim; d += CHANNELS) {
        const int64_t count = dim - d < CHANNELS ? dim - d : CHANNELS;
        for (int64_t i = 0; i < count; i += LANES) {
            float scale[LANES], low[LANES];
            half_numbers(block + b.key_scales + 2 * (d + i), scale);
            half_numbers(block + b.key_scales + 2 * (dim + d + i), low);
            for (int m = 0; m < M; m++)
                for (int64_t l = 0; l < LANES && i + l < count; l++) {
                    const float q = query[m * wide + d + i + l];
                    scaled[m * CHANNELS + i + l] = q * scale[l];
                    base[m] += q * low[l];
                }
        }
        quantised.unpack(block + d * b.key_row, bits, count * PAGE, codes);
        quantised.add_rows(codes, count, scaled, CHANNELS, sum, M, PAGE / LANES);
    }
    for (int m = 0; m < M; m++) {
        float all[PAGE];
        memcpy(all, sum + m * (PAGE / LANES), sizeof all);
        for (int64_t t = from; t < to; t++) scores[m * room + t - from] = all[t] + base[m];
    }
}

/* The same for turbo keys; sketch: the queries rotated as the keys' sketches are. */
static void turbo_scores(Quantised quantised, const uint8_t *block, int kind, int64_t from, int64_t to, int64_t dim,
                         int64_t value_dim, const float *query, const float *sketch, int64_t wide, float *scores,
                         int64_t room, int M) {
    const Block b = block_layout(kind, dim, value_dim, 2);
    Floats level_sum[MAX_QUERIES * (PAGE / LANES)] = {{0}}, sign_sum[MAX_QUERIES * (PAGE / LANES)] = {{0}};
    float base[MAX_QUERIES] = {0}, levels[CHANNELS * PAGE], signs[CHANNELS * PAGE], scale[PAGE], sketch_scale[PAGE];
    for (int64_t d = 0; d < dim; d += CHANNELS) {
        const int64_t count = dim - d < CHANNELS ? dim - d : CHANNELS;
        for (int64_t i = 0; i < count; i += LANES) {
            float mean[LANES];
            half_numbers(block + b.key_scales + 4 * PAGE + 2 * (d + i), mean);
            for (int m = 0; m < M; m++)
                for (int64_t l = 0; l < LANES && i + l < count; l++) base[m] += query[m * wide + d + i + l] * mean[l];
        }
        quantised.unpack_turbo(block + d * b.key_row, kind % TURBO, count * PAGE, levels, signs);
        quantised.add_rows(levels, count, query + d, wide, level_sum, M, PAGE / LANES);
        quantised.add_rows(signs, count, sketch + d, wide, sign_sum, M, PAGE / LANES);
    }
    for (int t = 0; t < PAGE; t += LANES) {
        half_numbers(block + b.key_scales + 2 * t, scale + t);
        half_numbers(block + b.key_scales + 2 * (PAGE + t), sketch_scale + t);
    }
    for (int m = 0; m < M; m++) {
        float level[PAGE], sign[PAGE];
        memcpy(level, level_sum + m * (PAGE / LANES), sizeof level);
        memcpy(sign, sign_sum + m * (PAGE / LANES), sizeof sign);
        for (int64_t t = from; t < to; t++)
            scores[m * room + t - from] = base[m] + level[t] * scale[t] + sign[t] * sketch_scale[t];
    }
}

/* sum[m * N + n] += over the tokens [from, to) of a page, weights[m * room + t - from] * value t, N vectors of it from
   number i on. A token's scale goes into its weight, its low into a sum that all numbers share. */
static void quantised_values(Quantised quantised, const uint8_t *block, int kind, int64_t from, int64_t to, int64_t key_dim,
                          int64_t dim, const float *weights, int64_t room, int64_t i, Floats *sum, int M, int N) {
    const Block b = block_layout(kind, key_dim, dim, 2);
    const int bits = kind % TURBO;
    float scale[PAGE], low[PAGE], base[MAX_QUERIES] = {0}, scaled[MAX_QUERIES * PAGE], codes[PAGE * 4 * LANES];
    for (int t = 0; t < PAGE; t += LANES) {
        half_numbers(block + b.value_scales + 2 * t, scale + t);
        half_numbers(block + b.value_scales + 2 * (PAGE + t), low + t);
    }
    for (int64_t t = from; t < to; t++) {
        for (int m = 0; m < M; m++) {
            scaled[m * PAGE + t - from] = weights[m * room + t - from] * scale[t];
            base[m] += weights[m * room + t - from] * low[t];
        }
        const uint8_t *row = block + b.values + t * b.value_row + i * bits / 8;
        quantised.unpack(row, bits, N * LANES, codes + (t - from) * N * LANES);
    }
    quantised.add_rows(codes, to - from, scaled, PAGE, sum, M, N);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m * N + n] += base[m];
}
