/* Which pages qbe::bounded_attention reads again from their originals. The bound and its proof are in
   reference/bounded_attention.py, whose names these are. Included by attention.c. */

/* Tensors as qbe.kernels.ops.bounded_attention says, all contiguous but originals, whose rows are those of the block_tables. */
struct Bounds {
    const int64_t *originals;
    const float *limits;
    int64_t *counts;
};

#define NO_ORIGINAL (-1)
#define SLACK 1.001f
#define NOTES 4 /* of a page and a query row: share, e, and h and a times the share */

/* What one key head of a sequence finds out about its pages, those from `first` on that it sees. */
typedef struct {
    int64_t first, pages;
    int64_t *table;   /* [pages] where they are read the second time */
    float *notes;     /* [pages, MAX_QUERIES, NOTES] */
    uint8_t *lowered; /* [pages] whether it has fewer than 16 bits and an original */
    uint8_t *raised;  /* [pages] whether a query head wants it again */
} Again;

#define AGAIN_BYTES (int64_t)(sizeof(int64_t) + sizeof(float) * MAX_QUERIES * NOTES + 2)

/* `both` made ready for a sequence that is bounded, else NULL. */
static Again *begin_again(const Attention *a, int64_t b, int64_t head, char *scratch, Again *both) {
    const AttentionShape *s = a->s;
    if (!a->bounds || !(a->bounds->limits[b] < __builtin_inff())) return NULL;
    const int64_t from = s->window && a->lengths[b] > s->window ? a->lengths[b] - s->window : 0;
    both->first = from / PAGE, both->pages = (a->lengths[b] + PAGE - 1) / PAGE - both->first;
    both->table = (int64_t *)(scratch + a->again_at);
    both->notes = (float *)(both->table + both->pages);
    both->lowered = (uint8_t *)(both->notes + both->pages * MAX_QUERIES * NOTES);
    both->raised = both->lowered + both->pages;
    for (int64_t p = 0; p < both->pages; p++) {
        const int64_t at = b * s->table_row + both->first + p;
        int bits;
        find_block(a->head_offsets, s->kv_heads, a->block_tables[at], head, &bits);
        both->lowered[p] = bits != FULL_BITS && a->bounds->originals[at] != NO_ORIGINAL;
        both->raised[p] = 0;
    }
    return both;
}

/* Counts the pages; where some are to be read again, the table that leads to their originals, else NULL. */
static const int64_t *raise_pages(const Attention *a, int64_t b, const int64_t *table, Again *again) {
    const AttentionShape *s = a->s;
    const Block full = block_layout(FULL_BITS, s->key_dim, s->value_dim, s->dtype == FLOAT32 ? 4 : 2);
    int64_t lowered = 0, raised = 0;
    for (int64_t p = 0; p < again->pages; p++) {
        const int64_t at = again->first + p;
        lowered += again->lowered[p], raised += again->raised[p];
        again->table[p] = again->raised[p] ? a->bounds->originals[b * s->table_row + at] : table[at];
    }
    int64_t *counts = a->bounds->counts + 3 * b;
    __atomic_fetch_add(counts, lowered, __ATOMIC_RELAXED);
    __atomic_fetch_add(counts + 1, raised, __ATOMIC_RELAXED);
    __atomic_fetch_add(counts + 2, raised * full.nbytes, __ATOMIC_RELAXED);
    return raised ? again->table - again->first : NULL;
}

static float magnitude(float f) { return f < 0 ? -f : f; }

/* e^x for any x, at least it: large ones are infinite, small ones are not rounded off. */
static float power(float x) {
    if (!(x < 80.0f)) return x == x ? __builtin_inff() : x;
    return exp_lanes(splat(x))[0];
}

static float number_error(float scale, float low, int bits) {
    const float levels = (float)(1 << bits), high = low + scale * (levels - 1);
    if (!(magnitude(low) < 65504.0f && magnitude(high) < 65504.0f)) return __builtin_inff();
    return scale * (0.5f + levels * 4.76837158e-7f) + magnitude(low) * 4.88281250e-4f + levels * 2.98023224e-8f;
}

static float norm_of(const float *x, int64_t count) {
    Floats sum = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        Floats f = {0};
        memcpy(&f, x + i, sizeof(float) * (size_t)(count - i < LANES ? count - i : LANES));
        sum += f * f;
    }
    const float total = sum_lanes(sum);
    return __builtin_sqrtf(total);
}

/* The notes of one page for M query rows; `weights` are those of its tokens [from, to), `query` is scaled and, for a
   quantised page, rotated. */
static void note_page(const Attention *a, Quantised quantised, const uint8_t *block, int kind, int64_t from, int64_t to,
                      const float *query, int64_t key_wide, const float *weights, int64_t room, int M, float *notes) {
    const AttentionShape *s = a->s;
    const int64_t dim = s->value_dim, number = s->dtype == FLOAT32 ? 4 : 2;
    const int bits = kind % TURBO;
    const Block b = block_layout(kind, s->key_dim, dim, number);
    memset(notes, 0, sizeof *notes * NOTES * (size_t)M);
    if (kind > TURBO) {
        for (int m = 0; m < M; m++) notes[m * NOTES + 1] = __builtin_inff();
    } else if (kind != FULL_BITS)
        for (int64_t d = 0; d < s->key_dim; d += LANES) {
            float scale[LANES], low[LANES];
            half_numbers(block + b.key_scales + 2 * d, scale);
            half_numbers(block + b.key_scales + 2 * (s->key_dim + d), low);
            for (int64_t l = 0; l < LANES && d + l < s->key_dim; l++) {
                const float error = number_error(scale[l], low[l], bits);
                for (int m = 0; m < M; m++) notes[m * NOTES + 1] += magnitude(query[m * key_wide + d + l]) * error;
            }
        }
    const float root = __builtin_sqrtf((float)dim);
    for (int64_t t = from; t < to; t++) {
        float norm, moved = 0;
        if (kind == FULL_BITS) {
            Floats sum = {0};
            for (int64_t i = 0; i < dim; i += LANES) {
                const Floats v = load_lanes((const char *)block + b.values + t * b.value_row, s->dtype, dim, i);
                sum += v * v;
            }
            norm = __builtin_sqrtf(sum_lanes(sum));
        } else {
            float numbers[4 * LANES], squares = 0;
            const float scale = from_half(((const uint16_t *)(block + b.value_scales))[t]);
            const float low = from_half(((const uint16_t *)(block + b.value_scales))[PAGE + t]);
            for (int64_t i = 0; i < dim; i += 4 * LANES) {
                const int64_t count = dim - i < 4 * LANES ? dim - i : 4 * LANES;
                quantised.unpack(block + b.values + t * b.value_row + i * bits / 8, bits, (count + LANES - 1) / LANES * LANES,
                              numbers);
                for (int64_t j = 0; j < count; j++) numbers[j] = numbers[j] * scale + low;
                const float part = norm_of(numbers, count);
                squares += part * part;
            }
            moved = root * number_error(scale, low, bits);
            norm = __builtin_sqrtf(squares) + moved;
        }
        for (int m = 0; m < M; m++) {
            const float weight = weights[m * room + t - from];
            notes[m * NOTES] += weight;
            notes[m * NOTES + 2] += weight * moved;
            notes[m * NOTES + 3] += weight * norm;
        }
    }
}

/* Marks the pages that one query row, whose notes these are, wants to be read again: `page_bounds` and
   `pages_to_raise`. */
static void flag_row(float *notes, float at_sink, float allowed, const Again *again) {
    const int64_t stride = MAX_QUERIES * NOTES;
    float least = at_sink, centre = 0, highest = allowed;
    for (int64_t p = 0; p < again->pages; p++) {
        const float *n = notes + p * stride;
        least += n[0] * power(-n[1]);
        centre += n[3] * power(n[1]);
    }
    centre /= least;
    for (int64_t p = 0; p < again->pages; p++) { /* B takes the place of the share */
        float *n = notes + p * stride;
        const float exact = power(n[1]) - 1, series = n[1] * (1 + n[1] / 2); /* the better one where e is small */
        const float grown = series > exact ? series : exact;
        n[0] = SLACK * (n[2] + grown * (n[3] + n[0] * centre)) / least;
    }
    for (;; highest /= 2) {
        float sum = 0;
        for (int64_t p = 0; p < again->pages; p++)
            if (again->lowered[p] && notes[p * stride] <= highest) sum += notes[p * stride];
        if (!(sum > allowed)) break;
    }
    for (int64_t p = 0; p < again->pages; p++)
        if (again->lowered[p] && !(notes[p * stride] <= highest)) again->raised[p] = 1;
}

/* The same for M query rows that have attended: `query` is scaled, `weights` [M, room] are those of all tokens they
   see, `at_sink` [M] those of their sinks, `out` is what they got. */
static void flag_pages(const Attention *a, Quantised quantised, int64_t b, int64_t head, const int64_t *table,
                       const float *query, int64_t key_wide, const float *weights, int64_t room, const float *at_sink,
                       const float *out, int64_t wide, int M, const Again *again) {
    const AttentionShape *s = a->s;
    const int64_t to = a->lengths[b], from = s->window && to > s->window ? to - s->window : 0;
    for (int64_t p = 0; p < again->pages; p++) {
        const int64_t at = (again->first + p) * PAGE, low = at > from ? at : from, high = at + PAGE < to ? at + PAGE : to;
        int bits;
        const uint8_t *block = a->memory + find_block(a->head_offsets, s->kv_heads, table[again->first + p], head, &bits);
        note_page(a, quantised, block, bits, low - at, high - at, query, key_wide, weights + low - from, room, M,
                  again->notes + p * MAX_QUERIES * NOTES);
    }
    for (int m = 0; m < M; m++)
        flag_row(again->notes + m * NOTES, at_sink[m], a->bounds->limits[b] * norm_of(out + m * wide, s->value_dim), again);
}
