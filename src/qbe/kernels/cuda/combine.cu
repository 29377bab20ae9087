// The new token of each sequence, and the parts of its pages, together: a warp a query head. Its key and value come
// from the step itself, and are written to their page.

DEVICE void load_row(float (&x)[2], const float *from) {
    const words2 two = *(const words2 *)from;
    x[0] = float_of_bits(two.x), x[1] = float_of_bits(two.y);
}

DEVICE void load_row(float (&x)[4], const float *from) {
    const words4 four = *(const words4 *)from;
    x[0] = float_of_bits(four.x), x[1] = float_of_bits(four.y);
    x[2] = float_of_bits(four.z), x[3] = float_of_bits(four.w);
}

DEVICE float of_warp(float x) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}

// Of each part and query head there are in `sums` the logarithm of its sum of weights (to base 2), its mean score, and
// 1 if its mean is rotated, else 0; `spans` says which parts a pair has. Other arguments are as in
// `qbe::paged_attention`.
template <int DIM, bool F16, bool SOFTCAP>
KERNEL(32 * WARPS, 1)
combine(const u16 *query, const u16 *key, const u16 *value, u8 *memory, const int *head_offsets, const i64 *slots,
        const float *means, const float *sums, const int *spans, const float *sinks, u16 *out, float *entropy, int q_row, int q_head,
        int q_one, int k_row, int k_head, int k_one, int v_row, int v_head, int v_one, int entropy_row, double scaling,
        double softcap, int kv_heads, int repeat, int all) {
    constexpr int COUNT = DIM / 32;  // numbers of a row that a lane has
    const int lane = threadIdx.x % 32, place = blockIdx.x * WARPS + threadIdx.x / 32;
    begin_next_kernel();
    if (place >= all) return;
    const int pair = (u32)place / (u32)repeat, own = place - pair * repeat;
    const int sequence = (u32)pair / (u32)kv_heads, head = pair - sequence * kv_heads;
    query += (i64)sequence * q_row + (i64)(head * repeat + own) * q_head + COUNT * lane * q_one;
    key += (i64)sequence * k_row + (i64)head * k_head + COUNT * lane * k_one;
    value += (i64)sequence * v_row + (i64)head * v_head + COUNT * lane * v_one;

    // The new token: its score, and its value as the first part. This may begin while `decode_attention` runs, which
    // has waited for whatever wrote the query, key and value.
    u16 numbers[COUNT];
    float keys[COUNT], plain[COUNT], rotated[COUNT], score = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        numbers[i] = value[i * v_one];
        keys[i] = float_of<F16>(key[i * k_one]);
        keys[i] += keys[i] * 0;  // infinity becomes NaN, so that it cannot hide behind a score that is low
        score += float_of<F16>(query[i * q_one]) * keys[i];
        plain[i] = float_of<F16>(numbers[i]), rotated[i] = 0;
    }
    score = capped<SOFTCAP>(of_warp(score) * (float)scaling, softcap) * LOG2E;
    const float sink = sinks ? fmaxf(sinks[head * repeat + own] * LOG2E, HIDDEN) : HIDDEN;  // its value is zero
    float top = fmaxf(score, sink);
    const float at_new = power2(score - top), at_sink = sink > HIDDEN ? power2(sink - top) : 0;
    float total = lane ? 0 : at_new + at_sink, weighted = lane ? 0 : at_new * score + at_sink * sink;
#pragma unroll
    for (int i = 0; i < COUNT; i++) plain[i] *= at_new;
    bool turned = false;

    wait_for_kernels();
    const int first = spans[2 * pair], count = spans[2 * pair + 1] - first;
    sums += (i64)first * 3 * repeat + own, means += ((i64)first * repeat + own) * DIM + COUNT * lane;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
        const float *at = sums + min(base + lane, count - 1) * 3 * repeat;
        const float logarithm = at[0], mean_score = at[repeat], is_turned = at[2 * repeat];
        constexpr int AT_ONCE = 4;  // parts whose means are loaded side by side, the first ones beside their sums
        float x[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) load_row(x[k], means + min(base + k, count - 1) * repeat * DIM);
        float most = logarithm;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
        const float higher = fmaxf(top, most), factor = power2(top - higher);
        const float weight = base + lane < count ? power2(logarithm - higher) : 0;
        top = higher, total = total * factor + weight, weighted = weighted * factor + weight * mean_score;
        turned |= any(is_turned > 0);
#pragma unroll
        for (int i = 0; i < COUNT; i++) plain[i] *= factor, rotated[i] *= factor;
#pragma unroll 1
        for (int part = 0; part < min(32, count - base); part += AT_ONCE) {  // those past the last one weigh nothing
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const float by = shuffle(weight, part + k);
                const bool to_rotated = shuffle(is_turned, part + k) > 0;
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                    rotated[i] += to_rotated ? x[k][i] * by : 0, plain[i] += to_rotated ? 0 : x[k][i] * by;
                load_row(x[k], means + min(base + part + AT_ONCE + k, count - 1) * repeat * DIM);
            }
        }
    }
    total = of_warp(total), weighted = of_warp(weighted);
    if (turned) rotate_query(rotated, lane, true);
    const float part_of = 1 / total;
    u16 *to = out + (i64)place * DIM + COUNT * lane;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2)
        *(u32 *)(to + i) = pack<F16>((plain[i] + rotated[i]) * part_of, (plain[i + 1] + rotated[i + 1]) * part_of);
    if (lane == 0)
        entropy[(i64)sequence * entropy_row + head * repeat + own] =
            (top + logarithm2(total) - weighted * part_of) / LOG2E;
    if (own == 0) {
        const i64 slot = slots[sequence];
        to = (u16 *)(memory + (slot & ~(i64)255) + (head_offsets[head] & ~255)) + (slot & 255) * DIM + COUNT * lane;
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] = pack<F16>(keys[i], 0), to[PAGE * DIM + i] = numbers[i];
    }
}
