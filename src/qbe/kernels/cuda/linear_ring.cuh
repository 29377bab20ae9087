// Weights and x come to shared memory ahead of time, 16 bytes a thread. Each warp's weights have a ring of their own, of as
// many slots as its bytes allow: fewer bits, more slots. The four warps that read the same x share its slots.

constexpr int SLOTS = 8, X_SLOTS = 3;

// Shared memory of a block, in bytes.
template <int TILES, int GROUP>
struct Room {
    static constexpr int ROW = 2 * GROUP + 16;  // of x: eight of them lie in different banks
    static constexpr int BARRIERS = 0;  // of each warp's slots of weights, then of its part of those of x
    static constexpr int SUMS = (8 * WARPS * (SLOTS + X_SLOTS) + 127) / 128 * 128;  // of the second half's warps
    static constexpr int SUM = OUTPUTS * 8 * TILES * 4;
    static constexpr int X = SUMS + PARTS * SUM;
    static constexpr int X_SLOT = 8 * TILES * ROW;
    static constexpr int RING = X + 2 * X_SLOTS * X_SLOT;
};

template <int GROUP>
struct Ring {
    const Linear *of;
    Walk walk;  // of the copies
    u64 policy;
    int room, lane, part;  // where this warp's shared memory begins: scales as numbers, 512 bytes a precision, then slots
    int bytes, slots;  // of a slot; how many
    int to, from, block, begun;
    u32 parity;
    u32 needs;  // of the weights, 8 bits each (Need)
    int first, weight;  // of the present tile: its first group of inputs of all of the weight
    int barriers;

    DEVICE void begin(const Linear &linear, int warp, int own_lane, int first_room, int first_barrier) {
        of = &linear, lane = own_lane, part = warp % PARTS, policy = read_once();
        room = first_room + warp * linear.ring, barriers = first_barrier + 8 * SLOTS * warp;
        parity = to = from = 0;
        if (lane < SLOTS) barrier_init(barriers + 8 * lane);
        fence_copies();
    }

    DEVICE int planes(int i) const { return needs >> 8 * i & 3; }
    DEVICE int pairs(int i) const { return needs >> (8 * i + 2) & 3; }
    DEVICE int decoded() const { return needs & 0x101010 ? 1536 : 512; }

    // Begins the first copies.
    DEVICE void start(u32 wanted, int begin, int end, int half) {
        needs = wanted;
        const int most = max(max(planes(0), planes(1)), max(planes(2), 1));
        bytes = 384 + 1024 + 1024 * most;
        slots = min(SLOTS, (of->ring - decoded()) / bytes);
        block = begun = 0;
        walk.begin(*of, begin, end, half);
        enter();
        for (; begun < slots && !walk.done(); begun++) copy_next();
    }

    // A tile, but those of which this warp reads no codes.
    DEVICE void enter() {
        while (!walk.done()) {
            weight = weight_of(*of, walk.tile);
            const int outputs = outputs_of(of->weights[weight], walk.tile, part);
            first = outputs * of->chunks;
            if (planes(weight) && outputs >= 0) return;
            walk.unit = walk.tile * of->chunks + walk.past;
            walk.enter(of->chunks);
        }
    }

    // A slot has the scales, 384 bytes, and the planes.
    DEVICE void copy_next() {
        if (walk.done()) return;
        const Weight &own = of->weights[weight];
        const int group = first + walk.chunk, at = group * (GROUP / BLOCK) + block;
        const int most = planes(weight), some = block ? 0 : 128 * pairs(weight);
        const int slot = room + decoded() + to * bytes + 16 * lane, barrier = barriers + 8 * to;
        expect_pieces(barrier, 1024 + 1024 * most + some);
        const u8 *from = own.codes + 16 * lane;
#pragma unroll
        for (int i = 0; i < 4; i++) copy_piece(slot + 384 + 512 * i, from + (i64)at * 2048 + 512 * i, true, barrier, policy);
        if (most > 1) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_piece(slot + 2432 + 512 * i, from + own.plane2 + (i64)at * 1024 + 512 * i, true, barrier, policy);
        }
        if (most > 2) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_piece(slot + 3456 + 512 * i, from + own.plane1 + (i64)at * 1024 + 512 * i, true, barrier, policy);
        }
        if (16 * lane < some)
            copy_piece(slot, from + own.scales + (i64)group * (128 * min(of->present + 1, 3)), true, barrier, policy);
        copies_begun(barrier, lane);
        to = to + 1 == slots ? 0 : to + 1;
        if (++block == GROUP / BLOCK) {
            block = 0;
            const int tile = walk.tile;
            walk.next(of->chunks);
            if (walk.tile != tile) enter();
        }
    }

    // The slot that was filled first, once it is.
    DEVICE int wait() {
        barrier_wait(barriers + 8 * from, parity >> from & 1);
        parity ^= 1u << from;
        return room + decoded() + from * bytes;
    }

    // It has been read.
    DEVICE void release() {
        from = from + 1 == slots ? 0 : from + 1;
        sync_warp();
        copy_next();
    }

    // Waits for all copies that have begun, and forgets them.
    DEVICE void drain() {
        for (int i = 0; i < begun; i++) wait(), from = from + 1 == slots ? 0 : from + 1;
        sync_warp();
        to = from = 0;
    }
};

// x of a half's warps, each of which copies a part of it: of 8 rows at a time a piece of 16 bytes a lane.
template <int TILES, int GROUP>
struct Inputs {
    using In = Room<TILES, GROUP>;
    static constexpr int PIECES = GROUP / 8, STEP = 32 * PARTS / PIECES;  // of a row; rows at a time
    const Linear *of;
    Walk walk;
    u64 policy;
    int room, barriers, row, piece;
    int to, from;
    u32 parity;

    DEVICE void begin(const Linear &linear, int warp, int lane) {
        of = &linear, policy = read_often();
        room = In::X + warp / PARTS * X_SLOTS * In::X_SLOT;
        barriers = In::BARRIERS + 8 * (WARPS * SLOTS + warp * X_SLOTS);
        row = (warp % PARTS * 32 + lane) / PIECES % (8 * TILES), piece = lane % PIECES;
        parity = from = 0;
        // ptxas 13.0 must not know it: of the first copy it makes an instruction that the GPU does not know.
        to = shuffle_word(0, lane);
        if (lane < X_SLOTS) barrier_init(barriers + 8 * lane);
        fence_copies();
    }

    DEVICE void start(int begin, int end, int half, int lane) {
        walk.begin(*of, begin, end, half);
        for (int i = 0; i < X_SLOTS - 1; i++) copy_next(lane);
    }

    // Rows and inputs past the last one are zero; rows of x lie together, padded to 16 bytes.
    DEVICE void copy_next(int lane) {
        if (walk.done()) return;
        constexpr int STEPS = (8 * TILES + STEP - 1) / STEP;
        const int barrier = barriers + 8 * to, input = walk.chunk * GROUP + 8 * piece;
        const bool some = input < of->x_row;
        expect_pieces(barrier, 512 * STEPS);
        int at = room + to * In::X_SLOT + row * In::ROW + 16 * piece;
#pragma unroll
        for (int i = 0; i < STEPS; i++, at += STEP * In::ROW) {
            const bool there = some && row + i * STEP < of->rows;
            copy_piece(at, of->x + (there ? 2 * ((i64)(row + i * STEP) * of->x_row + input) : 0), there, barrier, policy);
        }
        copies_begun(barrier, lane);
        to = to + 1 == X_SLOTS ? 0 : to + 1;
        walk.next(of->chunks);
    }

    // The next one, when all four warps have copied their parts; all have read the one before.
    DEVICE int wait(int half, int lane) {
        barrier_wait(barriers + 8 * from, parity >> from & 1);
        parity ^= 1u << from;
        const int slot = room + from * In::X_SLOT;
        from = from + 1 == X_SLOTS ? 0 : from + 1;
        sync_warps(1 + half, 32 * PARTS);
        copy_next(lane);
        return slot;
    }
};
