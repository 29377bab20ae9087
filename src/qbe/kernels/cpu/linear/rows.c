/* Which rows of x are multiplied together. Included by nested.c. */

/* The rows of x in the order of their precisions into j->row and j->precision, those at 16 bits last. */
static void sort_rows(Job *j) {
    const Layout *l = j->w.layout;
    const int64_t rows = j->given_rows;
    int64_t at = 0;
    for (int i = 0; i <= l->precisions; i++) /* ascending, so that equal precisions are neighbours */
        for (int eight = 0; eight < 2; eight++)
            for (int64_t r = 0; r < rows; r++) {
                const int bits = weight_bits(j->words[r]), full = bits >= FULL_BITS;
                const int above = i + 1 < l->precisions && bits >= l->precision[i + 1];
                const int below = i > 0 && i < l->precisions && bits < l->precision[i];
                if (has_eight(j->words[r]) != eight || full != (i == l->precisions) || (!full && (above || below))) continue;
                j->row[at] = (int32_t)r, j->precision[at] = i, j->planes[at] = eight ? 1 : 2, at++;
                j->full += full, j->full_eight += full && eight;
            }
    j->rows = rows - j->full;
    j->row_full = j->row + j->rows;
}

#ifdef X86
/* Rows of two planes that pay for it become int16. */
static void choose_int16(Job *j) {
    if (j->w.kp / j->w.groups > INT16_GROUP) return;
    for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {
        for (r1 = r0 + 1; r1 < j->rows && j->precision[r1] == j->precision[r0] && j->planes[r1] == j->planes[r0];) r1++;
        for (int64_t r = r0; r < r1 && r1 - r0 >= INT16_ROWS && j->planes[r] == 2; r++) j->planes[r] = INT16;
    }
}

/* Rows of bfloat16 of one precision that pay for tiles of it. One of 8-bit activations counts half: as integers it takes half the
   products. */
static void choose_tiles(Job *j) {
    if (!j->tiled_rows || j->dtype != BFLOAT16 || j->w.kp / j->w.groups > TILED_GROUP) return;
    for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {
        int64_t planes = j->planes[r0];
        for (r1 = r0 + 1; r1 < j->rows && j->precision[r1] == j->precision[r0];) planes += j->planes[r1++];
        if (planes < 2 * j->tiled_rows) continue;
        j->by_tiles[j->precision[r0]] = (Rows){.first = r0, .count = r1 - r0};
        for (int64_t r = r0; r < r1; r++) j->planes[r] = IN_TILES;
    }
}

/* The runs of few rows, as long as there is room for their sums. */
static void choose_few(Job *j) {
    const int fits = j->w.kp / j->w.groups <= 256; /* a sum of two planes, into 32 bits */
    const int64_t most = j->tiles ? TILED - 1 : FEW_ALIKE;
    for (int64_t r0 = 0, r1; r0 < j->rows; r0 = r1) {
        const int at = j->precision[r0], planes = j->planes[r0];
        for (r1 = r0 + 1; r1 < j->rows && j->precision[r1] == at && j->planes[r1] == planes;) r1++;
        if (planes == INT16 || planes == IN_TILES || (planes == 2 && !fits) || r1 - r0 > most || r1 - r0 > FEW - j->few_rows) continue;
        j->few[j->recipe[at].count - 1].planes[planes - 1] = (Rows){r0, r1 - r0, j->x + r0 * j->x_bytes};
        if (!j->few_rows) j->few_first = r0;
        j->few_rows += r1 - r0, j->few_highest = at;
    }
}

/* Whether the run that begins with this row is among them. */
INLINE int in_few(const Job *j, int64_t r0) {
    const int planes = j->planes[r0];
    if (planes == INT16 || planes == IN_TILES) return 0;
    const Rows *rows = &j->few[j->recipe[j->precision[r0]].count - 1].planes[planes - 1];
    return rows->count && rows->first == r0;
}
#endif

/* Of x in a run of planes, at most: so many bytes stay in a core's second cache while tiles pass by. */
#define RUN_BYTES (256 * 1024)
#define TILED_BYTES (1024 * 1024) /* of IN_TILES, whose panels take longer to make: processors with tiles have 2 MB there */

/* The end of the run of rows from r0 on that are multiplied together. */
static int64_t end_of_run(const Job *j, int64_t r0) {
    const int tiled = j->planes[r0] == IN_TILES, step = tiled ? 2 * TILE_LINES : 24;
    const int64_t most = (tiled ? TILED_BYTES : RUN_BYTES) / j->x_bytes, room = most > step ? most / step * step : step;
    const int64_t end = j->rows - r0 < room || j->planes[r0] == INT16 ? j->rows : r0 + room;
    int64_t r1 = r0 + 1;
    while (r1 < end && j->precision[r1] == j->precision[r0] && j->planes[r1] == j->planes[r0]) r1++;
    return r1;
}
