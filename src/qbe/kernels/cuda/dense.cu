// Fragments back to rows of numbers, at one precision: for products of so many rows that a library multiplies (dense.py).
// A block has 64 outputs and two blocks of 64 inputs; a warp has 16 outputs of one of them.

struct Dense {
    const u8 *codes;  // fragments.py
    const int *words;  // of the rows: where none has bits in low <= bits < high nothing is done
    u8 *out;
    const float *largest;  // of 8-bit formats: a bound of each output's magnitudes, from output `first` on
    float *scales;
    i64 plane2, plane1, pairs;  // where in `codes` they begin
    int rows, low, high;
    int inputs, group, count;  // inputs padded to groups; pairs of scales of a group
    int precision, exponent, first;  // index; first tile of 64 outputs
};

enum { BF16, HALF, FLOAT, E4M3, INT8 };

template <int KIND>
DEVICE void write_pair(u8 *out, i64 at, float low, float high) {
    if (KIND == BF16) *(u32 *)(out + 2 * at) = pack<false>(low, high);
    if (KIND == HALF) *(u32 *)(out + 2 * at) = pack<true>(low, high);
    if (KIND == FLOAT) ((float *)out)[at] = low, ((float *)out)[at + 1] = high;
    if (KIND == E4M3) *(u16 *)(out + at) = pack_e4m3(low, high);
    if (KIND == INT8) *(u16 *)(out + at) = ((int)floorf(low + 0.5f) & 255) | ((int)floorf(high + 0.5f) & 255) << 8;
}

template <int KIND>
KERNEL(256, 4)
dequantise(GIVEN Dense of) {
    wait_for_kernels();
    begin_next_kernel();
    if (of.rows) {
        bool some = false;
        for (int i = threadIdx.x % 32; i < of.rows; i += 32) {
            const int bits = of.words[i] & 255;
            some |= bits >= of.low && bits < of.high;
        }
        if (!any(some)) return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int blocks = of.inputs / 64, wide = (blocks + 1) / 2;
    const int out_tile = blockIdx.x / wide, tile = of.first + out_tile, block = blockIdx.x % wide * 2 + warp / 4, part = warp % 4;
    if (block >= blocks) return;
    const i64 at = ((i64)tile * blocks + block) * 4 + part;
    const words4 high = *(const words4 *)(of.codes + 16 * (32 * at + lane));
    words2 two = {}, one = {};
    if (of.precision > 0) two = *(const words2 *)(of.codes + of.plane2 + 8 * (32 * at + lane));
    if (of.precision > 1) one = *(const words2 *)(of.codes + of.plane1 + 8 * (32 * at + lane));
    const i64 group = (i64)tile * (of.inputs / of.group) + block * 64 / of.group;
    const u8 *scales = of.codes + of.pairs + group * 128 * of.count + 16 * g + 4 * part;
    const u32 base = *(const u32 *)scales, pair = of.precision == 2 ? 0 : *(const u32 *)(scales + 128 * (of.precision + 1));
    const u32 words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const i64 output = (i64)out_tile * 64 + 16 * part + 8 * h + g;
        Scale scale = scale_of(base, pair, of.precision, h, of.exponent);
        float factor = 1;
        if (KIND >= E4M3) {
            const float most = KIND == E4M3 ? 448 : 127, largest = fmaxf(of.largest[output], 1e-30f);
            factor = most / largest;
            if (block == 0 && t == 0) of.scales[output] = largest * (1 / most);
        }
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int kk = 0; kk < 2; kk++) {
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int from = 2 * (4 * (s & 1) + h + 2 * kk) + 16 * e;
                    u32 code = words[s] >> (4 * (h + 2 * kk) + 16 * e) & 15;
                    if (of.precision > 0) code = code << 2 | ((s < 2 ? two.x : two.y) >> from & 3);
                    if (of.precision > 1) code = code << 2 | ((s < 2 ? one.x : one.y) >> from & 3);
                    x[e] = ((float)code - scale.offset) * scale.scale;
                    if (KIND >= E4M3) x[e] *= factor;
                }
                write_pair<KIND>(of.out, output * of.inputs + 64 * block + 16 * s + 8 * kk + 2 * t, x[0], x[1]);
            }
    }
}

// A bound of the magnitudes of each output, from its scales alone (`qbe.format.scales.largest_of_rows`).
KERNEL(256, 1)
bounds(GIVEN Dense of) {
    wait_for_kernels();
    begin_next_kernel();
    const int output = blockIdx.x * 256 + threadIdx.x, groups = of.inputs / of.group, n = output % 64;
    if (output >= of.rows) return;
    const u8 *scales = of.codes + of.pairs + (i64)(of.first + output / 64) * groups * 128 * of.count;
    scales += 16 * (n % 8) + 4 * (n / 16);
    const float top = (16 << 2 * of.precision) - 1;
    float most = 0;
    for (int i = 0; i < groups; i++, scales += 128 * of.count) {
        const u32 pair = of.precision == 2 ? 0 : *(const u32 *)(scales + 128 * (of.precision + 1));
        const Scale scale = scale_of(*(const u32 *)scales, pair, of.precision, n / 8 % 2, of.exponent);
        most = fmaxf(most, scale.scale * fmaxf(scale.offset, top - scale.offset));
    }
    of.scales[output] = most;
}
