/* Coordinate descent over the codes and scales of rows of a nested weight. Semantics, names and units are those of
   qbe/kernels/reference/descent.py. A shared object of its own, called through ctypes (descent.py beside it). */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RATIO_STEP 256.0f
#define OFFSET_STEP 64.0f
#define MOST 8 /* precisions */
#define WIDEST_GROUP 1024
#define TILE 64 /* columns */

#if defined(__x86_64__) && defined(__gnu_linux__)
#define X86
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

/* What the weights of one row and precision have changed by within a group: the few or many that are not 0. */
typedef struct {
    int count;
    int32_t *at; /* [group] within it */
    float *by;   /* [group] */
} Change;

typedef void (*TakeTile)(const Change *c, const float *rows, int64_t stride, float *out);

typedef struct {
    int64_t k, groups, group;
    int precisions, total, slice[MOST], width[MOST];
    float importance[MOST];
    const float *hessian; /* [k, k] */
    const float *factor;  /* [k, k], see `begin_codes`; NULL: the codes are begun with as they are */
    const int32_t *order; /* [k] */
    float *block;         /* a part of one of these: [group, group] or [group, tile] */
    TakeTile take_tile;
} Problem;

typedef struct {
    uint8_t *codes;         /* [k] */
    int8_t *ratio, *offset; /* [precisions - 1, groups] */
    const float *scale;     /* [groups] of the widest precision */
    const uint8_t *zero;    /* [groups] */
    float *pull;            /* [precisions, k] (weight - what is read) times Hessian */
} Row;

/* Scale and offset of group g at precision i, as qbe/format/scales.py decodes them. */
static inline void decode(const Problem *p, const Row *r, int i, int64_t g, float *scale, float *offset) {
    const int last = i == p->precisions - 1;
    const float span = (float)(1 << (p->total - p->width[i]));
    const float ratio = last ? 0.0f : (float)r->ratio[i * p->groups + g] / RATIO_STEP;
    *scale = r->scale[g] * span * (1.0f + ratio);
    *offset = ((float)r->zero[g] - (span - 1.0f) / 2.0f) / span;
    if (!last) *offset += (float)r->offset[i * p->groups + g] / OFFSET_STEP;
}

static inline int64_t width_of(const Problem *p, int64_t g) {
    return (g + 1) * p->group < p->k ? p->group : p->k - g * p->group;
}

/* Takes a change times rows of the Hessian, `stride` apart, off a tile of columns, which stays in registers. Written
   once for each width of these: what a compiler makes of plain loops takes three times as long. */
#define TAKE_TILE(name, target, bytes)                                                                        \
    target static void name(const Change *c, const float *rows, int64_t stride, float *out) {                 \
        typedef float Wide __attribute__((vector_size(bytes), aligned(4), may_alias));                        \
        Wide sum[TILE * 4 / bytes];                                                                           \
        for (int i = 0; i < TILE * 4 / bytes; i++) sum[i] = ((const Wide *)out)[i];                           \
        for (int s = 0; s < c->count; s++) {                                                                  \
            const Wide *row = (const Wide *)(rows + c->at[s] * stride);                                       \
            for (int i = 0; i < TILE * 4 / bytes; i++) sum[i] -= c->by[s] * row[i];                           \
        }                                                                                                     \
        for (int i = 0; i < TILE * 4 / bytes; i++) ((Wide *)out)[i] = sum[i];                                 \
    }
TAKE_TILE(take_16, , 16)
#ifdef X86
TAKE_TILE(take_32, __attribute__((target("avx2,fma"))), 32)
TAKE_TILE(take_64, __attribute__((target("avx512f"))), 64)
#endif

static TakeTile best_take(void) {
#ifdef X86
    if (__builtin_cpu_supports("avx512f")) return take_64;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return take_32;
#endif
    return take_16;
}

/* The same for n columns, rows side by side. */
static void take(const Problem *p, const Change *c, const float *rows, float *out, int64_t n) {
    int64_t j = 0;
    for (; j + TILE <= n; j += TILE) p->take_tile(c, rows + j, n, out + j);
    for (int s = 0; s < c->count && j < n; s++)
        for (int64_t b = j; b < n; b++) out[b] -= c->by[s] * rows[c->at[s] * n + b];
}

/* Copies columns at..at+n of rows from..from+count of a matrix [k, k]: side by side they stay in the nearest cache. */
static void copy_block(const Problem *p, const float *matrix, int64_t from, int64_t count, int64_t at, int64_t n) {
    for (int64_t a = 0; a < count; a++)
        memcpy(p->block + a * n, matrix + (from + a) * p->k + at, (size_t)n * sizeof *p->block);
}

static void copy_group(const Problem *p, int64_t g) {
    copy_block(p, p->hessian, g * p->group, width_of(p, g), g * p->group, width_of(p, g));
}

/* What changes within columns from..from+count mean for the pulls of all columns from `first` on, or of those of them
   that are outside of these. A tile of columns at a time serves all rows and precisions. */
static void spread(const Problem *p, const float *matrix, Row *rows, int64_t n, const Change *changes, int64_t from,
                   int64_t count, int64_t first, int outside) {
    for (int64_t j = first; j < p->k; j += TILE) {
        if (outside && j >= from && j < from + count) continue;
        const int64_t width = j + TILE < p->k ? TILE : p->k - j;
        copy_block(p, matrix, from, count, j, width);
        for (int64_t row = 0; row < n; row++)
            for (int i = 0; i < p->precisions; i++)
                take(p, changes + row * p->precisions + i, p->block, rows[row].pull + i * p->k + j, width);
    }
}

typedef struct {
    const int *slice;
    int precisions, code;
    float cost, weight[MOST], target[MOST];
} Search;

/* The best continuation of a prefix, if it beats the best code so far: the nearest to each target first. */
static void descend_tree(Search *s, int i, int prefix, float cost) {
    const int first = prefix << s->slice[i], last = first + (1 << s->slice[i]) - 1;
    const float target = s->target[i], weight = s->weight[i];
    const int near = !(target > (float)first) ? first : target > (float)last ? last : (int)(target + 0.5f);
    if (i + 1 == s->precisions) {
        const float away = (float)near - target, total = cost + weight * away * away;
        if (total < s->cost) s->cost = total, s->code = near;
        return;
    }
    for (int c = near; c <= last; c++) {
        const float away = (float)c - target, total = cost + weight * away * away;
        if (total >= s->cost) break;
        descend_tree(s, i + 1, c, total);
    }
    for (int c = near - 1; c >= first; c--) {
        const float away = (float)c - target, total = cost + weight * away * away;
        if (total >= s->cost) break;
        descend_tree(s, i + 1, c, total);
    }
}

/* Chooses every code of a group of a row anew, one after the other, each given all others. */
FAST static void choose_codes(const Problem *p, Row *r, int64_t g, Change *changes) {
    const int64_t from = g * p->group, n = width_of(p, g);
    float scale[MOST], offset;
    for (int i = 0; i < p->precisions; i++) decode(p, r, i, g, scale + i, &offset), changes[i].count = 0;
    for (int64_t a = 0; a < n; a++) {
        const int64_t j = from + a;
        const float *row = p->block + a * n, curvature = row[a];
        Search s = {.slice = p->slice, .precisions = p->precisions, .code = r->codes[j]};
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
            const float by = scale[i] * (float)steps;
            float *pull = r->pull + i * p->k + from;
            for (int64_t b = 0; b < n; b++) pull[b] -= by * row[b];
            changes[i].at[changes[i].count] = (int32_t)a, changes[i].by[changes[i].count++] = by;
        }
        r->codes[j] = (uint8_t)s.code;
    }
}

static inline float within(float x, float step) {
    x = x < 0.0f ? -(float)(int)(0.5f - x * step) : (float)(int)(0.5f + x * step);
    return x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
}

/* The best scale and offset of group g at precision i given everything else, on the grid of the format.
   `ones` is the sum of the Hessian within the group. */
FAST static void refit_group(const Problem *p, Row *r, int i, int64_t g, float ones, Change *change) {
    const int shift = p->total - p->width[i];
    const int64_t from = g * p->group, n = width_of(p, g);
    const float *pull = r->pull + i * p->k + from;
    float scale, offset, product[WIDEST_GROUP], *code = change->by;
    float cc = 0.0f, c1 = 0.0f, bc = 0.0f, b1 = 0.0f, gain = 0.0f;
    decode(p, r, i, g, &scale, &offset);
    change->count = (int)n;
    for (int64_t a = 0; a < n; a++) change->at[a] = (int32_t)a, code[a] = (float)(r->codes[from + a] >> shift) - offset;
    memset(product, 0, sizeof *product * (size_t)n);
    take(p, change, p->block, product, n);
    for (int64_t a = 0; a < n; a++) {
        cc -= product[a] * code[a], c1 -= product[a];
        bc += pull[a] * code[a], b1 += pull[a];
    }
    change->count = 0;
    const float determinant = cc * ones - c1 * c1;
    if (!(ones > 0.0f) || !(determinant > 1e-4f * cc * ones)) return;
    const float plain = r->scale[g] * (float)(1 << shift), span = (float)(1 << shift);
    const float ratio = within((scale + (bc * ones - b1 * c1) / determinant) / plain - 1.0f, RATIO_STEP);
    const float wider = plain * (1.0f + ratio / RATIO_STEP), more = wider - scale;
    const float middle = ((float)r->zero[g] - (span - 1.0f) / 2.0f) / span;
    const float up = (b1 - more * c1) / ones; /* added to the whole group, beside the new scale */
    const float moved = within(offset - up / wider - middle, OFFSET_STEP);
    const float shifted = wider * (offset - (middle + moved / OFFSET_STEP));
    for (int64_t a = 0; a < n; a++) change->by[a] = more * code[a] + shifted;
    change->count = (int)n;
    memset(product, 0, sizeof *product * (size_t)n);
    take(p, change, p->block, product, n);
    for (int64_t a = 0; a < n; a++) gain += change->by[a] * (2.0f * pull[a] + product[a]);
    if (!(gain > 0.0f)) {
        change->count = 0;
        return;
    }
    r->ratio[i * p->groups + g] = (int8_t)ratio, r->offset[i * p->groups + g] = (int8_t)moved;
}

static void refit(const Problem *p, Row *rows, int64_t n, const float *ones, Change *changes) {
    const int last = p->precisions - 1; /* its scales stay */
    for (int64_t row = 0; row < n; row++) changes[row * p->precisions + last].count = 0;
    for (int64_t g = 0; g < p->groups && last; g++) {
        copy_group(p, g);
        for (int64_t lane = 0; lane < n * last; lane++) {
            const int64_t row = lane / last, i = lane % last;
            refit_group(p, rows + row, (int)i, g, ones[g], changes + row * p->precisions + i);
        }
        spread(p, p->hessian, rows, n, changes, g * p->group, width_of(p, g), 0, 0);
    }
}

static void sweep(const Problem *p, Row *rows, int64_t n, Change *changes) {
    for (int64_t g = 0; g < p->groups; g++) {
        copy_group(p, g);
        for (int64_t row = 0; row < n; row++) choose_codes(p, rows + row, g, changes + row * p->precisions);
        spread(p, p->hessian, rows, n, changes, g * p->group, width_of(p, g), 0, 1);
    }
}

/* Chooses the codes of a block of columns, one after the other in their order, each nearest to what the columns before
   it want it to be. `pull` is that, for each precision, in this order. */
FAST static void choose_first_codes(const Problem *p, Row *r, const float *weight, int64_t from, int64_t n,
                                    Change *changes) {
    for (int i = 0; i < p->precisions; i++) changes[i].count = 0;
    for (int64_t a = 0; a < n; a++) {
        const int64_t j = p->order[from + a], g = j / p->group;
        const float *row = p->block + a * n;
        Search s = {.slice = p->slice, .precisions = p->precisions, .cost = INFINITY};
        float scale[MOST], offset[MOST];
        for (int i = 0; i < p->precisions; i++) {
            decode(p, r, i, g, scale + i, offset + i);
            s.target[i] = r->pull[i * p->k + from + a] / scale[i] + offset[i];
            s.weight[i] = p->importance[i] * scale[i] * scale[i];
        }
        descend_tree(&s, 0, 0, 0.0f);
        r->codes[j] = (uint8_t)s.code;
        for (int i = 0; i < p->precisions; i++) {
            const int code = s.code >> (p->total - p->width[i]);
            const float by = scale[i] * ((float)code - offset[i]) - weight[j];
            float *pull = r->pull + i * p->k + from;
            for (int64_t b = a + 1; b < n; b++) pull[b] -= by * row[b];
            changes[i].at[changes[i].count] = (int32_t)a, changes[i].by[changes[i].count++] = by;
        }
    }
}

/* Codes to begin with. A column is to make up for what those before it, in `order`, are off by, as far as those after
   it will not do that better: row j of `factor` says by how much a change of column order[j] moves what the later ones
   should be. */
static void begin_codes(const Problem *p, Row *rows, int64_t n, const float *weight, Change *changes) {
    for (int64_t row = 0; row < n; row++)
        for (int i = 0; i < p->precisions; i++)
            for (int64_t j = 0; j < p->k; j++) rows[row].pull[i * p->k + j] = weight[row * p->k + p->order[j]];
    for (int64_t from = 0; from < p->k; from += TILE) {
        const int64_t count = from + TILE < p->k ? TILE : p->k - from;
        copy_block(p, p->factor, from, count, from, count);
        for (int64_t row = 0; row < n; row++)
            choose_first_codes(p, rows + row, weight + row * p->k, from, count, changes + row * p->precisions);
        spread(p, p->factor, rows, n, changes, from, count, from + count, 0);
    }
    for (int64_t row = 0; row < n; row++) memset(rows[row].pull, 0, (size_t)(p->precisions * p->k) * sizeof(float));
}

/* The pulls of rows, from their weights [n, k] and codes. */
static void begin(const Problem *p, Row *rows, int64_t n, const float *weight, Change *changes) {
    for (int64_t g = 0; g < p->groups; g++) {
        const int64_t from = g * p->group;
        for (int64_t row = 0; row < n; row++)
            for (int i = 0; i < p->precisions; i++) {
                Change *c = changes + row * p->precisions + i;
                float scale, offset;
                decode(p, rows + row, i, g, &scale, &offset);
                c->count = 0;
                for (int64_t a = 0; a < width_of(p, g); a++) {
                    const int code = rows[row].codes[from + a] >> (p->total - p->width[i]);
                    c->at[c->count] = (int32_t)a;
                    c->by[c->count++] = scale * ((float)code - offset) - weight[row * p->k + from + a];
                }
            }
        spread(p, p->hessian, rows, n, changes, from, width_of(p, g), 0, 0);
    }
}

/* What the descent lowers, of a row whose pull is known. */
static double error_of(const Problem *p, const Row *r, const float *weight) {
    double total = 0.0;
    for (int i = 0; i < p->precisions; i++)
        for (int64_t g = 0; g < p->groups; g++) {
            float scale, offset, sum = 0.0f;
            decode(p, r, i, g, &scale, &offset);
            for (int64_t j = g * p->group; j < g * p->group + width_of(p, g); j++) {
                const int code = r->codes[j] >> (p->total - p->width[i]);
                sum += (weight[j] - scale * ((float)code - offset)) * r->pull[i * p->k + j];
            }
            total += (double)p->importance[i] * sum;
        }
    return total;
}

/* Ratios and offsets of a row from its meta, uint8 [2P, plane], or back into it. */
static void copy_scales(const Problem *p, Row *r, uint8_t *meta, int64_t plane, int back) {
    for (int i = 0; i < p->precisions - 1; i++)
        for (int64_t g = 0; g < p->groups; g++) {
            uint8_t *ratio = meta + (2 + 2 * i) * plane + g, *offset = ratio + plane;
            if (back) *ratio = (uint8_t)r->ratio[i * p->groups + g], *offset = (uint8_t)r->offset[i * p->groups + g];
            else r->ratio[i * p->groups + g] = (int8_t)*ratio, r->offset[i * p->groups + g] = (int8_t)*offset;
        }
}

/* Rows [n, k] of weight, codes uint8 [n, kp], scale float [n, groups], meta uint8 [2P, rows of the matrix, groups] of
   which the first n rows from the given pointer on are theirs. A row that a new beginning does not better stays as it
   is. Returns 0; -2: out of memory. */
int64_t qbe_descend(const float *weight, const float *hessian, const float *factor, const int32_t *order,
                    uint8_t *codes, const float *scale, uint8_t *meta, const int32_t *slices, const float *importance,
                    int32_t precisions, int64_t n, int64_t k, int64_t group, int64_t plane, int32_t sweeps) {
    Problem p = {.k = k, .groups = (k + group - 1) / group, .group = group, .precisions = precisions, .hessian = hessian,
                 .factor = factor, .order = order, .take_tile = best_take()};
    for (int i = 0; i < precisions; i++) {
        p.slice[i] = slices[i], p.total += slices[i], p.width[i] = p.total, p.importance[i] = importance[i];
    }
    const int64_t bytes = (precisions - 1) * p.groups;
    Row *rows = malloc((size_t)n * sizeof *rows);
    Change *changes = malloc((size_t)(n * precisions) * sizeof *changes);
    float *pulls = calloc((size_t)(n * precisions * k), sizeof *pulls), *ones = calloc((size_t)p.groups, sizeof *ones);
    int8_t *shared = malloc(2 * (size_t)(n * bytes) + 1);
    p.block = malloc((size_t)(group * (group > TILE ? group : TILE)) * sizeof *p.block);
    int32_t *at = malloc((size_t)(n * precisions * group) * sizeof *at);
    float *by = malloc((size_t)(n * precisions * group) * sizeof *by);
    double *before = malloc((size_t)n * sizeof *before);
    uint8_t *old_codes = malloc((size_t)(n * p.groups * group));
    int8_t *old_shared = malloc(2 * (size_t)(n * bytes) + 1);
    const int enough = rows && changes && pulls && ones && shared && p.block && at && by && before && old_codes &&
                       old_shared;
    if (enough) {
        for (int64_t row = 0; row < n; row++) {
            rows[row] = (Row){.codes = codes + row * p.groups * group, .ratio = shared + 2 * row * bytes,
                              .offset = shared + (2 * row + 1) * bytes, .scale = scale + row * p.groups,
                              .zero = meta + plane + row * p.groups, .pull = pulls + row * precisions * k};
            copy_scales(&p, rows + row, meta + row * p.groups, plane, 0);
        }
        for (int64_t c = 0; c < n * precisions; c++) changes[c] = (Change){.at = at + c * group, .by = by + c * group};
        for (int64_t j = 0; j < k; j++)
            for (int64_t a = j / group * group; a < k && a < (j / group + 1) * group; a++)
                ones[j / group] += hessian[j * k + a];
        begin(&p, rows, n, weight, changes);
        const int anew = factor && sweeps;
        if (anew) {
            for (int64_t row = 0; row < n; row++) before[row] = error_of(&p, rows + row, weight + row * k);
            memcpy(old_codes, codes, (size_t)(n * p.groups * group));
            memcpy(old_shared, shared, 2 * (size_t)(n * bytes));
            begin_codes(&p, rows, n, weight, changes);
            begin(&p, rows, n, weight, changes);
        }
        for (int s = 0; s < sweeps; s++) refit(&p, rows, n, ones, changes), sweep(&p, rows, n, changes);
        refit(&p, rows, n, ones, changes);
        for (int64_t row = 0; anew && row < n; row++)
            if (error_of(&p, rows + row, weight + row * k) > before[row]) {
                memcpy(rows[row].codes, old_codes + row * p.groups * group, (size_t)(p.groups * group));
                memcpy(shared + 2 * row * bytes, old_shared + 2 * row * bytes, 2 * (size_t)bytes);
            }
        for (int64_t row = 0; row < n; row++) copy_scales(&p, rows + row, meta + row * p.groups, plane, 1);
    }
    free(rows), free(changes), free(pulls), free(ones), free(shared), free(p.block), free(at), free(by);
    free(before), free(old_codes), free(old_shared);
    return enough ? 0 : -2;
}
