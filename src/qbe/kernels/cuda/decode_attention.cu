// Attention of one new token per sequence over its pages, each read at its own precision: what
// qbe/kernels/triton/paged_attention_kernel.py computes, for the shapes that matter most. Pages are laid out as
// qbe/kernels/kv_blocks.py says for a GPU; tokens and channels of a product come in whatever order the codes have.
//
// There is a block for each processor. It serves parts of one or more pairs, one after the other: of a key head of a
// sequence some pages that follow each other (plan.cuh). Each of its warps takes whole pages and goes through an online
// softmax of its own, so that no warp waits for another before the end of a part. Keys and values come to shared memory
// by the copy engine, those of the next page while this one's are multiplied. Keys and values are the left operands of
// the tensor cores' products, the queries that share a key head the 8 columns of the right ones. The new token itself is
// counted where the parts are put together (combine.cu).
//
// Lanes: group = lane / 4 is a row of an operand or a query, quad = lane % 4 a place among its columns.
//
// decode_attention.py says which files come before this one; they are compiled as one.

// Means and sums are what `combine` takes: those of block b's part of pair p are in place b + p, so that all parts of a
// pair lie side by side, and `spans` says where they begin and end. Other arguments are as in `qbe::paged_attention`,
// strides in numbers; `start` and `least` as in Plan, unless each pair has so many `parts`, and each part a block.
template <int DIM, bool F16, bool SOFTCAP>
KERNEL(32 * WARPS, 1)
decode_attention(const u16 *queries, const u8 *memory, const int *blocks, const i64 *tables, const i64 *lengths,
                 float *means, float *parts_sums, int *spans, int q_row, int q_head, int q_one, int table_row,
                 double scaling, double softcap, int parts, int start, int least, int batch, int kv_heads, int repeat,
                 int window) {
    using In = Room<DIM>;
    Walk<DIM, F16, SOFTCAP> walk;
    Sums<DIM> &sums = walk.sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int room = warp * In::WARP, pairs = batch * kv_heads;
    const Sequences of = {blocks, tables, lengths, table_row, kv_heads, window};
    if (!parts) {
        const Plan plan = {of, batch, pairs, (int)gridDim.x, start, least, warp, lane};
        plan.add_costs();
        sync_block();
        if (warp < 2) {
            const Cut cut = plan.cut(blockIdx.x + warp);
            if (lane == 0) store4(In::CUTS + 8 * warp, cut.pair), store4(In::CUTS + 8 * warp + 4, cut.page);
        }
    } else if (threadIdx.x < 2) {
        const Cut cut = fixed_cut(of, blockIdx.x + threadIdx.x, parts, pairs);
        store4(In::CUTS + 8 * threadIdx.x, cut.pair), store4(In::CUTS + 8 * threadIdx.x + 4, cut.page);
    }
    sync_block();
    walk.room = room, walk.lane = lane, walk.group = group, walk.quad = quad;
    walk.to = walk.from = walk.taken = walk.parity = 0;
    walk.memory = memory, walk.queried = group < repeat;
    walk.scaling = scaling, walk.softcap = softcap;
    if (lane < SLOTS) barrier_init(room + In::BARRIERS + 8 * lane);
    fence_copies();

#pragma unroll 1
    for (int pair = load4(In::CUTS);; pair++) {
        const int last_pair = load4(In::CUTS + 8), last_page = load4(In::CUTS + 12);
        if (pair > last_pair || (pair == last_pair && !last_page)) return;
        const bool closes = pair < last_pair;
        const int sequence = (u32)pair / (u32)kv_heads, head = pair - sequence * kv_heads;
        const Seen seen = of.seen(sequence);
        const int skipped = pair == load4(In::CUTS) ? load4(In::CUTS + 4) : 0;
        const int low = seen.low + skipped, own = (closes ? seen.pages : last_page) - skipped;
        const i64 place = blockIdx.x + pair;
        if (threadIdx.x == 0) {
            if (!skipped) spans[2 * pair] = place;
            if (closes) spans[2 * pair + 1] = place + (own > 0 || skipped);
        }
        if (own <= 0 && !skipped) continue;  // only the new token is seen

        // Loads that wait for each other are begun before the queries are rotated.
        const i64 *table = tables + (i64)sequence * table_row + low;
        i64 entry = threadIdx.x < own ? table[threadIdx.x] : 0;
        const u16 *query = queries + (i64)sequence * q_row + (i64)head * repeat * q_head;
        rotate_queries<DIM, F16>(query, q_head, q_one, repeat, warp, lane);
        walk.second = false, walk.first = seen.first, walk.past = seen.past;
        sums.clear();
        bool turned = false, some = false;  // whether sums are rotated, and whether this warp has any
#pragma unroll 1
        for (int base = 0; base < own; base += 32 * WARPS) {
            const int i = base + threadIdx.x;
            if (base && i < own) entry = table[i];
            const int word = i < own ? blocks[(entry & 255) * kv_heads + head] : 0;
            int ends[KINDS];
            list_pages<DIM>(ends, i < own, entry, word, (low + i) * PAGE < seen.first, warp, lane);
            walk.first_listed = low + base;
#pragma unroll 1
            for (int sealed = 0; sealed < 2; sealed++) {
                if (!(sealed ? ends[KINDS - 1] - ends[0] : ends[0])) continue;
                if (turned != sealed) {
                    fence_copies();  // rows may have been set to zero where codes come next
                    if (some) sums.rotate(group);
                    turned = sealed;
                }
                if (!sealed) {
                    if (warp >= ends[0]) continue;
                    walk.full(query + (i64)(group < repeat ? group : 0) * q_head, q_one, warp, ends[0]);
                    some = true;
                    continue;
                }
                int next = walk.take_turns(ends[0], warp);
                some |= next < ends[KINDS - 1];
                walk.next = next, walk.second = false;
                next = walk.eight_bits(next, ends[1], ends[5]);
                next = walk.template few_bits<4, false>(next, ends[2], ends[5]);
                next = walk.template few_bits<2, false>(next, ends[3], ends[5]);
                next = walk.template few_bits<4, true>(next, ends[4], ends[5]);
                next = walk.template few_bits<2, true>(next, ends[5], ends[5]);
            }
        }

        sums.finish();
        sync_warp();
        leave(sums, room, group, quad);
        sync_block();
        merge<DIM>(means + place * repeat * DIM, parts_sums + place * 3 * repeat, repeat, turned, warp, lane);
        fence_copies();  // sums were left where the next part's keys come
    }
}
