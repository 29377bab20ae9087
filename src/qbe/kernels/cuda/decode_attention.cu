// Attention of one new token per sequence over its pages, each read at its own precision: what
// qbe/kernels/triton/paged_attention_kernel.py computes, for the shapes that matter most. Pages are laid out as
// qbe/kernels/kv_blocks.py says for a GPU; tokens and channels of a product come in whatever order the codes have.
//
// A block serves one key head of one sequence and a part of its pages. Each of its warps takes whole pages and goes
// through an online softmax of its own, so that no warp waits for another before the end. Keys and values come to shared
// memory by the copy engine, those of the next page while this one's are multiplied. Keys and values are the left
// operands of the tensor cores' products, the queries that share a key head the 8 columns of the right ones.
//
// Lanes: group = lane / 4 is a row of an operand or a query, quad = lane % 4 a place among its columns.
//
// Before this file come device.cuh, room.cuh, codes.cuh, sums.cuh and walk.cuh, in this order: they are compiled as one.

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
#pragma unroll
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

// sums and means are as `combine_kernel` takes them; other arguments as in `qbe::paged_attention`, strides in numbers.
template <int DIM, bool F16, bool SOFTCAP>
KERNEL(32 * WARPS, 1)
decode_attention(const u16 *query, const u16 *key, const u16 *value, u8 *memory, const int *blocks, const i64 *slots,
                 const i64 *tables, const i64 *lengths, float *means, float *parts_sums, int q_row, int q_head,
                 int q_one, int k_row, int k_head, int k_one, int v_row, int v_head, int v_one, int table_row,
                 double scaling, double softcap, int parts, int kv_heads, int repeat, int window) {
    using In = Room<DIM>;
    constexpr int COUNT = DIM / 32;  // numbers of a row that a lane has
    Walk<DIM, F16, SOFTCAP> walk;
    Sums<DIM> &sums = walk.sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int head = blockIdx.x % kv_heads, part = blockIdx.y;
    const i64 sequence = blockIdx.x / kv_heads;
    const int length = lengths[sequence], past = length - 1;
    const int first = window > 0 && length > window ? length - window : 0;
    const i64 pages = past > first ? (past + PAGE - 1) / PAGE - first / PAGE : 0;
    const int low = first / PAGE + pages * part / parts, own = first / PAGE + pages * (part + 1) / parts - low;
    const int room = warp * In::WARP;

    tables += sequence * table_row + low;
    query += sequence * q_row + (i64)head * repeat * q_head;
    walk.room = room, walk.lane = lane, walk.group = group, walk.quad = quad;
    walk.to = walk.from = walk.taken = walk.parity = 0, walk.second = false;
    walk.first = first, walk.past = past, walk.memory = memory, walk.queried = group < repeat;
    walk.scaling = scaling, walk.softcap = softcap;
    sums.clear();
    if (lane < SLOTS) barrier_init(room + In::BARRIERS + 8 * lane);
    fence_copies();

    for (int m = warp; m < repeat; m += WARPS) {
        float x[COUNT];
        for (int i = 0; i < COUNT; i++) x[i] = float_of<F16>(query[m * q_head + (i64)(COUNT * lane + i) * q_one]);
        for (int times = 0; times < 2; times++) {
            rotate_query(x, lane, !times);
            const int to = In::QUERIES + ((2 * m + times) * DIM + COUNT * lane) * 2;
            for (int i = 0; i < COUNT; i += 2) store4(to + 2 * i, pack<F16>(x[i], x[i + 1]));
        }
    }

    bool some_full = part == parts - 1 && warp == 0;
    if (some_full) {  // the new token: it is written to its page, and counted first
        const u16 *k = key + sequence * k_row + (i64)head * k_head + (i64)COUNT * lane * k_one;
        const u16 *v = value + sequence * v_row + (i64)head * v_head;
        const i64 slot = slots[sequence];
        u16 *to = (u16 *)(memory + (slot & ~(i64)255) + (blocks[head] & ~255));
        float own_key[COUNT], score[GROUPS];
        for (int i = 0; i < COUNT; i++) {
            float x = float_of<F16>(k[(i64)i * k_one]);
            own_key[i] = x + x * 0;  // infinity becomes NaN, so that it cannot hide behind a score that is low
            to[(slot & 255) * DIM + COUNT * lane + i] = pack<F16>(own_key[i], 0);
            to[PAGE * DIM + (slot & 255) * DIM + COUNT * lane + i] = v[(i64)(COUNT * lane + i) * v_one];
        }
#pragma unroll
        for (int m = 0; m < GROUPS; m++) {
            score[m] = 0;
            if (m < repeat)
                for (int i = 0; i < COUNT; i++)
                    score[m] += float_of<F16>(query[m * q_head + (i64)(COUNT * lane + i) * q_one]) * own_key[i];
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) score[m] += shuffle_xor(score[m], mask);
            if (m / 2 == quad) {
                sums.top[m % 2] = walk.scored(score[m]);
                sums.total[m % 2] = group == 0;
            }
        }
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                sums.acc[j][2 * h] = sums.acc[j][2 * h + 1] = float_of<F16>(v[(i64)(16 * j + 8 * h + group) * v_one]);
    }

    // Pages of 16 bits first, so that acc is rotated once at most; then those of each kind. A list holds them in this
    // order, and the warps take them in turns, so that each has as many of every kind.
    const bool one_list = own <= 32 * WARPS;
    bool turned = false;
    if (!one_list) {
        for (int i = threadIdx.x; i < own; i += 32 * WARPS)
            turned |= (blocks[(tables[i] & 255) * kv_heads + head] & 255) != 16;
        turned = any_of_block(turned);
    }
#pragma unroll 1
    for (int stage = 0; stage < 2; stage++) {
#pragma unroll 1
        for (int base = 0; base < own; base += 32 * WARPS) {
            int ends[KINDS];
            if (stage == 0 || !one_list) {
                const int i = base + threadIdx.x;
                u64 entry = 0;
                int kind = 0, mine = -1, place = 0;
                if (i < own) {
                    entry = tables[i];
                    int word = blocks[(entry & 255) * kv_heads + head];
                    kind = word & 255;
                    entry = (entry & ~(u64)255) + (word & ~255);
                }
                sync_block();  // the list before this one has been read
#pragma unroll
                for (int n = 0; n < KINDS; n++) {
                    u32 same = ballot(kind == kind_of(n));
                    if (same >> lane & 1) mine = n, place = ones(same & ((1u << lane) - 1));
                    if (lane == n) store1(In::COUNTS + 8 * n + warp, ones(same));
                }
                sync_block();
#pragma unroll
                for (int n = 0; n < KINDS; n++) {
                    const u64 counts = load_u64(In::COUNTS + 8 * n);
                    const int before = n ? ends[n - 1] : 0;
                    if (mine == n) place += before + sum_of_bytes(counts & ((1ull << 8 * warp) - 1));
                    ends[n] = before + sum_of_bytes(counts);
                }
                if (mine >= 0) {
                    u64 listed = entry | kind | ((low + i) * PAGE < first ? CUT : 0) | (u64)threadIdx.x << 56;
                    store4(In::LIST + 8 * place, (u32)listed);
                    store4(In::LIST + 8 * place + 4, (u32)(listed >> 32));
                }
                sync_block();
            } else {
#pragma unroll
                for (int n = 0; n < KINDS; n++)
                    ends[n] = (n ? ends[n - 1] : 0) + sum_of_bytes(load_u64(In::COUNTS + 8 * n));
            }
            walk.first_listed = low + base;
            if (one_list) turned = ends[KINDS - 1] > ends[0];
            if (stage == 0) {
                if (warp >= ends[0]) continue;
                walk.full(query + (i64)(group < repeat ? group : 0) * q_head, q_one, warp, ends[0]);
                some_full = true;
                continue;
            }
            int i = ends[0] + warp;
            walk.next = i, walk.second = false;
            i = walk.eight_bits(i, ends[1], ends[5]);
            i = walk.template few_bits<4, false>(i, ends[2], ends[5]);
            i = walk.template few_bits<2, false>(i, ends[3], ends[5]);
            i = walk.template few_bits<4, true>(i, ends[4], ends[5]);
            i = walk.template few_bits<2, true>(i, ends[5], ends[5]);
        }
        if (stage == 0 && turned) {
            fence_copies();  // rows may have been set to zero where codes come next
            if (some_full) sums.rotate(group);
        }
    }

    // The warps' sums together: each leaves its own where its keys and values came.
    sums.finish();
    sync_warp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int column = room + 4 * (2 * quad + i) * DIM;
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                store4(column + 4 * (16 * j + 8 * h + group), bits_of_float(sums.acc[j][2 * h + i]));
        if (group == 0) {
            const int at = room + In::SCALES + 12 * (2 * quad + i);
            store4(at, bits_of_float(sums.top[i]));
            store4(at + 4, bits_of_float(sums.total[i]));
            store4(at + 8, bits_of_float(sums.weighted[i]));
        }
    }
    sync_block();
    float *out = means + ((sequence * parts + part) * kv_heads + head) * repeat * DIM;
    float *out_sums = parts_sums + (sequence * parts + part) * 3 * kv_heads * repeat + head * repeat;
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
        // A part without keys has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
        const float some = total > 0 || total != total ? total : 1;
        for (int d = lane; d < DIM; d += 32) {
            float x = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x += float_of_bits(load4(w * In::WARP + 4 * (m * DIM + d))) * factors[w];
            out[m * DIM + d] = x / some;
        }
        if (lane == 0) {
            out_sums[m] = top + logarithm2(total);
            out_sums[kv_heads * repeat + m] = weighted / some;
            out_sums[2 * kv_heads * repeat + m] = turned;
        }
    }
}
