// Where the pieces of all blocks begin, for all layers whose keys have one shape: a decode step needs it once, where
// every block of every layer would find it out for itself, before it has anything to read.

// cuts int32 [layers, count + 1, 2]: pair and page of each of `count` blocks and of the end (Cut). A block finds WARPS
// of a layer's, so there are layers * ceil((count + 1) / WARPS). windows int32 [layers], 0 for all keys; `blocks_row`:
// head_offsets from a layer's to the next one's. Other arguments are as in `decode_attention`.
KERNEL(32 * WARPS, 1)
share_pages(const int *head_offsets, const int *windows, const i64 *block_tables, const i64 *lengths, int *cuts, int blocks_row,
            int table_row, int table_width, int start, int least, int batch, int kv_heads, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (count + WARPS) / WARPS;
    const int layer = blockIdx.x / each, block = blockIdx.x % each * WARPS + warp;
    const Sequences of = {head_offsets + (i64)layer * blocks_row, block_tables, lengths, table_row, kv_heads, windows[layer]};
    wait_for_kernels();
    begin_next_kernel();
    fetch_tables(of, batch, table_width, blockIdx.x % each, each);
    const Plan plan = {of, batch, batch * kv_heads, count, start, least, warp, lane};
    plan.add_costs();
    sync_block();
    if (block > count) return;
    const Cut cut = plan.cut(block);
    if (lane == 0) {
        int *at = cuts + 2 * ((i64)layer * (count + 1) + block);
        at[0] = cut.pair, at[1] = cut.page;
    }
}
