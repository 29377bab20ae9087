/* Scores and sums of values page by page, at each page's own precision. Included by attention.c. */

#define ROWS_AHEAD 16 /* keys that are asked for before their turn: a page is too short for the processor to find out itself */

/* scores[m * room + t] = query[m] . key t, for M queries and the tokens [from, to) of one page, t from 0. Their values are asked
   for meanwhile. */
INLINE void full_scores(SumEach *sum_each, const char *key, int64_t from, int64_t to, int64_t dim, int64_t value_dim,
                        const float *query, int64_t wide, float *scores, int64_t room, const int M, const int DTYPE) {
    const int64_t number = DTYPE == FLOAT32 ? 4 : 2, row = dim * number, value_row = value_dim * number;
    const char *value = key + PAGE * row + from * value_row;
    key += from * row;
    for (int64_t t = from; t < to; t += LANES) {
        const int64_t count = to - t < LANES ? to - t : LANES;
        Floats sums[MAX_QUERIES][LANES] = {{{0}}};
        for (int64_t j = 0; j < count; j++, key += row, value += value_row) {
            Floats sum[MAX_QUERIES] = {{0}};
            for (int64_t i = 0; i < row; i += 64) __builtin_prefetch(key + ROWS_AHEAD * row + i);
            for (int64_t i = 0; i < value_row; i += 64) __builtin_prefetch(value + i);
            for (int64_t i = 0; i < dim; i += LANES) {
                const Floats k = load_lanes(key, DTYPE, dim, i);
                for (int m = 0; m < M; m++) {
                    Floats q;
                    memcpy(&q, query + m * wide + i, sizeof q);
                    sum[m] += q * k;
                }
            }
            for (int m = 0; m < M; m++) sums[m][j] = sum[m];
        }
        for (int m = 0; m < M; m++) {
            float all[LANES];
            sum_each(sums[m], all);
            memcpy(scores + m * room + t - from, all, (size_t)count * sizeof *all);
        }
    }
}

/* sum[m * N + n] += over rows [from, to), weights[m * room + row - from] * the row's numbers, N * LANES of them from i. */
INLINE void add_rows(const char *rows, int64_t from, int64_t to, int64_t dim, const float *weights, int64_t room,
                     int64_t i, Floats *sum, const int M, const int N, const int DTYPE) {
    const int64_t size = dim * (DTYPE == FLOAT32 ? 4 : 2);
    rows += from * size;
    for (int64_t t = from; t < to; t++, rows += size)
        for (int n = 0; n < N; n++) {
            const Floats v = load_lanes(rows, DTYPE, dim, i + n * LANES);
            for (int m = 0; m < M; m++) sum[m * N + n] += v * weights[m * room + t - from];
        }
}

/* query: the M queries as they are, rotated (for quantised pages) and once more (for sketches), `next` floats apart. */
INLINE void attention_scores(const Attention *a, Quantised quantised, const int64_t *table, int64_t head, int64_t from,
                             int64_t to, const float *query, int64_t next, int64_t wide, float *scores, int64_t room,
                             const int M, const int DTYPE) {
    const AttentionShape *s = a->s;
    for (int64_t t = from, end; t < to; t = end) {
        const int64_t page = t / PAGE, first = t % PAGE;
        end = (page + 1) * PAGE < to ? (page + 1) * PAGE : to;
        const int64_t last = first + end - t;
        int kind;
        const uint8_t *block = a->memory + find_block(a->head_offsets, s->kv_heads, table[page], head, &kind);
        float *out = scores + t - from;
        if (kind == FULL_BITS)
            full_scores(quantised.sum_each, (const char *)block, first, last, s->key_dim, s->value_dim, query, wide, out, room, M, DTYPE);
        else if (kind > TURBO)
            turbo_scores(quantised, block, kind, first, last, s->key_dim, s->value_dim, query + next, query + 2 * next,
                         wide, out, room, M);
        else
            quantised_scores(quantised, block, kind, first, last, s->key_dim, s->value_dim, query + next, wide, out, room, M);
    }
}

/* out[m] = sum over tokens [from, to) of weights[m * room + t - from] * value t, for N * LANES numbers from i: of those
   in pages of 16 bits, and `next` floats behind of those in quantised pages, rotated. */
INLINE void attention_values(const Attention *a, Quantised quantised, const int64_t *table, int64_t head, int64_t from,
                             int64_t to, const float *weights, int64_t room, int64_t i, float *out, int64_t next,
                             int64_t wide, const int M, const int N, const int DTYPE) {
    const AttentionShape *s = a->s;
    const int64_t values = PAGE * s->key_dim * (DTYPE == FLOAT32 ? 4 : 2);
    Floats sum[MAX_QUERIES * 4] = {{0}}, rotated[MAX_QUERIES * 4] = {{0}};
    for (int64_t t = from, end; t < to; t = end) {
        const int64_t page = t / PAGE, first = t % PAGE;
        end = (page + 1) * PAGE < to ? (page + 1) * PAGE : to;
        const int64_t last = first + end - t;
        int kind;
        const uint8_t *block = a->memory + find_block(a->head_offsets, s->kv_heads, table[page], head, &kind);
        const float *own = weights + t - from;
        if (kind == FULL_BITS)
            add_rows((const char *)block + values, first, last, s->value_dim, own, room, i, sum, M, N, DTYPE);
        else
            quantised_values(quantised, block, kind, first, last, s->key_dim, s->value_dim, own, room, i, rotated, M, N);
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            memcpy(out + m * wide + i + n * LANES, &sum[m * N + n], sizeof(Floats));
            memcpy(out + next + m * wide + i + n * LANES, &rotated[m * N + n], sizeof(Floats));
        }
}
