/* A decode step of a Mamba-2 layer between its projections: qbe::mamba2_step. Included by nested.c.

   Reference: qbe/kernels/reference/mamba2_step.py. A sequence's result does not depend on those beside it. */

#include "state_rows.c"

enum { GATE_ALONE, NORM_OF_GATED, GATE_OF_NORMED }; /* NORMS of the op */

/* `_Shape` of qbe/kernels/cpu/recurrent/mamba2_step.py. */
typedef struct {
    int64_t rows, heads, head_dim, size, groups, taps, norm_groups, bytes;
    float eps;
    int32_t norm, dtype;
} Mamba2Shape;

typedef struct {
    const char *projected;                 /* [rows, inner + channels + heads]: gate; x, B, C; dt */
    char *memory;                          /* [bytes] */
    const int64_t *conv_at, *state_at;     /* [rows]: bytes from the beginning of memory to a sequence's states */
    const int32_t *bits, *positions;       /* [rows] */
    const float *conv_weight, *conv_bias;  /* [taps, channels], [channels] */
    const float *dt_bias, *a, *d;          /* [heads] */
    const float *norm;                     /* [inner] or NULL */
    char *y;                               /* [rows, inner] */
    const Mamba2Shape *shape;
} Mamba2Call;

typedef struct {
    const Mamba2Call *call;
    int64_t inner, channels, width, padded;
    float *mixed; /* [rows, padded]: what the convolution makes of x, B and C */
    float *read;  /* [rows, inner] */
    atomic_llong next;
} Mamba2;

INLINE float number_of(const char *from, int64_t i, int dtype) {
    return dtype == FLOAT32 ? ((const float *)from)[i] : bits_to_float((uint32_t)((const uint16_t *)from)[i] << 16);
}

INLINE void put_lanes(char *to, int64_t i, int64_t left, int dtype, Floats v) {
    for (int k = 0; k < (left < LANES ? left : LANES); k++) {
        if (dtype == FLOAT32) ((float *)to)[i + k] = v[k];
        else ((uint16_t *)to)[i + k] = to_bfloat16(v[k]);
    }
}

INLINE const char *projected_row(const Mamba2 *m, int64_t r) {
    return m->call->projected + r * m->width * (m->call->shape->dtype == FLOAT32 ? 4 : 2);
}

/* The convolution's window moves on by one input. */
INLINE void mamba2_convolve(const Mamba2 *m, int64_t r) {
    const Mamba2Call *c = m->call;
    const int64_t taps = c->shape->taps, bytes = c->shape->dtype == FLOAT32 ? 4 : 2;
    const int dtype = c->shape->dtype;
    const char *in = projected_row(m, r) + m->inner * bytes;
    char *window = c->memory + c->conv_at[r];
    float *mixed = m->mixed + r * m->padded;
    for (int64_t i = 0; i < m->channels; i++, window += taps * bytes) {
        float sum = c->conv_bias[i];
        memmove(window, window + bytes, (size_t)((taps - 1) * bytes));
        memcpy(window + (taps - 1) * bytes, in + i * bytes, (size_t)bytes);
        for (int64_t k = 0; k < taps; k++) sum += c->conv_weight[k * m->channels + i] * number_of(window, k, dtype);
        mixed[i] = sum;
    }
    for (int64_t i = 0; i < m->channels; i += LANES) {
        Floats v;
        memcpy(&v, mixed + i, sizeof v);
        v = v * sigmoid(v);
        memcpy(mixed + i, &v, sizeof v);
    }
}

/* The four taps that every published model has, of bfloat16: a window is one number of 64 bits. */
INLINE void mamba2_convolve_four(const Mamba2 *m, int64_t r) {
    const Mamba2Call *c = m->call;
    const uint16_t *in = (const uint16_t *)projected_row(m, r) + m->inner;
    char *windows = c->memory + c->conv_at[r];
    const float *w0 = c->conv_weight, *w1 = w0 + m->channels, *w2 = w1 + m->channels, *w3 = w2 + m->channels;
    float *mixed = m->mixed + r * m->padded;
    for (int64_t i = 0; i < m->channels; i++) {
        uint64_t window;
        memcpy(&window, windows + 8 * i, 8);
        window = window >> 16 | (uint64_t)in[i] << 48;
        memcpy(windows + 8 * i, &window, 8);
        float sum = c->conv_bias[i];
        sum += w0[i] * bits_to_float((uint32_t)window << 16);
        sum += w1[i] * bits_to_float((uint32_t)window & 0xFFFF0000u);
        sum += w2[i] * bits_to_float((uint32_t)(window >> 32) << 16);
        sum += w3[i] * bits_to_float((uint32_t)(window >> 32) & 0xFFFF0000u);
        mixed[i] = sum;
    }
    for (int64_t i = 0; i < m->channels; i += LANES) {
        Floats v;
        memcpy(&v, mixed + i, sizeof v);
        v = v * sigmoid(v);
        memcpy(mixed + i, &v, sizeof v);
    }
}

/* A head's state decays, takes what is new, and is read. */
INLINE void mamba2_head(const Mamba2 *m, int64_t r, int64_t head) {
    const Mamba2Call *c = m->call;
    const Mamba2Shape *s = c->shape;
    const int64_t size = s->size, group = head / (s->heads / s->groups);
    const float *x = m->mixed + r * m->padded, *b = x + m->inner + group * size, *of = b + s->groups * size;
    float dt = number_of(projected_row(m, r), m->inner + m->channels + head, s->dtype) + c->dt_bias[head];
    if (!(dt > 20.0f)) dt = log1pf(expf(dt));
    const float decay = expf(dt * c->a[head]);
    const int bits = c->bits[r];
    const StateRows state = state_rows(c->memory + c->state_at[r], s->heads * s->head_dim, size, bits);
    for (int64_t row = head * s->head_dim; row < (head + 1) * s->head_dim; row++) {
        const float in = dt * x[row];
        Floats sum = {0};
        float now[MOST_STATE], *kept = bits == STATE_FULL ? (float *)state.codes + row * size : now;
        const float scale = bits == STATE_FULL ? 0 : bits_to_float((uint32_t)state.scales[row] << 16);
        for (int64_t i = 0; i < size; i += LANES) {
            Floats v, new, read;
            if (bits == STATE_FULL) memcpy(&v, kept + i, sizeof v);
            else v = read_state(&state, row, i, scale);
            memcpy(&new, b + i, sizeof new), memcpy(&read, of + i, sizeof read);
            v = v * decay + new * in;
            memcpy(kept + i, &v, sizeof v);
            sum += v * read;
        }
        if (bits != STATE_FULL) write_state(&state, row, now, (uint32_t)c->positions[r]);
        m->read[r * m->inner + row] = sum_lanes(sum) + x[row] * c->d[head];
    }
}

INLINE Floats gate_lanes(const Mamba2 *m, int64_t r, int64_t i) {
    const Floats gate = load_lanes(projected_row(m, r), m->call->shape->dtype, m->inner, i);
    return gate * sigmoid(gate);
}

/* What was read, gated and normed. */
INLINE void mamba2_gate(const Mamba2 *m, int64_t r) {
    const Mamba2Call *c = m->call;
    const int64_t inner = m->inner, part = inner / c->shape->norm_groups;
    const int dtype = c->shape->dtype, norm = c->shape->norm;
    const char *read = (const char *)(m->read + r * inner);
    char *y = c->y + r * inner * (dtype == FLOAT32 ? 4 : 2);
    for (int64_t from = 0; from < inner; from += part) {
        float by = 1;
        if (norm != GATE_ALONE) {
            Floats squares = {0};
            for (int64_t i = from; i < from + part; i += LANES) {
                Floats v = load_lanes(read, FLOAT32, from + part, i);
                if (norm == NORM_OF_GATED) v *= gate_lanes(m, r, i);
                squares += v * v;
            }
            by = 1.0f / sqrtf(sum_lanes(squares) / (float)part + c->shape->eps);
        }
        for (int64_t i = from; i < from + part; i += LANES) {
            Floats v = load_lanes(read, FLOAT32, from + part, i);
            if (norm == GATE_OF_NORMED) v = v * by * load_lanes((const char *)c->norm, FLOAT32, from + part, i);
            v *= gate_lanes(m, r, i);
            if (norm == NORM_OF_GATED) {
                v *= by;
                for (int k = 0; k < LANES && dtype != FLOAT32; k++) v[k] = bits_to_float((uint32_t)to_bfloat16(v[k]) << 16);
                v *= load_lanes((const char *)c->norm, FLOAT32, from + part, i);
            }
            put_lanes(y, i, from + part - i, dtype, v);
        }
    }
}

#define DEFINE_MAMBA2(NAME, TARGET)                                                                     \
    TARGET static void NAME##_mamba2_convolve(void *arg) {                                              \
        Mamba2 *m = arg;                                                                                \
        const Mamba2Shape *s = m->call->shape;                                                          \
        for (int64_t r; (r = atomic_fetch_add(&m->next, 1)) < s->rows;)                                 \
            if (s->taps == 4 && s->dtype == BFLOAT16) mamba2_convolve_four(m, r);                       \
            else mamba2_convolve(m, r);                                                                 \
    }                                                                                                   \
    TARGET static void NAME##_mamba2_head(void *arg) {                                                  \
        Mamba2 *m = arg;                                                                                \
        const int64_t heads = m->call->shape->heads;                                                    \
        for (int64_t i; (i = atomic_fetch_add(&m->next, 1)) < m->call->shape->rows * heads;)            \
            mamba2_head(m, i / heads, i % heads);                                                       \
    }                                                                                                   \
    TARGET static void NAME##_mamba2_gate(void *arg) {                                                  \
        Mamba2 *m = arg;                                                                                \
        for (int64_t r; (r = atomic_fetch_add(&m->next, 1)) < m->call->shape->rows;) mamba2_gate(m, r); \
    }

DEFINE_MAMBA2(scalar, )
#ifdef X86
DEFINE_MAMBA2(avx2, TARGET_AVX2)
DEFINE_MAMBA2(avx512, TARGET_AVX512)
#endif

/* Returns 0, or -1: a state lies outside of memory; -2: out of memory (then nothing was done). */
int64_t qbe_mamba2_step(const Mamba2Call *call, int32_t threads, int32_t backend) {
    const Mamba2Shape *s = call->shape;
    const int64_t inner = s->heads * s->head_dim, channels = inner + 2 * s->groups * s->size;
    const int64_t window = channels * s->taps * (s->dtype == FLOAT32 ? 4 : 2);
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t state = state_bytes(inner, s->size, call->bits[r]);
        if (call->conv_at[r] < 0 || call->state_at[r] < 0 || call->conv_at[r] + window > s->bytes ||
            call->state_at[r] + state > s->bytes)
            return -1;
    }
    Mamba2 m = {.call = call, .inner = inner, .channels = channels, .width = inner + channels + s->heads,
                .padded = (channels + LANES - 1) / LANES * LANES};
    m.mixed = aligned_alloc(64, aligned((size_t)(s->rows * (m.padded + inner)) * 4));
    if (!m.mixed) return -2;
    memset(m.mixed, 0, (size_t)(s->rows * m.padded) * 4); /* past the last channel, too */
    m.read = m.mixed + s->rows * m.padded;
    threads = useful_threads(threads, s->rows * inner * s->size);
    RUN(&m, backend, useful_threads(threads, s->rows * channels * s->taps), mamba2_convolve);
    atomic_store(&m.next, 0);
    RUN(&m, backend, threads, mamba2_head);
    atomic_store(&m.next, 0);
    RUN(&m, backend, useful_threads(threads, s->rows * inner), mamba2_gate);
    free(m.mixed);
    return 0;
}
