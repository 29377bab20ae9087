// y = x W(bits).T + bias for prompts: register-source wgmma as in many_rows.cu, of ROWS rows at once, so that each weight
// is converted once for all of them, and never written. A block has whole sums of OUTPUTS outputs.
//
// Two blocks of a cluster have the same rows and outputs beside each other: each asks for half of x for both.
//
// 8-bit activations: both sides have a scale per row (`qbe.kernels.reference.eight_bit_rows`), the weight's from
// `row_bounds`, and the sums are whole numbers. x has its inputs in the order that a register of codes has (fragments.py).

constexpr int OUTPUTS = 128, TILES = OUTPUTS / 64, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int SPAN = EIGHT ? 128 : 64;  // inputs of a stage: 128 bytes of a row
constexpr int BLOCKS = SPAN / 64, SETS = SPAN / GROUP > 1 ? SPAN / GROUP : 1;
constexpr int X = ROWS * 128, HIGH = OUTPUTS * SPAN / 2, LOW = OUTPUTS * SPAN / 4, RAW = TILES * 128, DECODED = OUTPUTS * 8;
constexpr int MOST_STAGES = 8, SUMS = ROWS / 2;
constexpr int MULTIPLIERS = 224, BRINGERS = 56;  // registers of a thread

using Stage = StageOf<X + HIGH, LOW, RAW * SETS, DECODED * SETS, MOST_STAGES>;

struct Consumer {
    u32 base, full, scaled, empty, other_empty;
    int tile, warp, lane;
    Turn turn;

    DEVICE void release(int slot) const {
        if (slot >= 0 && lane < 2) arrive_relaxed((lane ? other_empty : empty) + 8 * slot);
    }

    // 64 inputs; what is in slot `read` has been read when the products before those of the block before are made.
    DEVICE void block(Number (&sums)[SUMS], u32 (&a)[4][4], Group (&group)[2], const Stage &stage, int planes, int block, bool fresh, int read) const {
        const u32 at = base + turn.slot * stage.bytes, place = tile * BLOCKS + block;
        const u32 low_at = at + X + HIGH + place * 1024 + warp * 256 + lane * 8;
        u32 high[4];
        load_words(high, at + X + place * 2048 + warp * 512 + lane * 16);
        if (fresh) {
            u32 s[4];
            load_words(s, at + stage.decoded + (SETS > 1 ? block * DECODED : 0) + tile * 512 + (lane >> 2) * 64 + warp * 16);
            group[0].set(s[0], s[1]), group[1].set(s[2], s[3]);
        }
        if (planes == 1) load_fragments<4, LOW>(a, high, low_at, group);
        else if (planes == 2) load_fragments<6, LOW>(a, high, low_at, group);
        else load_fragments<8, LOW>(a, high, low_at, group);
        release(read);
        const u64 x = descriptor(at) + (EIGHT ? 4 * block : 0);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < (EIGHT ? 2 : 4); s++) wgmma(sums, a[s][0], a[s][1], a[s][2], a[s][3], x + 2 * s);
        wgmma_commit();
    }

    DEVICE void wait() const { await(scaled + 8 * turn.slot, turn.parity); }  // which comes after `full`

    DEVICE void sum(Number (&sums)[SUMS], const Stage &stage, int planes, int steps) {
        u32 a[4][4], b[4][4];
        Group group[2];
        int one = -1, two = -1;  // slots of the steps before, that are not released
        for (int step = 0; step < steps; step += EIGHT ? 1 : 2) {
            wait();
            block(sums, a, group, stage, planes, 0, true, two);
            two = EIGHT ? -1 : one;
            if (EIGHT) {
                block(sums, b, group, stage, planes, 1, SETS > 1, one);
            } else {
                one = turn.slot;
                turn.next(stage.count);
                if (step + 1 == steps) break;
                wait();
                block(sums, b, group, stage, planes, 0, GROUP == 64, two);
                two = one;
            }
            one = turn.slot;
            turn.next(stage.count);
        }
        wgmma_wait<0>();
        release(two), release(one);
    }
};

KERNEL(THREADS, 1) dense_rows(const __grid_constant__ TensorMap map, const u8 *packed, const int *words, const int *order, void *y,
                              const u16 *bias, const float *x_scales, const float *bounds, int plane1, int plane2, int scales,
                              int count, int rows, int places, int columns, int blocks, int kinds, int pairs, int room,
                              double factor) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 base = shared_pointer(), full = base + room, scaled = full + 8 * MOST_STAGES, empty = scaled + 8 * MOST_STAGES;
    const u32 rank = cluster_rank();
    const int blocks64 = (columns + 63) / 64, row_tiles = (places + ROWS - 1) / ROWS;
    const int work = (blocks64 + 2 * TILES - 1) / (2 * TILES) * row_tiles, steps = (blocks + BLOCKS - 1) / BLOCKS;

    if (threadIdx.x == 0) {
        for (int i = 0; i < MOST_STAGES; i++)
            arrivals(full + 8 * i, 1), arrivals(scaled + 8 * i, 32 * TILES), arrivals(empty + 8 * i, 2 * CONSUMERS / 32);
        fence_barriers();
    }
    wait_for_kernels(), begin_next_kernel();
    int word = order ? 8 : 0;
    if (!order)
        for (int i = threadIdx.x; i < count; i += THREADS) word = max(word, words[i] & 255);
    const int most = most_planes(word, kinds);
    Stage stage;
    stage.set(most, room);
    cluster_arrive(), cluster_wait();  // the other block's barriers are there

    auto planes_at = [&](int row_tile) { return planes_of_tile(order, words, row_tile, most, kinds); };

    if (warp < CONSUMERS / 32) {
        take_registers<MULTIPLIERS>();
        const Results results = {y, bias, order, rows, columns, lane, (float)factor};
        Consumer consumer = {base, full, scaled, address_in(rank, empty), address_in(rank ^ 1, empty), warp >> 2, warp & 3, lane};
        for (int i = blockIdx.x / 2; i < work; i += gridDim.x / 2) {
            const int place = i % row_tiles, planes = planes_at(place);
            if (!planes) continue;
            Number sums[SUMS] = {};
            consumer.sum(sums, stage, planes, steps);
            const int column = (i / row_tiles * 2 + rank) * OUTPUTS + 64 * consumer.tile + 16 * consumer.warp;
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                const Number four[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
                const int row = place * ROWS + 8 * j;
                results.put(column, row, scaled_sums(four, x_scales, bounds, column, columns, row, places, lane).x);
            }
        }
    } else {
        give_registers<BRINGERS>();
        Turn turn;
        if (warp == CONSUMERS / 32) {
            const u64 policy = read_normally();
            // Lanes by what they copy: 0.. a tile's planes, 6.. its scales.
            const int tile = lane & 1, kind = lane >> 1, each = kind == 0 ? 2048 : 1024;
            const bool is_plane = kind < 3;
            const int own = is_plane ? X + (kind ? HIGH + LOW * (kind - 1) : 0) + tile * BLOCKS * each : stage.raw + (kind - 3) * RAW + tile * 128;
            for (int i = blockIdx.x / 2; i < work; i += gridDim.x / 2) {
                const int place = i % row_tiles, first_tile = (i / row_tiles * 2 + rank) * TILES, planes = planes_at(place);
                if (!planes) continue;
                const int present = max(0, min(TILES, blocks64 - first_tile));
                Brought brought;
                brought.set<SETS>(packed, plane1, plane2, scales, first_tile + tile, kind, each, planes, blocks, pairs);
                const bool copies = brought.wanted && tile < present;
                for (int step = 0; step < steps; step++) {
                    const int inputs = min(BLOCKS, blocks - BLOCKS * step), sets = min(SETS, inputs);
                    const u32 at = base + turn.slot * stage.bytes, barrier = full + 8 * turn.slot;
                    await(empty + 8 * turn.slot, turn.parity ^ 1);
                    if (lane == 0) {
                        arrive_expecting(barrier, X + present * bytes_of_tile(inputs, sets, planes));
                        copy_box_to(at + rank * (X / 2), &map, step * SPAN, place * ROWS + rank * (ROWS / 2), barrier, 3);
                    }
                    sync_warp();
                    if (copies && (is_plane || kind < 3 + 2 * sets)) {
                        const i64 offset = is_plane ? (i64)step * BLOCKS * each : (i64)(step * SPAN / GROUP) * pairs * 128;
                        copy_run(at + own, brought.from + offset, is_plane ? inputs * each : 128, barrier, policy);
                    }
                    turn.next(stage.count);
                }
            }
        } else if (warp <= CONSUMERS / 32 + TILES) {
            const int tile = warp - CONSUMERS / 32 - 1;
            for (int i = blockIdx.x / 2; i < work; i += gridDim.x / 2) {
                const int planes = planes_at(i % row_tiles);
                if (!planes) continue;
                ToEight to_eight;
                if (EIGHT) to_eight.set(bounds, (i / row_tiles * 2 + rank) * OUTPUTS + 64 * tile + 16 * (lane & 3) + (lane >> 2), columns);
                for (int step = 0; step < steps; step++) {
                    await(full + 8 * turn.slot, turn.parity);
                    const u32 at = base + turn.slot * stage.bytes;
#pragma unroll
                    for (int set = 0; set < SETS; set++) {
                        const u32 raw = at + stage.raw + 2 * set * RAW + tile * 128 + 4 * lane;
                        decode_scales(at + stage.decoded + set * DECODED + tile * 512 + lane * 16, raw, raw + RAW, planes, to_eight);
                    }
                    arrive(scaled + 8 * turn.slot);
                    turn.next(stage.count);
                }
            }
        }
    }
    sync_warp();
    cluster_arrive(), cluster_wait();  // nobody leaves while the other one may write to its shared memory
}
