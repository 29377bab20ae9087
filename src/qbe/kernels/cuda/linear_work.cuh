// Which part of a product which block and warp has. The weight is cut into tiles of 256 outputs, these into units of one
// group of inputs. All units lie in one row, tile after tile, of which each block has an equal run (stream-K): that
// depends on the weights and the number of blocks alone, so a row is the same whatever rows are beside it. Of a tile in
// its run a block's warps 0 to 3 have every second unit, 64 outputs each, and warps 4 to 7 the others.

constexpr int WEIGHTS = 3;  // of a launch, with one x
constexpr int WARPS = 8, PARTS = 4;
constexpr int OUTPUTS = 64, BLOCK = 64;  // of a warp: outputs, and inputs of a copy

struct Weight {
    const u8 *codes;  // fragments.py
    const int *words;  // precision of each row
    const u8 *original, *bias;
    i64 plane2, plane1, scales, counts;  // where in `codes` they begin
    int outputs, exponent;
    int first_tile, column;  // of all tiles and all results of a row
};

struct Linear {
    Weight weights[WEIGHTS];
    const u8 *x;
    u8 *y;
    float *sums;  // of cut tiles: [2 * blocks, PARTS, OUTPUTS * rows padded to 8]
    int count, rows, inputs, x_row, y_row;
    int chunks, units;  // groups of inputs; those of all tiles
    int present;  // precisions of the weights: 1 to 3
    int ring;  // bytes of shared memory that a warp's weights have
    int wide;  // results are float32
};

struct Shares {
    int least, more;  // the first `more` blocks have a unit more

    DEVICE Shares(int units, int blocks) : least(units / blocks), more(units % blocks) {}
    DEVICE int begin(int block) const { return block * least + min(block, more); }
    DEVICE int block_of(int unit) const {
        const int longer = more * (least + 1);
        return unit < longer ? unit / (least + 1) : more + (unit - longer) / least;
    }
};

DEVICE int weight_of(const Linear &of, int tile) {
    int i = 0;
    while (i + 1 < of.count && tile >= of.weights[i + 1].first_tile) i++;
    return i;
}

// 64 outputs of a warp, of all that the weight has, or -1 where it has no more.
DEVICE int outputs_of(const Weight &weight, int tile, int part) {
    const int at = (tile - weight.first_tile) * PARTS + part;
    return at * OUTPUTS < weight.outputs ? at : -1;
}

// What the rows of a step need of a weight.
struct Need {
    int planes;  // of codes, 0: none
    int pairs;  // of scales, from the first
    bool general;  // rows differ, or have activations of 8 bits
    bool full;  // some row reads the original

    DEVICE u32 packed() const { return planes | pairs << 2 | general << 4; }
};

constexpr int NONE = 3;  // in place of a precision: the row does not read codes

DEVICE int precision_of(int word, bool original, int present) {
    const int bits = word & 255;
    if (original && bits >= 16) return NONE;
    return min(bits >= 8 ? 2 : bits >= 6 ? 1 : 0, present - 1);
}

DEVICE bool has_eight(int word) { return word >> 8 == 8; }

// By a warp, whose lane has the word of the row of its number.
DEVICE Need need_of(int word, bool row, bool original, int present) {
    const int precision = precision_of(word, original, present);
    const bool four = ballot(row && precision == 0), six = ballot(row && precision == 1);
    const bool eight = ballot(row && precision == 2), full = ballot(row && precision == NONE);
    Need need;
    need.planes = eight ? 3 : six ? 2 : four ? 1 : 0;
    need.pairs = six ? 3 : four ? 2 : 1;
    need.general = four + six + eight + full > 1 || any(row && has_eight(word));
    need.full = full;
    return need;
}

// The units that a warp, or the four of a half, goes through.
struct Walk {
    int unit, end;  // from the first one of the present tile on
    int tile, chunk, past;  // units of this tile are before `past`
    int half;

    DEVICE void begin(const Linear &of, int first, int last, int own_half) {
        unit = first, end = last, half = own_half;
        enter(of.chunks);
    }

    DEVICE bool done() const { return unit >= end; }

    DEVICE void enter(int chunks) {
        while (unit < end) {
            tile = unit / chunks;
            past = min(chunks, end - tile * chunks);
            chunk = unit - tile * chunks + half;
            if (chunk < past) return;
            unit = tile * chunks + past;
        }
    }

    DEVICE void next(int chunks) {
        chunk += 2;
        if (chunk >= past) unit = tile * chunks + past, enter(chunks);
    }
};
