// Both sides of a product in int8 with a scale per row: what dense_rows.cu multiplies of 8-bit activations.

// A bound of the magnitudes of each output's weights at the precision that is read, in units of the scales' exponent
// (decode_scale): float32 [N padded to 64]. A block for 64 outputs.
KERNEL(256, 1) row_bounds(const u8 *packed, const int *words, float *bounds, int scales, int count, int groups, int pairs, int kinds) {
    __shared__ float most_of[8][64];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    wait_for_kernels(), begin_next_kernel();
    int word = 0;
    for (int i = threadIdx.x; i < count; i += 256) word = max(word, words[i] & 255);
    const bool eight = __syncthreads_or(word >= 8), six = __syncthreads_or(word >= 6);
    const int planes = planes_of(eight ? 8 : six ? 6 : 4, kinds);
    const float largest = (float)((1 << (2 + 2 * planes)) - 1);
    float most[2] = {1e-30f, 1e-30f};
    for (int g = warp; g < groups; g += 8) {
        const u32 *at = (const u32 *)(packed + scales * 16ll + ((i64)blockIdx.x * groups + g) * pairs * 128) + lane;
        const u32 wide = at[0], low = planes < 3 ? at[planes * 32] : 0;
        for (int h = 0; h < 2; h++) {
            float scale, offset;
            scale_of(wide >> 16 * h, low >> 16 * h, planes, scale, offset);
            most[h] = fmaxf(most[h], scale * fmaxf(offset, largest - offset));
        }
    }
    most_of[warp][2 * lane] = most[0], most_of[warp][2 * lane + 1] = most[1];
    __syncthreads();
    if (threadIdx.x < 64) {
        float x = most_of[0][threadIdx.x];
        for (int i = 1; i < 8; i++) x = fmaxf(x, most_of[i][threadIdx.x]);
        bounds[blockIdx.x * 64 + (threadIdx.x >> 1 & 3) * 16 + (threadIdx.x & 1) * 8 + (threadIdx.x >> 3)] = x;
    }
}

// x in int8 with a scale per row, its inputs permuted: bytes 4 t.. of 16 are inputs 2 t, 2 t + 8, 2 t + 1, 2 t + 9. A
// row with an infinity or a NaN has that for its scale, and zeros. A block for a row.
KERNEL(256, 1) eight_bit_rows(const u16 *x, signed char *out, float *x_scales, int columns, int padded) {
    __shared__ u32 most_of[8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    wait_for_kernels(), begin_next_kernel();
    const u16 *from = x + (i64)blockIdx.x * columns;
    auto value = [&](u32 h) { return F16 ? float_of_f16(h) : float_of_bits(h << 16); };
    u32 most = 0;
    if (columns % 8 == 0) {
        for (int k = 8 * threadIdx.x; k < columns; k += 8 * 256) {
            const words4 w = *(const words4 *)(from + k);
            const u32 part[4] = {w.x, w.y, w.z, w.w};
            for (int i = 0; i < 4; i++) most = max(most, max(part[i] & 0x7FFF, part[i] >> 16 & 0x7FFF));
        }
    } else {
        for (int k = threadIdx.x; k < columns; k += 256) most = max(most, (u32)from[k] & 0x7FFF);
    }
    most = most_of_warp(most);
    if (lane == 0) most_of[warp] = most;
    __syncthreads();
    for (int i = 0; i < 8; i++) most = max(most, most_of[i]);
    const float largest = fmaxf(value(most), 1e-30f);
    const bool finite = most < (F16 ? 0x7C00 : 0x7F80);
    const float times = finite ? __fdiv_rn(127.0f, largest) : 0;
    if (threadIdx.x == 0) x_scales[blockIdx.x] = finite ? largest * (1.0f / 127) : value(most);
    for (int k = 16 * threadIdx.x; k < padded; k += 16 * 256) {
        u32 in[16];
        if (k + 16 <= columns && columns % 8 == 0) {
            const words4 a = *(const words4 *)(from + k), b = *(const words4 *)(from + k + 8);
            const u32 part[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            for (int i = 0; i < 8; i++) in[2 * i] = part[i] & 0xFFFF, in[2 * i + 1] = part[i] >> 16;
        } else {
            for (int i = 0; i < 16; i++) in[i] = k + i < columns ? from[k + i] : 0;
        }
        u32 to[4];
        for (int t = 0; t < 4; t++) {
            u32 bytes = 0;
            const int at[4] = {2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9};
            for (int i = 0; i < 4; i++) bytes |= ((u32)(int)floorf(finite ? value(in[at[i]]) * times + 0.5f : 0.0f) & 255) << 8 * i;
            to[t] = bytes;
        }
        *(words4 *)(out + (i64)blockIdx.x * padded + k) = {to[0], to[1], to[2], to[3]};
    }
}
