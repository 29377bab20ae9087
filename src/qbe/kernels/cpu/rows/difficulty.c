/* How hard tokens are to predict: see qbe/analysis/difficulty.py. Included by nested.c. */

#include <math.h>

typedef struct {
    const float *logits; /* [n, vocabulary], rows `row` numbers apart */
    const int64_t *best;
    int64_t n, row, vocabulary;
    double *out; /* [3, n] */
} Difficulty;

enum { DIFFICULTY_PART = 64 * LANES }; /* numbers that are added up in float32; of parts the sums are float64 */

/* Adds the sums of e^l and of e^l * l over the numbers [from, to), l being a logit less the best one, and keeps the largest
   l but that of the token `first`, lane by lane. */
INLINE void add_part(const float *logits, float top, int64_t first, int64_t from, int64_t to, double *total, double *weighted,
                     Floats *margin) {
    Floats sum = {0}, times = {0};
    for (int64_t t = from; t < to; t += LANES) {
        Floats v;
        if (t + LANES <= to) memcpy(&v, logits + t, sizeof v);
        else {
            v = splat(-__builtin_inff());
            memcpy(&v, logits + t, (size_t)(to - t) * sizeof(float));
        }
        Floats below = v - top;
        below = pick(below < splat(-1e4f), splat(-1e4f), below); /* 0 * -inf would be NaN; a NaN stays one */
        v = exp_lanes(below);
        for (int i = 0; i < LANES && t + LANES > to; i++) v[i] = t + i < to ? v[i] : 0.0f;
        sum += v;
        times += v * below;
        for (int i = 0; i < LANES && t + LANES > to; i++) below[i] = t + i < to ? below[i] : -__builtin_inff();
        if (first >= t && first < t + LANES) below[first - t] = -__builtin_inff();
        *margin = pick(below > *margin, below, *margin);
    }
    *total += sum_lanes(sum);
    *weighted += sum_lanes(times);
}

INLINE void difficulty(const Difficulty *d) {
    for (int64_t i = 0; i < d->n; i++) {
        const float *logits = d->logits + i * d->row;
        const int64_t first = d->best[i] < 0 ? 0 : d->best[i];
        double total = 0, weighted = 0;
        Floats margin = splat(-__builtin_inff());
        for (int64_t from = 0; from < d->vocabulary; from += DIFFICULTY_PART) {
            const int64_t left = d->vocabulary - from, to = from + (left < DIFFICULTY_PART ? left : DIFFICULTY_PART);
            add_part(logits, logits[first], first, from, to, &total, &weighted, &margin);
        }
        float next = margin[0];
        for (int k = 1; k < LANES; k++) next = margin[k] > next ? margin[k] : next;
        const double entropy = log(total) - weighted / total;
        d->out[i] = (double)d->best[i];
        d->out[d->n + i] = entropy;
        d->out[2 * d->n + i] = entropy == entropy ? -(double)next : entropy;
    }
}

static void scalar_difficulty(void *arg) { difficulty(arg); }
#ifdef X86
TARGET_AVX2 static void avx2_difficulty(void *arg) { difficulty(arg); }
TARGET_AVX512 static void avx512_difficulty(void *arg) { difficulty(arg); }
#endif

/* One thread: a row of 49 152 logits takes it less time than waking another one is worth. */
void qbe_difficulty(const float *logits, const int64_t *best, double *out, int64_t n, int64_t row, int64_t vocabulary,
                    int32_t backend) {
    Difficulty d = {logits, best, n, row, vocabulary, out};
#ifdef X86
    (backend >= AVX512 ? avx512_difficulty : backend == AVX2 ? avx2_difficulty : scalar_difficulty)(&d);
#else
    scalar_difficulty(&d);
#endif
}
