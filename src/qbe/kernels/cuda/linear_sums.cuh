// A warp's sums over one group of inputs: 64 outputs as four tiles of 16, rows of x as tiles of 8.

// Sums of a warp: y[i][j] are those of outputs 16 i and rows 8 j, as `mma` has them: output g rows 2t and 2t + 1, then
// output g + 8 the same.
template <int TILES>
struct Sums {
    float y[4][TILES][4];
};

// The rows that a lane's sums are of.
template <int TILES>
struct Rows {
    int precision[TILES][2];
    bool eight;  // some row of all has activations of 8 bits
    bool own_eight[TILES];  // row g of each tile, which the lane has in x
};

template <int TILES>
DEVICE Rows<TILES> rows_of(int word, bool row, int lane, bool original, int present) {
    Rows<TILES> rows;
    rows.eight = any(row && has_eight(word));
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            rows.precision[j][i] = precision_of(shuffle_word(word, 8 * j + 2 * (lane % 4) + i), original, present);
        rows.own_eight[j] = has_eight(shuffle_word(word, 8 * j + lane / 4));
    }
    return rows;
}

// One group of inputs of x in shared memory.
template <int TILES, int GROUP, bool F16>
struct X {
    using In = Room<TILES, GROUP>;
    int slot, rows, lane;

    DEVICE int row(int i) const { return slot + i * In::ROW; }

    // Operands of four steps of 16 inputs from `first` on.
    DEVICE void load(u32 (&b)[8], int tile, int first) const {
        const int at = row(8 * tile + lane % 8) + 2 * first + 16 * (lane / 8);
        u32 part[4];
        load_matrices<false>(part, at);
        b[0] = part[0], b[1] = part[1], b[2] = part[2], b[3] = part[3];
        load_matrices<false>(part, at + 64);
        b[4] = part[0], b[5] = part[1], b[6] = part[2], b[7] = part[3];
    }

    // 8 inputs of row g of a tile.
    DEVICE words4 load_row(int tile, int first) const { return load16(row(8 * tile + lane / 4) + 2 * first); }

    DEVICE Rounding rounding(int tile) const {
        u32 most = 0;
        for (int i = 0; i < GROUP; i += 32) {
            const words4 x = load_row(tile, i + 8 * (lane % 4));
            most = most_of_halves(most, x.x & 0x7FFF7FFF), most = most_of_halves(most, x.y & 0x7FFF7FFF);
            most = most_of_halves(most, x.z & 0x7FFF7FFF), most = most_of_halves(most, x.w & 0x7FFF7FFF);
        }
        most = most_of_halves(most, most >> 16);
        most = most_of_halves(most, shuffle_word_xor(most, 1)), most = most_of_halves(most, shuffle_word_xor(most, 2));
        return rounding_of<F16>(value_of<F16>(most & 0xFFFF));
    }
};

// Of tiles of rows: what x's rows are rounded by, and what the sums of a lane's rows are multiplied with.
template <int TILES>
struct Roundings {
    float factor[TILES];  // 0: not at all
    float scale[TILES][2];
};

template <int TILES, int GROUP, bool F16>
DEVICE void roundings_of(Roundings<TILES> &out, const X<TILES, GROUP, F16> &x, const Rows<TILES> &rows, int lane) {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        out.factor[j] = -1, out.scale[j][0] = out.scale[j][1] = 1;
        if (!rows.eight) continue;
        const Rounding own = x.rounding(j);
        if (rows.own_eight[j]) out.factor[j] = own.factor;
        const float scale = rows.own_eight[j] ? own.scale : 1;
#pragma unroll
        for (int i = 0; i < 2; i++) out.scale[j][i] = shuffle(scale, 4 * (2 * (lane % 4) + i));
    }
}

// Scales of a group as numbers, where the whole warp finds them: of each kind for output 16 i + g and 8 more a `words4`.
// There is one kind, or with GENERAL one for each precision.
template <int PLANES, bool GENERAL, bool F16>
DEVICE void decode_scales(int decoded, int slot, int exponent, int lane) {
    const u32 base = load4(slot + 4 * lane);
#pragma unroll
    for (int precision = GENERAL ? 0 : PLANES - 1; precision < PLANES; precision++) {
        const u32 pair = precision == 2 ? 0 : load4(slot + 128 * (precision + 1) + 4 * lane);
        const Scale g = sum_scale_of<F16>(scale_of(base, pair, precision, 0, exponent), precision, 0);
        const Scale more = sum_scale_of<F16>(scale_of(base, pair, precision, 1, exponent), precision, 1);
        store16(decoded + (GENERAL ? 512 * precision : 0) + 128 * (lane % 4) + 16 * (lane / 4),
                {bits_of_float(g.scale), bits_of_float(g.offset), bits_of_float(more.scale), bits_of_float(more.offset)});
    }
    sync_warp();
}

struct Block {
    int slot, decoded;  // where its codes and scales are
    int input;  // the first of the group's
    int exponent;
    int planes, word;
    bool original;
    int present;
};

// y += the products of 64 inputs. GENERAL: rows differ, in precision or in their activations; else all read PLANES planes.
template <int PLANES, bool GENERAL, int TILES, int GROUP, bool F16>
DEVICE void add_block(Sums<TILES> &sums, const X<TILES, GROUP, F16> &x, const Block &block, int lane) {
    constexpr int TOGETHER = TILES < 2 ? TILES : 2;
    if (block.input == 0) decode_scales<PLANES, GENERAL, F16>(block.decoded, block.slot, block.exponent, lane);
    const int slot = block.slot + 384, high = slot + 16 * lane, scales = block.decoded + 16 * (lane / 4);
    // Planes that are not there are multiplied as whatever else is; nothing takes the result.
    const int low[3] = {0, slot + (block.planes > 1 ? 2048 : 0) + 8 * lane, slot + (block.planes > 2 ? 3072 : 0) + 8 * lane};
    Rows<TILES> rows;
    Roundings<TILES> roundings;
    if (GENERAL) {
        rows = rows_of<TILES>(block.word, lane < x.rows, lane, block.original, block.present);
        roundings_of(roundings, x, rows, lane);
    }
#pragma unroll
    for (int first = 0; first < TILES; first += TOGETHER) {
        u32 b[TOGETHER][8];
        float all[TOGETHER][4];  // sums of x
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            x.load(b[j], first + j, block.input);
            if (GENERAL && rows.eight)
#pragma unroll
                for (int s = 0; s < 8; s++) {
                    const float factor = roundings.factor[first + j];
                    if (factor >= 0) b[j][s] = rounded_pair<F16>(b[j][s], factor);
                }
            all[j][0] = all[j][1] = all[j][2] = all[j][3] = 0;
#pragma unroll
            for (int s = 0; s < 4; s++) {
                constexpr u32 ONE = Codes<F16>::ONES;
                mma<F16>(all[j][0], all[j][1], all[j][2], all[j][3], ONE, ONE, ONE, ONE, b[j][2 * s], b[j][2 * s + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float p[PLANES][TOGETHER][4];
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++) {
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) p[plane][j][0] = p[plane][j][1] = p[plane][j][2] = p[plane][j][3] = 0;
                u32 words[4];
                if (plane == 0) {
                    const words4 w = load16(high + 512 * i);
                    words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
                } else {
                    const words2 w = load8(low[plane] + 256 * i);
                    words[0] = words[1] = w.x, words[2] = words[3] = w.y;
                }
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    u32 a[4];
                    if (plane == 0)
                        high_codes<F16>(a, words[s]);
                    else
                        low_codes<F16>(a, words[s], s);
#pragma unroll
                    for (int j = 0; j < TOGETHER; j++)
                        mma<F16>(p[plane][j][0], p[plane][j][1], p[plane][j][2], p[plane][j][3], a[0], a[1], a[2], a[3],
                                 b[j][2 * s], b[j][2 * s + 1]);
                }
            }
            words4 scale = {};
            if (!GENERAL) scale = load16(scales + 128 * i);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    const int precision = GENERAL ? rows.precision[first + j][column] : PLANES - 1;
                    if (GENERAL) scale = load16(scales + 512 * min(precision, 2) + 128 * i);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int c = 2 * h + column;
                        float &y = sums.y[i][first + j][c];
                        const float factor = float_of_bits(h ? scale.z : scale.x);
                        const float offset = float_of_bits(h ? scale.w : scale.y);
                        float sum = p[0][j][c];
                        if (PLANES > 1) {
                            const float two = joined(sum, p[PLANES / 2][j][c], h);
                            sum = GENERAL && precision == 0 ? sum : two;
                            if (PLANES > 2) sum = GENERAL && precision < 2 ? sum : fmaf(4, two, p[PLANES - 1][j][c]);
                        }
                        sum = fmaf(-offset, all[j][column], sum);
                        if (GENERAL) {
                            const float more = fmaf(factor, sum * roundings.scale[first + j][column], y);
                            y = precision == NONE ? y : more;
                        } else
                            y = fmaf(factor, sum, y);
                    }
                }
        }
    }
}

// 8 numbers of 16 bits, of which there are so many.
CALLED words4 read_some(const u16 *from, int count) {
    u64 first = 0, second = 0;
    for (int i = 0; i < count && i < 4; i++) first |= (u64)from[i] << 16 * i;
    for (int i = 4; i < count && i < 8; i++) second |= (u64)from[i] << 16 * (i - 4);
    return {(u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32)};
}

// The same for rows that read the original: outputs `first` on, row-major. The inputs of a step may come in any order,
// if those of x come in the same: a lane takes 8 that lie together.
template <int TILES, int GROUP, bool F16>
DEVICE void add_original(Sums<TILES> &sums, const X<TILES, GROUP, F16> &x, int word, const Linear &of, const Weight &weight,
                         int first, int chunk, int lane) {
    const Rows<TILES> rows = rows_of<TILES>(word, lane < of.rows, lane, true, of.present);
    Roundings<TILES> roundings;
    roundings_of(roundings, x, rows, lane);
    const bool aligned = of.inputs % 8 == 0 && (u64)weight.original % 16 == 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float p[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) p[j][0] = p[j][1] = p[j][2] = p[j][3] = 0;
#pragma unroll
        for (int k = 0; k < GROUP; k += 32) {
            const int input = chunk * GROUP + k + 8 * (lane % 4);
            words4 w[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int output = first + 16 * i + 8 * h + lane / 4;
                const u16 *from = (const u16 *)weight.original + (i64)output * of.inputs + input;
                w[h] = {0, 0, 0, 0};
                if (output >= weight.outputs) continue;
                if (input >= of.inputs) continue;
                w[h] = aligned ? read16(from) : read_some(from, of.inputs - input);
            }
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                words4 b = x.load_row(j, k + 8 * (lane % 4));
                if (roundings.factor[j] >= 0) {
                    const float factor = roundings.factor[j];
                    b = {rounded_pair<F16>(b.x, factor), rounded_pair<F16>(b.y, factor), rounded_pair<F16>(b.z, factor),
                         rounded_pair<F16>(b.w, factor)};
                }
                mma<F16>(p[j][0], p[j][1], p[j][2], p[j][3], w[0].x, w[1].x, w[0].y, w[1].y, b.x, b.y);
                mma<F16>(p[j][0], p[j][1], p[j][2], p[j][3], w[0].z, w[1].z, w[0].w, w[1].w, b.z, b.w);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (rows.precision[j][c % 2] == NONE)
                    sums.y[i][j][c] = fmaf(p[j][c], roundings.scale[j][c % 2], sums.y[i][j][c]);
    }
}
