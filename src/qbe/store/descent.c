/* Coordinate descent over the codes and scales of rows of a nested weight. Semantics, names and units are those of
   qbe/kernels/reference/descent.py. A shared object of its own, called through ctypes (descent.py beside it). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RATIO_STEP 256.0f
#define OFFSET_STEP 64.0f
#define MOST 8 /* precisions */

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

typedef struct {
    int64_t k, groups, group;
    int precisions, total, slice[MOST], width[MOST];
    float importance[MOST];
    const float *hessian; /* [k, k] */
} Problem;

typedef struct {
    uint8_t *codes;         /* [k] */
    int8_t *ratio, *offset; /* [precisions - 1, groups] */
    const float *scale;     /* [groups] of the widest precision */
    const uint8_t *zero;    /* [groups] */
    float *pull;            /* [precisions, k] (weight - what is read) times Hessian */
} Row;

/* Scale and offset of group g at precision i, as qbe/store/scales.py decodes them. */
static inline void decode(const Problem *p, const Row *r, int i, int64_t g, float *scale, float *offset) {
    const int last = i == p->precisions - 1;
    const float span = (float)(1 << (p->total - p->width[i]));
    const float ratio = last ? 0.0f : (float)r->ratio[i * p->groups + g] / RATIO_STEP;
    *scale = r->scale[g] * span * (1.0f + ratio);
    *offset = ((float)r->zero[g] - (span - 1.0f) / 2.0f) / span;
    if (!last) *offset += (float)r->offset[i * p->groups + g] / OFFSET_STEP;
}

FAST static void subtract(float *restrict pull, const float *restrict row, float by, int64_t k) {
    for (int64_t j = 0; j < k; j++) pull[j] -= by * row[j];
}

typedef struct {
    const int *slice;
    int precisions, code;
    float cost, weight[MOST], target[MOST];
} Search;

/* Every continuation of a prefix that can still beat the best code so far. */
static void descend_tree(Search *s, int i, int prefix, float cost) {
    const int first = prefix << s->slice[i];
    for (int c = first; c < first + (1 << s->slice[i]); c++) {
        const float away = (float)c - s->target[i], total = cost + s->weight[i] * away * away;
        if (total >= s->cost) continue;
        if (i + 1 < s->precisions) descend_tree(s, i + 1, c, total);
        else s->cost = total, s->code = c;
    }
}

/* Chooses every code of the row anew, one after the other, each given all others. */
static void choose_codes(const Problem *p, Row *r) {
    float scale[MOST], offset[MOST];
    for (int64_t j = 0; j < p->k; j++) {
        const int64_t g = j / p->group;
        const float *row = p->hessian + j * p->k;
        const float curvature = row[j];
        Search s = {.slice = p->slice, .precisions = p->precisions, .code = r->codes[j]};
        if (j % p->group == 0)
            for (int i = 0; i < p->precisions; i++) decode(p, r, i, g, scale + i, offset + i);
        if (!(curvature > 0.0f)) continue;
        for (int i = 0; i < p->precisions; i++) {
            const float c = (float)(r->codes[j] >> (p->total - p->width[i])), away = r->pull[i * p->k + j] / curvature;
            s.target[i] = c + away / scale[i];
            s.weight[i] = p->importance[i] * scale[i] * scale[i];
            s.cost += s.weight[i] * (c - s.target[i]) * (c - s.target[i]);
        }
        descend_tree(&s, 0, 0, 0.0f);
        for (int i = 0; i < p->precisions; i++) {
            const int shift = p->total - p->width[i], steps = (s.code >> shift) - (r->codes[j] >> shift);
            if (!steps) continue;
            subtract(r->pull + i * p->k, row, scale[i] * (float)steps, p->k);
        }
        r->codes[j] = (uint8_t)s.code;
    }
}

static inline float within(float x, float step) {
    x = x < 0.0f ? -(float)(int)(0.5f - x * step) : (float)(int)(0.5f + x * step);
    return x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
}

/* The best scale and offset of group g at precision i given everything else, on the grid of the format. */
FAST static void refit_group(const Problem *p, Row *r, int i, int64_t g) {
    const int shift = p->total - p->width[i];
    const int64_t from = g * p->group, n = from + p->group < p->k ? p->group : p->k - from;
    float scale, offset, code[1024], change[1024];
    float cc = 0.0f, c1 = 0.0f, ones = 0.0f, bc = 0.0f, b1 = 0.0f, gain = 0.0f;
    decode(p, r, i, g, &scale, &offset);
    for (int64_t a = 0; a < n; a++) code[a] = (float)(r->codes[from + a] >> shift) - offset;
    for (int64_t a = 0; a < n; a++) {
        const float *row = p->hessian + (from + a) * p->k + from;
        float with_codes = 0.0f, with_ones = 0.0f;
        for (int64_t b = 0; b < n; b++) with_codes += row[b] * code[b], with_ones += row[b];
        cc += with_codes * code[a], c1 += with_codes, ones += with_ones;
        bc += r->pull[i * p->k + from + a] * code[a], b1 += r->pull[i * p->k + from + a];
    }
    const float determinant = cc * ones - c1 * c1;
    if (!(ones > 0.0f) || !(determinant > 1e-4f * cc * ones)) return;
    const float plain = r->scale[g] * (float)(1 << shift), span = (float)(1 << shift);
    const float ratio = within((scale + (bc * ones - b1 * c1) / determinant) / plain - 1.0f, RATIO_STEP);
    const float wider = plain * (1.0f + ratio / RATIO_STEP), more = wider - scale;
    const float middle = ((float)r->zero[g] - (span - 1.0f) / 2.0f) / span;
    const float up = (b1 - more * c1) / ones; /* added to the whole group, beside the new scale */
    const float moved = within(offset - up / wider - middle, OFFSET_STEP);
    const float shifted = wider * (offset - (middle + moved / OFFSET_STEP));
    for (int64_t a = 0; a < n; a++) change[a] = more * code[a] + shifted;
    for (int64_t a = 0; a < n; a++) {
        const float *row = p->hessian + (from + a) * p->k + from;
        float with_change = 0.0f;
        for (int64_t b = 0; b < n; b++) with_change += row[b] * change[b];
        gain += change[a] * (2.0f * r->pull[i * p->k + from + a] - with_change);
    }
    if (!(gain > 0.0f)) return;
    r->ratio[i * p->groups + g] = (int8_t)ratio, r->offset[i * p->groups + g] = (int8_t)moved;
    for (int64_t a = 0; a < n; a++) subtract(r->pull + i * p->k, p->hessian + (from + a) * p->k, change[a], p->k);
}

static void refit(const Problem *p, Row *r) {
    for (int i = 0; i < p->precisions - 1; i++)
        for (int64_t g = 0; g < p->groups; g++) refit_group(p, r, i, g);
}

/* Rows [n, k] of weight, codes uint8 [n, kp], scale float [n, groups], meta uint8 [2P, rows of the matrix, groups] of
   which the first n rows from the given pointer on are theirs. Returns 0; -2: out of memory. */
int64_t qbe_descend(const float *weight, const float *hessian, uint8_t *codes, const float *scale, uint8_t *meta,
                    const int32_t *slices, const float *importance, int32_t precisions, int64_t n, int64_t k,
                    int64_t group, int64_t plane, int32_t sweeps) {
    Problem p = {.k = k, .groups = (k + group - 1) / group, .group = group, .precisions = precisions, .hessian = hessian};
    for (int i = 0; i < precisions; i++) {
        p.slice[i] = slices[i], p.total += slices[i], p.width[i] = p.total, p.importance[i] = importance[i];
    }
    const int64_t numbers = precisions * k, bytes = precisions * p.groups;
    float *room = malloc((size_t)numbers * sizeof *room + 2 * (size_t)bytes);
    if (!room) return -2;
    int8_t *shared = (int8_t *)(room + numbers);
    for (int64_t row = 0; row < n; row++) {
        Row r = {.codes = codes + row * p.groups * group, .ratio = shared, .offset = shared + bytes,
                 .scale = scale + row * p.groups, .zero = meta + plane + row * p.groups, .pull = room};
        for (int i = 0; i < precisions - 1; i++) {
            memcpy(r.ratio + i * p.groups, meta + (2 + 2 * i) * plane + row * p.groups, (size_t)p.groups);
            memcpy(r.offset + i * p.groups, meta + (3 + 2 * i) * plane + row * p.groups, (size_t)p.groups);
        }
        memset(r.pull, 0, (size_t)numbers * sizeof *r.pull);
        for (int i = 0; i < precisions; i++)
            for (int64_t j = 0; j < k; j++) {
                float s, o;
                decode(&p, &r, i, j / group, &s, &o);
                const float error = weight[row * k + j] - s * ((float)(r.codes[j] >> (p.total - p.width[i])) - o);
                if (error != 0.0f) subtract(r.pull + i * k, hessian + j * k, -error, k);
            }
        for (int sweep = 0; sweep < sweeps; sweep++) refit(&p, &r), choose_codes(&p, &r);
        refit(&p, &r);
        for (int i = 0; i < precisions - 1; i++) {
            memcpy(meta + (2 + 2 * i) * plane + row * p.groups, r.ratio + i * p.groups, (size_t)p.groups);
            memcpy(meta + (3 + 2 * i) * plane + row * p.groups, r.offset + i * p.groups, (size_t)p.groups);
        }
    }
    free(room);
    return 0;
}
