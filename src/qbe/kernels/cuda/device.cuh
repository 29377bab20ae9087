// What the kernels need of a warp on an NVIDIA GPU of compute capability 9.0 or later. Shared memory is
// addressed in bytes from its beginning. tests/emulated_gpu.h is the same in plain C++.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define CALLED __device__ __noinline__
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GIVEN const __grid_constant__
#define EVERY 0xFFFFFFFFu

extern __shared__ __align__(128) u8 shared_memory[];

// As instructions take it.
DEVICE u32 shared_address(int at) {
    u32 begin;
    asm("mov.u32 %0,shared_memory;" : "=r"(begin));
    return begin + at;
}

struct __align__(8) words2 { u32 x, y; };
struct __align__(16) words4 { u32 x, y, z, w; };

// The instructions for it come after those for what is more often so.
DEVICE bool rarely(bool x) { return __builtin_expect(x, 0); }

// Brings the 128 bytes there from memory to the L2 cache.
DEVICE void fetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

DEVICE void store8(int at, words2 x) { *(words2 *)(shared_memory + at) = x; }
DEVICE u32 load4(int at) { return *(const u32 *)(shared_memory + at); }
DEVICE words2 load8(int at) { return *(const words2 *)(shared_memory + at); }
DEVICE words4 load16(int at) { return *(const words4 *)(shared_memory + at); }
DEVICE void store4(int at, u32 x) { *(u32 *)(shared_memory + at) = x; }
DEVICE void store1(int at, u8 x) { shared_memory[at] = x; }
DEVICE void store16(int at, words4 x) { *(words4 *)(shared_memory + at) = x; }

DEVICE void barrier_init(int at) {
    asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(shared_address(at)) : "memory");
}

// What generic stores left in shared memory comes before copies that are begun after this.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void barrier_expect(int at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(int at, u32 parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @!p bra again;}" ::"r"(shared_address(at)), "r"(parity)
        : "memory");
}

// A kernel may begin before the ones before it have ended (launch.py): what they wrote is there after this.
DEVICE void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may begin wherever there is room for its blocks.
DEVICE void begin_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// How copies use the L2 cache: what they bring leaves it first, since it is read once.
DEVICE u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
    return policy;
}

// By the copy engine; addresses and bytes are multiples of 16.
DEVICE void copy(int to, const u8* from, u32 bytes, int barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

// The same by the threads of a warp, 16 bytes each, or zeros in their place; `copies_begun` after a warp's last one.
// Such copies may lie anywhere, and there is no limit to how many begin in a cycle.
DEVICE void expect_pieces(int, u32) {}

DEVICE void copy_piece(int to, const u8* from, bool some, int, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2,%3;" ::"r"(shared_address(to)), "l"(from),
                 "r"(some ? 16 : 0), "l"(policy)
                 : "memory");
}

DEVICE void copies_begun(int barrier, int lane) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(shared_address(barrier)) : "memory");
}

template <bool TRANS>
DEVICE void load_matrices(u32 (&x)[4], int at) {
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(at)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(at)) : "memory");
}

// An 8 x 8 matrix of 16-bit numbers, of which a lane holds two of a row, transposed.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
    return y;
}

// d [16, 8] += a [16, 16] b [16, 8]
template <bool F16>
DEVICE void mma(float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of bytes, d [16, 8] += a [16, 32] b [32, 8]; those of b are signed, those of a if they are said to be.
template <bool SIGNED>
DEVICE void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float float_of_f16(u32 x) {
    float y;
    asm("{.reg .b16 h; cvt.u16.u32 h,%1; cvt.f32.f16 %0,h;}" : "=f"(y) : "r"(x));
    return y;
}

template <bool F16>
DEVICE u32 pack(float low, float high) {
    u32 x;
    if (F16)
        asm("cvt.rn.f16x2.f32 %0,%2,%1;" : "=r"(x) : "f"(low), "f"(high));
    else
        asm("cvt.rn.bf16x2.f32 %0,%2,%1;" : "=r"(x) : "f"(low), "f"(high));
    return x;
}

// Of both halves, unsigned.
DEVICE u32 most_of_halves(u32 a, u32 b) {
    u32 x;
    asm("max.u16x2 %0,%1,%2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

DEVICE u32 most_of_warp(u32 x) { return __reduce_max_sync(EVERY, x); }

DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DEVICE float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float logarithm2(float x) { return __log2f(x); }
DEVICE u32 bits_of_float(float x) { return __float_as_uint(x); }
DEVICE float float_of_bits(u32 x) { return __uint_as_float(x); }
DEVICE int ones(u32 x) { return __popc(x); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(EVERY, x, lane); }
DEVICE int shuffle_word(int x, int lane) { return __shfl_sync(EVERY, x, lane); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(EVERY, x, mask); }
DEVICE u32 shuffle_word_xor(u32 x, int mask) { return __shfl_xor_sync(EVERY, x, mask); }
DEVICE bool any(bool x) { return __any_sync(EVERY, x); }
DEVICE u32 ballot(bool x) { return __ballot_sync(EVERY, x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }

// (x & mask) | high in one instruction, which two constants would not be.
DEVICE u32 masked_or(u32 x, u32 mask, u32 high) {
    u32 y;
    asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(high));
    return y;
}

// The first `threads` threads that come there; barrier 0 is `sync_block`'s.
DEVICE void sync_warps(int barrier, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(barrier), "r"(threads) : "memory"); }

// How copies use the L2 cache where others will read the same.
DEVICE u64 read_often() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
    return policy;
}

DEVICE words4 read16(const void *at) {
    words4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

// What other blocks, or a kernel before this one, wrote.
DEVICE int read_fresh(const int *at) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

DEVICE void read_fresh16(float (&x)[4], const float *at) {
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(at) : "memory");
}

DEVICE void write16(float *at, const float (&x)[4]) {
    asm volatile("st.global.cg.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

DEVICE void fence_device() { __threadfence(); }
DEVICE int add_device(int *at, int x) { return atomicAdd(at, x); }

// Two numbers of E4M3, the first in the lower byte.
DEVICE u16 pack_e4m3(float low, float high) {
    u16 x;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(x) : "f"(high), "f"(low));
    return x;
}
