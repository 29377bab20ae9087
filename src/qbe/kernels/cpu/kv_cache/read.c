/* Pages of any bits to the keys and values they hold. Included by attention.c. */

/* Rotated numbers [dim, PAGE] to [PAGE, dim] as they were. */
INLINE void store_rotated(float *from, int64_t dim, int dtype, uint8_t *to) {
    rotate(from, dim, PAGE, 1);
    for (int64_t t = 0; t < PAGE; t++)
        for (int64_t d = 0; d < dim; d++) {
            if (dtype == FLOAT32) ((float *)to)[t * dim + d] = from[d * PAGE + t];
            else ((uint16_t *)to)[t * dim + d] = to_bfloat16(from[d * PAGE + t]);
        }
}

/* `turbo_numbers` of reference/kv_pages.py: keys [dim, PAGE]. sketch: room for as many. */
INLINE void read_turbo(const uint8_t *from, int64_t dim, int bits, const uint16_t *scale, float *keys, float *sketch) {
    const uint16_t *sketch_scale = scale + PAGE, *mean = sketch_scale + PAGE;
    if (bits == 4) unpack_turbo(from, 4, dim * PAGE, keys, sketch);
    else unpack_turbo(from, 2, dim * PAGE, keys, sketch);
    rotate(sketch, dim, PAGE, 0);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < PAGE; t++)
            keys[d * PAGE + t] = keys[d * PAGE + t] * from_half(scale[t]) + from_half(mean[d]) +
                                 sketch[d * PAGE + t] * from_half(sketch_scale[t]);
}

INLINE void read_block(const uint8_t *from, int kind, int64_t key_dim, int64_t value_dim, int dtype, uint8_t *keys,
                       uint8_t *values, float *work) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    const Block b = block_layout(kind, key_dim, value_dim, number);
    if (kind == FULL_BITS) {
        memcpy(keys, from, (size_t)(PAGE * key_dim * number));
        memcpy(values, from + b.values, (size_t)(PAGE * value_dim * number));
        return;
    }
    const int bits = kind % TURBO;
    const uint16_t *scales = (const uint16_t *)(from + b.key_scales);
    if (kind > TURBO) read_turbo(from, key_dim, bits, scales, work, work + key_dim * PAGE);
    else
        for (int64_t d = 0; d < key_dim; d++) {
            const float scale = from_half(scales[d]), low = from_half(scales[key_dim + d]);
            unpack_codes(from + d * b.key_row, bits, PAGE, work + d * PAGE);
            for (int64_t t = 0; t < PAGE; t++) work[d * PAGE + t] = work[d * PAGE + t] * scale + low;
        }
    store_rotated(work, key_dim, dtype, keys);
    scales = (const uint16_t *)(from + b.value_scales);
    float *row = work + value_dim * PAGE;
    for (int64_t t = 0; t < PAGE; t++) {
        const float scale = from_half(scales[t]), low = from_half(scales[PAGE + t]);
        unpack_codes(from + b.values + t * b.value_row, bits, (value_dim + LANES - 1) / LANES * LANES, row);
        for (int64_t d = 0; d < value_dim; d++) work[d * PAGE + t] = row[d] * scale + low;
    }
    store_rotated(work, value_dim, dtype, values);
}
