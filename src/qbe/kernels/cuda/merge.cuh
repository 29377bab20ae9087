// The warps' sums of a part become its means and sums.

// Each warp leaves its own where its keys and values came.
template <int DIM, int SETS>
DEVICE void leave(const Sums<DIM, SETS> &sums, int room, int group, int quad) {
    using In = Room<DIM>;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int head = quad + HEADS * set, column = room + 4 * head * DIM;
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                store4(column + 4 * (16 * j + 8 * h + group), bits_of_float(sums.acc[set][j][h]));
        if (group == 0) {
            const int at = room + In::SCALES + 12 * head;
            store4(at, bits_of_float(sums.top[set]));
            store4(at + 4, bits_of_float(sums.total[set]));
            store4(at + 8, bits_of_float(sums.weighted[set]));
        }
    }
}

// What they left, to `means` [repeat, DIM] and `sums` [3, repeat] (combine.cu).
template <int DIM>
DEVICE void merge(float *means, float *sums, int repeat, bool turned, int warp, int lane) {
    using In = Room<DIM>;
    for (int m = warp; m < repeat; m += WARPS) {
        float top = HIDDEN, total = 0, weighted = 0, factors[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, float_of_bits(load4(w * In::WARP + In::SCALES + 12 * m)));
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int at = w * In::WARP + In::SCALES + 12 * m;
            const float own_top = float_of_bits(load4(at)), own_total = float_of_bits(load4(at + 4));
            factors[w] = power2(own_top - top);
            total += own_total * factors[w];
            weighted += (float_of_bits(load4(at + 8)) + own_total * own_top) * factors[w];
        }
        // A part without keys that are seen has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
        const float some = total > 0 || total != total ? total : 1;
        for (int d = lane; d < DIM; d += 32) {
            float x = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x += float_of_bits(load4(w * In::WARP + 4 * (m * DIM + d))) * factors[w];
            means[m * DIM + d] = x / some;
        }
        if (lane == 0) {
            sums[m] = top + logarithm2(total);
            sums[repeat + m] = weighted / some;
            sums[2 * repeat + m] = turned;
        }
    }
}
