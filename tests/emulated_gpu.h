// What src/qbe/kernels/cuda/device.cuh gives a kernel, in plain C++: the threads of a block are fibers of one thread,
// which take turns at whatever a warp does together. Copies happen when they are begun or, if `late`, when they are
// waited for: a slot that is filled before it is free or read before it is full shows in one of the two.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define CALLED static
#define KERNEL(threads, blocks) void
#define EMULATED
#define THREADS 256
#define GIVEN const
#define EVERY 0xFFFFFFFFu
#define SHARED (227 << 10)

struct Place { int x, y; };
using std::max;
using std::min;
static Place threadIdx, blockIdx, gridDim;
static u8 shared_memory[SHARED];
static u32 shared_bytes;  // of it that a block has

struct Meeting { int here = 0, round = 0; };  // of the threads of a warp or block

static ucontext_t scheduler, fibers[THREADS];
static bool done[THREADS];
static Meeting warps[THREADS / 32], block, named[16];
static u32 given[THREADS / 32][2][32][8];  // what threads show each other, in turns
static int turn[THREADS];
static void (*body)();

static void yield() {
    int me = threadIdx.x;
    swapcontext(&fibers[me], &scheduler);
    threadIdx.x = me;
}

static void meet(Meeting &meeting, int count) {
    int round = meeting.round;
    if (++meeting.here == count) {
        meeting.here = 0, meeting.round++;
        return;
    }
    while (meeting.round == round) yield();
}

template <int COUNT>
static u32 (*shown(const u32 (&own)[COUNT]))[8] {
    int me = threadIdx.x;
    auto &all = given[me / 32][turn[me] ^= 1];
    memcpy(all[me % 32], own, sizeof own);
    meet(warps[me / 32], 32);
    return all;
}

static void fiber() {
    body();
    done[threadIdx.x] = true;
}

static void run_block() {
    static std::vector<u8> stacks(THREADS * (256 << 10));
    memset(shared_memory, 0xFF, sizeof shared_memory);
    for (int i = 0; i < THREADS; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * (256 << 10)];
        fibers[i].uc_stack.ss_size = 256 << 10;
        fibers[i].uc_link = &scheduler;
        done[i] = false;
        makecontext(&fibers[i], fiber, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (int i = 0; i < THREADS; i++)
            if (!done[i]) {
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i]);
                left |= !done[i];
            }
    }
}

inline u8 *shared_at(int at, u32 bytes, u32 multiple) {
    if (at % multiple || at + bytes > shared_bytes) {
        fprintf(stderr, "shared memory: %u bytes at %u\n", bytes, at);
        abort();
    }
    return shared_memory + at;
}

template <class T>
inline T loaded(int at) {
    T x;
    memcpy(&x, shared_at(at, sizeof x, sizeof x), sizeof x);
    return x;
}

struct words2 { u32 x, y; };
struct words4 { u32 x, y, z, w; };


inline bool rarely(bool x) { return x; }
inline void fetch(const void *) {}
inline u32 load4(int at) { return loaded<u32>(at); }
inline words2 load8(int at) { return loaded<words2>(at); }
inline words4 load16(int at) { return loaded<words4>(at); }
inline void store4(int at, u32 x) { memcpy(shared_at(at, 4, 4), &x, 4); }
inline void store1(int at, u8 x) { *shared_at(at, 1, 1) = x; }
inline void store8(int at, words2 x) { memcpy(shared_at(at, 8, 8), &x, 8); }
inline void store16(int at, words4 x) { memcpy(shared_at(at, 16, 16), &x, 16); }
inline void barrier_init(int at) { memset(shared_at(at, 8, 8), 0, 8); }
inline void fence_copies() {}
inline void wait_for_kernels() {}
inline void begin_next_kernel() {}

struct Copy {
    int to;
    const u8 *from;  // nullptr: zeros
    u32 bytes;
    int barrier;
};

static bool late;
static std::vector<Copy> copies;

[[noreturn]] inline void fault(const char *what) {
    fprintf(stderr, "%s\n", what);
    abort();
}

// A barrier: bytes that are still expected, and how often they all came.
inline void barrier_expect(int at, u32 bytes) {
    if (load4(at)) fault("a barrier is used before its copies came");
    store4(at, bytes);
    if (!bytes) store4(at + 4, load4(at + 4) + 1);
}

inline void arrive(Copy c) {
    u8 *to = shared_at(c.to, c.bytes, 16);
    if (c.from)
        memcpy(to, c.from, c.bytes);
    else
        memset(to, 0, c.bytes);
    store4(c.barrier, load4(c.barrier) - c.bytes);
    if (!load4(c.barrier)) store4(c.barrier + 4, load4(c.barrier + 4) + 1);
}

inline u64 read_once() { return 0; }

inline void copy(int to, const u8 *from, u32 bytes, int barrier, u64) {
    if (bytes % 16 || (u64)from % 16 || load4(barrier) < bytes) fault("a copy of odd size or place");
    if (late)
        copies.push_back({to, from, bytes, barrier});
    else
        arrive({to, from, bytes, barrier});
}

inline void expect_pieces(int at, u32 bytes) {
    if (threadIdx.x % 32 == 0) barrier_expect(at, bytes);
    u32 none[1] = {0};
    shown(none);
}

inline void copy_piece(int to, const u8 *from, bool some, int barrier, u64) { copy(to, some ? from : nullptr, 16, barrier, 0); }

inline void copies_begun(int, int) {}

// Others may have to begin its copies yet.
inline void barrier_wait(int at, u32 parity) {
    u32 none[1] = {0};
    shown(none);
    for (int turns = 0;; turns++) {
        auto waits = std::stable_partition(copies.begin(), copies.end(), [at](const Copy &c) { return c.barrier != at; });
        for (auto c = waits; c != copies.end(); c++) arrive(*c);
        copies.erase(waits, copies.end());
        if (!load4(at) && load4(at + 4) % 2 != parity) break;
        if (turns == 1000) fault("a barrier waits for ever");
        yield();
    }
    shown(none);
}

inline void sync_warp() {
    u32 none[1] = {0};
    shown(none);
}

inline void sync_block() { meet(block, THREADS); }

template <bool TRANS>
inline void load_matrices(u32 (&x)[4], int at) {
    u32 own[1] = {at};
    auto all = shown(own);
    int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        u32 half[2];
        for (int i = 0; i < 2; i++) {
            int row = TRANS ? lane % 4 * 2 + i : lane / 4, column = TRANS ? lane / 4 : lane % 4 * 2 + i;
            half[i] = *(u16 *)(shared_at(all[8 * m + row][0], 16, 16) + 2 * column);
        }
        x[m] = half[0] | half[1] << 16;
    }
}

inline u32 transposed(u32 x) {
    u32 own[1] = {x};
    auto all = shown(own);
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;  // of what comes back
    u32 y = 0;
    for (int i = 0; i < 2; i++) y |= (all[(column + i) * 4 + row / 2][0] >> (row % 2 * 16) & 0xFFFF) << 16 * i;
    return y;
}

inline u32 bits_of_float(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}

inline float float_of_bits(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

inline float float_of_f16(u32 x) {
    u16 half = x;
    _Float16 y;
    memcpy(&y, &half, 2);
    return y;
}

template <bool F16>
inline float number(u32 x) {
    return F16 ? float_of_f16(x & 0xFFFF) : float_of_bits(x << 16);
}

template <bool F16>
inline u32 rounded(float x) {
    if (F16) {
        _Float16 y = x;
        u16 half;
        memcpy(&half, &y, 2);
        return half;
    }
    u32 y = bits_of_float(x);
    return x != x ? 0x7FFF : (y + 0x7FFF + (y >> 16 & 1)) >> 16;
}

template <bool F16>
inline u32 pack(float low, float high) {
    return rounded<F16>(low) | rounded<F16>(high) << 16;
}

template <bool F16>
inline void mma(float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    float *d[4] = {&d0, &d1, &d2, &d3};
    u32 own[6] = {a0, a1, a2, a3, b0, b1};
    auto all = shown(own);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            u32 a = all[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], b = all[column * 4 + k % 8 / 2][4 + k / 8];
            *d[i] += number<F16>(a >> k % 2 * 16) * number<F16>(b >> k % 2 * 16);
        }
    }
}

template <bool SIGNED>
inline void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 own[6] = {a0, a1, a2, a3, b0, b1};
    auto all = shown(own);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; k++) {
            u32 a = all[row * 4 + k % 16 / 4][i / 2 + k / 16 * 2] >> k % 4 * 8 & 255;
            u32 b = all[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8 & 255;
            d[i] += (SIGNED ? (signed char)a : (int)a) * (signed char)b;
        }
    }
}

inline u32 most_of_halves(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

inline u32 bytes_of(u32 a, u32 b, u32 selector) {
    u64 all = (u64)b << 32 | a;
    u32 x = 0;
    for (int i = 0; i < 4; i++) x |= (u32)(all >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return x;
}

inline float reciprocal(float x) { return 1 / x; }
inline float power2(float x) { return exp2f(x); }
inline float logarithm2(float x) { return log2f(x); }
inline int ones(u32 x) { return __builtin_popcount(x); }

inline float shuffle(float x, int lane) {
    u32 own[1] = {bits_of_float(x)};
    return float_of_bits(shown(own)[lane][0]);
}

inline int shuffle_word(int x, int lane) {
    u32 own[1] = {(u32)x};
    return shown(own)[lane][0];
}

inline u32 shuffle_word_xor(u32 x, int mask) { return shuffle_word(x, threadIdx.x % 32 ^ mask); }

inline u32 most_of_warp(u32 x) {
    u32 own[1] = {x}, y = 0;
    auto all = shown(own);
    for (int i = 0; i < 32; i++) y = max(y, all[i][0]);
    return y;
}

inline float shuffle_xor(float x, int mask) { return shuffle(x, threadIdx.x % 32 ^ mask); }

inline u32 ballot(bool x) {
    u32 own[1] = {x}, y = 0;
    auto all = shown(own);
    for (int i = 0; i < 32; i++) y |= all[i][0] << i;
    return y;
}

inline bool any(bool x) { return ballot(x); }

inline void sync_warps(int barrier, int threads) { meet(named[barrier], threads); }

inline u64 read_often() { return 0; }
inline words4 read16(const void *at) {
    if ((u64)at % 16) fault("16 bytes at an odd place");
    words4 x;
    memcpy(&x, at, 16);
    return x;
}
inline int read_fresh(const int *at) { return *at; }
inline void read_fresh16(float (&x)[4], const float *at) { memcpy(x, at, 16); }
inline void write16(float *at, const float (&x)[4]) { memcpy(at, x, 16); }
inline void fence_device() {}
inline int add_device(int *at, int x) {
    int before = *at;
    *at += x;
    return before;
}
inline u32 masked_or(u32 x, u32 mask, u32 high) { return (x & mask) | high; }

inline u16 pack_e4m3(float low, float high) {
    u16 both = 0;
    for (int i = 0; i < 2; i++) {
        const float x = i ? high : low, size = min(fabsf(x), 448.0f);
        int exponent = size ? max(ilogbf(size), -6) : -6;
        int steps = (int)nearbyintf(ldexpf(size, 3 - exponent));  // of 2^(exponent - 3)
        if (steps == 16) steps = 8, exponent++;
        const int byte = steps < 8 ? steps : (exponent + 7) << 3 | (steps - 8);
        both |= (byte | (std::signbit(x) ? 128 : 0)) << 8 * i;
    }
    return both;
}
