// What attention sums up, and its softmax.

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
        add_bases();
#pragma unroll
        for (int i = 0; i < 2; i++) total[i] = of_groups(total[i]), weighted[i] = of_groups(weighted[i]);
    }

    // To all channels as they are now, rotated.
    DEVICE void add_bases() {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float base = of_groups(bases[i]);
            bases[i] = 0;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) acc[j][i] += base, acc[j][2 + i] += base;
        }
    }

    static DEVICE float of_groups(float x) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
        return x;
    }

    // The rotation of sealed pages (qbe/kernels/reference/rotation.py), its own inverse, of acc.
    DEVICE void rotate(int group) {
        add_bases();
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
