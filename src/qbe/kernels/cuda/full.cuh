// Pages of 16 bits, multiplied and added to the sums.

// Columns of a product are query heads: column n is head n / 2, of eight heads n / 2 + 4 if n is odd, so that a lane's
// two columns are the heads of its sums.
template <int DIM, bool F16, bool SOFTCAP, int SETS>
struct Full {
    Ring<DIM> &ring;
    Sums<DIM, SETS> &sums;
    int lane, group;
    float scaling, softcap;

    static DEVICE int head_of(int group) { return group / 2 + HEADS * (group & 1); }

    DEVICE float scored(float score) const { return capped<SOFTCAP>(score * scaling, softcap) * LOG2E; }

    // The first `pages` of the list, this warp's in turns from its first one on. `query`: of head_of(group), if
    // queried.
    DEVICE void walk(const u16 *query, i64 one, bool queried, int warp, int pages) {
        int chunk = ring.next_chunk(2 * warp - 2 * WARPS + 1, pages);
        int ahead = chunk;
        ring.second = false;
        ring.fill_full(ahead, pages);  // come while the queries do
        const int quad = lane % 4;
        u32 q[DIM / 16][2];
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u16 *at = query + (16 * k + 8 * h + 2 * quad) * one;
                q[k][h] = queried ? at[0] | (u32)at[one] << 16 : 0;
            }
        float none[DIM / 16][2];  // sums of the columns that have no head
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) none[j][0] = none[j][1] = 0;
        const int key_row = lane & 15, value_row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll 1
        while (chunk < 2 * pages) {
            const int begin = ring.seen_begin(chunk), end = ring.seen_end(chunk);
            float s[2][4];
            const int keys = ring.wait();
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
#pragma unroll
                for (int k = 0; k < 4; k++) s[tile][k] = 0;
#pragma unroll
                for (int k = 0; k < DIM / 16; k++) {
                    u32 a[4];
                    load_matrices<false>(a, keys + ring.swizzled(16 * tile + key_row, 2 * k + (lane >> 4)));
                    mma<F16>(s[tile][0], s[tile][1], s[tile][2], s[tile][3], a[0], a[1], a[2], a[3], q[k][0], q[k][1]);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int token = 16 * tile + 8 * (k / 2) + group;
                    s[tile][k] = token >= begin && token < end ? scored(s[tile][k]) : HIDDEN;
                }
            }
            ring.taken--, ring.fill_full(ahead, pages);
            sums.template add<F16>(s);
            const int values = ring.wait();
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                if (SETS == 1) s[tile][1] = s[tile][3] = 0;
                u32 x = transposed(pack<F16>(s[tile][0], s[tile][1])), y = transposed(pack<F16>(s[tile][2], s[tile][3]));
#pragma unroll
                for (int j = 0; j < DIM / 16; j++) {
                    u32 a[4];
                    float(&other)[2] = SETS == 1 ? none[j] : sums.acc[SETS - 1][j];
                    load_matrices<true>(a, values + ring.swizzled(16 * tile + value_row, 2 * j + (lane >> 3 & 1)));
                    mma<F16>(sums.acc[0][j][0], other[0], sums.acc[0][j][1], other[1], a[0], a[1], a[2], a[3], x, y);
                }
            }
            ring.taken--, ring.fill_full(ahead, pages);
            chunk = ring.next_chunk(chunk, pages);
        }
    }
};
