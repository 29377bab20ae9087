// Which pages a block walks: so that all blocks end at the same time, whatever the lengths of sequences and the
// precisions of their heads and pages. It is worked out on the device from block_tables and lengths, which change from step
// to step while launches stay as a graph has them: once for all layers (share.cu), or by every block for itself.
//
// A pair is a key head of a sequence. The pages of all pairs lie one after the other on a line, a page as long as its
// kind takes to be read, and before those of a pair lies what its beginning and end take. The line is cut into pieces
// of the same length, one for each block. Where each pair can be cut into equal pieces that are longer by no more than a
// part of what a beginning takes, or where as many pairs for each block are hardly longer, it is cut so: then no block
// begins more often than it must.
//
// Of each sequence SAMPLES pages stand for those around them, a page a lane: so much is looked at, however long it is.

constexpr int SAMPLES = 32;

// What a page takes, in tenths of one of 4 bits. Those of 16 and 8 bits wait for memory: they take less (24, 13) where
// others wait for instructions than where all are alike (27, 15).
DEVICE int cost_of(int kind) {
    return kind == 16 ? 27 : kind == 8 ? 15 : kind == (TURBO | 4) ? 15 : kind == (TURBO | 2) ? 14 : kind == 2 ? 9 : 10;
}

// In one place, because it is long: the instructions of a plan come from far away, each for the first time.
CALLED u32 quotient(u32 a, u32 b) { return a / b; }

// Keys [first, past) of a sequence are read from pages low, low + 1, .., low + pages - 1 of its table.
struct Seen { int first, past, low, pages; };

struct Sequences {
    const int *head_offsets;
    const i64 *block_tables, *lengths;
    int table_row, kv_heads, window;

    DEVICE Seen seen(int sequence) const {
        const int length = lengths[sequence], past = length - 1;
        const int first = window > 0 && length > window ? length - window : 0, low = first / PAGE;
        return {first, past, low, past > first ? (past + PAGE - 1) / PAGE - low : 0};
    }

    // The format of this lane's page among a sequence's samples, if it has pages.
    DEVICE int sample(int sequence, Seen of, int lane) const {
        const i64 *at = block_tables + (i64)sequence * table_row + of.low + (u32)((2 * lane + 1) * of.pages) / (2 * SAMPLES);
        return of.pages ? *at & 255 : 0;
    }

    DEVICE int cost(int format, int head) const { return cost_of(head_offsets[format * kv_heads + head] & 255); }
};

// Tables and head_offsets to the L2 cache, by so many blocks together: they are read one after the other, each time by every
// block, and what steps stream has driven them out.
DEVICE void fetch_tables(const Sequences &of, int batch, int width, int block, int blocks) {
    constexpr int LINE = 128, FORMATS = 256;
    const i64 at = ((i64)threadIdx.x * blocks + block) * LINE;
    if (at < ((i64)(batch - 1) * of.table_row + width) * 8) fetch((const u8 *)of.block_tables + at);
    if (at < (i64)FORMATS * of.kv_heads * 4) fetch((const u8 *)of.head_offsets + at);
    if (at < (i64)batch * 8) fetch((const u8 *)of.lengths + at);
}

// A place between two pages of a pair; page 0 is also the end of the pair before.
struct Cut { int pair, page; };

DEVICE int first_of(u32 lanes) { return ones((lanes & (0 - lanes)) - 1); }

struct Plan {
    Sequences of;
    int batch, pairs, blocks;
    int start, least;  // the cost of a beginning and an end, and the least cost of pages for which a pair is cut
    int warp, lane;

    // What the pages of all pairs cost, to the beginning of shared memory; warps take the sequences in turns. Lengths
    // are loaded two turns ahead, samples one, since one waits for the other.
    DEVICE void add_costs() const {
        Seen own = of.seen(min(warp, batch - 1)), next = of.seen(min(warp + WARPS, batch - 1));
        int format = of.sample(min(warp, batch - 1), own, lane);
#pragma unroll 1
        for (int sequence = warp; sequence < batch; sequence += WARPS) {
            const int own_format = format, pages = own.pages;
            own = next, format = of.sample(min(sequence + WARPS, batch - 1), own, lane);
            next = of.seen(min(sequence + 2 * WARPS, batch - 1));
            add_pairs(sequence, pages, own_format);
        }
    }

    DEVICE void add_pairs(int sequence, int pages, int format) const {
#pragma unroll 1
        for (int head = lane; head < (of.kv_heads + 31 & ~31); head += 32) {
            int sum = 0;
            for (u32 left = EVERY; left;) {  // over the formats there are
                const int one = shuffle_word(format, first_of(left));
                const u32 same = ballot(format == one);
                if (head < of.kv_heads) sum += ones(same) * of.cost(one, head);
                left &= ~same;
            }
            if (head < of.kv_heads) store4(4 * (sequence * of.kv_heads + head), cost_of_pages(sum, pages));
        }
    }

    static DEVICE int cost_of_pages(int sum, int pages) { return (u32)(sum * pages) / SAMPLES; }

    DEVICE int cost(int pair) const { return load4(4 * pair); }

    // Pairs without pages are on no line.
    DEVICE int length(int pair) const { return cost(pair) ? cost(pair) + start : 0; }

    // Those of no more than `most`, if there are fewer pairs than blocks.
    DEVICE int pieces(int pair, int most) const {
        return pairs > blocks ? cost(pair) > 0 : quotient(cost(pair) + most - 1, most);
    }

    // Sum of x over the lanes before this one; `all`: over all lanes.
    DEVICE int sum_before(int x, int &all) const {
        int sum = x;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = shuffle_word(sum, (lane - by) & 31);
            if (lane >= by) sum += other;
        }
        all = shuffle_word(sum, 31);
        return sum - x;
    }

    // Where the piece of a block begins, found by a warp; of the block after the last one: the end of all.
    DEVICE Cut cut(int block) const {
        const int each = (u32)(pairs + 31) / 32, low = min(pairs, lane * each), high = min(pairs, low + each);
        int own = 0, own_pieces = 0, longest = 0, all, count;
#pragma unroll 1
        for (int i = low; i < high; i++) own += length(i), longest = max(longest, length(i));
        int before = sum_before(own, all);
        const int even = quotient(all, blocks), most = max(least, even + min(even / 32, start / 4));
#pragma unroll 1
        for (int i = low; i < high; i++) own_pieces += pieces(i, most);
        const int pieces_before = sum_before(own_pieces, count);
        const int each_block = quotient(count + blocks - 1, blocks);
        // Hardly longer: no block ends later than one that begins within a pair would.
        const bool whole = pairs > blocks ? !any(longest > (int)quotient(even + even / 32 + start, max(each_block, 1)))
                                          : each_block < 2;
        if (whole) own = own_pieces, before = pieces_before;
        if (!block) return {0, 0};
        int at = whole ? min(block * each_block, count) : block * even + min(block, all - even * blocks);
        if (at == (whole ? count : all)) return {pairs, 0};

        // The pair in which that is, and how far in it; a lane has found it.
        int pair = low;
        const bool mine = at >= before && at < before + own;
        if (mine) {
            at -= before;
#pragma unroll 1
            for (int next; at >= (next = whole ? pieces(pair, most) : length(pair)); pair++) at -= next;
        }
        const int finder = first_of(ballot(mine));
        pair = shuffle_word(pair, finder), at = shuffle_word(at, finder);
        const int target = whole ? (int)quotient(cost(pair) * at, pieces(pair, most)) : max(0, at - start);
        const int page = page_at(pair, target);
        return page && page == of.seen(quotient(pair, of.kv_heads)).pages ? Cut{pair + 1, 0} : Cut{pair, page};
    }

    // The pages of a pair before a cost.
    DEVICE int page_at(int pair, int target) const {
        const int sequence = quotient(pair, of.kv_heads);
        const Seen seen = of.seen(sequence);
        if (!seen.pages) return 0;
        int all;
        const int own = of.cost(of.sample(sequence, seen, lane), pair - sequence * of.kv_heads);
        const int before = sum_before(own, all) * seen.pages;
        // A sample stands for 1 / SAMPLES of the pages, which are counted in as many parts each.
        const int from = SAMPLES * target - before;
        const u32 mine = ballot(from >= 0 && from < own * seen.pages);
        const int part = lane * seen.pages + (int)quotient(max(0, from), own);
        return (u32)(shuffle_word(part, first_of(mine)) + SAMPLES / 2) / SAMPLES;
    }
};

// Where the piece of a block begins if each pair has the same number of parts.
DEVICE Cut fixed_cut(const Sequences &of, int block, int parts, int pairs) {
    const int pair = block / parts, part = block % parts;
    if (pair >= pairs || !part) return {pair, 0};
    return {pair, (int)((i64)of.seen(pair / of.kv_heads).pages * part / parts)};
}
