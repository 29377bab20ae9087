// What the kernels for many rows need of Hopper's own instructions (compute capability 9.0a): counted barriers, copies
// of tiles by tensor maps, clusters, wgmma's fences. Shared memory is addressed as instructions take it.

DEVICE u32 shared_pointer() {
    const u32 begin = __cvta_generic_to_shared(shared_memory);
    return (begin + 1023) & ~1023u;  // wgmma's swizzle repeats after 1024 bytes
}

DEVICE void arrivals(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(barrier) : "memory"); }

DEVICE void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void await(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @!p bra again;}" ::"r"(barrier), "r"(parity)
        : "memory");
}

DEVICE void copy_run(u32 to, const u8 *from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// A tensor map, made by the driver on the host.
struct __align__(64) TensorMap { u64 words[16]; };

// The box at (column, row) of a matrix; zeros where it lies outside.
DEVICE void copy_box(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// The same for the blocks of a cluster that the mask names: to the same place in each, and to its barrier.
DEVICE void copy_box_to(u32 to, const TensorMap *map, int column, int row, u32 barrier, u16 mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1,{%2,%3}],[%4],%5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
                 : "memory");
}

// Four matrices of 8 x 8 16-bit numbers, of which a lane holds two of a row; lane 8 i + r says where row r of matrix i goes.
DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE u64 read_normally() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0,1.0;" : "=l"(policy));
    return policy;
}

DEVICE u32 cluster_rank() {
    u32 x;
    asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(x));
    return x;
}

DEVICE u32 cluster_size() {
    u32 x;
    asm("mov.u32 %0,%%cluster_nctarank;" : "=r"(x));
    return x;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where another block of the cluster has what this one has there.
DEVICE u32 address_in(u32 rank, u32 at) {
    u32 x;
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(x) : "r"(at), "r"(rank));
    return x;
}

// Says only that what was there has been read: to release what was written would take a fence of the whole device.
DEVICE void arrive_relaxed(u32 remote) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _,[%0];" ::"r"(remote) : "memory");
}

// 16 bytes to another block's shared memory, which its barrier counts.
DEVICE void store_async(u32 remote, float a, float b, float c, float d, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(remote), "f"(a),
                 "f"(b), "f"(c), "f"(d), "r"(barrier)
                 : "memory");
}

DEVICE void store_async(u32 remote, int a, int b, int c, int d, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0],{%1,%2,%3,%4},[%5];" ::"r"(remote), "r"(a),
                 "r"(b), "r"(c), "r"(d), "r"(barrier)
                 : "memory");
}

// Of memory that other blocks wrote, or that they will read.
DEVICE void load_fresh(u32 (&x)[4], const u32 *at) {
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at) : "memory");
}

DEVICE void store_fresh(u32 *at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.cg.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void load_words(u32 (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

DEVICE void load_pair(u32 (&x)[2], u32 at) {
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}

DEVICE void store_words(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE u32 load_word(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

// x tile in shared memory, rows of 128 swizzled bytes: what wgmma takes for its second operand.
DEVICE u64 descriptor(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Of a warp group's threads.
template <int REGISTERS>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Of the 128 threads of a warp group.
DEVICE void sync_group(int number) { asm volatile("bar.sync %0,128;" ::"r"(number) : "memory"); }
