// Sizes, and what lies where in shared memory.

constexpr int PAGE = 64;
constexpr int WARPS = 8;
constexpr int HEADS = 4;   // query heads in the columns of a product of bytes, two columns each
constexpr int CHUNK = 32;  // tokens of a page of 16 bits that are copied at once
constexpr int SLOTS = 3;   // places of a warp that copies go to, in turns
constexpr int AHEAD = 6;   // quantised pages that take as long as one of 16 bits before them
constexpr int KINDS = 6;   // of blocks
constexpr int LISTED = 256;  // pages of a list, a thread each; a byte of an block_id says which one
constexpr int TURBO = 64;  // in a block's kind
constexpr int CUT = 128;   // in a list of pages, beside the kind: a window begins within the page
constexpr float LOG2E = 1.4426950408889634f;
constexpr float HIDDEN = -1e30f;  // the score of a token that is not seen

// How far scores (times log2 e) of 16-bit pages may be above `top` before sums are scaled anew. Their weights have to
// be numbers of the dtype; in float16, with numbers of 16 bits, none is above 1.
template <bool F16>
constexpr float SLACK = F16 ? 0 : 8;

// Shared memory, in bytes: of a warp, and behind those of all warps, of a block.
template <int DIM>
struct Room {
    static constexpr int ROW = 2 * DIM;  // of 16 bits
    // A slot holds a page of 4 or 2 bits, of turbo keys if these take more, or keys or values of 8 bits or of a chunk.
    static constexpr int PLAIN = 68 * DIM + 4 * PAGE, TURBO_PAGE = 66 * DIM + 8 * PAGE;
    static constexpr int SLOT = PLAIN > TURBO_PAGE ? PLAIN : TURBO_PAGE;
    static constexpr int SCALES = SLOTS * SLOT;      // of a page's channels of keys, float
    static constexpr int LOWS = SCALES + 4 * DIM;    // what code 0 stands for, float16
    static constexpr int BARRIERS = LOWS + 2 * DIM;
    static constexpr int WARP = (BARRIERS + 8 * SLOTS + 127) / 128 * 128;
    static constexpr int LIST = WARPS * WARP;          // 8 bytes a page
    static constexpr int COUNTS = LIST + 8 * LISTED;   // of each kind, a byte a warp
    static constexpr int QUERIES = COUNTS + 8 * KINDS;    // float16, over a power of two; rotated once and twice
    static constexpr int POWERS = QUERIES + 2 * HEADS * 2 * DIM * 2;  // of each of those, float, times what scores are
    static constexpr int CUTS = POWERS + 2 * HEADS * 2 * 4;           // where this block's piece begins and ends
    static constexpr int BYTES = CUTS + 16;
    static_assert(32 * WARPS >= LISTED && WARPS >= 2 * HEADS, "a thread for each page, a warp for each query head");
    static_assert(CHUNK * ROW <= SLOT && 68 * DIM <= SLOT, "keys or values of 16 and of 8 bits fit into a slot");
};
