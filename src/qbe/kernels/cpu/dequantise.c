/* The weight at one precision, in float32 or bfloat16: (code - offset) * scale, the reference's values bit for bit (then
   rounded once). For many rows where there is no AVX-512. Included by nested.c. */

/* Block b of a row whose parts begin at part[]: into f, or, for bfloat16, into h; the other is not touched. */
INLINE void dequantise_block(const Job *j, const uint8_t *const *part, int parts, int64_t b, float scale, float offset,
                             float f[BLOCK], uint16_t h[BLOCK]) {
    uint64_t words[8];
    uint8_t codes[BLOCK];
    unpack_block(j->w.layout, part, parts, b, words);
    memcpy(codes, words, BLOCK);
    if (j->dtype == FLOAT32)
        for (int i = 0; i < BLOCK; i++) f[i] = ((float)codes[i] - offset) * scale;
    else
        for (int i = 0; i < BLOCK; i++) h[i] = to_bfloat16(((float)codes[i] - offset) * scale);
}

INLINE void dequantise_chunks(Jobs *jobs) {
    Job *j = jobs->job;
    const Weight *w = &j->w;
    const int parts = parts_of(w->layout, w->layout->precision[j->index]);
    float *scale = jobs->scratch + atomic_fetch_add(&jobs->slot, 1) * jobs->scratch_floats;
    float *offset = scale + j->chunk * w->groups;
    const int64_t blocks = w->kp / w->groups / BLOCK;
    for (;;) {
        const int64_t n0 = j->n0 + atomic_fetch_add(&j->next, j->chunk), last = j->n0 + j->rows;
        if (n0 >= last) return;
        const int64_t n1 = n0 + j->chunk < last ? n0 + j->chunk : last;
        decode_meta(w, n0, n1, j->index, scale, offset);
        for (int64_t n = n0; n < n1; n++) {
            const uint8_t *part[8];
            for (int p = 0; p < parts; p++) part[p] = part_row(w, p, n);
            for (int64_t b = 0; b * BLOCK < j->k; b++) {
                const int64_t g = (n - n0) * w->groups + b / blocks, at = (n - j->n0) * j->k + b * BLOCK;
                const int64_t left = j->k - b * BLOCK;
                float f[BLOCK], *fs = (float *)j->y + at;
                uint16_t h[BLOCK], *hs = (uint16_t *)j->y + at;
                if (left >= BLOCK) {
                    dequantise_block(j, part, parts, b, scale[g], offset[g], fs, hs);
                    continue;
                }
                dequantise_block(j, part, parts, b, scale[g], offset[g], f, h);
                if (j->dtype == FLOAT32) memcpy(fs, f, (size_t)left * sizeof *f);
                else memcpy(hs, h, (size_t)left * sizeof *h);
            }
        }
    }
}
