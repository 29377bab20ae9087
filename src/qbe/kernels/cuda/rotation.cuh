// A query of which each lane has COUNT numbers, rotated (qbe/kernels/reference/rotation.py), with or without signs.
template <int COUNT>
DEVICE void rotate_query(float (&x)[COUNT], int lane, bool signs) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = COUNT * lane + i;
        if (signs && ones(at & at >> 1) & 1) x[i] = -x[i];
    }
#pragma unroll
    for (int bit = 1; bit < COUNT; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (!(i & bit)) {
                float low = x[i];
                x[i] = low + x[i | bit], x[i | bit] = low - x[i | bit];
            }
#pragma unroll 1  // fewer instructions to be fetched, each for the first time
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float other = shuffle_xor(x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = COUNT * lane + i;
        if (signs && ones(at & at >> 1) & 1) x[i] = -x[i];
        x[i] *= COUNT == 4 ? 0.08838834764831845f : 0.125f;
    }
}

// The queries of a key head, a warp each, to shared memory: rotated, and once more as the sketches of turbo keys are.
template <int DIM, bool F16>
DEVICE void rotate_queries(const u16 *query, int q_head, int q_one, int repeat, int warp, int lane) {
    constexpr int COUNT = DIM / 32;  // numbers of a row that a lane has
    for (int m = warp; m < repeat; m += WARPS) {
        float x[COUNT];
        for (int i = 0; i < COUNT; i++) x[i] = float_of<F16>(query[m * q_head + (i64)(COUNT * lane + i) * q_one]);
        for (int times = 0; times < 2; times++) {
            rotate_query(x, lane, !times);
            const int to = Room<DIM>::QUERIES + ((2 * m + times) * DIM + COUNT * lane) * 2;
            for (int i = 0; i < COUNT; i += 2) store4(to + 2 * i, pack<F16>(x[i], x[i + 1]));
        }
    }
}
