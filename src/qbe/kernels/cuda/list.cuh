// The pages of a part, sorted by kind: those of 16 bits first, so that sums are rotated once at most, then those of
// each other kind. Warps take pages of a list in turns, so that each has as many of every kind.

// A list of up to LISTED pages, one for each of the first threads, whose table block_id and head_offset that thread has; `seen`:
// whether there is one. Pages of kind n end at place ends[n].
template <int DIM>
DEVICE void list_pages(int (&ends)[KINDS], bool seen, i64 block_id, int head_offset, bool cut, int warp, int lane) {
    using In = Room<DIM>;
    const int kind = seen ? head_offset & 255 : 0;
    int mine = -1, place = 0;
    sync_block();  // the list before this one, and what parts before left for each other, has been read
#pragma unroll
    for (int n = 0; n < KINDS; n++) {
        const u32 same = ballot(kind == kind_of(n));
        if (same >> lane & 1) mine = n, place = ones(same & ((1u << lane) - 1));
        if (lane == n && warp < LISTED / 32) store1(In::COUNTS + 8 * n + warp, ones(same));
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
        const u64 at = (block_id & ~(u64)255) + (head_offset & ~255);
        const u64 listed = at | kind | (cut ? CUT : 0) | (u64)threadIdx.x << 56;
        store4(In::LIST + 8 * place, (u32)listed);
        store4(In::LIST + 8 * place + 4, (u32)(listed >> 32));
    }
    sync_block();
}
