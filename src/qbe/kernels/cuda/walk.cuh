// Pages of every kind: copied ahead, multiplied, added to the sums.

// A warp on its way through pages of one head.
template <int DIM, bool F16, bool SOFTCAP>
struct Walk {
    using In = Room<DIM>;
    Sums<DIM> sums;
    int room;           // where this warp's shared memory begins
    int next;           // page of the list to be copied next
    bool second;        // of which its keys, of 8 bits, are copied already
    int turns, step;    // before page `turns` of the list this warp takes every step-th one
    int to, from;       // slots that the next copy goes to, and that is read next
    int taken;          // slots that copies went to and that are not free yet
    u32 parity;         // of the slots' barriers
    int lane, group, quad;
    int first, past;    // keys that are seen
    int first_listed;   // the page that has place 0
    const u8 *memory;
    bool queried;  // whether there is a query for this group
    float scaling, softcap;

    // Warps take sealed pages in turns, those with a page of 16 bits only when the others have had AHEAD: so much time
    // goes into such a page, whose instructions come from far away, and into the rotation after it. Returns the first.
    DEVICE int take_turns(int full, int warp) {
        const int busy = full < WARPS ? full : 0;
        step = WARPS - busy, turns = full + AHEAD * step;
        return warp < busy ? turns + step + warp : full + ((warp - full) & (WARPS - 1));
    }

    DEVICE int after(int i) const { return i + (i < turns ? step : WARPS); }

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

    // Pages i, after(i), .. before end of the list, which ends at `all`. Returns the first one of this warp that is left.
    DEVICE int eight_bits(int i, int end, int all) {
        constexpr int BITS = 8;
        if (i >= end) return i;
        forget(room);
        fill(all);
        float q[DIM / 16][4];
        load_query<BITS>(q);
#pragma unroll 1
        for (; i < end; i = after(i)) {
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
        for (;; i = after(i)) {
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
            const int at = room + In::SCALES + swapped<BITS>(8 * channel<BITS>(k)) + 16 * pad;
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

    // With 2 bits every other 128 bytes of scales have the halves of their 64 bytes swapped.
    template <int BITS>
    static DEVICE int swapped(int at) {
        return BITS == 2 ? at ^ (at >> 2 & 32) : at;
    }

    // Scale and low of a channel as floats, the low as what code CENTRE stands for.
    template <int BITS>
    DEVICE void centres(int scales) {
        constexpr int COUNT = DIM / 32, CODES = 8 * DIM * BITS;
        constexpr float CENTRE = Codes<BITS>::CENTRE;
        // Lanes of a quad read channels that lie ROW / 4 apart: 16 bytes in between keep them in different banks, for
        // which there is no room with 2 bits.
        const int pad = BITS == 2 ? 0 : COUNT * lane / (CODES / 256);
        u32 pairs[COUNT];
        load_words(pairs, scales + 4 * COUNT * lane);
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float x = float_of_f16(pairs[i] & 0xFFFF), y = float_of_f16(pairs[i + 1] & 0xFFFF);
            float u = float_of_f16(pairs[i] >> 16) + CENTRE * x, v = float_of_f16(pairs[i + 1] >> 16) + CENTRE * y;
            words4 out = {bits_of_float(x), bits_of_float(u), bits_of_float(y), bits_of_float(v)};
            store16(room + In::SCALES + swapped<BITS>(8 * (COUNT * lane + i)) + 16 * pad, out);
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
