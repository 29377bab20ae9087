// What attention sums up, and its softmax.

// An online softmax of a lane's query heads: head quad, of eight heads quad + 4 too; over the tokens of its group.
template <int DIM, int SETS>
struct Sums {
    float acc[SETS][DIM / 16][2];  // weight * value: channels 16 j + group and + 8
    float top[SETS];               // what sums are relative to: no score of a quantised page is above it
    float total[SETS];             // of weights
    float weighted[SETS];          // weight * (score - top)
    float bases[SETS];             // what the lows of values add to all channels

    DEVICE void clear() {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) acc[set][j][0] = acc[set][j][1] = 0;
            top[set] = HIDDEN, total[set] = weighted[set] = bases[set] = 0;
        }
    }

    // Sums are relative to `most` from now on, where that is higher.
    DEVICE void lift(const float (&most)[SETS]) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float higher = fmaxf(top[set], most[set]), factor = power2(top[set] - higher);
            weighted[set] = (weighted[set] + total[set] * (top[set] - higher)) * factor;
            total[set] *= factor, bases[set] *= factor;
            top[set] = higher;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) acc[set][j][0] *= factor, acc[set][j][1] *= factor;
        }
    }

    // Scores (times log2 e) of tokens of 16 bits, a set's in columns `set` and 2 + `set`, become their weights.
    template <bool F16, int TILES>
    DEVICE void add(float (&s)[TILES][4]) {
        float most[SETS];
        bool over = false;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            most[set] = HIDDEN;
#pragma unroll
            for (int i = 0; i < TILES; i++) most[set] = fmaxf(most[set], fmaxf(s[i][set], s[i][2 + set]));
            over |= most[set] > top[set] + SLACK<F16>;
        }
        if (any(over)) {
#pragma unroll
            for (int set = 0; set < SETS; set++) most[set] = most_of_groups(most[set]);
            lift(most);
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int h = 0; h < 4; h += 2)
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const float x = s[i][h + set] - top[set], weight = power2(x);
                    total[set] += weight, weighted[set] += weight * x;
                    s[i][h + set] = weight;
                }
    }

    // Over the tokens of all groups.
    DEVICE void finish() {
        add_bases();
#pragma unroll
        for (int set = 0; set < SETS; set++)
            total[set] = of_groups(total[set]), weighted[set] = of_groups(weighted[set]);
    }

    // To all channels as they are now, rotated.
    DEVICE void add_bases() {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float base = of_groups(bases[set]);
            bases[set] = 0;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) acc[set][j][0] += base, acc[set][j][1] += base;
        }
    }

    static DEVICE float of_groups(float x) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
        return x;
    }

    static DEVICE float most_of_groups(float x) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
        return x;
    }

    // The rotation of quantised pages (qbe/kernels/reference/rotation.py), its own inverse, of acc.
    DEVICE void rotate(int group) {
        add_bases();
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float(&x)[DIM / 16][2] = acc[set];
            sign(x, group);
#pragma unroll
            for (int bit = 1; bit < 8; bit *= 2)
#pragma unroll
                for (int j = 0; j < DIM / 16; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float other = shuffle_xor(x[j][h], 4 * bit);
                        x[j][h] = group & bit ? other - x[j][h] : x[j][h] + other;
                    }
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) butterfly(x[j][0], x[j][1]);
#pragma unroll
            for (int bit = 1; bit < DIM / 16; bit *= 2)
#pragma unroll
                for (int j = 0; j < DIM / 16; j++)
                    if (!(j & bit)) butterfly(x[j][0], x[j | bit][0]), butterfly(x[j][1], x[j | bit][1]);
            sign(x, group);
            const float factor = DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) x[j][0] *= factor, x[j][1] *= factor;
        }
    }

    static DEVICE void butterfly(float &a, float &b) {
        const float low = a;
        a = low + b, b = low - b;
    }

    static DEVICE void sign(float (&x)[DIM / 16][2], int group) {
#pragma unroll
        for (int j = 0; j < DIM / 16; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = 16 * j + 8 * h + group;
                if (ones(at & at >> 1) & 1) x[j][h] = -x[j][h];
            }
    }
};
