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

#define FULL_BITS 16 /* a row at this width belongs to the 16-bit original, not to this file */

enum { SCALAR, AVX2, AVX512 };

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#include "attention.c"

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
        Job *j = arg;                                                                                 \
        float *scale = j->scratch + atomic_fetch_add(&j->slot, 1) * 2 * j->chunk * j->w.groups;       \
        for (;;) {                                                                                    \
            const int64_t n0 = atomic_fetch_add(&j->next, j->chunk), left = j->w.n - n0;              \
            if (left <= 0) return;                                                                    \
            const int64_t n1 = n0 + (left < j->chunk ? left : j->chunk);                              \
            for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {                                         \
                const int at = j->precision[r0];                                                      \
                for (r1 = r0 + 1; r1 < j->rows && j->precision[r1] == at;) r1++;                      \
                MULTIPLY(j, at, n0, n1, r0, r1, scale, scale + j->chunk * j->w.groups);               \
            }                                                                                         \
        }                                                                                             \
    }                                                                                                 \
    TARGET static void NAME##_dequantise(void *arg) { dequantise_chunks(arg, DEQUANTISE); }

DEFINE_WORK(scalar, , multiply_scalar, dequantise_float)
#ifdef X86
DEFINE_WORK(avx2, TARGET_AVX2, multiply_avx2, dequantise_float)
DEFINE_WORK(avx512, TARGET_AVX512, multiply_avx512, dequantise_avx512)
#endif

static void run(Job *j, int threads, void (*scalar)(void *), void (*avx2)(void *), void (*avx512)(void *)) {
    void (*work)(void *) = j->backend == AVX512 ? avx512 : j->backend == AVX2 ? avx2 : scalar;
    pool_run(work, j, threads);
}

#ifdef X86
#define RUN(J, THREADS, KIND) run(J, THREADS, scalar_##KIND, avx2_##KIND, avx512_##KIND)
#else
#define RUN(J, THREADS, KIND) run(J, THREADS, scalar_##KIND, scalar_##KIND, scalar_##KIND)
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

/* y[r] = x[r] @ W(bits[r]).T + bias for every row below 16 bits; rows at 16 are left for the caller.
   x [rows, k] and y [rows, n] of `dtype`, contiguous; bits int32 [rows]; bias float32 [n] or NULL.
   Returns how many rows asked for 16 bits, or -1: there is such a row and `refuse_full` (nothing was done);
   -2: out of memory (nothing was done). */
int64_t qbe_multiply(const void *x, const uint8_t *packed, const uint8_t *meta, const int32_t *bits, const float *bias,
                     void *y, const Shape *shape, int64_t rows, int32_t dtype, int32_t refuse_full, int32_t threads,
                     int32_t backend) {
    const int64_t k = shape->k, n = shape->n, kp = shape->kp, groups = shape->groups;
    const Layout *layout = &shape->layout;
    int64_t full = 0;
    for (int64_t r = 0; r < rows; r++) full += bits[r] >= FULL_BITS;
    if (full && refuse_full) return -1;
    if (full == rows || n == 0) return full;

    Job j = {.w = weight_of(packed, meta, shape), .backend = backend, .dtype = dtype,
             .rows = rows - full, .bias = bias, .y = y};
    threads = useful_threads(threads, n * kp);
    j.chunk = chunk_rows(n, kp, threads);
    j.x_bytes = kp * (backend != AVX512 ? 4 : dtype == FLOAT32 ? 6 : 2);
    const size_t x_size = aligned((size_t)(j.rows * j.x_bytes)), list = aligned((size_t)j.rows * 4);
    const size_t sums_size = aligned((size_t)(j.rows * groups) * 4);
    const size_t scratch = aligned((size_t)(threads * 2 * j.chunk * groups) * 4);
    char *memory = aligned_alloc(64, x_size + sums_size + 2 * list + scratch);
    if (!memory) return -2;
    float *sums = (float *)(memory + x_size);
    int32_t *row = (int32_t *)(memory + x_size + sums_size), *precision = row + list / 4;
    j.x = memory, j.sums = sums, j.row = row, j.precision = precision, j.scratch = (float *)(precision + list / 4);

    int64_t at = 0;
    for (int i = 0; i < layout->precisions; i++) { /* ascending, so that equal precisions are neighbours */
        const int64_t before = at;
        for (int64_t r = 0; r < rows; r++) {
            if (bits[r] >= FULL_BITS) continue;
            const int above = i + 1 < layout->precisions && bits[r] >= layout->precision[i + 1];
            const int below = i > 0 && bits[r] < layout->precision[i];
            if (above || below) continue;
            const char *from = (const char *)x + r * k * (dtype == FLOAT32 ? 4 : 2);
            void *to = memory + at * j.x_bytes;
#ifdef X86
            if (backend == AVX512) load_avx512(from, dtype, k, &j.w, to, sums + at * groups);
            else
#endif
                load_float(from, dtype, k, kp, backend == AVX2, to);
            row[at] = (int32_t)r, precision[at] = i, at++;
        }
#ifdef X86
        if (backend == AVX512 && at > before) j.recipe[i] = recipe_of(layout, layout->precision[i], 5);
#endif
    }
    RUN(&j, threads, multiply);
    free(memory);
    return full;
}

/* out[n1-n0, k] of `dtype`: rows n0..n1 of the weight at the precision `index`. Returns 0, or -2: out of memory. */
int64_t qbe_dequantise(const uint8_t *packed, const uint8_t *meta, void *out, const Shape *shape, int64_t n0, int64_t n1,
                       int32_t index, int32_t dtype, int32_t threads, int32_t backend) {
    Job j = {.w = weight_of(packed, meta, shape), .backend = backend, .dtype = dtype,
             .rows = n1 - n0, .y = out, .n0 = n0, .k = shape->k, .index = index};
    if (n1 <= n0) return 0;
    threads = useful_threads(threads, (n1 - n0) * shape->kp);
    j.chunk = chunk_rows(n1 - n0, shape->kp, threads);
#ifdef X86
    if (backend == AVX512) j.recipe[index] = recipe_of(&shape->layout, shape->layout.precision[index], 8);
#endif
    j.scratch = aligned_alloc(64, aligned((size_t)threads * 2 * j.chunk * shape->groups * 4));
    if (!j.scratch) return -2;
    RUN(&j, threads, dequantise);
    free(j.scratch);
    return 0;
}
