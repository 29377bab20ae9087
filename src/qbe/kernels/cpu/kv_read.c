/* Pages of any bits to the keys and values they hold. Included by attention.c. */

/* Rotated numbers [dim, PAGE] to [PAGE, dim] as they were. */
static void store_rotated(float *from, int64_t dim, int dtype, uint8_t *to) {
    rotate(from, dim, PAGE, 1);
    for (int64_t t = 0; t < PAGE; t++)
        for (int64_t d = 0; d < dim; d++) {
            if (dtype == FLOAT32) ((float *)to)[t * dim + d] = from[d * PAGE + t];
            else ((uint16_t *)to)[t * dim + d] = to_bfloat16(from[d * PAGE + t]);
        }
}

/* `turbo_numbers` of reference/kv_pages.py: keys [dim, PAGE]. sketch: room for as many. */
static void read_turbo(const uint8_t *from, int64_t dim, int bits, const uint16_t *scale, float *keys, float *sketch) {
    const uint16_t *sketch_scale = scale + PAGE, *mean = sketch_scale + PAGE;
    if (bits == 4) unpack_turbo(from, 4, dim * PAGE, keys, sketch);
    else unpack_turbo(from, 2, dim * PAGE, keys, sketch);
    rotate(sketch, dim, PAGE, 0);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < PAGE; t++)
            keys[d * PAGE + t] = keys[d * PAGE + t] * from_half(scale[t]) + from_half(mean[d]) +
                                 sketch[d * PAGE + t] * from_half(sketch_scale[t]);
}

static void read_block(const uint8_t *from, int kind, int64_t key_dim, int64_t value_dim, int dtype, uint8_t *keys,
                       uint8_t *values, float *work) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    const Block b = block_layout(kind, key_dim, value_dim, number);
    if (kind == FULL_BITS) {
        memcpy(keys, from, (size_t)(PAGE * key_dim * number));
        memcpy(values, from + b.values, (size_t)(PAGE * value_dim * number));
        return;
    }
    const int bits = kind % TURBO, mask = (1 << bits) - 1;
    const uint16_t *scales = (const uint16_t *)(from + b.key_scales);
    if (kind > TURBO) read_turbo(from, key_dim, bits, scales, work, work + key_dim * PAGE);
    else
        for (int64_t d = 0; d < key_dim; d++) {
            const float scale = from_half(scales[d]), low = from_half(scales[key_dim + d]);
            for (int64_t t = 0; t < PAGE; t++)
                work[d * PAGE + t] = (float)(from[d * b.key_row + t * bits / 8] >> t * bits % 8 & mask) * scale + low;
        }
    store_rotated(work, key_dim, dtype, keys);
    scales = (const uint16_t *)(from + b.value_scales);
    for (int64_t t = 0; t < PAGE; t++) {
        const float scale = from_half(scales[t]), low = from_half(scales[PAGE + t]);
        const uint8_t *row = from + b.values + t * b.value_row;
        for (int64_t d = 0; d < value_dim; d++)
            work[d * PAGE + t] = (float)(row[d * bits / 8] >> d * bits % 8 & mask) * scale + low;
    }
    store_rotated(work, value_dim, dtype, values);
}

/* `read_pages` of qbe/kernels/kv_pages.py, words int32 [ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_read_pages(const uint8_t *memory, const int32_t *words, const int64_t *entries, int64_t pages,
                       int64_t kv_heads, int64_t key_dim, int64_t value_dim, int32_t dtype, uint8_t *keys,
                       uint8_t *values) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    float *work = malloc(sizeof *work * (size_t)work_size(key_dim, value_dim));
    if (!work) return -2;
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t page = 0; page < pages; page++) {
            int kind;
            const int64_t at = find_block(words, kv_heads, entries[page], head, &kind);
            const int64_t row = (head * pages + page) * PAGE;
            read_block(memory + at, kind, key_dim, value_dim, dtype, keys + row * key_dim * number,
                       values + row * value_dim * number, work);
        }
    free(work);
    return 0;
}
