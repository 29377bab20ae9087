// decode_attention.cu as a function on a CPU. The order of what is included matters.

#include "emulated_gpu.h"
//
#include "../src/qbe/kernels/cuda/room.cuh"
//
#include "../src/qbe/kernels/cuda/codes.cuh"
//
#include "../src/qbe/kernels/cuda/sums.cuh"
//
#include "../src/qbe/kernels/cuda/walk.cuh"
//
#include "../src/qbe/kernels/cuda/decode_attention.cu"

struct Arguments {
    const u16 *query, *key, *value;
    u8 *memory;
    const int *blocks;
    const i64 *slots, *tables, *lengths;
    float *means, *sums;
    int strides[10];
    double scaling, softcap;
    int parts, kv_heads, repeat, window;
};

static Arguments given_arguments;

template <int DIM, bool F16, bool SOFTCAP>
static void call() {
    const Arguments &a = given_arguments;
    const int *s = a.strides;
    decode_attention<DIM, F16, SOFTCAP>(a.query, a.key, a.value, a.memory, a.blocks, a.slots, a.tables, a.lengths,
                                        a.means, a.sums, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7],
                                        s[8], s[9], a.scaling, a.softcap, a.parts, a.kv_heads, a.repeat, a.window);
}

template <int DIM>
static void (*chosen(bool f16, bool softcap))() {
    if (f16) return softcap ? call<DIM, true, true> : call<DIM, true, false>;
    return softcap ? call<DIM, false, true> : call<DIM, false, false>;
}

extern "C" int room_bytes(int dim) { return dim == 128 ? Room<128>::BYTES : Room<64>::BYTES; }

extern "C" void run(const Arguments *arguments, int dim, int f16, int batch, int copies_late) {
    late = copies_late;
    shared_bytes = room_bytes(dim);
    given_arguments = *arguments;
    body = dim == 128 ? chosen<128>(f16, arguments->softcap) : chosen<64>(f16, arguments->softcap);
    for (int y = 0; y < arguments->parts; y++)
        for (int x = 0; x < batch * arguments->kv_heads; x++) {
            blockIdx.x = x, blockIdx.y = y;
            run_block();
        }
}
