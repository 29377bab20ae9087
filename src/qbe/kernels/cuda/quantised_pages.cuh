// Pages of 8 bits and fewer, multiplied and added to the sums. Their codes are multiplied as bytes, with queries and
// weights of 16 bits, which are two bytes each (codes.cuh): column 2 h of a product is the high bytes of query head h,
// column 2 h + 1 its low ones, so that a lane gets both of one head. All numbers of a product share an exponent:
// queries times scales of a page's channels are relative to the largest scale, weights times scales of its tokens to
// the largest of these.
//
// EXACT: of such numbers all 16 bits count at every code (field_of), as results in float16 need it.
//
// Everything but the unpacking of codes is the same for all kinds, and there is one copy of it: blocks that go through
// pages of several kinds wait for instructions where each kind has a loop of its own.

// Which tokens a lane has scores of: in half h of tile 2 p + s, for word a = 2 p + h of the values' operands, that is
// own + (a & 1) * near + (a >> 1) * far + 2 s.
struct Tokens {
    int own, near, far;

    DEVICE static Tokens of(int bits, int group) {
        const int own = 2 * bits * (group >> 1) + (group & 1);
        return bits == 8 ? Tokens{own, 4, 8} : bits == 4 ? Tokens{own, 32, 4} : Tokens{own, 16, 32};
    }

    DEVICE int at(int a, int s) const { return own + (a & 1) * near + (a >> 1) * far + 2 * s; }
};

template <int DIM, bool EXACT, bool SOFTCAP, int SETS>
struct Quantised {
    using In = Room<DIM>;
    static constexpr int STEPS = DIM / 16;  // words of a token's codes that a lane has, of four channels each
    static constexpr int QUARTER = DIM / 4, WORDS = DIM / 64;  // channels, and a lane's words of each quarter
    Ring<DIM> &ring;
    Sums<DIM, SETS> &sums;
    int lane, group, quad;
    float softcap;
    u32 q[SETS][STEPS][2];  // of the head of this lane's column: two channels each, float16
    float floats[SETS == 1 ? STEPS : 1][4];  // the same, where there is room for it
    float factor[SETS];     // of this lane's scores, those of head quad
    u32 part;               // which bytes of a number the column has: 0 for the high ones

    DEVICE Quantised(Ring<DIM> &ring, Sums<DIM, SETS> &sums, int lane, float softcap)
        : ring(ring), sums(sums), lane(lane), group(lane / 4), quad(lane % 4), softcap(softcap), part(lane >> 2 & 1) {}

    // The first of the four channels of a word.
    DEVICE int channel(int a) const { return a / WORDS * QUARTER + quad * (QUARTER / 4) + 4 * (a % WORDS); }

    static DEVICE int place_of(int head, bool twice) { return 2 * head + twice; }

    template <bool TWICE>
    DEVICE void load_queries(u32 (&x)[SETS][STEPS][2]) const {
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int a = 0; a < STEPS; a++) {
                const int place = place_of(group / 2 + HEADS * set, TWICE);
                const words2 two = load8(In::QUERIES + 2 * (place * DIM + channel(a)));
                x[set][a][0] = two.x, x[set][a][1] = two.y;
            }
    }

    DEVICE float power_of(int set, bool twice) const {
        return float_of_bits(load4(In::POWERS + 4 * place_of(quad + HEADS * set, twice)));
    }

    // Pages i, ring.after(i), .. before `all` of the list.
    DEVICE void walk(int i, int all) {
        ring.fill(all);
        load_queries<false>(q);
        if (SETS == 1)
#pragma unroll
            for (int a = 0; a < STEPS; a++)
#pragma unroll
                for (int k = 0; k < 4; k++) floats[SETS == 1 ? a : 0][k] = float_of_f16(q[0][a][k / 2] >> 16 * (k % 2) & 0xFFFF);
#pragma unroll
        for (int set = 0; set < SETS; set++) factor[set] = power_of(set, false);
#pragma unroll 1
        for (; i < all; i = ring.after(i)) {
            const u64 block_id = listed<DIM>(i);
            const int kind = block_id & 127, bits = kind & 15, codes = 8 * DIM * bits;
            const Tokens tokens = Tokens::of(bits, group);
            const int keys = ring.wait();
            float s[SETS][4][2];
            u32 scaled[SETS][STEPS];
            const float largest = spread_scales(keys + (kind == 8 ? codes : 2 * codes), kind);
            float off[SETS];
            scale_queries(scaled, q, SETS == 1);
            add_lows(off);
            if (rarely(kind > TURBO)) {
                if (bits == 4) multiply_turbo<4>(s, scaled, keys, tokens);
                else multiply_turbo<2>(s, scaled, keys, tokens);
            } else if (kind == 4) multiply_keys<4>(s, scaled, keys);
            else if (kind == 2) multiply_keys<2>(s, scaled, keys);
            else multiply_keys<8>(s, scaled, keys);
            score(s, off, largest, block_id, tokens);
            int page = keys;
            if (kind == 8) ring.release(all), page = ring.wait();

            u32 weights[SETS][4];
            float to_sums[SETS];
            const int values = kind == 8 ? page : page + codes;
            const int scales = kind == 8    ? page + codes
                               : kind < TURBO ? page + 2 * codes + 4 * DIM
                                              : page + 2 * codes + 4 * PAGE + 2 * DIM;
            weigh(weights, to_sums, s, scales, bits, tokens);
            if (bits == 4) multiply_values<4>(weights, to_sums, values);
            else if (bits == 2) multiply_values<2>(weights, to_sums, values);
            else multiply_values<8>(weights, to_sums, values);
            ring.release(all);
        }
    }

    // Scales of a page's channels, over the largest of them, and lows, to where all lanes find them; returns the
    // largest. Turbo keys have a mean for each channel, and scales elsewhere.
    DEVICE float spread_scales(int scales, int kind) {
        constexpr int COUNT = DIM / 32;  // channels of a lane
        u32 pairs[COUNT], lows[COUNT / 2];
        float x[COUNT], largest = 1;
        sync_warp();  // those of the page before have been read
        if (!rarely(kind > TURBO)) {
            load_words(pairs, scales + 4 * COUNT * lane);
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < COUNT; i++) most = most_of_halves(most, pairs[i]);
            largest = float_of_f16(most_of_warp(most & 0xFFFF));
            // Channels of odd fields: of 4 bits the second half of them, of 2 bits the second and the fourth quarter.
            float less = largest > 0 ? LARGEST / 2 * reciprocal(largest) : 0;
            if (kind == 4 ? lane & 16 : kind == 2 ? lane & 8 : 0) less *= odd_field<EXACT>(kind);
#pragma unroll
            for (int i = 0; i < COUNT; i++) x[i] = float_of_f16(pairs[i] & 0xFFFF) * less;
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) lows[i / 2] = bytes_of(pairs[i], pairs[i + 1], 0x7632);
        } else {
            load_words(lows, scales + 4 * PAGE + 2 * COUNT * lane);
#pragma unroll
            for (int i = 0; i < COUNT; i++) x[i] = LARGEST / 2;
        }
        const int at = ring.room + In::SCALES + 4 * COUNT * lane, low_at = ring.room + In::LOWS + 2 * COUNT * lane;
        if constexpr (COUNT == 4) {
            store16(at, words4{bits_of_float(x[0]), bits_of_float(x[1]), bits_of_float(x[2]), bits_of_float(x[3])});
            store8(low_at, words2{lows[0], lows[1]});
        } else {
            store8(at, words2{bits_of_float(x[0]), bits_of_float(x[1])});
            store4(low_at, lows[0]);
        }
        sync_warp();
        return largest;
    }

    // Queries times scales, which is at most LARGEST, as bytes of this lane's column.
    DEVICE void scale_queries(u32 (&scaled)[SETS][STEPS], const u32 (&x)[SETS][STEPS][2], bool have_floats) const {
#pragma unroll
        for (int a = 0; a < STEPS; a++) {
            const words4 by = load16(ring.room + In::SCALES + 4 * channel(a));
            const float scales[4] = {float_of_bits(by.x), float_of_bits(by.y), float_of_bits(by.z), float_of_bits(by.w)};
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float y[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    y[k] = (have_floats ? floats[SETS == 1 ? a : 0][k] : float_of_f16(x[set][a][k / 2] >> 16 * (k % 2) & 0xFFFF)) *
                               scales[k] + TO_BYTES;
                scaled[set][a] = own_bytes(y[0], y[1], y[2], y[3]);
            }
        }
    }

    DEVICE u32 own_bytes(float x, float y, float z, float w) const {
        const u32 which = part ? 0x40 : 0x51;
        const u32 low = bytes_of(bits_of_float(x), bits_of_float(y), which);
        const u32 high = bytes_of(bits_of_float(z), bits_of_float(w), which);
        return bytes_of(low, high, 0x5410) ^ (part ? SIGNS : 0);
    }

    // What the lows of channels add to every token's score. Lows are left operands as they lie: the first and the third
    // word are of rows of which the products with their channels' queries are taken, so are the second and the fourth.
    DEVICE void add_lows(float (&off)[SETS]) const {
        float first[SETS][4], second[SETS][4];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int k = 0; k < 4; k++) first[set][k] = second[set][k] = 0;
#pragma unroll
        for (int a = 0; a < STEPS; a += 2) {
            const int at = ring.room + In::LOWS + 2 * channel(a);
            u32 low[4];
            if constexpr (WORDS == 2) {
                load_words(low, at);
            } else {
                const words2 x = load8(at), y = load8(at + 2 * QUARTER);
                low[0] = x.x, low[1] = x.y, low[2] = y.x, low[3] = y.y;
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float(&x)[4] = first[set], (&y)[4] = second[set];
                mma<true>(x[0], x[1], x[2], x[3], low[0], low[1], low[2], low[3], q[set][a][0], q[set][a + 1][0]);
                mma<true>(y[0], y[1], y[2], y[3], low[0], low[1], low[2], low[3], q[set][a][1], q[set][a + 1][1]);
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) off[set] = first[set][0] + second[set][2];
    }

    // The codes of a token that a lane multiplies: word `a` of STEPS.
    template <int BITS>
    static DEVICE u32 key_word(const u32 (&x)[BITS / 2][WORDS], int a) {
        const int quarter = a / WORDS;  // of 8 bits a quarter of the row, of 4 bits half of a field, of 2 bits a field
        return BITS == 8   ? x[quarter % (BITS / 2)][a % WORDS]
               : BITS == 4 ? field_of<4, EXACT>(x[quarter % (BITS / 2)][a % WORDS], quarter >> 1)
                           : field_of<2, EXACT>(x[0][a % WORDS], quarter);
    }

    template <int BITS>
    DEVICE void load_keys(u32 (&x)[BITS / 2][WORDS], int at) const {
#pragma unroll
        for (int i = 0; i < BITS / 2; i++) load_words(x[i], at + i * QUARTER);
    }

    static DEVICE constexpr int token_offset(int bits, int a, int s) {
        return bits == 8 ? 4 * a + 2 * s : bits == 4 ? 32 * (a & 1) + 4 * (a >> 1) + 2 * s : 16 * a + 2 * s;
    }

    // Integer scores.
    template <int BITS>
    DEVICE void multiply_keys(float (&s)[SETS][4][2], const u32 (&scaled)[SETS][STEPS], int keys) const {
        constexpr int ROW = DIM * BITS / 8;
        const int own = keys + Tokens::of(BITS, group).own * ROW + quad * (QUARTER / 4);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            u32 x[BITS / 2][WORDS], y[BITS / 2][WORDS];
            int sum[SETS][4];
            load_keys<BITS>(x, own + token_offset(BITS, tile / 2 * 2, tile % 2) * ROW);
            load_keys<BITS>(y, own + token_offset(BITS, tile / 2 * 2 + 1, tile % 2) * ROW);
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int k = 0; k < 4; k++) sum[set][k] = 0;
#pragma unroll
            for (int a = 0; a < STEPS; a += 2)
#pragma unroll
                for (int set = 0; set < SETS; set++)
                    mma_bytes<false>(sum[set], key_word<BITS>(x, a), key_word<BITS>(y, a), key_word<BITS>(x, a + 1),
                                     key_word<BITS>(y, a + 1), scaled[set][a], scaled[set][a + 1]);
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int h = 0; h < 2; h++) s[set][tile][h] = joined(sum[set][2 * h], sum[set][2 * h + 1]);
        }
    }

    static DEVICE float joined(int high, int low) { return high * 256 + low; }

    // The same of turbo keys: their tokens have a scale for levels, and one for sketches.
    template <int BITS>
    DEVICE void multiply_turbo(float (&s)[SETS][4][2], const u32 (&scaled)[SETS][STEPS], int keys, Tokens tokens) const {
        constexpr int ROW = DIM * BITS / 8;
        const int own = keys + tokens.own * ROW + quad * (QUARTER / 4), scales = keys + 16 * DIM * BITS;
        u32 twice[SETS][STEPS][2], sketched[SETS][STEPS];
        load_queries<true>(twice);
        scale_queries(sketched, twice, false);
        float ratio[SETS];
#pragma unroll
        for (int set = 0; set < SETS; set++) ratio[set] = power_of(set, true) / factor[set];
#pragma unroll 1  // such pages are rare, and their instructions are not to be in the way of others
        for (int tile = 0; tile < 4; tile++) {
            u32 x[BITS / 2][WORDS], y[BITS / 2][WORDS];
            load_keys<BITS>(x, own + token_offset(BITS, tile / 2 * 2, tile % 2) * ROW);
            load_keys<BITS>(y, own + token_offset(BITS, tile / 2 * 2 + 1, tile % 2) * ROW);
            int levels[SETS][4], signs[SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int k = 0; k < 4; k++) levels[set][k] = signs[set][k] = 0;
#pragma unroll
            for (int a = 0; a < STEPS; a += 2) {
                u32 level[4], sign[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int quarter = (a + k / 2) / WORDS, word = (a + k / 2) % WORDS;
                    const u32 from = (k & 1 ? y : x)[quarter % (BITS / 2)][word];
                    const int field = BITS == 4 ? quarter >> 1 : quarter;
                    level[k] = turbo_levels<BITS>(from, field), sign[k] = turbo_signs<BITS>(from, field);
                }
#pragma unroll
                for (int set = 0; set < SETS; set++) {
                    mma_bytes<true>(levels[set], level[0], level[1], level[2], level[3], scaled[set][a], scaled[set][a + 1]);
                    mma_bytes<true>(signs[set], sign[0], sign[1], sign[2], sign[3], sketched[set][a], sketched[set][a + 1]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 pair = load4(scales + 4 * tokens.at(tile / 2 * 2 + h, tile % 2));
                const float level = float_of_f16(pair & 0xFFFF), sign = float_of_f16(pair >> 16);
#pragma unroll
                for (int set = 0; set < SETS; set++) {
                    const float score = joined(levels[set][2 * h], levels[set][2 * h + 1]) * level +
                                        joined(signs[set][2 * h], signs[set][2 * h + 1]) * (sign * ratio[set]);
#pragma unroll
                    for (int other = 0; other < 4; other++)
                        if (other == tile) s[set][other][h] = score;
                }
            }
        }
    }

    // Integer scores become scores, times log2 e; tokens before a window are not seen.
    DEVICE void score(float (&s)[SETS][4][2], const float (&off)[SETS], float largest, u64 block_id, Tokens tokens) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float by = factor[set] * largest * (2.0f / LARGEST), more = off[set] * factor[set];
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    s[set][tile][h] = s[set][tile][h] * by + more;
                    if (SOFTCAP) s[set][tile][h] = capped<true>(s[set][tile][h], softcap) * LOG2E;
                }
        }
        if (!(block_id & CUT)) return;
        const int hidden = ring.first - ring.first_key(block_id);
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (tokens.at(tile / 2 * 2 + h, tile % 2) < hidden)
#pragma unroll
                    for (int set = 0; set < SETS; set++) s[set][tile][h] = HIDDEN;
    }

    // Scores become weights times the scales of their tokens' values, as bytes of this lane's column, and are counted.
    // `to_sums` is what the products have to be multiplied with.
    DEVICE void weigh(u32 (&weights)[SETS][4], float (&to_sums)[SETS], float (&s)[SETS][4][2], int scales, int bits,
                      Tokens tokens) {
        u32 pairs[4][2];
        float most[SETS];
        bool over = false;
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) pairs[tile][h] = load4(scales + 4 * tokens.at(tile / 2 * 2 + h, tile % 2));
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            most[set] = HIDDEN;
#pragma unroll
            for (int tile = 0; tile < 4; tile++) most[set] = fmaxf(most[set], fmaxf(s[set][tile][0], s[set][tile][1]));
            most[set] = sums.most_of_groups(most[set]);
            over |= most[set] > sums.top[set];
        }
        if (any(over)) sums.lift(most);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            // The largest number is that of the tokens' own scales: the highest score may be of one whose value is
            // small. It is found by bits, of which those of NaN are the largest, so that none is dropped.
            float total = 0, weighted = 0, base = 0, number[4][2];
            u32 largest_bits = 0, both[4];  // halves of a tile
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float x = s[set][tile][h] - most[set], weight = power2(x);
                    total += weight, weighted += weight * x;
                    base += weight * float_of_f16(pairs[tile][h] >> 16);
                    number[tile][h] = weight * float_of_f16(pairs[tile][h] & 0xFFFF);
                    largest_bits = max(largest_bits, bits_of_float(number[tile][h]));
                }
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) largest_bits = max(largest_bits, shuffle_word_xor(largest_bits, mask));
            const float largest = float_of_bits(largest_bits);
            const float less = largest > NOTHING ? LARGEST * reciprocal(largest) : 0, odd_less = less * odd_field<EXACT>(bits);
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
                both[tile] = transposed(bytes_of(bits_of_float(number[tile][0] * less + TO_BYTES),
                                                 bits_of_float(number[tile][1] * odd_less + TO_BYTES), 0x5410));
            const float by = power2(most[set] - sums.top[set]);
            sums.total[set] += total * by, sums.bases[set] += base * by;
            sums.weighted[set] += (weighted + total * (most[set] - sums.top[set])) * by;
            to_sums[set] = by * largest * (1.0f / LARGEST);
            // A lane has both bytes of half `part` of its head's tokens now, and needs one byte of both halves.
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const u32 kept = bytes_of(both[2 * p], both[2 * p + 1], part ? 0x6420 : 0x7531);
                const u32 given = bytes_of(both[2 * p], both[2 * p + 1], part ? 0x7531 : 0x6420);
                const u32 taken = shuffle_word_xor(given, 4);
                weights[set][2 * p] = (part ? taken : kept) ^ (part ? SIGNS : 0);
                weights[set][2 * p + 1] = (part ? kept : taken) ^ (part ? SIGNS : 0);
            }
        }
    }

    template <int BITS>
    DEVICE void multiply_values(const u32 (&weights)[SETS][4], const float (&to_sums)[SETS], int values) {
        constexpr int FIELDS = 8 / BITS;
        const int own = values + group * (8 * BITS) + quad * (2 * BITS);
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            u32 x[BITS / 2], y[BITS / 2];
            load_words(x, own + 16 * j * 8 * BITS);
            load_words(y, own + (16 * j + 8) * 8 * BITS);
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                int sum[4] = {0, 0, 0, 0};
#pragma unroll
                for (int a = 0; a < 4; a += 2)
                    mma_bytes<false>(sum, field_of<BITS, EXACT>(x[a / FIELDS], a % FIELDS), field_of<BITS, EXACT>(y[a / FIELDS], a % FIELDS),
                                     field_of<BITS, EXACT>(x[(a + 1) / FIELDS], (a + 1) % FIELDS),
                                     field_of<BITS, EXACT>(y[(a + 1) / FIELDS], (a + 1) % FIELDS), weights[set][a],
                                     weights[set][a + 1]);
                sums.acc[set][j][0] += joined(sum[0], sum[1]) * to_sums[set];
                sums.acc[set][j][1] += joined(sum[2], sum[3]) * to_sums[set];
            }
        }
    }
};
