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

// Of the queries of a key head a warp's own; heads that there are not are zero.
template <int DIM, bool F16>
DEVICE void load_query(float (&x)[DIM / 32], const u16 *query, int q_head, int q_one, int repeat, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        x[i] = warp < repeat ? float_of<F16>(query[warp * q_head + (i64)(DIM / 32 * lane + i) * q_one]) : 0;
}

// The queries of a key head, a warp each, to shared memory: rotated, and once more as the sketches of turbo keys are.
// They are divided by the power of two that leaves the largest number of each below 2. `factor`: what scores are
// multiplied with.
template <int DIM>
DEVICE void rotate_queries(float (&x)[DIM / 32], float factor, int warp, int lane) {
    using In = Room<DIM>;
    constexpr int COUNT = DIM / 32;  // numbers of a row that a lane has
    if (warp >= 2 * HEADS) return;
    for (int times = 0; times < 2; times++) {
        rotate_query(x, lane, !times);
        u32 most = 0x00800000;  // the smallest power of two, so that there is one
        for (int i = 0; i < COUNT; i++) most = max(most, bits_of_float(x[i]) & 0x7FFFFFFF);
        const u32 power = most_of_warp(most) & 0x7F800000;  // infinite if a number is that or none, and so the score
        const float less = float_of_bits(0x7F000000 - power);
        const int place = 2 * warp + times;
        for (int i = 0; i < COUNT; i += 2)
            store4(In::QUERIES + (place * DIM + COUNT * lane + i) * 2, pack<true>(x[i] * less, x[i + 1] * less));
        if (lane == 0) store4(In::POWERS + 4 * place, bits_of_float(float_of_bits(power) * factor));
    }
}
