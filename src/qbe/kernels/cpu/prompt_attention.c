/* Attention of a prompt's tokens to keys that are there already, in bfloat16 with AVX-512. Included by nested.c.

   Scores and sums of values are both products of up to MOST_ROWS rows with a panel of 64 columns, two numbers at a time
   (`vdpbf16ps`): of keys two dimensions, of values two tokens. Weights are rounded to bfloat16, as torch's flash attention
   does. A row's scores are all there before any value is read, and its result is the same, bit for bit, whatever rows are
   beside it and however many keys come after its own. */

#ifdef X86
#define PANEL 64     /* columns */
#define MOST_ROWS 6  /* whose sums, 4 registers each, stay in registers */
#define BLOCK_ROWS 24 /* that share a panel while it is in the first cache */

/* `_Shape` of prompt_attention.py. Strides are in numbers; the last dimension is contiguous. The rows are the last of the keys. */
typedef struct {
    int64_t heads, kv_heads, rows, keys, key_dim, value_dim;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    int64_t window; /* 0: none */
    float scaling;
} PromptShape;

typedef struct {
    const PromptShape *s;
    const uint16_t *query, *key, *value;
    uint16_t *out; /* [rows, heads, value_dim] */
    char *panels, *scratch;
    int64_t room, key_pairs, value_panels; /* keys in whole panels; pairs of dimensions of a key; panels of a value */
    int64_t scratch_bytes;                 /* of a thread */
    atomic_llong packing, next;
    atomic_int slot;
} PromptAttention;

/* Bytes of the panels of a head's keys, which its values follow. */
INLINE int64_t key_bytes(const PromptAttention *a) { return a->room * a->key_pairs * 4; }
INLINE char *panels_of(const PromptAttention *a, int64_t head) {
    return a->panels + head * (key_bytes(a) + a->room * a->value_panels * PANEL * 2);
}

/* Keys as [panel, pair of dimensions, 64 tokens], values as [panel of dimensions, pair of tokens, 64 dimensions]. */
TARGET_AVX512 static void pack_head(const PromptAttention *a, int64_t head) {
    const PromptShape *s = a->s;
    const uint16_t *key = a->key + head * s->key_head, *value = a->value + head * s->value_head;
    char *to = panels_of(a, head);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)s->key_row));
    for (int64_t t = 0; t < a->room; t += 16) {
        const int64_t left = s->keys - t;
        const __mmask16 in = left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        char *column = to + t / PANEL * PANEL * a->key_pairs * 4 + t % PANEL * 4;
        for (int64_t p = 0; p < a->key_pairs; p++, column += PANEL * 4)
            _mm512_store_si512(column, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), in, at,
                                                                   key + t * s->key_row + 2 * p, 2));
    }
    to += key_bytes(a);
    for (int64_t d = 0; d < a->value_panels * PANEL; d += 16) {
        const int64_t left = s->value_dim - d;
        const __mmask16 in = left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        char *column = to + d / PANEL * a->room * PANEL * 2 + d % PANEL * 4;
        for (int64_t t = 0; t < a->room; t += 2, column += PANEL * 4) {
            const uint16_t *two = value + t * s->value_row + d;
            const __mmask16 first = t < s->keys ? in : 0, second = t + 1 < s->keys ? in : 0;
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, two));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, two + s->value_row));
            _mm512_store_si512(column, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

/* sums[m] += products of row m with `pairs` pairs of a panel. In assembler as ADD_PRODUCTS of dot_vnni.c. */
TARGET_AVX512 INLINE void add_panel(const char *rows, int64_t row_bytes, const char *panel, int64_t pairs, float *sums,
                                    int64_t stride, const int M) {
    __m512 sum[MOST_ROWS][4];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[m][i] = _mm512_load_ps(sums + m * stride + i * 16);
    for (int64_t p = 0; p < pairs; p++, rows += 4, panel += PANEL * 4) {
        __m512i column[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) column[i] = _mm512_load_si512(panel + i * 64);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            int32_t two;
            memcpy(&two, rows + m * row_bytes, 4);
            const __m512i both = _mm512_set1_epi32(two);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum[m][i]) : "v"(column[i]), "v"(both));
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) _mm512_store_ps(sums + m * stride + i * 16, sum[m][i]);
}

/* The same for `count` rows. */
TARGET_AVX512 static void add_products(const char *rows, int64_t row_bytes, const char *panel, int64_t pairs, float *sums,
                                       int64_t stride, int64_t count) {
    for (; count >= MOST_ROWS; count -= MOST_ROWS, rows += MOST_ROWS * row_bytes, sums += MOST_ROWS * stride)
        add_panel(rows, row_bytes, panel, pairs, sums, stride, MOST_ROWS);
    for (; count > 0; count--, rows += row_bytes, sums += stride) add_panel(rows, row_bytes, panel, pairs, sums, stride, 1);
}

/* The weights of the keys [from, to) out of a row's scores, in bfloat16, `room` of them, zero elsewhere; returns one over
   the sum they had before they were rounded. */
TARGET_AVX512 static float weights_of(float *scores, int64_t from, int64_t to, int64_t room, float scaling, uint16_t *weights) {
    const int64_t first = from / LANES * LANES;
    Floats best = splat(-__builtin_inff()), total = {0};
    for (int i = 0; i < LANES; i++)
        if (first + i < from) scores[first + i] = -__builtin_inff();
    for (int64_t t = to; t % LANES; t++) scores[t] = -__builtin_inff();
    for (int64_t t = first; t < to; t += LANES) {
        Floats v;
        memcpy(&v, scores + t, sizeof v);
        best = pick(v > best, v, best);
    }
    float top = best[0];
    for (int i = 1; i < LANES; i++) top = best[i] > top ? best[i] : top;
    memset(weights, 0, (size_t)first * 2);
    int64_t t = first;
    for (; t < to; t += LANES) {
        Floats v;
        memcpy(&v, scores + t, sizeof v);
        const Floats below = (v - top) * scaling;
        v = pick(below < splat(-87.0f), splat(0.0f), exp_lanes(below));
        total += v;
        _mm256_storeu_si256((__m256i *)(weights + t), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
    memset(weights + t, 0, (size_t)(room - t) * 2);
    return 1.0f / sum_lanes(total);
}

/* Rows [r0, r1) of a key head: position by position, and of each the query heads that share it. */
TARGET_AVX512 static void attend_rows(const PromptAttention *a, int64_t head, int64_t r0, int64_t r1, char *scratch) {
    const PromptShape *s = a->s;
    const int64_t repeat = s->heads / s->kv_heads, before = s->keys - s->rows, row_bytes = a->key_pairs * 4;
    const int64_t end = before + (r1 - 1) / repeat + 1, room = (end + PANEL - 1) / PANEL * PANEL, width = a->value_panels * PANEL;
    float *scores = (float *)scratch, *sums = scores + BLOCK_ROWS * a->room, scale[BLOCK_ROWS];
    uint16_t *weights = (uint16_t *)(sums + BLOCK_ROWS * width);
    char *query = (char *)(weights + BLOCK_ROWS * a->room);
    const char *panel = panels_of(a, head);
    const int64_t earliest = before + r0 / repeat + 1, begin = s->window && earliest > s->window ? earliest - s->window : 0;
    const int64_t from = begin / PANEL * PANEL;
    for (int64_t r = r0; r < r1; r++)
        memcpy(query + (r - r0) * row_bytes,
               a->query + (head * repeat + r % repeat) * s->query_head + r / repeat * s->query_row, (size_t)row_bytes);
    for (int64_t r = 0; r < r1 - r0; r++) memset(scores + r * a->room + from, 0, (size_t)(room - from) * 4);
    for (int64_t t = from; t < room; t += PANEL)
        add_products(query, row_bytes, panel + t * a->key_pairs * 4, a->key_pairs, scores + t, a->room, r1 - r0);
    for (int64_t r = r0; r < r1; r++) {
        const int64_t to = before + r / repeat + 1, mine = s->window && to > s->window ? to - s->window : 0;
        scale[r - r0] = weights_of(scores + (r - r0) * a->room, mine, to, room, s->scaling, weights + (r - r0) * a->room);
    }
    memset(sums, 0, (size_t)((r1 - r0) * width) * 4);
    panel += key_bytes(a);
    for (int64_t d = 0; d < width; d += PANEL)
        for (int64_t t = from; t < room; t += 2 * PANEL) { /* so many that sums pay for being put away */
            const int64_t tokens = room - t < 2 * PANEL ? room - t : 2 * PANEL;
            add_products((const char *)(weights + t), a->room * 2, panel + (d / PANEL * a->room + t) * PANEL * 2, tokens / 2,
                         sums + d, width, r1 - r0);
        }
    for (int64_t r = r0; r < r1; r++)
        for (int64_t d = 0; d < s->value_dim; d += 16) {
            const int64_t left = s->value_dim - d;
            const __m512 y = _mm512_mul_ps(_mm512_load_ps(sums + (r - r0) * width + d), _mm512_set1_ps(scale[r - r0]));
            store_sixteen(a->out + (r / repeat * s->heads + head * repeat + r % repeat) * s->value_dim + d, BFLOAT16,
                          left >= 16 ? 0xFFFF : (__mmask16)((1 << left) - 1), y);
        }
}

static void prompt_pack(void *arg) {
    PromptAttention *a = arg;
    for (int64_t head; (head = atomic_fetch_add(&a->packing, 1)) < a->s->kv_heads;) pack_head(a, head);
}

static void prompt_attend(void *arg) {
    PromptAttention *a = arg;
    const int64_t rows = a->s->rows * (a->s->heads / a->s->kv_heads), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    char *scratch = a->scratch + atomic_fetch_add(&a->slot, 1) * a->scratch_bytes;
    for (int64_t task; (task = atomic_fetch_add(&a->next, 1)) < blocks * a->s->kv_heads;) {
        const int64_t r0 = (blocks - 1 - task % blocks) * BLOCK_ROWS; /* the longest first, so that threads end together */
        attend_rows(a, task / blocks, r0, r0 + BLOCK_ROWS < rows ? r0 + BLOCK_ROWS : rows, scratch);
    }
}

/* out [rows, heads, value_dim]; all of bfloat16, key_dim even. Returns 0, or -2: out of memory. */
int64_t qbe_prompt_attention(const void *query, const void *key, const void *value, void *out, const PromptShape *s,
                             int32_t threads) {
    PromptAttention a = {.s = s, .query = query, .key = key, .value = value, .out = out, .key_pairs = s->key_dim / 2,
                         .room = (s->keys + PANEL - 1) / PANEL * PANEL, .value_panels = (s->value_dim + PANEL - 1) / PANEL};
    const int64_t wide = a.value_panels * PANEL, panels = s->kv_heads * a.room * (a.key_pairs * 4 + wide * 2);
    a.scratch_bytes = (int64_t)aligned((size_t)(BLOCK_ROWS * (a.room * 6 + wide * 4 + a.key_pairs * 4)));
    if (threads < 1 || s->rows * s->heads * s->keys * s->key_dim < 1 << 20) threads = 1; /* waking one takes longer */
    a.panels = aligned_alloc(64, (size_t)(panels + threads * a.scratch_bytes));
    if (!a.panels) return -2;
    a.scratch = a.panels + panels;
    pool_run(prompt_pack, &a, threads);
    pool_run(prompt_attend, &a, threads);
    free(a.panels);
    return 0;
}
#endif
