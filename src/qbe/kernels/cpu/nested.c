/* The CPU kernels of qbe::nested_linear and qbe::paged_attention: a plain shared object, called through ctypes (see
   nested_linear.py, paged_attention.py).

   Layout and semantics: qbe/store/layout.py, qbe/store/scales.py, qbe/kernels/reference/nested_linear.py.

   Every row of x goes through the same operations in the same order whatever rows it shares the call with: a row's
   result does not depend on its batch. */

#define _GNU_SOURCE /* pthread_sigmask under -std=c11 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

#include "store.c"

#include "job.c"

#include "dot_float.c"

#ifdef X86
#include "dot_avx512.c"
#endif

#include "dequantise.c"

#include "pool.c"

#define FULL_BITS 16 /* a row at this width reads the 16-bit original */

enum { SCALAR, AVX2, AVX512 };

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#include "attention.c"

#include "dot_full.c"

#ifndef QBE_SOURCE_HASH
#define QBE_SOURCE_HASH ""
#endif
const char *qbe_source_hash(void) { return QBE_SOURCE_HASH; }

int qbe_best_backend(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16")) return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return SCALAR;
}

/* What one thread does, given MULTIPLY(j, precision, rows of the weight, rows of x, scratch) and
   DEQUANTISE (dequantise.c). */
#define DEFINE_WORK(NAME, TARGET, MULTIPLY, DEQUANTISE)                                                \
    TARGET static void NAME##_multiply(void *arg) {                                                   \
        Jobs *jobs = arg;                                                                             \
        float *scale = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;       \
        for (Job *j = jobs->job; j < jobs->job + jobs->count; j++)                                    \
            for (;;) {                                                                                \
                const int64_t n0 = atomic_fetch_add(&j->next, j->chunk), left = j->w.n - n0;          \
                if (left <= 0) break;                                                                 \
                const int64_t n1 = n0 + (left < j->chunk ? left : j->chunk);                          \
                if (j->full) full_##NAME(j, n0, n1);                                                  \
                for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {                                     \
                    const int at = j->precision[r0];                                                  \
                    for (r1 = r0 + 1; r1 < j->rows && j->precision[r1] == at;) r1++;                  \
                    MULTIPLY(j, at, n0, n1, r0, r1, scale, scale + j->chunk * j->w.groups);           \
                }                                                                                     \
            }                                                                                         \
    }                                                                                                 \
    TARGET static void NAME##_dequantise(void *arg) { dequantise_chunks(arg, DEQUANTISE); }

DEFINE_WORK(scalar, , multiply_scalar, dequantise_float)
#ifdef X86
DEFINE_WORK(avx2, TARGET_AVX2, multiply_avx2, dequantise_float)
DEFINE_WORK(avx512, TARGET_AVX512, multiply_avx512, dequantise_avx512)
#endif

#ifdef X86
#define RUN(JOBS, BACKEND, THREADS, KIND)                                                                        \
    pool_run((BACKEND) == AVX512 ? avx512_##KIND : (BACKEND) == AVX2 ? avx2_##KIND : scalar_##KIND, JOBS, THREADS)
#else
#define RUN(JOBS, BACKEND, THREADS, KIND) pool_run(scalar_##KIND, JOBS, THREADS)
#endif

/* Rows of the weight in a chunk: an even share for each thread, in whole tiles, at most 64 K weights (shorter runs break
   the streams that prefetching lives on: 16 K cost a fifth of a decode step; longer ones balance the threads worse). */
static int64_t chunk_rows(int64_t rows, int64_t kp, int threads) {
    const int64_t share = (rows / threads + 3) / 4 * 4, most = 65536 / kp / 4 * 4;
    const int64_t chunk = share < most ? share : most;
    return chunk < 4 ? 4 : chunk;
}

/* Waking a thread costs about as much as this many weights. */
static int useful_threads(int threads, int64_t weights) { return threads < 1 || weights < 32768 ? 1 : threads; }

static Weight weight_of(const uint8_t *packed, const uint8_t *meta, const Shape *s) {
    Weight w = {packed, meta, s->n, s->kp, s->groups, s->exponent, &s->layout};
    return w;
}

#ifdef X86
/* The recipes of a layout's precisions; kept, because one model has one layout. */
static const Recipe *recipes(const Layout *layout, int most) {
    static _Thread_local struct { Layout layout; int most; Recipe recipe[8]; } kept;
    if (kept.most != most || memcmp(&kept.layout, layout, sizeof *layout)) {
        for (int i = 0; i < layout->precisions; i++) kept.recipe[i] = recipe_of(layout, layout->precision[i], most);
        kept.layout = *layout, kept.most = most;
    }
    return kept.recipe;
}
#endif

/* One weight of a call. */
typedef struct {
    const uint8_t *packed, *meta;
    const int32_t *bits;  /* one per row of x */
    const void *original; /* [n, k] of x's dtype, or NULL */
    const void *bias;     /* [n] or NULL */
    void *y;              /* [rows, n], its rows y_stride numbers apart */
    const Shape *shape;
    int64_t y_stride;
    int32_t bias_dtype;
} Matrix;

static char *take(char **memory, size_t bytes) {
    char *taken = *memory;
    *memory += aligned(bytes);
    return taken;
}

/* y[r] = x[r] @ W(bits[r]).T + bias, for weights with the same slices and inputs. x [rows, k] and y of `dtype`, x
   contiguous. Returns 0, or -1: a row asks for 16 bits and there is no original (nothing was done); -2: out of memory
   (nothing was done). */
int64_t qbe_multiply_many(const void *x, const Matrix *matrix, int64_t count, int64_t rows, int32_t dtype, int32_t threads,
                          int32_t backend) {
    const int64_t row_bytes = matrix->shape->k * (dtype == FLOAT32 ? 4 : 2);
    int64_t weights = 0, scratch = 0;
    size_t size = aligned((size_t)count * sizeof(Job));
    for (const Matrix *m = matrix; m < matrix + count; m++) {
        for (int64_t r = 0; r < rows; r++)
            if (m->bits[r] >= FULL_BITS && !m->original) return -1;
        weights += m->shape->n * m->shape->kp;
    }
    if (weights == 0 || rows == 0) return 0;
    threads = useful_threads(threads, weights);

    const int64_t per = backend != AVX512 ? 4 : dtype == FLOAT32 ? 6 : 2; /* bytes of x for an input */
    for (const Matrix *m = matrix; m < matrix + count; m++) {
        const Shape *s = m->shape;
        const int64_t chunk = chunk_rows(s->n, s->kp, threads);
        size += aligned((size_t)(rows * s->kp * per)) + aligned((size_t)(rows * s->groups) * 4) + 2 * aligned((size_t)rows * 4);
        scratch = scratch > 2 * chunk * s->groups ? scratch : 2 * chunk * s->groups;
    }
    scratch = (int64_t)aligned((size_t)scratch * 4) / 4;
    char *const memory = aligned_alloc(64, size + (size_t)(threads * scratch) * 4), *left = memory;
    if (!memory) return -2;
    Jobs jobs = {.job = (Job *)take(&left, (size_t)count * sizeof(Job)), .scratch_floats = scratch};

    for (const Matrix *m = matrix; m < matrix + count; m++) {
        if (m->shape->n == 0) continue;
        const Shape *s = m->shape;
        const Layout *layout = &s->layout;
        Job j = {.w = weight_of(m->packed, m->meta, s), .dtype = dtype, .y = m->y, .y_stride = m->y_stride,
                 .bias = m->bias, .bias_dtype = m->bias_dtype, .x_bytes = s->kp * per, .k = s->k,
                 .original = m->original, .x_full = x};
        j.chunk = chunk_rows(s->n, s->kp, threads);
        const Job *same = jobs.job; /* one that has x laid out alike */
        while (same < jobs.job + jobs.count && (same->w.kp != s->kp || same->w.groups != s->groups)) same++;
        if (same < jobs.job + jobs.count) {
            j.x = same->x, j.sums = same->sums;
        } else {
            char *to = take(&left, (size_t)(rows * j.x_bytes));
            float *sums = (float *)take(&left, (size_t)(rows * s->groups) * 4);
            for (int64_t r = 0; r < rows; r++) {
                const char *from = (const char *)x + r * row_bytes;
#ifdef X86
                if (backend == AVX512) load_avx512(from, dtype, s->k, &j.w, (void *)(to + r * j.x_bytes), sums + r * s->groups);
                else
#endif
                    load_float(from, dtype, s->k, s->kp, backend == AVX2, (void *)(to + r * j.x_bytes));
            }
            j.x = to, j.sums = sums;
        }
        j.row = (int32_t *)take(&left, (size_t)rows * 4), j.precision = (int32_t *)take(&left, (size_t)rows * 4);
        int64_t at = 0;
        for (int64_t r = 0; r < rows; r++) j.full += m->bits[r] >= FULL_BITS;
        j.rows = rows - j.full;
        for (int i = 0; i < layout->precisions; i++) /* ascending, so that equal precisions are neighbours */
            for (int64_t r = 0; r < rows; r++) {
                if (m->bits[r] >= FULL_BITS) continue;
                const int above = i + 1 < layout->precisions && m->bits[r] >= layout->precision[i + 1];
                const int below = i > 0 && m->bits[r] < layout->precision[i];
                if (above || below) continue;
                j.row[at] = (int32_t)r, j.precision[at] = i, at++;
            }
        j.row_full = j.row + at; /* behind the others */
        for (int64_t r = 0; r < rows; r++)
            if (m->bits[r] >= FULL_BITS) j.row[at++] = (int32_t)r;
#ifdef X86
        if (backend == AVX512) j.recipe = recipes(layout, 5);
#endif
        jobs.job[jobs.count++] = j;
    }
    jobs.scratch = (float *)left;
    RUN(&jobs, backend, threads, multiply);
    free(memory);
    return 0;
}

/* The same for one weight, y contiguous. */
int64_t qbe_multiply(const void *x, const uint8_t *packed, const uint8_t *meta, const int32_t *bits,
                     const void *original, const void *bias, void *y, const Shape *shape, int64_t rows, int32_t dtype,
                     int32_t bias_dtype, int32_t threads, int32_t backend) {
    const Matrix m = {packed, meta, bits, original, bias, y, shape, shape->n, bias_dtype};
    return qbe_multiply_many(x, &m, 1, rows, dtype, threads, backend);
}

/* out[n1-n0, k] of `dtype`: rows n0..n1 of the weight at the precision `index`. Returns 0, or -2: out of memory. */
int64_t qbe_dequantise(const uint8_t *packed, const uint8_t *meta, void *out, const Shape *shape, int64_t n0, int64_t n1,
                       int32_t index, int32_t dtype, int32_t threads, int32_t backend) {
    Job j = {.w = weight_of(packed, meta, shape), .dtype = dtype, .rows = n1 - n0, .y = out, .n0 = n0, .k = shape->k,
             .index = index};
    if (n1 <= n0) return 0;
    threads = useful_threads(threads, (n1 - n0) * shape->kp);
    j.chunk = chunk_rows(n1 - n0, shape->kp, threads);
#ifdef X86
    if (backend == AVX512) j.recipe = recipes(&shape->layout, 8);
#endif
    Jobs jobs = {.job = &j, .count = 1, .scratch_floats = (int64_t)aligned((size_t)(2 * j.chunk * shape->groups) * 4) / 4};
    jobs.scratch = aligned_alloc(64, (size_t)(threads * jobs.scratch_floats) * 4);
    if (!jobs.scratch) return -2;
    RUN(&jobs, backend, threads, dequantise);
    free(jobs.scratch);
    return 0;
}
