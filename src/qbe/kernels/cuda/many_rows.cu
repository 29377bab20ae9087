// y = x W(bits).T + bias for more rows than a few: register-source wgmma over the fragments of fragments.py. The weight
// is the operand of 64 rows, converted in registers and never written; x is the other one, in swizzled shared memory.
//
// A block makes OUTPUTS outputs of ROWS rows. Warp groups multiply, each 64 outputs: while some convert, the tensor
// cores are at others' products. One more warp brings data by the copy engine, three decode scales. The ring of stages has
// as many as have room, more where fewer planes are read: planes and bytes follow from a word in memory.
//
// Work is steps of STEP inputs of OUTPUTS outputs, shared out evenly over pairs of blocks (stream-K), however many rows
// there are: a row's sums have one order, whatever is beside it. A pair halves the inputs of a piece and then the
// results, through each other's shared memory. Where pairs share a tile each leaves its sum in memory; who comes last
// adds them up in the order of the inputs. Nobody waits for another pair.

constexpr int TILES = ROWS > 128 ? 2 : 3;             // warp groups that multiply, each 64 outputs
constexpr int OUTPUTS = 64 * TILES, STEP = 128, CONSUMERS = 128 * TILES, THREADS = CONSUMERS + 128;
constexpr int MULTIPLIERS = ROWS > 128 ? 224 : 152, BRINGERS = 56;  // registers of a thread
constexpr int MOST_STAGES = 8, PER_STAGE = STEP / GROUP;
constexpr int X = ROWS * STEP * (EIGHT ? 1 : 2);      // bytes of x in a stage, in boxes of ROWS rows of 128 bytes
constexpr int BOXES = X / (ROWS * 128), BOX = STEP / BOXES;
constexpr int HIGH = OUTPUTS * STEP / 2;              // of the plane of 4 bits
constexpr int LOW = OUTPUTS * STEP / 4;               // of a plane of 2 bits
constexpr int RAW = TILES * 128;                      // of pairs of one kind for a group
constexpr int DECODED = OUTPUTS * 8;                  // of decoded scales for a group
constexpr int SUMS = ROWS / 2;                        // of a thread
constexpr int UNITS = ROWS / 16;                      // of four sums of a thread, half of them
constexpr int EXCHANGE = 4 * 16 * CONSUMERS;          // four units of each thread at a time

using Stage = StageOf<X + HIGH, LOW, RAW * PER_STAGE, DECODED * PER_STAGE, MOST_STAGES>;

// A pair's part of the work: steps [first, end) of a tile, half of them this block's.
struct Pieces {
    int steps, at, end, tile, first, last;
    u32 rank;
    DEVICE Pieces(int pair, int pairs, int tiles, int steps, u32 rank) : steps(steps), rank(rank) {
        at = pair * (tiles * steps) / pairs, end = (pair + 1) * (tiles * steps) / pairs;
    }
    DEVICE bool next() {
        if (at == end) return false;
        tile = at / steps, first = at % steps;
        last = first + (end - at) < steps ? first + (end - at) : steps;
        at += last - first;
        return true;
    }
    DEVICE int middle() const { return first + (last - first + 1) / 2; }
    DEVICE int mine() const { return rank ? middle() : first; }
    DEVICE int mine_end() const { return rank ? last : middle(); }
    DEVICE bool whole() const { return first == 0 && last == steps; }
};

struct Consumer {
    u32 base, full, scaled, empty;  // shared memory
    int tile, warp, lane;           // of 64 outputs; of the warp group
    Turn turn;

    DEVICE void release(int slot) const {
        if (lane == 0) arrive(empty + 8 * slot);
    }

    DEVICE void sum(Number (&sums)[SUMS], const Stage &stage, int planes, int steps) {
        u32 a[2][4][4];
        Group group[2];
        int last = -1;
        for (int step = 0; step < steps; step++) {
            await(scaled + 8 * turn.slot, turn.parity);  // which comes after `full`
            const u32 at = base + turn.slot * stage.bytes, high_at = at + X + tile * 4096 + warp * 512 + lane * 16;
            const u32 low_at = at + X + HIGH + tile * 2048 + warp * 256 + lane * 8;
            u32 high[2][4];
            load_words(high[0], high_at), load_words(high[1], high_at + 2048);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (h < PER_STAGE) {
                    u32 s[4];
                    load_words(s, at + stage.decoded + h * DECODED + tile * 512 + (lane >> 2) * 64 + warp * 16);
                    group[0].set(s[0], s[1]), group[1].set(s[2], s[3]);
                }
                if (planes == 1) load_fragments<4, LOW>(a[h], high[h], low_at + 1024 * h, group);
                else if (planes == 2) load_fragments<6, LOW>(a[h], high[h], low_at + 1024 * h, group);
                else load_fragments<8, LOW>(a[h], high[h], low_at + 1024 * h, group);
                if (h == 1 && last >= 0) release(last);
                const u64 x = EIGHT ? descriptor(at) + 4 * h : descriptor(at + h * (ROWS * 128));
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < (EIGHT ? 2 : 4); s++) wgmma(sums, a[h][s][0], a[h][s][1], a[h][s][2], a[h][s][3], x + 2 * s);
                wgmma_commit();
            }
            last = turn.slot;
            turn.next(stage.count);
        }
        wgmma_wait<0>();
        if (last >= 0) release(last);
    }
};

// A pair of blocks adds up: each gives the other half of its sums, in shared memory, warp by warp.
struct Pair {
    u32 room, barriers;  // each warp's: full, empty
    u32 rank;
    int thread;
    u32 parity;

    DEVICE void init() const {
        if (thread % 32 == 0) arrivals(barriers + 16 * (thread / 32), 1), arrivals(barriers + 16 * (thread / 32) + 8, 1);
    }

    // mine: units of this block's half of the results, those j with j % 2 == rank
    DEVICE void add(const Number (&sums)[SUMS], Number (&mine)[UNITS][4]) {
        const u32 own = barriers + 16 * (thread / 32), other = address_in(rank ^ 1, own);
        const u32 at = room + 16 * thread, there = address_in(rank ^ 1, at);
#pragma unroll
        for (int pass = 0; pass < UNITS / 4; pass++) {
            await(own + 8, parity ^ 1);  // the other one has read what was there
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * (8 * pass + 2 * i);
                const bool odd = rank == 0;
                store_async(there + i * 16 * CONSUMERS, odd ? sums[j + 4] : sums[j], odd ? sums[j + 5] : sums[j + 1],
                            odd ? sums[j + 6] : sums[j + 2], odd ? sums[j + 7] : sums[j + 3], other);
            }
            if (thread % 32 == 0) arrive_expecting(own, 4 * 16 * 32);
            await(own, parity);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * (8 * pass + 2 * i);
                u32 x[4];
                load_words(x, at + i * 16 * CONSUMERS);
#pragma unroll
                for (int v = 0; v < 4; v++) mine[4 * pass + i][v] = of_word(x[v]) + (rank ? sums[j + 4 + v] : sums[j + v]);
            }
            sync_warp();
            if (thread % 32 == 0) arrive_relaxed(other + 8);
            parity ^= 1;
        }
    }
};

KERNEL(THREADS, 1) many_rows(const __grid_constant__ TensorMap map, const u8 *packed, const int *words, const int *order, void *y,
                             const u16 *bias, const float *x_scales, const float *bounds, u32 *parts, u32 *counts, int plane1, int plane2, int scales, int count,
                             int rows, int places, int columns, int blocks, int kinds, int pairs, int room, double factor) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 base = shared_pointer(), exchange = base + room, full = exchange + EXCHANGE, scaled = full + 8 * MOST_STAGES;
    const u32 empty = scaled + 8 * MOST_STAGES, last = empty + 8 * MOST_STAGES + 16 * (CONSUMERS / 32);
    const u32 rank = cluster_rank();
    const int blocks64 = (columns + 63) / 64, tiles = (blocks64 + TILES - 1) / TILES;
    const int row_tiles = (places + ROWS - 1) / ROWS, steps = (blocks + 1) / 2, couples = gridDim.x / 2;
    Pieces pieces(blockIdx.x / 2, couples, tiles, steps, rank);
    Pair pair = {exchange, empty + 8 * MOST_STAGES, rank, (int)threadIdx.x, 0};

    begin_next_kernel();
    if (threadIdx.x < CONSUMERS) pair.init();
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < MOST_STAGES; i++) {
            arrivals(full + 8 * i, 1), arrivals(scaled + 8 * i, 32 * TILES), arrivals(empty + 8 * i, CONSUMERS / 32);
        }
    }
    if (threadIdx.x % 32 == 0) fence_barriers();
    // The rows' words were not written by the kernel before this one, or that one lets nobody begin before its end.
    int word = 0;
    if (!order) {
        for (int i = threadIdx.x; i < count; i += THREADS) word = max(word, words[i] & 255);
    } else {
        wait_for_kernels();
        word = 8;
    }
    const int most = most_planes(word, kinds);
    cluster_arrive();
    Stage stage;
    stage.set(most, room);
    auto planes_at = [&](int row_tile) { return planes_of_tile(order, words, row_tile, most, kinds); };

    if (warp < CONSUMERS / 32) {
        take_registers<MULTIPLIERS>();
        Consumer consumer = {base, full, scaled, empty, warp >> 2, warp & 3, lane};
        const Results results = {y, bias, order, rows, columns, lane, (float)factor};
        const int work = tiles * steps;
        bool met = false;
        while (pieces.next()) {
            for (int place = 0; place < row_tiles; place++) {
                const int planes = planes_at(place);
                if (!planes) continue;
                Number sums[SUMS] = {}, mine[UNITS][4];
                const int own_steps = pieces.mine_end() - pieces.mine();
                consumer.sum(sums, stage, planes, own_steps);
                if (!met) cluster_wait(), met = true;  // the other block's barriers are there
                pair.add(sums, mine);
                if (pieces.tile * TILES + consumer.tile >= blocks64) continue;  // padding
                if (!pieces.whole()) {
                    constexpr int SIZE = UNITS * 4 * CONSUMERS;
                    const int begin = pieces.tile * steps, field = 4 * (2 * place + rank);
                    const int from = ((begin + 1) * couples - 1) / work, to = ((begin + steps) * couples - 1) / work;
                    const i64 own = 4 * threadIdx.x + (i64)SIZE * (rank + 2 * place);
                    const i64 stride = (i64)SIZE * 2 * row_tiles;  // of a piece
                    u32 *at = parts + own + stride * (2 * (blockIdx.x / 2) + (pieces.first == 0));
#pragma unroll
                    for (int i = 0; i < UNITS; i++) store_fresh(at + i * 4 * CONSUMERS, as_word(mine[i][0]), as_word(mine[i][1]), as_word(mine[i][2]), as_word(mine[i][3]));
                    __threadfence();
                    sync_group(1 + consumer.tile);
                    u32 *arrivals_of = counts + pieces.tile * TILES + consumer.tile;
                    if (threadIdx.x % 128 == 0) {
                        const u32 arrived = atomicAdd(arrivals_of, 1u << field) >> field & 15;
                        if (arrived == to - from) atomicSub(arrivals_of, (u32)(to - from + 1) << field);
                        __threadfence();
                        asm volatile("st.shared.u32 [%0],%1;" ::"r"(last + 4 * consumer.tile), "r"((u32)(arrived == to - from)) : "memory");
                    }
                    sync_group(1 + consumer.tile);
                    const bool is_last = load_word(last + 4 * consumer.tile);
                    sync_group(1 + consumer.tile);
                    if (!is_last) continue;
#pragma unroll
                    for (int i = 0; i < UNITS; i++) mine[i][0] = mine[i][1] = mine[i][2] = mine[i][3] = 0;
                    for (int c = from; c <= to; c++) {
                        const u32 *part = parts + own + stride * (2 * c + (c * work / couples <= begin));
                        u32 x[UNITS][4];
#pragma unroll
                        for (int i = 0; i < UNITS; i++) load_fresh(x[i], part + i * 4 * CONSUMERS);
#pragma unroll
                        for (int i = 0; i < UNITS; i++)
#pragma unroll
                            for (int v = 0; v < 4; v++) mine[i][v] += of_word(x[i][v]);
                    }
                }
                const int column = pieces.tile * OUTPUTS + 64 * (warp >> 2) + 16 * (warp & 3);
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    const int first_row = place * ROWS + 8 * (2 * i + rank);
                    results.put(column, first_row, scaled_sums(mine[i], x_scales, bounds, column, columns, first_row, places, lane).x);
                }
            }
        }
        if (!met) cluster_wait();
    } else {
        give_registers<BRINGERS>();
        if (warp == CONSUMERS / 32) {
            Turn turn;
            const u64 policy = row_tiles == 1 ? read_once() : read_normally();
            // Lanes by what they copy: 0.. a tile's planes, 12.. its scales.
            const int tile = lane & 3, kind = lane >> 2;
            const bool is_plane = kind < 3;
            const int each = kind == 0 ? 2048 : 1024;  // bytes of 64 inputs and outputs
            const int own = is_plane ? X + (kind ? HIGH + LOW * (kind - 1) + tile * 2048 : tile * 4096)
                                     : stage.raw + (kind - 3) * RAW + tile * 128;
            bool waited = order != nullptr;
            while (pieces.next()) {
                const int first_tile = pieces.tile * TILES, first = pieces.mine(), end = pieces.mine_end();
                for (int place = 0; place < row_tiles; place++) {
                    const int planes = planes_at(place), present = min(TILES, blocks64 - first_tile);
                    if (!planes) continue;
                    Brought brought;
                    brought.set<PER_STAGE>(packed, plane1, plane2, scales, first_tile + tile, kind, each, planes, blocks, pairs);
                    const bool copies = brought.wanted && tile < present;
                    int ahead = 0;  // stages whose x is not asked for yet
                    for (int step = first; step <= end; step++) {
                        if (!waited && (ahead == stage.count || step == end)) {
                            wait_for_kernels(), waited = true;
                            if (lane < BOXES)
                                for (int s = 0; s < ahead; s++)
                                    copy_box(base + s * stage.bytes + lane * (ROWS * 128), &map, (first + s) * STEP + lane * BOX, place * ROWS, full + 8 * s);
                        }
                        if (step == end) break;
                        const int inputs = min(2, blocks - 2 * step);  // blocks of 64 of them
                        const int sets = GROUP == 64 ? inputs : 1;
                        await(empty + 8 * turn.slot, turn.parity ^ 1);
                        if (lane == 0)
                            arrive_expecting(full + 8 * turn.slot, X + present * bytes_of_tile(inputs, sets, planes));
                        sync_warp();
                        const u32 at = base + turn.slot * stage.bytes;
                        if (copies && (is_plane || kind < 3 + 2 * sets)) {
                            const i64 offset = is_plane ? (i64)step * 2 * each : (i64)step * PER_STAGE * pairs * 128;
                            copy_run(at + own, brought.from + offset, is_plane ? inputs * each : 128, full + 8 * turn.slot, policy);
                        }
                        if (!waited) ahead++;
                        else if (lane < BOXES) copy_box(at + lane * (ROWS * 128), &map, step * STEP + lane * BOX, place * ROWS, full + 8 * turn.slot);
                        turn.next(stage.count);
                    }
                }
            }
        } else if (warp <= CONSUMERS / 32 + TILES) {
            Turn turn;
            if (EIGHT) wait_for_kernels();  // for the bounds
            while (pieces.next()) {
                const int tile = warp - CONSUMERS / 32 - 1;
                ToEight to_eight;
                if (EIGHT) to_eight.set(bounds, pieces.tile * OUTPUTS + 64 * tile + 16 * (lane & 3) + (lane >> 2), columns);
                for (int place = 0; place < row_tiles; place++) {
                    const int planes = planes_at(place);
                    if (!planes) continue;
                    for (int step = pieces.mine(); step < pieces.mine_end(); step++) {
                        await(full + 8 * turn.slot, turn.parity);
                        const u32 at = base + turn.slot * stage.bytes;
#pragma unroll
                        for (int g = 0; g < PER_STAGE; g++) {
                            const u32 raw = at + stage.raw + 2 * g * RAW + tile * 128 + 4 * lane;
                            decode_scales(at + stage.decoded + g * DECODED + tile * 512 + lane * 16, raw, raw + RAW, planes, to_eight);
                        }
                        arrive(scaled + 8 * turn.slot);
                        turn.next(stage.count);
                    }
                }
            }
        }
        cluster_wait();
    }
    sync_warp();
    cluster_arrive(), cluster_wait();  // nobody leaves while the other one may write to its shared memory
}
