// decode_attention.cu as a function on a CPU. The order of what is included matters.

#include "emulated_gpu.h"
//
#include "../src/qbe/kernels/cuda/room.cuh"
//
#include "../src/qbe/kernels/cuda/plan.cuh"
//
#include "../src/qbe/kernels/cuda/codes.cuh"
//
#include "../src/qbe/kernels/cuda/sums.cuh"
//
#include "../src/qbe/kernels/cuda/rotation.cuh"
//
#include "../src/qbe/kernels/cuda/list.cuh"
//
#include "../src/qbe/kernels/cuda/ring.cuh"
//
#include "../src/qbe/kernels/cuda/full.cuh"
//
#include "../src/qbe/kernels/cuda/quantised_pages.cuh"
//
#include "../src/qbe/kernels/cuda/merge.cuh"
//
#include "../src/qbe/kernels/cuda/decode_attention.cu"
//
#include "../src/qbe/kernels/cuda/combine.cu"
//
#include "../src/qbe/kernels/cuda/share.cu"

struct Arguments {
    const u16 *query, *key, *value;
    u8 *memory;
    const int *head_offsets;
    const i64 *slots, *block_tables, *lengths;
    int *cuts;
    float *means, *sums;
    int *spans;
    const float *sinks;
    u16 *out;
    float *entropy;
    int strides[11];
    double scaling, softcap;
    int parts, start, least, batch, kv_heads, repeat, window, count;
};

static Arguments given_arguments;

template <int DIM, bool F16, bool SOFTCAP, int SETS>
static void call() {
    const Arguments &a = given_arguments;
    const int *s = a.strides;
    decode_attention<DIM, F16, SOFTCAP, SETS>(a.query, a.memory, a.head_offsets, a.block_tables, a.lengths, a.cuts, a.means, a.sums, a.spans,
                                              s[0], s[1], s[2], s[9], s[10], a.scaling, a.softcap, a.parts, a.start, a.least,
                                              a.batch, a.kv_heads, a.repeat, a.window);
}

static void call_share() {
    const Arguments &a = given_arguments;
    share_pages(a.head_offsets, &a.window, a.block_tables, a.lengths, a.cuts, 0, a.strides[9], a.strides[10], a.start, a.least, a.batch,
                a.kv_heads, a.count);
}

template <int DIM, bool F16, bool SOFTCAP>
static void call_combine() {
    const Arguments &a = given_arguments;
    const int *s = a.strides, heads = a.kv_heads * a.repeat;
    combine<DIM, F16, SOFTCAP>(a.query, a.key, a.value, a.memory, a.head_offsets, a.slots, a.means, a.sums, a.spans, a.sinks, a.out,
                               a.entropy, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], heads, a.scaling,
                               a.softcap, a.kv_heads, a.repeat, a.batch * heads);
}

static void launch(void (*kernel)(), int blocks, u32 shared) {
    body = kernel, gridDim.x = blocks, shared_bytes = shared;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}

template <int DIM, bool F16, bool SOFTCAP>
static void both(int blocks) {
    const Arguments &a = given_arguments;
    const bool few = a.repeat <= HEADS;
    if (a.cuts) launch(call_share, (a.count + WARPS) / WARPS, Room<64>::BYTES);
    launch(few ? call<DIM, F16, SOFTCAP, 1> : call<DIM, F16, SOFTCAP, 2>, blocks, Room<DIM>::BYTES);
    launch(call_combine<DIM, F16, SOFTCAP>, (a.batch * a.kv_heads * a.repeat + WARPS - 1) / WARPS, 0);
}

template <int DIM>
static void (*chosen(bool f16, bool softcap))(int) {
    if (f16) return softcap ? both<DIM, true, true> : both<DIM, true, false>;
    return softcap ? both<DIM, false, true> : both<DIM, false, false>;
}

struct Pieces {
    Sequences of;
    int batch, blocks, start, least;
    Cut *found;
};

static Pieces given_pieces;

static void find_piece() {
    const Pieces &p = given_pieces;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Plan plan = {p.of, p.batch, p.batch * p.of.kv_heads, p.blocks, p.start, p.least, warp, lane};
    plan.add_costs();
    sync_block();
    if (warp >= 2) return;
    const Cut cut = plan.cut(blockIdx.x + warp);
    if (lane == 0) p.found[2 * blockIdx.x + warp] = cut;
}

// Where the pieces of all blocks begin and end.
extern "C" void pieces(const int *head_offsets, const i64 *block_tables, const i64 *lengths, Cut *found, int table_row, int kv_heads,
                       int window, int batch, int count, int start, int least) {
    given_pieces = {{head_offsets, block_tables, lengths, table_row, kv_heads, window}, batch, count, start, least, found};
    launch(find_piece, count, Room<64>::BYTES);
}

extern "C" int room_bytes(int dim) { return dim == 128 ? Room<128>::BYTES : Room<64>::BYTES; }

extern "C" void run(const Arguments *arguments, int dim, int f16, int blocks, int copies_late) {
    late = copies_late;
    given_arguments = *arguments;
    (dim == 128 ? chosen<128> : chosen<64>)(f16, arguments->softcap)(blocks);
}
