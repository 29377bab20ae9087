// Attention of one new token per sequence over its pages, each read at its own precision: what
// qbe/kernels/triton/attention/paged_kernel.py computes, for the shapes that matter most. Pages are laid out as
// qbe/format/kv_blocks.py says for a GPU; tokens and channels of a product come in whatever order the codes have.
//
// There is a block for each processor. It serves parts of one or more pairs, one after the other: of a key head of a
// sequence some pages that follow each other (plan.cuh). Each of its warps takes whole pages and goes through an online
// softmax of its own, so that no warp waits for another before the end of a part. Keys and values come to shared memory
// ahead of time, those of the next pages while this one's are multiplied. Keys and values are the left operands of the
// tensor cores' products, the queries that share a key head columns of the right ones. The new token itself is counted
// where the parts are put together (combine.cu).
//
// Lanes: group = lane / 4 is a row of an operand or a column of the right one, quad = lane % 4 a place in it. SETS: 1
// for up to HEADS query heads a key head, 2 for up to twice as many.
//
// decode_attention.py says which files come before this one; they are compiled as one.

// Means and sums are what `combine` takes: those of block b's part of pair p are in place b + p, so that all parts of a
// pair lie side by side, and `spans` says where they begin and end. Other arguments are as in `qbe::paged_attention`,
// strides in numbers. Where pieces begin is in `cuts` (share.cu); if that is null, `start` and `least` are as in Plan,
// unless each pair has so many `parts`, and each part a block.
template <int DIM, bool F16, bool SOFTCAP, int SETS>
KERNEL(32 * WARPS, 1)
decode_attention(const u16 *queries, const u8 *memory, const int *head_offsets, const i64 *block_tables, const i64 *lengths,
                 const int *cuts, float *means, float *parts_sums, int *spans, int q_row, int q_head, int q_one, int table_row,
                 int table_width, double scaling, double softcap, int parts, int start, int least, int batch, int kv_heads, int repeat,
                 int window) {
    using In = Room<DIM>;
    Ring<DIM> ring;
    Sums<DIM, SETS> sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int room = warp * In::WARP, pairs = batch * kv_heads;
    const Sequences of = {head_offsets, block_tables, lengths, table_row, kv_heads, window};
    fetch_tables(of, batch, table_width, blockIdx.x, gridDim.x);
    wait_for_kernels();   // before the next line: what comes after this kernel relies on what came before it (combine.cu)
    begin_next_kernel();
    if (cuts) {
        if (threadIdx.x < 4) store4(In::CUTS + 4 * threadIdx.x, cuts[2 * blockIdx.x + threadIdx.x]);
    } else if (!parts) {
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
    ring.begin(memory, warp, lane);  // where costs have been read
    using Full16 = Full<DIM, F16, SOFTCAP, SETS>;
    Full16 full = {ring, sums, lane, group, (float)scaling, (float)softcap};
    Quantised<DIM, F16, SOFTCAP, SETS> quantised(ring, sums, lane, softcap);

#pragma unroll 1
    for (int pair = load4(In::CUTS);; pair++) {
        const int last_pair = load4(In::CUTS + 8), last_page = load4(In::CUTS + 12);
        if (pair > last_pair || (pair == last_pair && !last_page)) return;
        const bool closes = pair < last_pair;
        const int sequence = quotient(pair, kv_heads), head = pair - sequence * kv_heads;
        const Seen seen = of.seen(sequence);
        const int skipped = pair == load4(In::CUTS) ? load4(In::CUTS + 4) : 0;
        const int low = seen.low + skipped, own = (closes ? seen.pages : last_page) - skipped;
        const i64 place = blockIdx.x + pair;
        if (threadIdx.x == 0) {
            if (!skipped) spans[2 * pair] = place;
            if (closes) spans[2 * pair + 1] = place + (own > 0 || skipped);
        }
        if (own <= 0 && !skipped) continue;  // only the new token is seen

        const i64 *table = block_tables + (i64)sequence * table_row + low;
        const bool lists = threadIdx.x < LISTED;
        i64 block_id = lists && threadIdx.x < own ? table[threadIdx.x] : 0;
        const u16 *query = queries + (i64)sequence * q_row + (i64)head * repeat * q_head;
        float own_query[DIM / 32];
        load_query<DIM, F16>(own_query, query, q_head, q_one, repeat, warp, lane);
        ring.first = seen.first, ring.past = seen.past;
        sums.clear();
        bool turned = false, some = false;  // whether sums are rotated, and whether this warp has any
        bool queries_are = false;           // rotated
#pragma unroll 1
        for (int base = 0; base < own; base += LISTED) {
            const int i = base + threadIdx.x;
            const bool there = lists && i < own;
            if (base && there) block_id = table[i];
            const int head_offset = there ? head_offsets[(block_id & 255) * kv_heads + head] : 0;
            int ends[KINDS];
            list_pages<DIM>(ends, there, block_id, head_offset, (low + i) * PAGE < seen.first, warp, lane);
            ring.first_listed = low + base;
            const int pages = ends[KINDS - 1], full_pages = ends[0], next = ring.take_turns(full_pages, warp);
            ring.next = next, ring.second = false;
            if (pages > full_pages && !queries_are) {
                if (!full_pages) fence_copies(), ring.fill(pages);  // the first ones come meanwhile
                rotate_queries<DIM>(own_query, SOFTCAP ? scaling : scaling * LOG2E, warp, lane);
                queries_are = true;
                sync_block();
            }
#pragma unroll 1
            for (int is_quantised = 0; is_quantised < 2; is_quantised++) {
                if (!(is_quantised ? pages - full_pages : full_pages)) continue;
                if (turned != is_quantised) {
                    fence_copies();  // rows were copied by threads where the copy engine's come next
                    if (some) sums.rotate(group);
                    turned = is_quantised;
                }
                if (!is_quantised) {
                    if (warp >= full_pages) continue;
                    const int head = Full16::head_of(group);
                    const bool queried = head < repeat;
                    full.walk(query + (i64)(queried ? head : 0) * q_head, q_one, queried, warp, full_pages);
                    ring.second = false, some = true;
                    continue;
                }
                if (next >= pages) continue;
                quantised.walk(next, pages);
                some = true;
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
