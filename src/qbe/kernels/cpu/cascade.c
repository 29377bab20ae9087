/* qbe::cascade: see qbe/kernels/cascade_ops.py. Included by nested.c. */

#include <math.h>

/* Sizes and tables that stay from step to step; `Cascade` of cascade.py. */
typedef struct {
    int64_t heads, entropy_row, sites, words_row;
    int64_t point, layer, sign, window, most, who;
} CascadeShape;

enum { CASCADE_UP = 1, CASCADE_DOWN = 2, CASCADE_LEVELS = 256, CASCADE_WIDTHS = 32 };

void qbe_cascade(const float *entropy, const int64_t *lengths, const int64_t *rows, int64_t n, int32_t *words,
                 const int32_t *steering, int32_t *moves, const float *thresholds, const uint8_t *steps,
                 const int32_t *layers, const CascadeShape *s) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = rows ? rows[i] : i;
        int32_t done = s->point ? moves[row] : 0;
        if (steering[row] >> 8 == s->who) {
            float sum = 0;
            for (int64_t h = 0; h < s->heads; h++) sum += entropy[i * s->entropy_row + h];
            const int64_t seen = s->window && s->window < lengths[i] ? s->window : lengths[i];
            const float share = (float)s->sign * (sum / (float)s->heads) / logf((float)(seen > 2 ? seen : 2));
            const float *limit = thresholds + 2 * (s->point * CASCADE_LEVELS + (steering[row] & 255));
            const int move = share > limit[1] ? CASCADE_UP : share < limit[0] ? CASCADE_DOWN : 0;
            int changes = 0;
            for (int32_t left = done; left; left >>= 2) changes += (left & 3) != 0;
            if (move && changes < s->most) {
                done |= move << 2 * s->point;
                for (int64_t site = 0; site < s->sites; site++)
                    if (layers[site] > s->layer) {
                        int32_t *word = words + site * s->words_row + row;
                        const int side = move == CASCADE_UP;
                        *word = (*word & ~255) | steps[(site * 2 + side) * CASCADE_WIDTHS + (*word & 31)];
                    }
            }
        }
        moves[row] = done;
    }
}
