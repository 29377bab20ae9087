// Attention of one new token per sequence over its pages, each read at its own precision: what
// qbe/kernels/triton/paged_attention_kernel.py computes, for the shapes that matter most. Pages are laid out as
// qbe/kernels/kv_blocks.py says for a GPU; tokens and channels of a product come in whatever order the codes have.
//
// A block serves one key head of one sequence and a part of its pages. Each of its warps takes whole pages and goes
// through an online softmax of its own, so that no warp waits for another before the end. Keys and values come to shared
// memory by the copy engine, those of the next page while this one's are multiplied. Keys and values are the left
// operands of the tensor cores' products, the queries that share a key head the 8 columns of the right ones.
//
// Lanes: group = lane / 4 is a row of an operand or a query, quad = lane % 4 a place among its columns.

constexpr int PAGE = 64;
constexpr int WARPS = 8;
constexpr int GROUPS = 8;  // rows of half a tile, and columns of queries
constexpr int CHUNK = 32;  // tokens of a page of 16 bits that are copied at once
constexpr int SLOTS = 3;   // places of a warp that copies go to, in turns
constexpr int KINDS = 6;   // of blocks
constexpr int TURBO = 64;  // in a block's kind
constexpr int CUT = 128;   // in a list of pages, beside the kind: a window begins within the page
constexpr float LOG2E = 1.4426950408889634f;
constexpr float HIDDEN = -1e30f;  // the score of a token that is not seen

// How far scores (times log2 e) may be above `top` before sums are scaled anew. A weight times a value's scale has to be
// a number of its dtype: the scale is one of float16, so that there no weight may be above 1.
template <bool F16>
constexpr float SLACK = F16 ? 0 : 8;

// Shared memory, in bytes: of a warp, and behind those of all warps, of a block.
template <int DIM>
struct Room {
    static constexpr int ROW = 2 * DIM + 16;  // of 16 bits, so that 8 rows lie in different banks
    // A slot holds a page of 4 or 2 bits, of turbo keys if these take more, or keys or values of 8 bits or of a chunk.
    static constexpr int PLAIN = 68 * DIM + 4 * PAGE, TURBO_PAGE = 66 * DIM + 8 * PAGE;
    static constexpr int SLOT = PLAIN > TURBO_PAGE ? PLAIN : TURBO_PAGE;
    static constexpr int SCALES = SLOTS * SLOT;  // and centres, float
    static constexpr int BARRIERS = SCALES + 8 * DIM + 16 * 7;
    static constexpr int WARP = (BARRIERS + 8 * SLOTS + 127) / 128 * 128;
    static constexpr int LIST = WARPS * WARP;             // of 32 * WARPS pages, 8 bytes each
    static constexpr int COUNTS = LIST + 8 * 32 * WARPS;  // of each kind, a byte a warp
    static constexpr int QUERIES = COUNTS + 8 * KINDS;    // rotated once and twice
    static_assert(WARPS == 8, "a byte for each warp");
    static constexpr int BYTES = QUERIES + GROUPS * 2 * DIM * 2;
    static_assert(CHUNK * ROW <= SLOT && 68 * DIM <= SLOT, "keys or values of 16 and of 8 bits fit into a slot");
};

template <int BITS>
struct Codes {
    static constexpr int FIELDS = 8 / BITS;
    static constexpr float CENTRE = 1 << (BITS - 1);
};

// Codes of 2 and 4 bits become this + code: the lowest bits of a mantissa, or, because they are nearer to 0 there, the
// highest. `offset_pair` is what takes it and the centre off again, in products of its own.
template <int BITS, bool F16>
DEVICE constexpr int offset_of(int field, int e) {
    return !F16 && field + e == 0 ? 128 : 1 << BITS;
}

// Two codes of this field of a word: of bytes 0 and 2 for e = 0, of 1 and 3 for e = 1.
template <int BITS, bool F16>
DEVICE u32 pair_of(u32 word, int field, int e) {
    if constexpr (BITS == 8) {  // less the centre, exactly
        u32 x = e ? word >> 8 : word;
        if (F16) return add2<true>(and_or(x, 0x00FF00FF, 0x64006400), 0xE480E480);  // 1024 + code - 1152
        return add2<false>(and_or(x, 0x007F007F, 0x43004300), and_not_or(x, 0x00800080, 0xC300C300));
    } else {
        const bool lowest = !F16 && field + e == 0;
        const int to = lowest ? 0 : (F16 ? 10 : 7) - BITS, from = 8 * e + BITS * field;
        const u32 one = lowest ? 0x4300 : F16 ? (BITS == 4 ? 0x4C00 : 0x4400) : (BITS == 4 ? 0x4180 : 0x4080);
        const u32 mask = ((1u << BITS) - 1) << to;
        u32 x = from > to ? word >> (from - to) : word << (to - from);
        return and_or(x, mask | mask << 16, one | one << 16);
    }
}

template <int BITS, bool F16>
DEVICE u32 offset_pair(int field, int e) {
    const float off = -offset_of<BITS, F16>(field, e) - Codes<BITS>::CENTRE;
    return pack<F16>(off, off);
}

// Turbo keys: levels of the codes that `pair_of` would take, and the signs of their sketches.
template <int BITS, bool F16>
DEVICE u32 turbo_levels(u32 word, int field, int e) {
    u32 x = word >> (8 * e + BITS * field);
    const u32 one = F16 ? 0x3C003C00 : 0x3F803F80;
    if (BITS == 2) return one ^ ((~x & 0x00010001) << 15);
    // 7, 22, 39, 63: the high and the low bytes of each, the negative ones first
    u32 at = x & 0x00070007;
    at |= at >> 12;
    u32 high = F16 ? bytes_of(0xD3D0CDC7, 0x53504D47, at) : bytes_of(0xC2C2C1C0, 0x42424140, at);
    u32 low = F16 ? bytes_of(0xE0E08000, 0xE0E08000, at) : bytes_of(0x7C1CB0E0, 0x7C1CB0E0, at);
    return bytes_of(low, high, 0x5140);
}

template <int BITS, bool F16>
DEVICE u32 turbo_signs(u32 word, int field, int e) {
    u32 x = word >> (8 * e + BITS * field + BITS - 1);
    return (F16 ? 0x3C003C00 : 0x3F803F80) ^ ((~x & 0x00010001) << 15);
}

// Kinds of blocks in the order of a list.
DEVICE constexpr int kind_of(int n) {
    return n == 0 ? 16 : n == 1 ? 8 : n == 2 ? 4 : n == 3 ? 2 : n == 4 ? TURBO | 4 : TURBO | 2;
}

DEVICE u64 load_u64(int at) {
    const words2 x = load8(at);
    return (u64)x.y << 32 | x.x;
}

DEVICE int sum_of_bytes(u64 x) {  // each at most 32
    return ((u32)x * 0x01010101u >> 24) + ((u32)(x >> 32) * 0x01010101u >> 24);
}

template <bool F16>
DEVICE float float_of(u32 x) {  // of the low 16 bits
    return F16 ? float_of_f16(x & 0xFFFF) : float_of_bits(x << 16);
}

template <int COUNT>
DEVICE void load_words(u32 (&x)[COUNT], int at) {
    if (COUNT == 1) x[0] = load4(at);
    else if (COUNT == 2) {
        words2 w = load8(at);
        x[0] = w.x, x[1] = w.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            words4 w = load16(at + 4 * i);
            x[i] = w.x, x[i + 1 < COUNT ? i + 1 : 0] = w.y, x[i + 2 < COUNT ? i + 2 : 0] = w.z,
            x[i + 3 < COUNT ? i + 3 : 0] = w.w;
        }
    }
}

template <bool SOFTCAP>
DEVICE float capped(float score, float softcap) {
    if (!SOFTCAP) return score;
    float e = power2((score < 0 ? score : -score) * (2 * LOG2E) / softcap);
    float bent = softcap * (1 - e) / (1 + e);
    return score < 0 ? -bent : bent;
}

// An online softmax: of the queries 2 quad and 2 quad + 1, and of the tokens of this lane's group.
template <int DIM>
struct Sums {
    float acc[DIM / 16][4];  // weight * value: channels 16 j + group and + 8, each for both queries
    float top[2];            // what sums are relative to: no score is more than SLACK above it
    float total[2];          // of weights
    float weighted[2];       // weight * (score - top)
    float bases[2];          // what the lows of values add to all channels

    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][i] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = HIDDEN, total[i] = weighted[i] = bases[i] = 0;
    }

    // Scores (times log2 e) of tokens, from which the `off` of their column is missing, become their weights.
    template <bool F16, int TILES>
    DEVICE void add(float (&s)[TILES][4], float off0, float off1) {
        float most[2] = {HIDDEN, HIDDEN};
        const float off[2] = {off0, off1};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) most[k & 1] = fmaxf(most[k & 1], s[i][k]);
        if (any(most[0] + off0 > top[0] + SLACK<F16> || most[1] + off1 > top[1] + SLACK<F16>)) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) most[i] = fmaxf(most[i], shuffle_xor(most[i], mask));
                const float higher = fmaxf(top[i], most[i] + off[i]), factor = power2(top[i] - higher);
                weighted[i] = (weighted[i] + total[i] * (top[i] - higher)) * factor;
                total[i] *= factor, bases[i] *= factor;
                top[i] = higher;
#pragma unroll
                for (int j = 0; j < DIM / 16; j++) acc[j][i] *= factor, acc[j][2 + i] *= factor;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float shift = off[k & 1] - top[k & 1];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const float x = s[i][k] + shift;
                s[i][k] = power2(x);
                total[k & 1] += s[i][k];
                weighted[k & 1] += s[i][k] * x;
            }
        }
    }

    // Over the tokens of all groups.
    DEVICE void finish() {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
                total[i] += shuffle_xor(total[i], mask);
                weighted[i] += shuffle_xor(weighted[i], mask);
                bases[i] += shuffle_xor(bases[i], mask);
            }
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) acc[j][k] += bases[k & 1];
    }

    // The rotation of sealed pages (qbe/kernels/reference/rotation.py), its own inverse, of acc.
    DEVICE void rotate(int group) {
        sign(group);
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2)
#pragma unroll
            for (int j = 0; j < DIM / 16; j++)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float other = shuffle_xor(acc[j][k], 4 * bit);
                    acc[j][k] = group & bit ? other - acc[j][k] : acc[j][k] + other;
                }
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int k = 0; k < 2; k++) butterfly(acc[j][k], acc[j][2 + k]);
#pragma unroll
        for (int bit = 1; bit < DIM / 16; bit *= 2)
#pragma unroll
            for (int j = 0; j < DIM / 16; j++)
                if (!(j & bit))
#pragma unroll
                    for (int k = 0; k < 4; k++) butterfly(acc[j][k], acc[j | bit][k]);
        sign(group);
        const float factor = DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) acc[j][k] *= factor;
    }

    static DEVICE void butterfly(float &a, float &b) {
        float low = a;
        a = low + b, b = low - b;
    }

    DEVICE void sign(int group) {
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int at = 16 * j + 8 * h + group;
                if (ones(at & at >> 1) & 1) acc[j][2 * h] = -acc[j][2 * h], acc[j][2 * h + 1] = -acc[j][2 * h + 1];
            }
    }
};

// A warp on its way through pages of one head.
template <int DIM, bool F16, bool SOFTCAP>
struct Walk {
    using In = Room<DIM>;
    Sums<DIM> sums;
    int room;           // where this warp's shared memory begins
    int next;           // page of the list to be copied next
    bool second;        // of which its keys, of 8 bits, are copied already
    int to, from;       // slots that the next copy goes to, and that is read next
    int taken;          // slots that copies went to and that are not free yet
    u32 parity;         // of the slots' barriers
    int lane, group, quad;
    int first, past;    // keys that are seen
    int first_listed;   // the page that has place 0
    const u8 *memory;
    bool queried;  // whether there is a query for this group
    float scaling, softcap;

    DEVICE float scored(float score) { return capped<SOFTCAP>(score * scaling, softcap) * LOG2E; }

    // A page in the list: its block's address, in the lowest byte its kind and CUT, in the highest its place of 256.
    static DEVICE u64 listed(int i) { return load_u64(In::LIST + 8 * i); }

    DEVICE const u8 *address_of(u64 entry) { return memory + (entry & 0x00FFFFFFFFFFFF00); }

    DEVICE int first_key(u64 entry) { return (first_listed + (int)(entry >> 56)) * PAGE; }

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

    // Begins to copy the next of the sealed pages before `all`; of 8 bits the keys or the values.
    DEVICE void begin_sealed(int all) {
        if (next >= all) return;
        const int slot = take();
        const u64 entry = listed(next);
        const int kind = entry & 127;
        if (lane == 0) {
            const int at = room + slot * In::SLOT, barrier = room + In::BARRIERS + 8 * slot;
            const u8 *from = address_of(entry);
            if (kind == 8) {
                constexpr int CODES = 64 * DIM;
                const int scales = second ? 4 * PAGE : 4 * DIM;
                barrier_expect(barrier, CODES + scales);
                copy(at, from + (second ? CODES : 0), CODES, barrier);
                copy(at + CODES, from + 2 * CODES + (second ? 4 * DIM : 0), scales, barrier);
            } else {
                const int scales = kind > TURBO ? 8 * PAGE + 2 * DIM : 4 * PAGE + 4 * DIM;
                const int bytes = 16 * DIM * (kind % TURBO) + scales;
                barrier_expect(barrier, bytes);
                copy(at, from, bytes, barrier);
            }
        }
        second = kind == 8 && !second;
        if (!second) next += WARPS;
    }

    DEVICE void fill(int all) {
        while (taken < SLOTS && next < all) begin_sealed(all);
    }

    // The slot that was filled first has been read, for the last time.
    DEVICE void release(int all) {
        taken--;
        begin_sealed(all);
    }

    // The channels of this lane's query: FIELDS times ROW / 4 that lie side by side.
    template <int BITS>
    DEVICE void load_query(float (&q)[DIM / 16][4]) {
        const float factor = SOFTCAP ? 1 : scaling * LOG2E;
        int queries = In::QUERIES + group * 4 * DIM;
        forget(queries);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            words2 x = load8(queries + 2 * channel<BITS>(k));
            if (!queried) x.x = x.y = 0;
            q[k][0] = float_of<F16>(x.x) * factor, q[k][1] = float_of<F16>(x.x >> 16) * factor;
            q[k][2] = float_of<F16>(x.y) * factor, q[k][3] = float_of<F16>(x.y >> 16) * factor;
        }
    }

    // The pairs of channels whose codes `pair_of` takes; rotated twice if `twice`.
    template <int BITS>
    DEVICE void load_pairs(u32 (&q)[DIM / 16][2], bool twice) {
        int queries = In::QUERIES + group * 4 * DIM + twice * 2 * DIM;
        forget(queries);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            words2 x = load8(queries + 2 * channel<BITS>(k));
            if (!queried) x.x = x.y = 0;
            q[k][0] = bytes_of(x.x, x.y, 0x5410), q[k][1] = bytes_of(x.x, x.y, 0x7632);
        }
    }

    // Of this group's row in the first tile.
    template <int BITS>
    DEVICE int own_token() {
        return 2 * BITS * (group >> 1) + 2 * (group & 1);
    }

    // Tokens before a window are not seen.
    template <int BITS>
    DEVICE void hide(float (&s)[4][4], u64 entry) {
        if (!(entry & CUT)) return;
        const int at = first_key(entry) + own_token<BITS>();
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (at + first_token<BITS>(tile) + k / 2 < first) s[tile][k] = HIDDEN;
    }

    // Adds the weights of scores to the sums; `off` is what is missing from the scores of each column.
    template <int BITS>
    DEVICE void weigh(float (&s)[4][4], float (&off)[4], u64 entry) {
        if (SOFTCAP) {
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int k = 0; k < 4; k++) s[tile][k] = scored(s[tile][k] + off[k]);
        }
        hide<BITS>(s, entry);
        sums.template add<F16>(s, SOFTCAP ? 0 : off[0], SOFTCAP ? 0 : off[1]);
    }

    // Pages i, i + WARPS, .. before end of the list, which ends at `all`. Returns the first one of this warp that is left.
    DEVICE int eight_bits(int i, int end, int all) {
        constexpr int BITS = 8;
        if (i >= end) return i;
        forget(room);
        fill(all);
        float q[DIM / 16][4];
        load_query<BITS>(q);
#pragma unroll 1
        for (; i < end; i += WARPS) {
            const u64 entry = listed(i);
            float s[4][4], off[4];
            u32 scaled[DIM / 16][2], weights[4][2];
            const int keys = wait();
            scale_queries<BITS>(scaled, off, q, keys + 64 * DIM);
#pragma unroll
            for (int tile = 0; tile < 4; tile++) multiply_keys<BITS>(s[tile], scaled, keys, tile);
            release(all);
            weigh<BITS>(s, off, entry);
            const int values = wait();
            scale_weights<BITS>(weights, s, values + 64 * DIM, true);
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) multiply_values<BITS>(weights, j, values);
            release(all);
        }
        return i;
    }

    // The same of 4 and 2 bits. Keys of a page and values of the page before it are multiplied side by side, so that
    // neither waits for its operands; once more in the end for the last values.
    template <int BITS, bool IS_TURBO>
    DEVICE int few_bits(int i, int end, int all) {
        constexpr int STEPS = DIM / 16, CODES = 8 * DIM * BITS;
        constexpr int KEY_SCALES = 2 * CODES, VALUE_SCALES = KEY_SCALES + (IS_TURBO ? 4 * PAGE + 2 * DIM : 4 * DIM);
        if (i >= end) return i;
        forget(room);
        fill(all);
        float q[IS_TURBO ? 1 : STEPS][4];
        u32 once[IS_TURBO ? STEPS : 1][2], twice[IS_TURBO ? STEPS : 1][2];
        if constexpr (IS_TURBO)
            load_pairs<BITS>(once, false), load_pairs<BITS>(twice, true);
        else
            load_query<BITS>(q);
        float weights[4][4];
        int page = room, before = room;
        bool pending = false;
#pragma unroll 1
        for (;; i += WARPS) {
            const bool more = i < end;
            const u64 entry = more ? listed(i) : 0;
            float s[4][4], off[4], value_off[4] = {0, 0, 0, 0};
            u32 scaled[STEPS][2], scaled_weights[4][2];
            if (more) page = wait();
            scale_weights<BITS>(scaled_weights, weights, before + VALUE_SCALES, pending);
            if constexpr (IS_TURBO)
                turbo_scores<BITS>(s, once, twice, page);
            else
                scale_queries<BITS>(scaled, off, q, page + KEY_SCALES);
            value_offsets<BITS>(value_off, scaled_weights);
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                if constexpr (!IS_TURBO) {
                    multiply_keys<BITS>(s[tile], scaled, page, tile);
                    if (tile == 1) key_offsets<BITS>(off, scaled);
                }
#pragma unroll
                for (int n = 0; n < DIM / 64; n++) {
                    const int j = tile * (DIM / 64) + n;
                    multiply_values<BITS>(scaled_weights, j, before + CODES);
#pragma unroll
                    for (int k = 0; k < 4; k++) sums.acc[j][k] += value_off[k];
                }
            }
            if (pending) release(all);
            if (!more) return i;
            if constexpr (IS_TURBO) {
                hide<BITS>(s, entry);
                sums.template add<F16>(s, 0, 0);
            } else {
                weigh<BITS>(s, off, entry);
            }
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int k = 0; k < 4; k++) weights[tile][k] = s[tile][k];
            pending = true, before = page;
        }
    }

    // Queries times the scales of their channels, and what the lows add to all tokens' scores.
    template <int BITS, int STEPS>
    DEVICE void scale_queries(u32 (&scaled)[STEPS][2], float (&off)[4], float (&q)[STEPS][4], int scales) {
        constexpr int FIELDS = Codes<BITS>::FIELDS;
        centres<BITS>(scales);
        float moved = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int pad = BITS == 2 ? 0 : 4 * (k % FIELDS) + quad;
            const int at = room + In::SCALES + 8 * channel<BITS>(k) + 16 * pad;
            words4 a = load16(at), b = load16(at + 16);
            moved += q[k][0] * float_of_bits(a.y) + q[k][1] * float_of_bits(a.w);
            moved += q[k][2] * float_of_bits(b.y) + q[k][3] * float_of_bits(b.w);
            scaled[k][0] = pack<F16>(q[k][0] * float_of_bits(a.x), q[k][2] * float_of_bits(b.x));
            scaled[k][1] = pack<F16>(q[k][1] * float_of_bits(a.z), q[k][3] * float_of_bits(b.z));
        }
        by_column(off, moved);
    }

    template <int BITS, int STEPS>
    DEVICE void key_offsets(float (&off)[4], u32 (&scaled)[STEPS][2]) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int f = k % Codes<BITS>::FIELDS;
            const u32 less0 = offset_pair<BITS, F16>(f, 0), less1 = offset_pair<BITS, F16>(f, 1);
            mma<F16>(off, less0, less0, less1, less1, scaled[k][0], scaled[k][1]);
        }
    }

    // Scores of a tile, but for `off`.
    template <int BITS, int STEPS>
    DEVICE void multiply_keys(float (&s)[4], u32 (&scaled)[STEPS][2], int keys, int tile) {
        constexpr int FIELDS = Codes<BITS>::FIELDS, ROW = DIM * BITS / 8, WORDS = ROW / 16;
        const int token = own_token<BITS>() + first_token<BITS>(tile);
        u32 a[WORDS], b[WORDS];
#pragma unroll
        for (int k = 0; k < 4; k++) s[k] = 0;
        load_words(a, keys + token * ROW + quad * (ROW / 4));
        load_words(b, keys + (token + 1) * ROW + quad * (ROW / 4));
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int w = k / FIELDS, f = k % FIELDS;
            mma<F16>(s, pair_of<BITS, F16>(a[w], f, 0), pair_of<BITS, F16>(b[w], f, 0), pair_of<BITS, F16>(a[w], f, 1),
                     pair_of<BITS, F16>(b[w], f, 1), scaled[k][0], scaled[k][1]);
        }
    }

    // Weights times the scales of their tokens; the lows go to all channels.
    template <int BITS>
    DEVICE void scale_weights(u32 (&scaled)[4][2], float (&weights)[4][4], int scales, bool some) {
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 pair = load4(scales + 4 * (own_token<BITS>() + first_token<BITS>(tile) + e));
                float x = some ? weights[tile][2 * e] : 0, y = some ? weights[tile][2 * e + 1] : 0;
                float scale = some ? float_of_f16(pair & 0xFFFF) : 0, low = some ? float_of_f16(pair >> 16) : 0;
                float centre = low + Codes<BITS>::CENTRE * scale;
                sums.bases[0] += x * centre, sums.bases[1] += y * centre;
                scaled[tile][e] = transposed(pack<F16>(x * scale, y * scale));
            }
    }

    template <int BITS>
    DEVICE void value_offsets(float (&off)[4], u32 (&weights)[4][2]) {
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const int f = tile % Codes<BITS>::FIELDS;
            const u32 less0 = offset_pair<BITS, F16>(f, 0), less1 = offset_pair<BITS, F16>(f, 1);
            mma<F16>(off, less0, less0, less1, less1, weights[tile][0], weights[tile][1]);
        }
    }

    // 16 channels of values times the weights of a page.
    template <int BITS>
    DEVICE void multiply_values(u32 (&weights)[4][2], int j, int values) {
        constexpr int FIELDS = Codes<BITS>::FIELDS, WORDS = BITS / 2;
        u32 a[WORDS], b[WORDS];
        const int at = values + (16 * j + group) * (8 * BITS) + quad * (2 * BITS);
        load_words(a, at);
        load_words(b, at + GROUPS * 8 * BITS);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const int w = tile / FIELDS, f = tile % FIELDS;
            mma<F16>(sums.acc[j], pair_of<BITS, F16>(a[w], f, 0), pair_of<BITS, F16>(b[w], f, 0),
                     pair_of<BITS, F16>(a[w], f, 1), pair_of<BITS, F16>(b[w], f, 1), weights[tile][0], weights[tile][1]);
        }
    }

    // The first of four channels of a step of the products, bytes of one word.
    template <int BITS>
    DEVICE int channel(int step) {
        constexpr int FIELDS = Codes<BITS>::FIELDS, ROW = DIM * BITS / 8;
        return step % FIELDS * ROW + quad * (ROW / 4) + 4 * (step / FIELDS);
    }

    // What a tile adds to the token of a row: it takes one field of one word of a lane's values.
    template <int BITS>
    static DEVICE int first_token(int tile) {
        return tile % Codes<BITS>::FIELDS * 8 * BITS + 4 * (tile / Codes<BITS>::FIELDS);
    }

    // Scale and low of a channel as floats, the low as what code CENTRE stands for.
    template <int BITS>
    DEVICE void centres(int scales) {
        constexpr int COUNT = DIM / 32, CODES = 8 * DIM * BITS;
        constexpr float CENTRE = Codes<BITS>::CENTRE;
        // Lanes of a quad read channels that lie ROW / 4 apart: 16 bytes in between keep them in different banks.
        const int pad = BITS == 2 ? 0 : COUNT * lane / (CODES / 256);
        u32 pairs[COUNT];
        load_words(pairs, scales + 4 * COUNT * lane);
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float x = float_of_f16(pairs[i] & 0xFFFF), y = float_of_f16(pairs[i + 1] & 0xFFFF);
            float u = float_of_f16(pairs[i] >> 16) + CENTRE * x, v = float_of_f16(pairs[i + 1] >> 16) + CENTRE * y;
            words4 out = {bits_of_float(x), bits_of_float(u), bits_of_float(y), bits_of_float(v)};
            store16(room + In::SCALES + 8 * COUNT * lane + 16 * pad + 8 * i, out);
        }
        sync_warp();
    }

    // Of each group's query a number -> the same for the queries of this lane's columns.
    DEVICE void by_column(float (&x)[4], float own) {
        own += shuffle_xor(own, 1);
        own += shuffle_xor(own, 2);
        x[0] = x[2] = shuffle(own, 8 * quad);
        x[1] = x[3] = shuffle(own, 8 * quad + 4);
    }

    template <int BITS, int STEPS>
    DEVICE void turbo_scores(float (&s)[4][4], u32 (&plain)[STEPS][2], u32 (&sketch)[STEPS][2], int keys) {
        constexpr int FIELDS = Codes<BITS>::FIELDS, ROW = DIM * BITS / 8, WORDS = ROW / 16;
        const int scales = keys + 16 * DIM * BITS, token = own_token<BITS>();
        float moved = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            words2 m = load8(scales + 4 * PAGE + 2 * channel<BITS>(k));
            moved += float_of<F16>(plain[k][0]) * float_of_f16(m.x & 0xFFFF);
            moved += float_of<F16>(plain[k][1]) * float_of_f16(m.x >> 16);
            moved += float_of<F16>(plain[k][0] >> 16) * float_of_f16(m.y & 0xFFFF);
            moved += float_of<F16>(plain[k][1] >> 16) * float_of_f16(m.y >> 16);
        }
        float off[4];
        by_column(off, moved);
#pragma unroll 1
        for (int tile = 0; tile < 4; tile++) {
            float levels[4] = {0, 0, 0, 0}, signs[4] = {0, 0, 0, 0};
            u32 a[WORDS], b[WORDS];
            int t = token + first_token<BITS>(tile);
            int at = keys + t * ROW + quad * (ROW / 4);
            load_words(a, at);
            load_words(b, at + ROW);
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                const int w = k / FIELDS, f = k % FIELDS;
                mma<F16>(levels, turbo_levels<BITS, F16>(a[w], f, 0), turbo_levels<BITS, F16>(b[w], f, 0),
                         turbo_levels<BITS, F16>(a[w], f, 1), turbo_levels<BITS, F16>(b[w], f, 1), plain[k][0],
                         plain[k][1]);
                mma<F16>(signs, turbo_signs<BITS, F16>(a[w], f, 0), turbo_signs<BITS, F16>(b[w], f, 0),
                         turbo_signs<BITS, F16>(a[w], f, 1), turbo_signs<BITS, F16>(b[w], f, 1), sketch[k][0],
                         sketch[k][1]);
            }
            float out[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 pair = load4(scales + 4 * (t + k / 2));
                out[k] = off[k] + levels[k] * float_of_f16(pair & 0xFFFF) + signs[k] * float_of_f16(pair >> 16);
            }
#pragma unroll
            for (int other = 0; other < 4; other++)
                if (other == tile)
#pragma unroll
                    for (int k = 0; k < 4; k++) s[other][k] = scored(out[k]);
        }
    }

    // Of pages of 16 bits, whose chunks are numbered: page i of the list has 2 i and 2 i + 1.

    DEVICE int seen_end(int chunk) {  // of a chunk's tokens
        int end = past - first_key(listed(chunk >> 1)) - CHUNK * (chunk & 1);
        return end < CHUNK ? end : CHUNK;
    }

    DEVICE int seen_begin(int chunk) {
        int begin = first - first_key(listed(chunk >> 1)) - CHUNK * (chunk & 1);
        return begin > 0 ? begin : 0;
    }

    // The next one that this warp sees anything of; `end` pages are listed.
    DEVICE int next_chunk(int chunk, int end) {
        do chunk += chunk & 1 ? 2 * WARPS - 1 : 1;
        while (chunk < 2 * end && seen_begin(chunk) >= seen_end(chunk));
        return chunk;
    }

    // Keys or values: a row a lane; rows past the last token are zero, whatever memory holds there.
    DEVICE void begin_full(int chunk, bool values) {
        const int slot = take(), barrier = room + In::BARRIERS + 8 * slot, at = room + slot * In::SLOT + lane * In::ROW;
        const int end = seen_end(chunk);
        const u8 *from = address_of(listed(chunk >> 1)) + (values ? PAGE * 2 * DIM : 0);
        if (lane == 0) barrier_expect(barrier, end * 2 * DIM);
        sync_warp();
        if (lane < end)
            copy(at, from + (CHUNK * (chunk & 1) + lane) * (2 * DIM), 2 * DIM, barrier);
        else
            for (int i = 0; i < 2 * DIM; i += 16) store16(at + i, words4{0, 0, 0, 0});
        sync_warp();
    }

    // Keys and values of a chunk take turns, those of the next one come meanwhile.
    DEVICE void fill_full(int &ahead, int pages) {
        while (taken < SLOTS && ahead < 2 * pages) {
            begin_full(ahead, second);
            if (second) ahead = next_chunk(ahead, pages);
            second = !second;
        }
    }

    DEVICE void full(const u16 *query, i64 one, int begin_page, int pages) {
        u32 q[DIM / 16][2];
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u16 *at = query + (16 * k + 8 * h + 2 * quad) * one;
                q[k][h] = queried ? at[0] | (u32)at[one] << 16 : 0;
            }
        const int key_row = (lane & 15) * In::ROW + (lane >> 4) * 16;
        const int value_row = ((lane & 7) + (lane >> 4) * 8) * In::ROW + (lane >> 3 & 1) * 16;
        int chunk = next_chunk(2 * begin_page - 2 * WARPS + 1, pages);
        int ahead = chunk;
        second = false;
        fill_full(ahead, pages);
#pragma unroll 1
        while (chunk < 2 * pages) {
            const int begin = seen_begin(chunk), end = seen_end(chunk);
            float s[2][4];
            const int keys = wait() + key_row;
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
#pragma unroll
                for (int k = 0; k < 4; k++) s[tile][k] = 0;
#pragma unroll
                for (int k = 0; k < DIM / 16; k++) {
                    u32 a[4];
                    load_matrices<false>(a, keys + tile * 16 * In::ROW + 32 * k);
                    mma<F16>(s[tile], a[0], a[1], a[2], a[3], q[k][0], q[k][1]);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int token = 16 * tile + 8 * (k / 2) + group;
                    s[tile][k] = token >= begin && token < end ? scored(s[tile][k]) : HIDDEN;
                }
            }
            taken--, fill_full(ahead, pages);
            sums.template add<F16>(s, 0, 0);
            const int values = wait() + value_row;
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                u32 x = transposed(pack<F16>(s[tile][0], s[tile][1])), y = transposed(pack<F16>(s[tile][2], s[tile][3]));
#pragma unroll
                for (int j = 0; j < DIM / 16; j++) {
                    u32 a[4];
                    load_matrices<true>(a, values + tile * 16 * In::ROW + 32 * j);
                    mma<F16>(sums.acc[j], a[0], a[1], a[2], a[3], x, y);
                }
            }
            taken--, fill_full(ahead, pages);
            chunk = next_chunk(chunk, pages);
        }
    }
};

// A query of which each lane has COUNT numbers, rotated (qbe/kernels/reference/rotation.py), with or without signs.
template <int COUNT>
DEVICE void rotate_query(float (&x)[COUNT], int lane, bool signs) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = COUNT * lane + i;
        if (signs && ones(at & at >> 1) & 1) x[i] = -x[i];
    }
#pragma unroll
    for (int bit = 1; bit < COUNT; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (!(i & bit)) {
                float low = x[i];
                x[i] = low + x[i | bit], x[i | bit] = low - x[i | bit];
            }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float other = shuffle_xor(x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = COUNT * lane + i;
        if (signs && ones(at & at >> 1) & 1) x[i] = -x[i];
        x[i] *= COUNT == 4 ? 0.08838834764831845f : 0.125f;
    }
}

// sums and means are as `combine_kernel` takes them; other arguments as in `qbe::paged_attention`, strides in numbers.
template <int DIM, bool F16, bool SOFTCAP>
KERNEL(32 * WARPS, 1)
decode_attention(const u16 *query, const u16 *key, const u16 *value, u8 *memory, const int *blocks, const i64 *slots,
                 const i64 *tables, const i64 *lengths, float *means, float *parts_sums, int q_row, int q_head,
                 int q_one, int k_row, int k_head, int k_one, int v_row, int v_head, int v_one, int table_row,
                 double scaling, double softcap, int parts, int kv_heads, int repeat, int window) {
    using In = Room<DIM>;
    constexpr int COUNT = DIM / 32;  // numbers of a row that a lane has
    Walk<DIM, F16, SOFTCAP> walk;
    Sums<DIM> &sums = walk.sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int head = blockIdx.x % kv_heads, part = blockIdx.y;
    const i64 sequence = blockIdx.x / kv_heads;
    const int length = lengths[sequence], past = length - 1;
    const int first = window > 0 && length > window ? length - window : 0;
    const i64 pages = past > first ? (past + PAGE - 1) / PAGE - first / PAGE : 0;
    const int low = first / PAGE + pages * part / parts, own = first / PAGE + pages * (part + 1) / parts - low;
    const int room = warp * In::WARP;

    tables += sequence * table_row + low;
    query += sequence * q_row + (i64)head * repeat * q_head;
    walk.room = room, walk.lane = lane, walk.group = group, walk.quad = quad;
    walk.to = walk.from = walk.taken = walk.parity = 0, walk.second = false;
    walk.first = first, walk.past = past, walk.memory = memory, walk.queried = group < repeat;
    walk.scaling = scaling, walk.softcap = softcap;
    sums.clear();
    if (lane < SLOTS) barrier_init(room + In::BARRIERS + 8 * lane);
    fence_copies();

    for (int m = warp; m < repeat; m += WARPS) {
        float x[COUNT];
        for (int i = 0; i < COUNT; i++) x[i] = float_of<F16>(query[m * q_head + (i64)(COUNT * lane + i) * q_one]);
        for (int times = 0; times < 2; times++) {
            rotate_query(x, lane, !times);
            const int to = In::QUERIES + ((2 * m + times) * DIM + COUNT * lane) * 2;
            for (int i = 0; i < COUNT; i += 2) store4(to + 2 * i, pack<F16>(x[i], x[i + 1]));
        }
    }

    bool some_full = part == parts - 1 && warp == 0;
    if (some_full) {  // the new token: it is written to its page, and counted first
        const u16 *k = key + sequence * k_row + (i64)head * k_head + (i64)COUNT * lane * k_one;
        const u16 *v = value + sequence * v_row + (i64)head * v_head;
        const i64 slot = slots[sequence];
        u16 *to = (u16 *)(memory + (slot & ~(i64)255) + (blocks[head] & ~255));
        float own_key[COUNT], score[GROUPS];
        for (int i = 0; i < COUNT; i++) {
            float x = float_of<F16>(k[(i64)i * k_one]);
            own_key[i] = x + x * 0;  // infinity becomes NaN, so that it cannot hide behind a score that is low
            to[(slot & 255) * DIM + COUNT * lane + i] = pack<F16>(own_key[i], 0);
            to[PAGE * DIM + (slot & 255) * DIM + COUNT * lane + i] = v[(i64)(COUNT * lane + i) * v_one];
        }
#pragma unroll
        for (int m = 0; m < GROUPS; m++) {
            score[m] = 0;
            if (m < repeat)
                for (int i = 0; i < COUNT; i++)
                    score[m] += float_of<F16>(query[m * q_head + (i64)(COUNT * lane + i) * q_one]) * own_key[i];
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) score[m] += shuffle_xor(score[m], mask);
            if (m / 2 == quad) {
                sums.top[m % 2] = walk.scored(score[m]);
                sums.total[m % 2] = group == 0;
            }
        }
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                sums.acc[j][2 * h] = sums.acc[j][2 * h + 1] = float_of<F16>(v[(i64)(16 * j + 8 * h + group) * v_one]);
    }

    // Pages of 16 bits first, so that acc is rotated once at most; then those of each kind. A list holds them in this
    // order, and the warps take them in turns, so that each has as many of every kind.
    const bool one_list = own <= 32 * WARPS;
    bool turned = false;
    if (!one_list) {
        for (int i = threadIdx.x; i < own; i += 32 * WARPS)
            turned |= (blocks[(tables[i] & 255) * kv_heads + head] & 255) != 16;
        turned = any_of_block(turned);
    }
#pragma unroll 1
    for (int stage = 0; stage < 2; stage++) {
#pragma unroll 1
        for (int base = 0; base < own; base += 32 * WARPS) {
            int ends[KINDS];
            if (stage == 0 || !one_list) {
                const int i = base + threadIdx.x;
                u64 entry = 0;
                int kind = 0, mine = -1, place = 0;
                if (i < own) {
                    entry = tables[i];
                    int word = blocks[(entry & 255) * kv_heads + head];
                    kind = word & 255;
                    entry = (entry & ~(u64)255) + (word & ~255);
                }
                sync_block();  // the list before this one has been read
#pragma unroll
                for (int n = 0; n < KINDS; n++) {
                    u32 same = ballot(kind == kind_of(n));
                    if (same >> lane & 1) mine = n, place = ones(same & ((1u << lane) - 1));
                    if (lane == n) store1(In::COUNTS + 8 * n + warp, ones(same));
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
                    u64 listed = entry | kind | ((low + i) * PAGE < first ? CUT : 0) | (u64)threadIdx.x << 56;
                    store4(In::LIST + 8 * place, (u32)listed);
                    store4(In::LIST + 8 * place + 4, (u32)(listed >> 32));
                }
                sync_block();
            } else {
#pragma unroll
                for (int n = 0; n < KINDS; n++)
                    ends[n] = (n ? ends[n - 1] : 0) + sum_of_bytes(load_u64(In::COUNTS + 8 * n));
            }
            walk.first_listed = low + base;
            if (one_list) turned = ends[KINDS - 1] > ends[0];
            if (stage == 0) {
                if (warp >= ends[0]) continue;
                walk.full(query + (i64)(group < repeat ? group : 0) * q_head, q_one, warp, ends[0]);
                some_full = true;
                continue;
            }
            int i = ends[0] + warp;
            walk.next = i, walk.second = false;
            i = walk.eight_bits(i, ends[1], ends[5]);
            i = walk.template few_bits<4, false>(i, ends[2], ends[5]);
            i = walk.template few_bits<2, false>(i, ends[3], ends[5]);
            i = walk.template few_bits<4, true>(i, ends[4], ends[5]);
            i = walk.template few_bits<2, true>(i, ends[5], ends[5]);
        }
        if (stage == 0 && turned) {
            fence_copies();  // rows may have been set to zero where codes come next
            if (some_full) sums.rotate(group);
        }
    }

    // The warps' sums together: each leaves its own where its keys and values came.
    sums.finish();
    sync_warp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int column = room + 4 * (2 * quad + i) * DIM;
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                store4(column + 4 * (16 * j + 8 * h + group), bits_of_float(sums.acc[j][2 * h + i]));
        if (group == 0) {
            const int at = room + In::SCALES + 12 * (2 * quad + i);
            store4(at, bits_of_float(sums.top[i]));
            store4(at + 4, bits_of_float(sums.total[i]));
            store4(at + 8, bits_of_float(sums.weighted[i]));
        }
    }
    sync_block();
    float *out = means + ((sequence * parts + part) * kv_heads + head) * repeat * DIM;
    float *out_sums = parts_sums + (sequence * parts + part) * 3 * kv_heads * repeat + head * repeat;
    for (int m = warp; m < repeat; m += WARPS) {
        float top = HIDDEN, total = 0, weighted = 0, factors[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, float_of_bits(load4(w * In::WARP + In::SCALES + 12 * m)));
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int at = w * In::WARP + In::SCALES + 12 * m;
            const float own_top = float_of_bits(load4(at)), own_total = float_of_bits(load4(at + 4));
            factors[w] = power2(own_top - top);
            total += own_total * factors[w];
            weighted += (float_of_bits(load4(at + 8)) + own_total * own_top) * factors[w];
        }
        // A part without keys has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
        const float some = total > 0 || total != total ? total : 1;
        for (int d = lane; d < DIM; d += 32) {
            float x = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x += float_of_bits(load4(w * In::WARP + 4 * (m * DIM + d))) * factors[w];
            out[m * DIM + d] = x / some;
        }
        if (lane == 0) {
            out_sums[m] = top + logarithm2(total);
            out_sums[kv_heads * repeat + m] = weighted / some;
            out_sums[2 * kv_heads * repeat + m] = turned;
        }
    }
}
