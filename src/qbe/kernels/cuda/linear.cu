// y = x W^T for 1 to 8 TILES rows, each at its own precision, read from `words` while the kernel runs (linear.py).

// Results: rounded to x's dtype or float32.
template <int TILES, bool F16>
DEVICE void write(const Sums<TILES> &sums, const Linear &of, const Weight &weight, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int output = first + 16 * i + 8 * h + lane / 4;
            if (output >= weight.outputs) continue;
            const float bias = weight.bias ? value_of<F16>(((const u16 *)weight.bias)[output]) : 0;
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int row = 8 * j + 2 * (lane % 4) + c;
                    if (row >= of.rows) continue;
                    const i64 at = (i64)row * of.y_row + weight.column + output;
                    const float y = sums.y[i][j][2 * h + c] + bias;
                    if (of.wide)
                        ((float *)of.y)[at] = y;
                    else
                        ((u16 *)of.y)[at] = (u16)pack<F16>(y, 0);
                }
        }
}

// Sums of a cut tile: whoever comes last adds those of all blocks, in their order.
template <int TILES>
DEVICE bool added(Sums<TILES> &sums, const Linear &of, const Weight &weight, int outputs, int tile, int part, int lane,
                  const Shares &shares, int block) {
    constexpr int SIZE = OUTPUTS * 8 * TILES;
    const int begin = tile * of.chunks, first = shares.block_of(begin), last = shares.block_of(begin + of.chunks - 1);
    if (first == last) return true;
    auto place = [&](int b) {  // a block has two cut tiles at most: the first of its run and the last
        return of.sums + ((i64)(2 * b + (shares.begin(b) < begin)) * PARTS + part) * SIZE + 4 * lane;
    };
    float *own = place(block);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < TILES; j++) write16(own + 128 * (i * TILES + j), sums.y[i][j]);
    fence_device();
    sync_warp();
    int *count = (int *)(weight.codes + weight.counts) + outputs;
    int before = lane == 0 ? add_device(count, 1) : 0;
    before = shuffle_word(before, 0);
    if (before != last - first) return false;
    fence_device();
    if (lane == 0) *count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < TILES; j++) sums.y[i][j][0] = sums.y[i][j][1] = sums.y[i][j][2] = sums.y[i][j][3] = 0;
    for (int b = first; b <= last; b++) {
        const float *from = place(b);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                float y[4];
                read_fresh16(y, from + 128 * (i * TILES + j));
#pragma unroll
                for (int c = 0; c < 4; c++) sums.y[i][j][c] += y[c];
            }
    }
    return true;
}

template <int TILES, int GROUP, bool F16>
KERNEL(32 * WARPS, TILES == 1 ? 2 : 1)
linear(GIVEN Linear of) {
    using In = Room<TILES, GROUP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS, half = warp / PARTS;
    const Shares shares(of.units, gridDim.x);
    const int block = blockIdx.x, begin = shares.begin(block), end = shares.begin(block + 1);
    const bool row = lane < of.rows;
    Ring<GROUP> ring;
    Inputs<TILES, GROUP> inputs;
    ring.begin(of, warp, lane, In::RING, In::BARRIERS);
    inputs.begin(of, warp, lane);
    sync_warp();

    // The first weights come while the kernels before this one end. Which planes is read too early for certainty, so
    // it is read once more when they have ended.
    Need needs[WEIGHTS];
    int words[WEIGHTS];
    auto read_needs = [&]() {
        u32 packed = 0;
#pragma unroll
        for (int i = 0; i < WEIGHTS; i++) {
            const bool some = row && i < of.count;
            words[i] = some ? read_fresh(of.weights[i].words + lane) : 0;
            needs[i] = need_of(words[i], some, of.weights[i].original, of.present);
            packed |= needs[i].packed() << 8 * i;
        }
        return packed;
    };
    ring.start(read_needs(), begin, end, half);
    sync_block();  // barriers are made
    wait_for_kernels();
    begin_next_kernel();
    inputs.start(begin, end, half, lane);
    const u32 needed = read_needs();
    if (rarely(needed != ring.needs)) {
        ring.drain();
        ring.start(needed, begin, end, half);
    }

    for (int unit = begin; unit < end;) {
        const int tile = unit / of.chunks, from = unit - tile * of.chunks, past = min(of.chunks, end - tile * of.chunks);
        const int number = weight_of(of, tile);
        const Weight &weight = of.weights[number];
        const int outputs = outputs_of(weight, tile, part);
        const Need need = number == 0 ? needs[0] : number == 1 ? needs[1] : needs[2];
        const int word = number == 0 ? words[0] : number == 1 ? words[1] : words[2];
        Sums<TILES> sums;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++) sums.y[i][j][0] = sums.y[i][j][1] = sums.y[i][j][2] = sums.y[i][j][3] = 0;
        for (int chunk = from + half; chunk < past; chunk += 2) {
            const X<TILES, GROUP, F16> x = {inputs.wait(half, lane), of.rows, lane};
            if (outputs >= 0) {
                for (int block = 0; block < (need.planes ? GROUP / BLOCK : 0); block++) {
                    const int slot = ring.wait();
                    const Block at = {slot, ring.room, BLOCK * block, weight.exponent, need.planes, word, weight.original != 0, of.present};
                    if (need.general)
                        add_block<3, true>(sums, x, at, lane);
                    else if (need.planes == 1)
                        add_block<1, false>(sums, x, at, lane);
                    else if (need.planes == 2)
                        add_block<2, false>(sums, x, at, lane);
                    else
                        add_block<3, false>(sums, x, at, lane);
                    ring.release();
                }
                if (rarely(need.full)) add_original(sums, x, word, of, weight, OUTPUTS * outputs, chunk, lane);
            }
        }
        if (outputs >= 0) {
            const int at = In::SUMS + part * In::SUM + 16 * lane;
            if (half) {
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < TILES; j++) {
                        const float(&y)[4] = sums.y[i][j];
                        store16(at + 512 * (i * TILES + j), {bits_of_float(y[0]), bits_of_float(y[1]), bits_of_float(y[2]),
                                                             bits_of_float(y[3])});
                    }
            }
            sync_warps(3 + part, 64);
            if (!half) {
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < TILES; j++) {
                        const words4 y = load16(at + 512 * (i * TILES + j));
                        sums.y[i][j][0] += float_of_bits(y.x), sums.y[i][j][1] += float_of_bits(y.y);
                        sums.y[i][j][2] += float_of_bits(y.z), sums.y[i][j][3] += float_of_bits(y.w);
                    }
            }
            sync_warps(3 + part, 64);
            if (!half && added(sums, of, weight, outputs, tile, part, lane, shares, block))
                write<TILES, F16>(sums, of, weight, OUTPUTS * outputs, lane);
        }
        unit = tile * of.chunks + past;
    }
}
