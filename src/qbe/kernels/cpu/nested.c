/* The CPU kernels of qbe::nested_linear and qbe::paged_attention: a plain shared object, called through ctypes (see
   linear/nested.py, attention/paged.py).

   Layout and semantics: qbe/format/layout.py, qbe/format/scales.py, qbe/kernels/reference/nested_linear.py.

   Every row of x goes through the same operations in the same order, or through others that end in the same integers, whatever
   rows it shares the call with: a row's result does not depend on its batch. */

#define _GNU_SOURCE /* pthread_sigmask under -std=c11 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define X86 1
#endif

#include "linear/store.c"

#include "job.c"

#include "linear/activations.c"

#include "linear/dot_float.c"

#ifdef X86
#include "linear/codes_avx512.c"

#include "linear/panel_avx512.c"

#include "linear/dot_vnni.c"

#include "linear/dot_few.c"

#include "linear/dot_tiles.c"

#include "linear/dot_bfloat16.c"

#include "linear/dot_winograd.c"

#include "linear/dot_pairs.c"
#endif

#include "linear/rows.c"

#include "linear/dequantise.c"

#include "pool.c"

enum { SCALAR, AVX2, AVX512, TILES };

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#include "attention/attention.c"

#include "attention/prompt.c"

#include "rows/norm_rope.c"

#include "rows/difficulty.c"

#include "linear/dot_full.c"

#ifndef QBE_SOURCE_HASH
#define QBE_SOURCE_HASH ""
#endif
const char *qbe_source_hash(void) { return QBE_SOURCE_HASH; }

int qbe_best_backend(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"))
        return has_bf16() && has_tiles() ? TILES : AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return SCALAR;
}

/* What one thread does: rows of x into the backend's form, and chunks of the weights. */
#define DEFINE_WORK(NAME, TARGET)                                                                     \
    TARGET static void NAME##_multiply(void *arg) {                                                   \
        Jobs *jobs = arg;                                                                             \
        float *scratch = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;     \
        for (Job *j = jobs->job; j < jobs->job + jobs->count; j++)                                    \
            for (;;) {                                                                                \
                const int64_t n0 = atomic_fetch_add(&j->next, j->chunk), left = j->w.n - n0;          \
                if (left <= 0) break;                                                                 \
                const int64_t n1 = n0 + (left < j->chunk ? left : j->chunk);                          \
                if (j->full) full_##NAME(j, n0, n1);                                                  \
                for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {                                     \
                    r1 = end_of_run(j, r0);                                                           \
                    multiply_##NAME(j, j->precision[r0], n0, n1, r0, r1, scratch);                    \
                }                                                                                     \
            }                                                                                         \
    }                                                                                                 \
    static void NAME##_load(void *arg) {                                                              \
        Jobs *jobs = arg;                                                                             \
        for (Job *j = jobs->job; j < jobs->job + jobs->count; j++)                                    \
            for (int64_t r; !j->shares && (r = atomic_fetch_add(&j->loading, 1)) < j->rows;)          \
                load_##NAME(j, r);                                                                    \
    }

/* Rows of x as 8 bits hold them. */
INLINE void round_rows(Jobs *jobs) {
    Job *j = jobs->job;
    float *row = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;
    const int64_t bytes = j->k * (j->dtype == FLOAT32 ? 4 : 2);
    for (int64_t r; (r = atomic_fetch_add(&j->loading, 1)) < j->rows;) {
        char *const to = (char *)j->y + r * bytes;
        round_to_eight(j->given + r * bytes, j->dtype, j->k, j->w.kp, j->w.groups, row);
        if (j->dtype == FLOAT32) memcpy(to, row, (size_t)bytes);
        else for (int64_t i = 0; i < j->k; i++) ((uint16_t *)to)[i] = to_bfloat16(row[i]);
    }
}

static void scalar_round(void *arg) { round_rows(arg); }
#ifdef X86
TARGET_AVX2 static void avx2_round(void *arg) { round_rows(arg); }
TARGET_AVX512 static void avx512_round(void *arg) {
    Job *j = ((Jobs *)arg)->job;
    const int64_t bytes = j->k * (j->dtype == FLOAT32 ? 4 : 2);
    for (int64_t r; (r = atomic_fetch_add(&j->loading, 1)) < j->rows;)
        round_row_avx512(j->given + r * bytes, j->dtype, j->k, j->w.kp, j->w.groups, (char *)j->y + r * bytes);
}
#endif

static void load_scalar(Job *j, int64_t r) {
    const int32_t row = j->row[r];
    load_float(given_row(j, row), j->dtype, j->k, &j->w, has_eight(j->words[row]), 0, (float *)(j->x + r * j->x_bytes));
}

DEFINE_WORK(scalar, )
#ifdef X86
static void load_avx2(Job *j, int64_t r) {
    const int32_t row = j->row[r];
    load_float(given_row(j, row), j->dtype, j->k, &j->w, has_eight(j->words[row]), 1, (float *)(j->x + r * j->x_bytes));
}

static void load_avx512(Job *j, int64_t r) {
    if (j->planes[r] == IN_TILES) load_tile_row(j, r);
    else fixed_point(given_row(j, j->row[r]), j->dtype, j->k, j->w.kp, j->w.groups, j->planes[r], j->x + r * j->x_bytes, j->of_group + r, j->rows);
}

TARGET_AVX512 INLINE void multiply_avx512(const Job *j, int at, int64_t n0, int64_t n1, int64_t r0, int64_t r1, float *scratch) {
    if (j->planes[r0] == IN_TILES) multiply_bfloat16(j, at, n0, n1, r0, r1, scratch);
    else if (in_few(j, r0)) {
        if (r0 == j->few_first) multiply_few(j, n0, n1, scratch);
    } else if (j->planes[r0] == INT16) multiply_int16(j, at, n0, n1, r0, r1, scratch);
    else if (j->tiles && r1 - r0 >= TILED) multiply_tiles(j, at, n0, n1, r0, r1, scratch);
    else if (j->planes[r0] == 1 && r1 - r0 > INT16_MOST) multiply_pairs(j, at, n0, n1, r0, r1, scratch);
    else multiply_integers(j, at, n0, n1, r0, r1, scratch);
}

DEFINE_WORK(avx2, TARGET_AVX2)
DEFINE_WORK(avx512, TARGET_AVX512)
#endif

#ifdef X86
#define RUN(JOBS, BACKEND, THREADS, KIND)                                                                        \
    pool_run((BACKEND) >= AVX512 ? avx512_##KIND : (BACKEND) == AVX2 ? avx2_##KIND : scalar_##KIND, JOBS, THREADS)
#else
#define RUN(JOBS, BACKEND, THREADS, KIND) pool_run(scalar_##KIND, JOBS, THREADS)
#endif

/* Rows of the weight in a chunk: even parts of an even share for each thread, in whole tiles, at most CHUNK weights
   (shorter runs break the streams that prefetching lives on: 16 K cost a fifth of a decode step; longer ones balance the
   threads worse). In pairs of tiles where many rows of x take them so (dot_pairs.c). */
static int64_t chunk_rows(int64_t rows, int64_t kp, int threads, int pairs) {
    const int64_t share = rows > threads ? (rows + threads - 1) / threads : 1, unit = pairs ? 32 : 16;
    const int64_t most = CHUNK / kp > unit ? CHUNK / kp / unit * unit : unit;
    const int64_t parts = (share + most - 1) / most;
    return (share + parts * unit - 1) / (parts * unit) * unit;
}

/* Waking a thread costs about as much as this many weights. */
static int useful_threads(int threads, int64_t weights) { return threads < 1 || weights < 32768 ? 1 : threads; }

static Weight weight_of(const uint8_t *packed, const uint8_t *meta, const Shape *s) {
    Weight w = {packed, meta, s->n, s->kp, s->groups, s->exponent, &s->layout};
    return w;
}

#ifdef X86
/* The recipes of a layout's precisions; kept, because one model has one layout. */
static const Recipe *recipes(const Layout *layout) {
    static _Thread_local struct { Layout layout; Recipe recipe[8]; } kept;
    if (memcmp(&kept.layout, layout, sizeof *layout)) {
        for (int i = 0; i < layout->precisions; i++) kept.recipe[i] = recipe_of(layout, layout->precision[i]);
        kept.layout = *layout;
    }
    return kept.recipe;
}
#endif

/* Whether two jobs have the same rows of x laid out alike: in one order, in as many planes, which precisions they read or not. */
static int same_rows(const Job *a, const Job *b) {
    const size_t bytes = (size_t)b->given_rows * 4;
    for (int64_t r = 1; r < a->rows && r < b->rows; r++) /* tiles hold rows of one precision */
        if (a->planes[r] == IN_TILES && (a->precision[r] == a->precision[r - 1]) != (b->precision[r] == b->precision[r - 1]))
            return 0;
    return a->given == b->given && a->x_row == b->x_row && a->given_rows == b->given_rows && a->w.kp == b->w.kp
           && a->w.groups == b->w.groups && a->full == b->full && a->full_eight == b->full_eight
           && !memcmp(a->row, b->row, bytes) && !memcmp(a->planes, b->planes, bytes);
}

static char *take(char **memory, size_t bytes) {
    char *taken = *memory;
    *memory += aligned(bytes);
    return taken;
}

/* Bytes of x for an input, as the backend's load function leaves it. */
INLINE int64_t bytes_of_input(int backend) { return backend < AVX512 ? 4 : 2; }

/* From so many rows of a precision on, products of bfloat16 by tiles pay (benchmarks/cpu_crossover.py), and so many have them where
   a row of few is to come out the same whatever rows are beside it. */
#define FEW_TILED 40
#define MANY_TILED 96

INLINE int takes_pairs(int backend, int64_t rows) {
#ifdef X86
    return backend == AVX512 ? rows > INT16_MOST : backend == TILES && rows >= FEW_TILED;
#else
    return 0;
#endif
}

/* Room that a job's rows need beside its scratch, and the floats of scratch that a thread needs for it. */
static size_t job_bytes(const Job *j, int threads, int backend, int64_t *scratch) {
    const Weight *w = &j->w;
    const int64_t rows = j->given_rows;
    int64_t floats = 2 * chunk_rows(w->n, w->kp, threads, 0) * w->groups, eight = 0;
#ifdef X86
    if (backend >= AVX512) {
        floats = int16_floats(w) * int16_tiles(chunk_rows(w->n, w->kp, threads, takes_pairs(backend, rows)), rows);
        if (floats < few_floats(w)) floats = few_floats(w);
        const int tiled = backend == TILES && j->tiled_rows && rows >= j->tiled_rows;
        if (tiled && floats < tile_floats(w) + bfloat16_floats(w)) floats = tile_floats(w) + bfloat16_floats(w);
    }
#endif
    if (*scratch < floats) *scratch = floats;
    for (int64_t r = 0; r < rows; r++) eight += weight_bits(j->words[r]) >= FULL_BITS && has_eight(j->words[r]);
    return aligned((size_t)(rows * w->kp * bytes_of_input(backend))) + aligned((size_t)(rows * w->groups) * sizeof(OfGroup))
           + 3 * aligned((size_t)rows * 4) + aligned((size_t)(eight * w->kp) * 4);
}

/* Orders a job's rows and gives them their room; of the jobs before it one may have x laid out alike. Returns the inputs to load. */
static int64_t plan_job(Job *j, const Job *before, int threads, int backend, char **memory) {
    const size_t numbers = (size_t)j->given_rows * 4;
    const int64_t kp = j->w.kp;
    j->chunk = chunk_rows(j->w.n, kp, threads, takes_pairs(backend, j->given_rows));
    j->x_bytes = kp * bytes_of_input(backend);
    j->row = (int32_t *)take(memory, numbers), j->precision = (int32_t *)take(memory, numbers);
    j->planes = (int32_t *)take(memory, numbers);
    sort_rows(j);
#ifdef X86
    if (backend == AVX512) choose_int16(j);
    if (backend == TILES) choose_tiles(j);
    if (backend >= AVX512) j->recipe = recipes(j->w.layout), j->tiles = backend == TILES;
#endif
    const Job *same = j->x_row ? j : before; /* rows picked out of x are nobody else's */
    while (same < j && !same_rows(same, j)) same++;
    if (same < j) {
        j->x = same->x, j->of_group = same->of_group, j->x_eight = same->x_eight, j->shares = 1;
    } else {
        j->x = take(memory, (size_t)(j->rows * j->x_bytes));
        j->of_group = (OfGroup *)take(memory, (size_t)(j->rows * j->w.groups) * sizeof(OfGroup));
        j->x_eight = (float *)take(memory, (size_t)(j->full_eight * kp) * 4);
        for (int64_t r = 0; r < j->full_eight; r++)
            round_to_eight(given_row(j, j->row_full[j->full - j->full_eight + r]), j->dtype, j->k, kp, j->w.groups,
                           j->x_eight + r * kp);
    }
#ifdef X86
    if (backend >= AVX512) choose_few(j);
#endif
    return j->shares ? 0 : j->rows * kp;
}

/* Every job's y[r] = x[r] @ W(words[r]).T + bias, of weights with the same slices. What a caller sets of a job is in job.c; its
   rows at 16 bits have an original. Returns 0, or -2: out of memory (nothing was done). */
static int64_t run_jobs(Job *job, int64_t count, int threads, int backend) {
    int64_t weights = 0, scratch = 0, loads = 0;
    size_t size = 0;
    for (Job *j = job; j < job + count; j++) weights += j->w.n * j->w.kp;
    if (weights == 0) return 0;
    threads = useful_threads(threads, weights);
    for (Job *j = job; j < job + count; j++) size += job_bytes(j, threads, backend, &scratch);
    scratch = (int64_t)aligned((size_t)scratch * 4) / 4;
    char *const memory = aligned_alloc(64, size + (size_t)(threads * scratch) * 4), *left = memory;
    if (!memory) return -2;
    Jobs jobs = {.job = job, .count = count, .scratch_floats = scratch};
    for (Job *j = job; j < job + count; j++) loads += plan_job(j, job, threads, backend, &left);
    jobs.scratch = (float *)left;
    RUN(&jobs, backend, useful_threads(threads, loads), load);
    RUN(&jobs, backend, threads, multiply);
    free(memory);
    return 0;
}

/* One weight of a call. */
typedef struct {
    const uint8_t *packed, *meta;
    const int32_t *bits;  /* one per row of x */
    const void *original; /* [n, k] of x's dtype, or NULL */
    const void *bias;     /* [n] or NULL */
    void *y;              /* [rows, n], its rows y_stride numbers apart */
    const Shape *shape;
    int64_t y_stride;
    int32_t bias_dtype, y_dtype; /* y in x's, or in FLOAT32 */
} Matrix;

static int missing_original(const int32_t *words, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        if (weight_bits(words[r]) >= FULL_BITS) return 1;
    return 0;
}

/* y[r] = x[r] @ W(bits[r]).T + bias, for weights with the same slices and inputs. x [rows, k] of `dtype`
   (FLOAT16: with AVX-512, and no row at 16 bits), contiguous. invariant: a row of fewer than MANY_TILED comes out the same, bit
   for bit, whatever rows are beside it. A y in FLOAT32 is a sum of weights that are not rounded. Returns 0, or -1: a row asks for 16 bits and there is
   no original (nothing was done); -2: out of memory (nothing was done). */
int64_t qbe_multiply_many(const void *x, const Matrix *matrix, int64_t count, int64_t rows, int32_t dtype, int32_t invariant,
                          int32_t threads, int32_t backend) {
    int64_t used = 0;
    for (const Matrix *m = matrix; m < matrix + count; m++)
        if (!m->original && missing_original(m->bits, rows)) return -1;
    if (rows == 0) return 0;
    Job *const job = calloc((size_t)count, sizeof *job);
    if (!job) return -2;
    for (const Matrix *m = matrix; m < matrix + count; m++) {
        if (m->shape->n == 0) continue;
        const Job j = {.w = weight_of(m->packed, m->meta, m->shape), .dtype = dtype, .y_dtype = m->y_dtype, .y = m->y,
                       .y_stride = m->y_stride, .words = m->bits, .bias = m->bias, .bias_dtype = m->bias_dtype,
                       .k = m->shape->k, .original = m->original, .given = x, .given_rows = rows,
                       .tiled_rows = m->y_dtype == FLOAT32 ? 0 : invariant ? MANY_TILED : FEW_TILED};
        job[used++] = j;
    }
    const int64_t failed = run_jobs(job, used, threads, backend);
    free(job);
    return failed;
}

/* The same for one weight, y contiguous. */
int64_t qbe_multiply(const void *x, const uint8_t *packed, const uint8_t *meta, const int32_t *bits,
                     const void *original, const void *bias, void *y, const Shape *shape, int64_t rows, int32_t dtype,
                     int32_t y_dtype, int32_t bias_dtype, int32_t invariant, int32_t threads, int32_t backend) {
    const Matrix m = {packed, meta, bits, original, bias, y, shape, shape->n, bias_dtype, y_dtype};
    return qbe_multiply_many(x, &m, 1, rows, dtype, invariant, threads, backend);
}

/* Rows of x as 8 bits hold them, of x's `dtype`: out [rows, k]. Returns 0, or -2: out of memory. */
int64_t qbe_round_rows(const void *x, void *out, const Shape *shape, int64_t rows, int32_t dtype, int32_t threads,
                       int32_t backend) {
    Job j = {.w = {.kp = shape->kp, .groups = shape->groups}, .dtype = dtype, .rows = rows, .given = x, .y = out, .k = shape->k};
    threads = useful_threads(threads, rows * shape->kp);
    Jobs jobs = {.job = &j, .count = 1, .scratch_floats = (int64_t)aligned((size_t)shape->kp * 4) / 4};
    jobs.scratch = aligned_alloc(64, (size_t)(threads * jobs.scratch_floats) * 4);
    if (!jobs.scratch) return -2;
    RUN(&jobs, backend, threads, round);
    free(jobs.scratch);
    return 0;
}

/* out[n1-n0, k] of `dtype`: rows n0..n1 of the weight at the precision `index`. Returns 0, or -2: out of memory. */
int64_t qbe_dequantise(const uint8_t *packed, const uint8_t *meta, void *out, const Shape *shape, int64_t n0, int64_t n1,
                       int32_t index, int32_t dtype, int32_t threads, int32_t backend) {
    Job j = {.w = weight_of(packed, meta, shape), .dtype = dtype, .rows = n1 - n0, .y = out, .n0 = n0, .k = shape->k,
             .index = index};
    if (n1 <= n0) return 0;
    threads = useful_threads(threads, (n1 - n0) * shape->kp);
    j.chunk = chunk_rows(n1 - n0, shape->kp, threads, 0);
#ifdef X86
    if (backend >= AVX512) j.recipe = recipes(&shape->layout);
#endif
    Jobs jobs = {.job = &j, .count = 1, .scratch_floats = (int64_t)aligned((size_t)(2 * j.chunk * shape->groups) * 4) / 4};
    jobs.scratch = aligned_alloc(64, (size_t)(threads * jobs.scratch_floats) * 4);
    if (!jobs.scratch) return -2;
    RUN(&jobs, backend, threads, dequantise);
    free(jobs.scratch);
    return 0;
}

#include "experts/experts.c"

#include "recurrent/mamba2_step.c"
