/* Attention of a prompt's tokens, which are in their pages already, in bfloat16 with AVX-512. Included by nested.c.

   Every page that is seen becomes a panel of keys and one of values: as it is quantised, as it is at 16 bits, or both, because
   tokens see the last pages before them at 16 bits (`quantised_pages` of kv_blocks.py).

   Scores and sums of values are both products of up to MOST_ROWS rows with 64 columns of a panel, two numbers at a time
   (`vdpbf16ps`): of keys two dimensions, of values two tokens. Weights are rounded to bfloat16, as torch's flash attention
   does. A row's scores are all there before any value is read, and its result is the same, bit for bit, whatever rows are
   beside it and however many keys come after its own. */

#ifdef X86
#define MOST_ROWS 6   /* whose sums, 4 registers each, stay in registers */
#define BLOCK_ROWS 24 /* that share a panel while it is in the first cache */

/* `_Shape` of prompt.py. Strides are in numbers; the last dimension is contiguous. The rows' tokens are at positions
   [start, start + rows) of a sequence with so many pages. */
typedef struct {
    int64_t heads, kv_heads, key_dim, value_dim, rows, start, pages, bytes, stretch;
    int64_t query_head, query_row;
    int64_t window; /* 0: none */
    float scaling;
} PromptShape;

typedef struct {
    const PromptShape *s;
    const uint16_t *query;
    const float *sinks; /* [heads] or NULL */
    const uint8_t *memory;
    const int32_t *head_offsets;
    const int64_t *block_ids, *staging_pages; /* of all pages; of those seen at 16 bits, from `first_exact` on */
    uint16_t *out;                   /* [rows, heads, value_dim] */
    char *panels, *scratch;
    int64_t begin, quantised, first_exact; /* pages: the first one seen, the end of those seen quantised, the first at 16 bits */
    int64_t key_bytes, panel_bytes;     /* of a page's keys, of its keys and values */
    int64_t wide;                       /* numbers of a value, in whole panels of 64 */
    int64_t scratch_bytes;              /* of a thread */
    atomic_llong packing, next;
    atomic_int slot;
} PromptAttention;

/* How many of the pages before `page` its tokens see quantised: `quantised_pages` of kv_blocks.py. */
INLINE int64_t seen_sealed(const PromptShape *s, int64_t page) { return page - (page % s->stretch > 0); }

/* The panels of a head: of pages [begin, quantised) as they are quantised, then of [first_exact, pages) at 16 bits. */
INLINE int64_t panels_of_head(const PromptAttention *a) { return a->quantised - a->begin + a->s->pages - a->first_exact; }

/* A page's panel. One that is not quantised has that of 16 bits alone. */
INLINE int64_t panel_of(const PromptAttention *a, int64_t page, int exact) {
    if (!exact && page >= a->first_exact && a->block_ids[page] == a->staging_pages[page - a->first_exact]) exact = 1;
    return exact ? a->quantised - a->begin + page - a->first_exact : page - a->begin;
}

/* `count` tokens of a page's keys as [pair of dimensions, 64 tokens] and values as [64 dimensions, pair of tokens, 64 of
   them]; zero past them. */
TARGET_AVX512 static void pack_page(const PromptAttention *a, const uint16_t *key, const uint16_t *value, int64_t count, char *to) {
    const PromptShape *s = a->s;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)s->key_dim));
    for (int64_t t = 0; t < PAGE; t += 16) {
        const int64_t left = count - t;
        const __mmask16 in = left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        for (int64_t p = 0; p < s->key_dim / 2; p++)
            _mm512_store_si512(to + (p * PAGE + t) * 4, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), in, at,
                                                                                   key + t * s->key_dim + 2 * p, 2));
    }
    to += a->key_bytes;
    for (int64_t d = 0; d < a->wide; d += 16) {
        const int64_t left = s->value_dim - d;
        const __mmask16 in = left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        char *column = to + d / 64 * PAGE * 128 + d % 64 * 4;
        for (int64_t t = 0; t < PAGE; t += 2, column += 256) {
            const uint16_t *two = value + t * s->value_dim + d;
            const __mmask16 first = t < count ? in : 0, second = t + 1 < count ? in : 0;
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, two));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, two + s->value_dim));
            _mm512_store_si512(column, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

/* Panel number `task` of all heads'. room: what a quantised page is read into. */
static void pack_panel(const PromptAttention *a, int64_t task, char *room) {
    const PromptShape *s = a->s;
    const int64_t head = task / panels_of_head(a), i = task % panels_of_head(a), before = a->quantised - a->begin;
    const int exact = i >= before;
    const int64_t page = exact ? i - before + a->first_exact : i + a->begin, left = s->start + s->rows - page * PAGE;
    if (panel_of(a, page, exact) != i) return;
    int kind;
    const uint8_t *block = a->memory + find_block(a->head_offsets, s->kv_heads, exact ? a->staging_pages[page - a->first_exact] : a->block_ids[page],
                                                  head, &kind);
    const uint8_t *value = block + block_layout(FULL_BITS, s->key_dim, s->value_dim, 2).values;
    if (kind != FULL_BITS) {
        uint8_t *read = (uint8_t *)room;
        value = read + PAGE * s->key_dim * 2;
        avx512_read(block, kind, s->key_dim, s->value_dim, BFLOAT16, read, read + PAGE * s->key_dim * 2,
                    (float *)(read + PAGE * (s->key_dim + s->value_dim) * 2));
        block = read;
    }
    pack_page(a, (const uint16_t *)block, (const uint16_t *)value, left < PAGE ? left : PAGE, a->panels + task * a->panel_bytes);
}

/* Bytes that pack_panel needs. */
static int64_t reading_bytes(const PromptShape *s) {
    return PAGE * (s->key_dim + s->value_dim) * 2 + 4 * work_size(s->key_dim, s->value_dim);
}

/* sums[m] += products of row m with `pairs` pairs of each of `count` panels. In assembler as ADD_PRODUCTS of dot_vnni.c. */
TARGET_AVX512 INLINE void add_panels(const char *rows, int64_t row_bytes, const char *const *panels, int64_t count, int64_t pairs,
                                     float *sums, int64_t stride, const int M) {
    __m512 sum[MOST_ROWS][4];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[m][i] = _mm512_load_ps(sums + m * stride + i * 16);
    for (int64_t n = 0; n < count; n++) {
        const char *panel = panels[n];
        for (int64_t p = 0; p < pairs; p++, rows += 4, panel += 256) {
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
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) _mm512_store_ps(sums + m * stride + i * 16, sum[m][i]);
}

/* The same for R rows. */
TARGET_AVX512 static void add_products(const char *rows, int64_t row_bytes, const char *const *panels, int64_t count, int64_t pairs,
                                       float *sums, int64_t stride, int64_t R) {
    for (; R >= MOST_ROWS; R -= MOST_ROWS, rows += MOST_ROWS * row_bytes, sums += MOST_ROWS * stride)
        add_panels(rows, row_bytes, panels, count, pairs, sums, stride, MOST_ROWS);
    for (; R > 0; R--, rows += row_bytes, sums += stride) add_panels(rows, row_bytes, panels, count, pairs, sums, stride, 1);
}

/* 2^x for x <= 0; 0 below -150, off by 3e-6 of itself at most: weights are rounded to 2^-9 of themselves. */
TARGET_AVX512 INLINE __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x); /* a NaN stays one: it is the second */
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f); /* Taylor's: ln(2)^n / n! */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022651f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* The weights of the keys [from, to) out of a row's scores, in bfloat16, `room` of them, zero elsewhere; returns one over
   the sum they had before they were rounded, with that of a sink (-infinity: none). */
TARGET_AVX512 static float weights_of(float *scores, int64_t from, int64_t to, int64_t room, float scaling, float sink,
                                      uint16_t *weights) {
    const int64_t first = from / 16 * 16;
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff()), factor = _mm512_set1_ps(scaling * 1.44269504f);
    __m512 best = lowest, total = _mm512_setzero_ps();
    for (int i = 0; i < 16; i++)
        if (first + i < from) scores[first + i] = -__builtin_inff();
    for (int64_t t = to; t % 16; t++) scores[t] = -__builtin_inff();
    for (int64_t t = first; t < to; t += 16) best = _mm512_max_ps(_mm512_load_ps(scores + t), best);
    const float highest = _mm512_reduce_max_ps(best), level = sink / scaling; /* of the sink, as scores are */
    const __m512 top = _mm512_set1_ps(level > highest ? level : highest);
    memset(weights, 0, (size_t)first * 2);
    int64_t t = first;
    for (; t < to; t += 16) {
        const __m512 v = power_of_two(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + t), top), factor));
        total = _mm512_add_ps(total, v);
        _mm256_store_si256((__m256i *)(weights + t), (__m256i)_mm512_cvtneps_pbh(v));
    }
    memset(weights + t, 0, (size_t)(room - t) * 2);
    float sum = sum_lanes((Floats)total);
    if (sink > -__builtin_inff())
        sum += _mm512_cvtss_f32(power_of_two(_mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(level), top), factor)));
    return 1.0f / sum;
}

/* Rows [r0, r1) of a key head, tokens of one page: position by position, and of each the query heads that share it. */
TARGET_AVX512 static void attend_rows(const PromptAttention *a, int64_t head, int64_t r0, int64_t r1, char *scratch) {
    const PromptShape *s = a->s;
    const int64_t repeat = s->heads / s->kv_heads, row_bytes = s->key_dim * 2, own = (s->start + r0 / repeat) / PAGE;
    const int64_t exact = seen_sealed(s, own), earliest = s->start + r0 / repeat + 1;
    const int64_t from = s->window && earliest > s->window ? (earliest - s->window) / PAGE : 0;
    const int64_t room = (own + 1 - from) * PAGE, stride = (s->pages - a->begin) * PAGE;
    float *scores = (float *)scratch, *sums = scores + BLOCK_ROWS * stride, scale[BLOCK_ROWS];
    uint16_t *weights = (uint16_t *)(sums + BLOCK_ROWS * a->wide);
    char *query = (char *)(weights + BLOCK_ROWS * stride);
    const char *panels = a->panels + head * panels_of_head(a) * a->panel_bytes;
    for (int64_t r = r0; r < r1; r++) {
        memcpy(query + (r - r0) * row_bytes,
               a->query + (head * repeat + r % repeat) * s->query_head + r / repeat * s->query_row, (size_t)row_bytes);
        memset(scores + (r - r0) * stride, 0, (size_t)room * 4);
    }
    for (int64_t page = from; page <= own; page++) {
        const char *panel = panels + panel_of(a, page, page >= exact) * a->panel_bytes;
        add_products(query, row_bytes, &panel, 1, s->key_dim / 2, scores + (page - from) * PAGE, stride, r1 - r0);
    }
    for (int64_t r = r0; r < r1; r++) {
        const int64_t to = s->start + r / repeat + 1, mine = s->window && to > s->window ? to - s->window : 0;
        scale[r - r0] = weights_of(scores + (r - r0) * stride, mine > from * PAGE ? mine - from * PAGE : 0, to - from * PAGE, room,
                                   s->scaling, a->sinks ? a->sinks[head * repeat + r % repeat] : -__builtin_inff(),
                                   weights + (r - r0) * stride);
    }
    memset(sums, 0, (size_t)((r1 - r0) * a->wide) * 4);
    for (int64_t d = 0; d < a->wide; d += 64)
        for (int64_t page = from; page <= own; page += 2) { /* so many that sums pay for being put away */
            const char *two[2];
            for (int64_t i = 0; i < 2 && page + i <= own; i++)
                two[i] = panels + panel_of(a, page + i, page + i >= exact) * a->panel_bytes + a->key_bytes + d / 64 * PAGE * 128;
            add_products((const char *)(weights + (page - from) * PAGE), stride * 2, two, page < own ? 2 : 1, PAGE / 2, sums + d,
                         a->wide, r1 - r0);
        }
    for (int64_t r = r0; r < r1; r++)
        for (int64_t d = 0; d < s->value_dim; d += 16) {
            const int64_t left = s->value_dim - d;
            const __m512 y = _mm512_mul_ps(_mm512_load_ps(sums + (r - r0) * a->wide + d), _mm512_set1_ps(scale[r - r0]));
            store_sixteen(a->out + (r / repeat * s->heads + head * repeat + r % repeat) * s->value_dim + d, BFLOAT16,
                          left >= 16 ? 0xFFFF : (__mmask16)((1 << left) - 1), y);
        }
}

static void prompt_pack(void *arg) {
    PromptAttention *a = arg;
    char *scratch = a->scratch + atomic_fetch_add(&a->slot, 1) * a->scratch_bytes;
    for (int64_t task; (task = atomic_fetch_add(&a->packing, 1)) < a->s->kv_heads * panels_of_head(a);) pack_panel(a, task, scratch);
}

static void prompt_attend(void *arg) {
    PromptAttention *a = arg;
    const PromptShape *s = a->s;
    const int64_t repeat = s->heads / s->kv_heads, blocks = (PAGE * repeat + BLOCK_ROWS - 1) / BLOCK_ROWS; /* of a page */
    const int64_t first = s->start / PAGE, tasks = (s->pages - first) * blocks;
    char *scratch = a->scratch + atomic_fetch_add(&a->slot, 1) * a->scratch_bytes;
    for (int64_t task; (task = atomic_fetch_add(&a->next, 1)) < tasks * s->kv_heads;) {
        const int64_t block = tasks - 1 - task % tasks, page = first + block / blocks; /* the longest first: threads end together */
        const int64_t begin = page * PAGE > s->start ? page * PAGE - s->start : 0, after = (page + 1) * PAGE - s->start;
        const int64_t r0 = begin * repeat + block % blocks * BLOCK_ROWS, end = (after < s->rows ? after : s->rows) * repeat;
        if (r0 < end) attend_rows(a, task / tasks, r0, r0 + BLOCK_ROWS < end ? r0 + BLOCK_ROWS : end, scratch);
    }
}

/* Whether a page's blocks lie inside of the memory, and are of 16 bits where they have to be. */
static int prompt_page_fits(const PromptShape *s, const int32_t *head_offsets, int64_t block_id, int open) {
    const AttentionShape shape = {.kv_heads = s->kv_heads, .key_dim = s->key_dim, .value_dim = s->value_dim, .bytes = s->bytes,
                                  .dtype = BFLOAT16};
    return page_fits(&shape, head_offsets, block_id, open);
}

/* `prompt_attention` of qbe/kernels/cpu/attention/prompt.py: all of bfloat16, key_dim even, head_offsets, block_ids and staging_pages contiguous.
   Returns 0; -1: a page outside of the memory (nothing was done); -2: out of memory. */
int64_t qbe_prompt_attention(const void *query, const void *memory, const int32_t *head_offsets, const int64_t *block_ids,
                             const int64_t *staging_pages, const float *sinks, void *out, const PromptShape *s,
                             int32_t threads) {
    PromptAttention a = {.s = s, .query = query, .sinks = sinks, .memory = memory, .head_offsets = head_offsets, .block_ids = block_ids, .out = out};
    const int64_t earliest = s->start + 1, first = seen_sealed(s, s->start / PAGE);
    a.begin = s->window && earliest > s->window ? (earliest - s->window) / PAGE : 0;
    a.quantised = seen_sealed(s, (s->start + s->rows - 1) / PAGE);
    a.first_exact = first > a.begin ? first : a.begin;
    a.staging_pages = staging_pages + a.first_exact - first;
    if (a.quantised < a.begin) a.quantised = a.begin;
    for (int64_t page = a.begin; page < a.quantised; page++)
        if (!prompt_page_fits(s, head_offsets, block_ids[page], 0)) return -1;
    for (int64_t page = a.first_exact; page < s->pages; page++)
        if (!prompt_page_fits(s, head_offsets, a.staging_pages[page - a.first_exact], 1)) return -1;
    a.wide = (s->value_dim + 63) / 64 * 64;
    a.key_bytes = s->key_dim / 2 * 256;
    a.panel_bytes = a.key_bytes + a.wide * PAGE * 2;
    const int64_t scores = BLOCK_ROWS * ((s->pages - a.begin) * PAGE * 6 + a.wide * 4 + s->key_dim * 2), reading = reading_bytes(s);
    a.scratch_bytes = (int64_t)aligned((size_t)(scores > reading ? scores : reading));
    if (threads < 1 || s->rows * s->heads * (s->start + s->rows) * s->key_dim < 1 << 20) threads = 1; /* waking one takes longer */
    const int64_t panels = s->kv_heads * panels_of_head(&a) * a.panel_bytes;
    a.panels = aligned_alloc(64, (size_t)(panels + threads * a.scratch_bytes));
    if (!a.panels) return -2;
    a.scratch = a.panels + panels;
    pool_run(prompt_pack, &a, threads);
    atomic_store(&a.slot, 0);
    pool_run(prompt_attend, &a, threads);
    free(a.panels);
    return 0;
}
#endif
