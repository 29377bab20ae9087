/* The routed experts of a mixture-of-experts layer: qbe::nested_experts. Included by nested.c.

   A pair is a token and one of the experts that it chose. Pairs lie in the order of their experts, and in that of the tokens for
   each: those of one expert are the rows of a product like any other (job.c), and what is read of it is what they ask for. */

#include "gate.c"

/* One matrix of every expert: `_Matrices` of nested.py. */
typedef struct {
    const uint8_t *packed, *meta, *precision; /* of an expert: packed_bytes, meta_bytes; of a row of the plan: precision_row */
    const int32_t *exponents;
    const char *original, *bias; /* of x's dtype, and of bias_dtype; or NULL */
    const Shape *shape;          /* but for the exponent */
    int64_t packed_bytes, meta_bytes, precision_row, bias_dtype;
} Matrices;

/* `_Call` of nested.py. */
typedef struct {
    const char *x;           /* [tokens, hidden] */
    const int64_t *ids;      /* [tokens, top]; below 0, or at least `experts`: nobody */
    const float *weights;    /* [tokens, top] */
    const int32_t *rows;     /* [tokens], of the plan */
    const uint8_t *skip;     /* [experts], those whose pairs somebody else multiplies; or NULL */
    float *each;             /* [tokens * top, hidden]: what the experts give, in the order of the pairs */
    char *out;               /* [tokens, hidden] */
    Matrices gate_up, down;
    int64_t tokens, top, experts, plan_rows, dtype;
    Gate gate;
} Call;

/* What the threads of one call share. */
typedef struct {
    const Call *call;
    int64_t pairs;
    const int64_t *position; /* [tokens * top], of each pair in their order; -1: nobody */
    const int32_t *token;    /* [pairs]; -1: skipped */
    const float *both;       /* [pairs, 2 * inner] */
    char *inside;            /* [pairs, inner] of x's dtype */
    atomic_llong next;
} Experts;

/* A byte of the plan as a precision word. */
INLINE int32_t word_of_byte(uint8_t byte) { return byte & 128 ? (byte & 127) | EIGHT << 8 : byte; }

/* Pairs in order: first[e] becomes the number of those before expert e, [experts + 1]; position as above. Returns how many. */
static int64_t sort_pairs(const Call *c, int64_t *first, int64_t *position) {
    const int64_t all = c->tokens * c->top, experts = c->experts;
    memset(first, 0, (size_t)(experts + 1) * sizeof *first);
    for (int64_t i = 0; i < all; i++)
        if (c->ids[i] >= 0 && c->ids[i] < experts) first[c->ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < all; i++) position[i] = c->ids[i] >= 0 && c->ids[i] < experts ? first[c->ids[i]]++ : -1;
    memmove(first + 1, first, (size_t)experts * sizeof *first); /* each had moved on to the next one's */
    first[0] = 0;
    return first[experts];
}

#define DEFINE_EXPERTS(NAME, TARGET, GATE_ROW)                                                                           \
    TARGET static void NAME##_gate(void *arg) {                                                                          \
        Experts *e = arg;                                                                                                \
        const int64_t inner = e->call->down.shape->k, dtype = e->call->dtype, bytes = inner * (dtype == FLOAT32 ? 4 : 2); \
        for (int64_t p; (p = atomic_fetch_add(&e->next, 1)) < e->pairs;)                                                 \
            if (e->token[p] >= 0) GATE_ROW(&e->call->gate, e->both + p * 2 * inner, inner, (int)dtype, e->inside + p * bytes);                 \
    }                                                                                                                    \
    /* The sum of a token's experts in the order in which it chose them. */                                              \
    TARGET static void NAME##_sum(void *arg) {                                                                           \
        Experts *e = arg;                                                                                                \
        const Call *c = e->call;                                                                                         \
        const int64_t hidden = c->down.shape->n;                                                                         \
        for (int64_t t; (t = atomic_fetch_add(&e->next, 1)) < c->tokens;)                                                \
            for (int64_t i = 0; i < hidden; i += LANES) {                                                                \
                Floats sum = {0};                                                                                        \
                for (int64_t s = t * c->top; s < (t + 1) * c->top; s++)                                                  \
                    if (e->position[s] >= 0)                                                                             \
                        sum += c->weights[s]                                                                             \
                               * load_lanes((const char *)(c->each + e->position[s] * hidden), FLOAT32, hidden, i);      \
                NAME##_store(c->out, (int)c->dtype, t * hidden + i, hidden - i, sum);                                    \
            }                                                                                                            \
    }

INLINE void scalar_store(char *to, int dtype, int64_t at, int64_t left, Floats sum) {
    for (int64_t i = 0; i < LANES && i < left; i++)
        if (dtype == FLOAT32) ((float *)to)[at + i] = sum[i];
        else ((uint16_t *)to)[at + i] = to_bfloat16(sum[i]);
}
DEFINE_EXPERTS(scalar, , gate_row)
#ifdef X86
#define avx2_store scalar_store
TARGET_AVX512 INLINE void avx512_store(char *to, int dtype, int64_t at, int64_t left, Floats sum) {
    const __mmask16 in = left >= LANES ? 0xFFFF : (__mmask16)((1 << left) - 1);
    store_sixteen(to + at * (dtype == FLOAT32 ? 4 : 2), dtype, in, (__m512)sum);
}
DEFINE_EXPERTS(avx2, TARGET_AVX2, gate_row)
DEFINE_EXPERTS(avx512, TARGET_AVX512, gate_row_avx512)
#endif

/* A job for every expert that has pairs and is not skipped; its rows of x are `given` [.., k], by x_row if there is one, of y
   [pairs, n]. Returns how many. */
static int64_t fill_jobs(const Call *c, const Matrices *m, const int64_t *first, const char *given, const int32_t *x_row,
                         const int32_t *words, float *y, Job *job) {
    const Shape *s = m->shape;
    const int64_t number = c->dtype == FLOAT32 ? 4 : 2;
    Job *j = job;
    for (int64_t e = 0; e < c->experts; e++) {
        if (first[e] == first[e + 1] || (c->skip && c->skip[e])) continue;
        const Job one = {.w = {m->packed + e * m->packed_bytes, m->meta + e * m->meta_bytes, s->n, s->kp, s->groups,
                               m->exponents[e], &s->layout},
                         .dtype = (int)c->dtype, .y_dtype = FLOAT32, .y = y + first[e] * s->n, .y_stride = s->n,
                         .words = words + first[e], .k = s->k, .given_rows = first[e + 1] - first[e],
                         .given = given + (x_row ? 0 : first[e] * s->k * number), .x_row = x_row ? x_row + first[e] : NULL,
                         .original = m->original ? m->original + e * s->n * s->k * number : NULL,
                         .bias = m->bias ? m->bias + e * s->n * (m->bias_dtype == FLOAT32 ? 4 : 2) : NULL,
                         .bias_dtype = (int)m->bias_dtype, .tiled_rows = MANY_TILED};
        *j++ = one;
    }
    return j - job;
}

/* Token and precision words of every pair. Returns 0; -1 and -3 as qbe_experts does. */
static int64_t describe_pairs(const Call *c, const int64_t *position, int32_t *token, int32_t *gate_up, int32_t *down) {
    for (int64_t i = 0; i < c->tokens * c->top; i++) {
        const int64_t at = position[i], e = c->ids[i], row = c->rows[i / c->top];
        if (row < 0 || row >= c->plan_rows) return -3;
        if (at < 0) continue;
        token[at] = c->skip && c->skip[e] ? -1 : (int32_t)(i / c->top);
        gate_up[at] = word_of_byte(c->gate_up.precision[row * c->gate_up.precision_row + e]);
        down[at] = word_of_byte(c->down.precision[row * c->down.precision_row + e]);
        if (token[at] < 0) continue;
        if ((weight_bits(gate_up[at]) >= FULL_BITS && !c->gate_up.original) || (weight_bits(down[at]) >= FULL_BITS && !c->down.original))
            return -1;
    }
    return 0;
}

/* call->each of all pairs whose expert is not skipped. Returns 0; -1: a row asks for 16 bits and there is no original; -2: out of
   memory; -3: a token's row lies outside of the plan. */
int64_t qbe_experts(const Call *c, int32_t threads, int32_t backend) {
    const int64_t all = c->tokens * c->top, experts = c->experts, inner = c->down.shape->k;
    const size_t number = c->dtype == FLOAT32 ? 4 : 2;
    char *const memory = aligned_alloc(
        64, aligned((size_t)(experts + 1) * 8) + aligned((size_t)all * 8) + 3 * aligned((size_t)all * 4)
                + aligned((size_t)(all * 2 * inner) * 4) + aligned((size_t)(all * inner) * number) + aligned((size_t)experts * sizeof(Job)));
    char *left = memory;
    if (!memory) return -2;
    int64_t *const first = (int64_t *)take(&left, (size_t)(experts + 1) * 8), *const position = (int64_t *)take(&left, (size_t)all * 8);
    int32_t *const token = (int32_t *)take(&left, (size_t)all * 4), *const gate_up = (int32_t *)take(&left, (size_t)all * 4);
    int32_t *const down = (int32_t *)take(&left, (size_t)all * 4);
    float *const both = (float *)take(&left, (size_t)(all * 2 * inner) * 4);
    char *const inside = take(&left, (size_t)(all * inner) * number);
    Job *const job = (Job *)take(&left, (size_t)experts * sizeof(Job));
    Experts shared = {.call = c, .pairs = sort_pairs(c, first, position), .token = token, .both = both, .inside = inside};
    int64_t failed = describe_pairs(c, position, token, gate_up, down);
    if (!failed) failed = run_jobs(job, fill_jobs(c, &c->gate_up, first, c->x, token, gate_up, both, job), threads, backend);
    if (!failed) {
        RUN(&shared, backend, useful_threads(threads, shared.pairs * inner * 8), gate);
        failed = run_jobs(job, fill_jobs(c, &c->down, first, inside, NULL, down, c->each, job), threads, backend);
    }
    free(memory);
    return failed;
}

/* call->out of call->each. Returns 0, or -2: out of memory. */
int64_t qbe_sum_experts(const Call *c, int32_t threads, int32_t backend) {
    const int64_t all = c->tokens * c->top;
    int64_t *const position = malloc((size_t)(all + c->experts + 1) * sizeof *position);
    if (!position) return -2;
    Experts shared = {.call = c, .position = position};
    shared.pairs = sort_pairs(c, position + all, position);
    RUN(&shared, backend, useful_threads(threads, all * c->down.shape->n), sum);
    free(position);
    return 0;
}
