// Pages come to a warp's shared memory ahead of time, in slots that are filled and read in turns.

// A page in the list (list.cuh): its block's address, in the lowest byte its kind and CUT, in the highest its place of
// 256.
template <int DIM>
DEVICE u64 listed(int i) {
    return load_u64(Room<DIM>::LIST + 8 * i);
}

template <int DIM>
struct Ring {
    using In = Room<DIM>;
    const u8 *memory;
    u64 policy;        // of copies
    int room;          // where this warp's shared memory begins
    int lane;
    int next;          // page of the list to be copied next
    bool second;       // of which its keys are copied already, where values are copied on their own
    int turns, step;   // before page `turns` of the list this warp takes every step-th one
    int to, from;      // slots that the next copy goes to, and that is read next
    int taken;         // slots that copies went to and that are not free yet
    u32 parity;        // of the slots' barriers
    int first, past;   // keys that are seen
    int first_listed;  // the page that has place 0

    DEVICE void begin(const u8 *pages, int warp, int own_lane) {
        memory = pages, policy = read_once(), room = warp * In::WARP, lane = own_lane;
        to = from = taken = parity = 0;
        if (lane < SLOTS) barrier_init(room + In::BARRIERS + 8 * lane);
        fence_copies();
    }

    // Warps take quantised pages in turns, those with a page of 16 bits only when the others have had AHEAD: so much time
    // goes into such a page, whose instructions come from far away, and into the rotation after it. Returns the first.
    DEVICE int take_turns(int full, int warp) {
        const int busy = full < WARPS ? full : 0;
        step = WARPS - busy, turns = full + AHEAD * step;
        return warp < busy ? turns + step + warp : full + (u32)(warp + LISTED * WARPS - full) % WARPS;
    }

    DEVICE int after(int i) const { return i + (i < turns ? step : WARPS); }

    DEVICE const u8 *address_of(u64 block_id) const { return memory + (block_id & 0x00FFFFFFFFFFFF00); }

    DEVICE int first_key(u64 block_id) const { return (first_listed + (int)(block_id >> 56)) * PAGE; }

    // The slot that was filled first, once it is.
    DEVICE int wait() {
        const int slot = from;
        barrier_wait(room + In::BARRIERS + 8 * slot, parity >> slot & 1);
        parity ^= 1u << slot;
        from = slot == SLOTS - 1 ? 0 : slot + 1;
        return room + slot * In::SLOT;
    }

    // The slot that is to be filled.
    DEVICE int take() {
        const int slot = to;
        to = slot == SLOTS - 1 ? 0 : slot + 1, taken++;
        sync_warp();  // what was there has been read
        return slot;
    }

    // Begins to copy the next of the quantised pages before `all`; of 8 bits the keys or the values.
    DEVICE void begin_sealed(int all) {
        if (next >= all) return;
        const int slot = take();
        const u64 block_id = listed<DIM>(next);
        const int kind = block_id & 127;
        if (lane == 0) {
            const int at = room + slot * In::SLOT, barrier = room + In::BARRIERS + 8 * slot;
            const u8 *from = address_of(block_id);
            if (kind == 8) {
                constexpr int CODES = 64 * DIM;
                const int scales = second ? 4 * PAGE : 4 * DIM;
                barrier_expect(barrier, CODES + scales);
                copy(at, from + (second ? CODES : 0), CODES, barrier, policy);
                copy(at + CODES, from + 2 * CODES + (second ? 4 * DIM : 0), scales, barrier, policy);
            } else {
                const int scales = kind > TURBO ? 8 * PAGE + 2 * DIM : 4 * PAGE + 4 * DIM;
                const int bytes = 16 * DIM * (kind % TURBO) + scales;
                barrier_expect(barrier, bytes);
                copy(at, from, bytes, barrier, policy);
            }
        }
        second = kind == 8 && !second;
        if (!second) next = after(next);
    }

    DEVICE void fill(int all) {
        while (taken < SLOTS && next < all) begin_sealed(all);
    }

    // The slot that was filled first has been read, for the last time.
    DEVICE void release(int all) {
        taken--;
        begin_sealed(all);
    }

    // Of pages of 16 bits, whose chunks are numbered: page i of the list has 2 i and 2 i + 1.

    DEVICE int seen_end(int chunk) const {  // of a chunk's tokens
        const int end = past - first_key(listed<DIM>(chunk >> 1)) - CHUNK * (chunk & 1);
        return end < CHUNK ? end : CHUNK;
    }

    DEVICE int seen_begin(int chunk) const {
        const int begin = first - first_key(listed<DIM>(chunk >> 1)) - CHUNK * (chunk & 1);
        return begin > 0 ? begin : 0;
    }

    // The next one that this warp sees anything of; `end` pages are listed.
    DEVICE int next_chunk(int chunk, int end) const {
        do chunk += chunk & 1 ? 2 * WARPS - 1 : 1;
        while (chunk < 2 * end && seen_begin(chunk) >= seen_end(chunk));
        return chunk;
    }

    // Where a row's piece of 16 bytes lies, so that those of 8 rows lie in different banks.
    static DEVICE int swizzled(int row, int piece) { return row * In::ROW + 16 * (piece ^ (row & 7)); }

    // Keys or values; rows past the last token are zero, whatever memory holds there.
    DEVICE void begin_full(int chunk, bool values) {
        constexpr int PIECES = In::ROW / 16;
        const int slot = take(), barrier = room + In::BARRIERS + 8 * slot, at = room + slot * In::SLOT;
        const int end = seen_end(chunk);
        const u8 *from = address_of(listed<DIM>(chunk >> 1)) + (values ? PAGE : 0) * In::ROW;
        from += (chunk & 1) * (CHUNK * In::ROW) + 16 * lane;
        expect_pieces(barrier, CHUNK * In::ROW);
#pragma unroll
        for (int i = 0; i < CHUNK * PIECES / 32; i++) {
            const int row = i * (32 / PIECES) + lane / PIECES;
            copy_piece(at + swizzled(row, lane % PIECES), from + 512 * i, row < end, barrier, policy);
        }
        copies_begun(barrier, lane);
    }

    // Keys and values of a chunk take turns, those of the next one come meanwhile.
    DEVICE void fill_full(int &ahead, int pages) {
        while (taken < SLOTS && ahead < 2 * pages) {
            begin_full(ahead, second);
            if (second) ahead = next_chunk(ahead, pages);
            second = !second;
        }
    }
};
