/* Attention of one new token per sequence over its pages: qbe::paged_attention and, with bounds, qbe::bounded_attention.
   Included by nested.c.

   Query rows that share a key head are served by one reading of it, page by page at each page's own precision. Sums are
   float32 in an order that depends on the sequence alone. */

#include "../kv_cache/blocks.c"

#include "lanes.c"

#include "../kv_cache/quantise.c"

#include "../kv_cache/read.c"

#include "../kv_cache/pages.c"

#define MAX_QUERIES 4 /* rows served by one reading */

#include "quantised_pages.c"

/* `_Shape` of paged.py. Strides are in numbers; the last dimension is contiguous. */
typedef struct {
    int64_t batch, heads, kv_heads, key_dim, value_dim, bytes, table_width;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head, table_row, entropy_row;
    int64_t window;
    float scaling, softcap;
    int32_t dtype;
} AttentionShape;

typedef struct Bounds Bounds;

typedef struct {
    const AttentionShape *s;
    const Bounds *bounds; /* or NULL */
    const char *query;
    const uint8_t *memory;
    const int32_t *head_offsets;
    const int64_t *block_tables, *lengths;
    const float *sinks; /* [heads] or NULL */
    char *out, *scratch;
    float *entropy;
    int64_t again_at, scratch_bytes; /* of a thread: where `Again` has its part, and all of it */
    atomic_llong next;
    atomic_int slot;
    int backend;
} Attention;

#include "pages.c"

#include "softmax.c"

#include "bounds.c"

/* Rotations of a query that the pages of the tokens [from, to) call for: 2 for turbo keys, 0 for 16 bits, else 1. */
INLINE int rotations(const Attention *a, const int64_t *table, int64_t head, int64_t from, int64_t to) {
    int most = 0;
    for (int64_t page = from / PAGE; page * PAGE < to && most < 2; page++) {
        int kind;
        find_block(a->head_offsets, a->s->kv_heads, table[page], head, &kind);
        if (kind != FULL_BITS) most = kind > TURBO ? 2 : 1;
    }
    return most;
}

/* M query heads from `first` on, which share the key head `head`, of sequence b, whose pages are `table`. `again` takes
   note of the pages that should be read again, unless it is NULL. */
INLINE void attend(const Attention *a, Quantised quantised, int64_t b, int64_t head, int64_t first, const int64_t *table,
                   Again *again, char *scratch, const int M, const int DTYPE) {
    const AttentionShape *s = a->s;
    const int64_t number = DTYPE == FLOAT32 ? 4 : 2, to = a->lengths[b];
    const int64_t from = s->window && to > s->window ? to - s->window : 0, room = (to - from + LANES - 1) / LANES * LANES;
    const int64_t key_wide = (s->key_dim + LANES - 1) / LANES * LANES, wide = (s->value_dim + LANES - 1) / LANES * LANES;
    const int64_t queries = MAX_QUERIES * key_wide, sums = MAX_QUERIES * wide;
    float *query = (float *)scratch, *out = query + 3 * queries, *scores = out + 2 * sums;
    const int turns = rotations(a, table, head, from, to);
    for (int m = 0; m < M; m++)
        for (int64_t i = 0; i < s->key_dim; i += LANES) {
            const char *q = a->query + (b * s->query_row + (first + m) * s->query_head) * number;
            const Floats v = load_lanes(q, DTYPE, s->key_dim, i) * s->scaling;
            memcpy(query + m * key_wide + i, &v, sizeof v);
        }
    for (int turn = 0; turn < turns; turn++) {
        float *rotated = query + (turn + 1) * queries;
        memcpy(rotated, rotated - queries, (size_t)(M * key_wide) * 4);
        for (int m = 0; m < M; m++) rotate_query(rotated + m * key_wide, s->key_dim, turn == 0);
    }
    attention_scores(a, quantised, table, head, from, to, query, queries, key_wide, scores, room, M, DTYPE);
    float at_sink[MAX_QUERIES];
    for (int m = 0; m < M; m++) {
        const float sink = a->sinks ? a->sinks[first + m] : -__builtin_inff();
        a->entropy[b * s->entropy_row + first + m] = softmax(scores + m * room, to - from, s->softcap, sink, at_sink + m);
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= wide; i += 4 * LANES)
        attention_values(a, quantised, table, head, from, to, scores, room, i, out, sums, wide, M, 4, DTYPE);
    for (; i < wide; i += LANES)
        attention_values(a, quantised, table, head, from, to, scores, room, i, out, sums, wide, M, 1, DTYPE);
    for (int m = 0; m < M && turns; m++) {
        rotate_query(out + sums + m * wide, s->value_dim, 1);
        for (int64_t d = 0; d < s->value_dim; d++) out[m * wide + d] += out[sums + m * wide + d];
    }
    if (again)
        flag_pages(a, quantised, b, head, table, query + (turns ? queries : 0), key_wide, scores, room, at_sink, out, wide, M,
                   again);
    for (int m = 0; m < M; m++) {
        char *y = a->out + (b * s->heads + first + m) * s->value_dim * number;
        if (DTYPE == FLOAT32) memcpy(y, out + m * wide, (size_t)s->value_dim * 4);
        else for (int64_t d = 0; d < s->value_dim; d++) ((uint16_t *)y)[d] = to_bfloat16(out[m * wide + d]);
    }
}

#define ATTEND(SEALED, M)                                                                                     \
    (s->dtype == FLOAT32 ? attend(a, SEALED, b, head, first, table, again, scratch, M, FLOAT32)               \
                         : attend(a, SEALED, b, head, first, table, again, scratch, M, BFLOAT16))
#define ADD_ROWS(M)                                                                                           \
    (N == 4 ? add_floats(rows, count, weights, room, sum, M, 4) : add_floats(rows, count, weights, room, sum, M, 1))

/* What one thread does: a key head of a sequence at a time. */
#define DEFINE_ATTENTION(NAME, TARGET, SUM_EACH)                                                              \
    TARGET static void NAME##_unpack(const uint8_t *from, int bits, int64_t count, float *to) {               \
        unpack_codes(from, bits, count, to);                                                                  \
    }                                                                                                         \
    TARGET static void NAME##_unpack_turbo(const uint8_t *from, int bits, int64_t count, float *levels,       \
                                           float *signs) {                                                    \
        if (bits == 4) unpack_turbo(from, 4, count, levels, signs);                                           \
        else unpack_turbo(from, 2, count, levels, signs);                                                     \
    }                                                                                                         \
    TARGET static void NAME##_add_rows(const float *rows, int64_t count, const float *weights, int64_t room,  \
                                       Floats *sum, int M, int N) {                                           \
        switch (M) {                                                                                          \
        case 1: ADD_ROWS(1); break;                                                                           \
        case 2: ADD_ROWS(2); break;                                                                           \
        case 3: ADD_ROWS(3); break;                                                                           \
        default: ADD_ROWS(4);                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    static const Quantised NAME##_sealed = {NAME##_unpack, NAME##_unpack_turbo, NAME##_add_rows, SUM_EACH};      \
    TARGET static void NAME##_attention(void *arg) {                                                          \
        Attention *a = arg;                                                                                   \
        const AttentionShape *s = a->s;                                                                       \
        char *scratch = a->scratch + atomic_fetch_add(&a->slot, 1) * a->scratch_bytes;                        \
        const int64_t repeat = s->heads / s->kv_heads;                                                        \
        for (;;) {                                                                                            \
            const int64_t task = atomic_fetch_add(&a->next, 1), b = task / s->kv_heads;                       \
            if (b >= s->batch) return;                                                                        \
            const int64_t head = task % s->kv_heads, end = (head + 1) * repeat;                               \
            const int64_t *table = a->block_tables + b * s->table_row;                                              \
            Again both, *again = begin_again(a, b, head, scratch, &both);                                     \
            for (;;) { /* twice where pages are read again */                                                 \
                for (int64_t first = head * repeat; first < end; first += MAX_QUERIES)                        \
                    switch (end - first) {                                                                    \
                    case 1: ATTEND(NAME##_sealed, 1); break;                                                  \
                    case 2: ATTEND(NAME##_sealed, 2); break;                                                  \
                    case 3: ATTEND(NAME##_sealed, 3); break;                                                  \
                    default: ATTEND(NAME##_sealed, 4);                                                        \
                    }                                                                                         \
                if (!again || !(table = raise_pages(a, b, table, again))) break;                              \
                again = NULL;                                                                                 \
            }                                                                                                 \
        }                                                                                                     \
    }

DEFINE_ATTENTION(scalar, , sum_each)
#ifdef X86
DEFINE_ATTENTION(avx2, TARGET_AVX2, sum_each)
DEFINE_ATTENTION(avx512, TARGET_AVX512, sum_each_avx512)
#endif

/* Whether a page's blocks of this layer lie inside of the memory. */
static int page_fits(const AttentionShape *s, const int32_t *head_offsets, int64_t block_id, int open) {
    if (block_id < 0 || block_id >= s->bytes) return 0;
    for (int64_t head = 0; head < s->kv_heads; head++) {
        int kind;
        const int64_t at = find_block(head_offsets, s->kv_heads, block_id, head, &kind);
        const int quantised = kind == 2 || kind == 4 || kind == 8 || kind == (TURBO | 2) || kind == (TURBO | 4);
        if (!quantised && kind != FULL_BITS) return 0;
        const Block b = block_layout(kind, s->key_dim, s->value_dim, s->dtype == FLOAT32 ? 4 : 2);
        if (at < 0 || at + b.nbytes > s->bytes) return 0;
        if (open && quantised) return 0;
    }
    return 1;
}

/* Infinite numbers of a key become NaN, so that they cannot hide behind a score that is low. */
static void mark_infinite(uint8_t *key, int64_t count, int dtype) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == FLOAT32) {
            uint32_t *u = (uint32_t *)key + i;
            *u |= (uint32_t)((*u & 0x7f800000) == 0x7f800000) << 22;
        } else {
            uint16_t *u = (uint16_t *)key + i;
            *u = (uint16_t)(*u | ((*u & 0x7f80) == 0x7f80) << 6);
        }
    }
}

/* Whether a row can be written there. */
static int slot_fits(const AttentionShape *s, const int32_t *head_offsets, int64_t slot) {
    return slot >= 0 && slot % ALIGN < PAGE && page_fits(s, head_offsets, slot - slot % ALIGN, 1);
}

/* Keys and values of the batch's rows to their slots. */
static void write_all(uint8_t *memory, const int32_t *head_offsets, const int64_t *slots, const char *key, const char *value,
                      const AttentionShape *s) {
    const int64_t number = s->dtype == FLOAT32 ? 4 : 2;
    const Block full = block_layout(FULL_BITS, s->key_dim, s->value_dim, number);
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->kv_heads; h++) {
            const int64_t offset = slots[b] % ALIGN;
            int kind;
            uint8_t *to = memory + find_block(head_offsets, s->kv_heads, slots[b] - offset, h, &kind);
            memcpy(to + offset * full.key_row, key + (b * s->key_row + h * s->key_head) * number, (size_t)full.key_row);
            mark_infinite(to + offset * full.key_row, s->key_dim, s->dtype);
            memcpy(to + full.values + offset * full.value_row, value + (b * s->value_row + h * s->value_head) * number,
                   (size_t)full.value_row);
        }
}

/* `write_rows` of qbe/kernels/ops/kv_pages.py. Returns 0; -1: a slot outside of the memory (nothing was done). */
int64_t qbe_write_rows(const void *key, const void *value, void *memory, const int32_t *head_offsets, const int64_t *slots,
                       const AttentionShape *s) {
    for (int64_t b = 0; b < s->batch; b++)
        if (!slot_fits(s, head_offsets, slots[b])) return -1;
    write_all(memory, head_offsets, slots, key, value, s);
    return 0;
}

/* New keys and values go to their slots, then every query attends. Tensors as qbe.kernels.ops.paged_attention says, head_offsets
   contiguous, out [batch, heads, value_dim] contiguous; sinks NULL for none; bounds NULL or as qbe.kernels.ops.bounded_attention says. Returns 0; -1: a
   slot, length or page outside of the memory (nothing was done); -2: out of memory. */
int64_t qbe_bounded_attention(const void *query, const void *key, const void *value, void *memory, const int32_t *head_offsets,
                              const int64_t *slots, const int64_t *block_tables, const int64_t *lengths, const float *sinks,
                              float *entropy, void *out, const AttentionShape *s, const Bounds *bounds, int32_t threads,
                              int32_t backend) {
    int64_t longest = 0, tokens = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        const int64_t from = s->window && lengths[b] > s->window ? lengths[b] - s->window : 0, count = lengths[b] - from;
        if (count < 1 || lengths[b] > s->table_width * PAGE) return -1;
        if (!slot_fits(s, head_offsets, slots[b])) return -1;
        for (int64_t p = from / PAGE; p * PAGE < lengths[b]; p++)
            if (!page_fits(s, head_offsets, block_tables[b * s->table_row + p], 0)) return -1;
        longest = count > longest ? count : longest;
        tokens += count;
    }
    /* Reading these many numbers takes longer than waking a thread. */
    if (threads < 1 || tokens * s->heads * (s->key_dim + s->value_dim) < 65536) threads = 1;
    Attention a = {.s = s, .bounds = bounds, .query = query, .memory = memory, .head_offsets = head_offsets, .block_tables = block_tables, .lengths = lengths,
                   .sinks = sinks, .entropy = entropy, .out = out, .backend = backend};
    const int64_t floats = 3 * s->key_dim + 2 * s->value_dim + longest + 6 * LANES;
    a.again_at = (int64_t)aligned((size_t)(4 * MAX_QUERIES * floats));
    a.scratch_bytes = a.again_at + (bounds ? (int64_t)aligned((size_t)(s->table_width * AGAIN_BYTES)) : 0);
    a.scratch = aligned_alloc(64, (size_t)(threads * a.scratch_bytes));
    if (!a.scratch) return -2;
    write_all(memory, head_offsets, slots, key, value, s); /* here, because rows that pad a batch share a slot */
#ifdef X86
    pool_run(backend >= AVX512 ? avx512_attention : backend == AVX2 ? avx2_attention : scalar_attention, &a, threads);
#else
    pool_run(scalar_attention, &a, threads);
#endif
    free(a.scratch);
    return 0;
}

int64_t qbe_paged_attention(const void *query, const void *key, const void *value, void *memory, const int32_t *head_offsets,
                            const int64_t *slots, const int64_t *block_tables, const int64_t *lengths, const float *sinks,
                            float *entropy, void *out, const AttentionShape *s, int32_t threads, int32_t backend) {
    return qbe_bounded_attention(query, key, value, memory, head_offsets, slots, block_tables, lengths, sinks, entropy, out, s,
                                 NULL, threads, backend);
}
