// linear.cu and dense.cu as functions on a CPU. The order of what is included matters.

#include "emulated_gpu.h"
//
#include "../src/qbe/kernels/cuda/linear_work.cuh"
//
#include "../src/qbe/kernels/cuda/linear_ring.cuh"
//
#include "../src/qbe/kernels/cuda/linear_codes.cuh"
//
#include "../src/qbe/kernels/cuda/linear_sums.cuh"
//
#include "../src/qbe/kernels/cuda/linear.cu"
//
#include "../src/qbe/kernels/cuda/dense.cu"

static Linear given_linear;

template <int TILES, int GROUP, bool F16>
static void call() {
    linear<TILES, GROUP, F16>(given_linear);
}

template <int TILES>
static void (*chosen(int group, bool f16))() {
    if (group == 64) return f16 ? call<TILES, 64, true> : call<TILES, 64, false>;
    return f16 ? call<TILES, 128, true> : call<TILES, 128, false>;
}

extern "C" void run_linear(const Linear *given, int tiles, int group, int f16, int blocks, int shared, int copies_late) {
    late = copies_late, given_linear = *given;
    body = tiles == 1 ? chosen<1>(group, f16) : tiles == 2 ? chosen<2>(group, f16) : chosen<4>(group, f16);
    gridDim.x = blocks, shared_bytes = shared;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}

extern "C" int sizes(int what) { return what == 0 ? sizeof(Weight) : what == 1 ? sizeof(Linear) : sizeof(Dense); }

static Dense given_dense;

template <int KIND>
static void call_dense() {
    dequantise<KIND>(given_dense);
}

static void call_bounds() { bounds(given_dense); }

// kind: of dense.cu, or -1 for the bounds.
extern "C" void run_dense(const Dense *given, int kind, int blocks) {
    static void (*const kernels[])() = {call_bounds, call_dense<BF16>, call_dense<HALF>, call_dense<FLOAT>, call_dense<E4M3>, call_dense<INT8>};
    given_dense = *given, body = kernels[kind + 1];
    gridDim.x = blocks, shared_bytes = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}
