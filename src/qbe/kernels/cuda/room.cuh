// Sizes, and what lies where in shared memory.

constexpr int PAGE = 64;
constexpr int WARPS = 8;
constexpr int GROUPS = 8;  // rows of half a tile, and columns of queries
constexpr int CHUNK = 32;  // tokens of a page of 16 bits that are copied at once
constexpr int SLOTS = 3;   // places of a warp that copies go to, in turns
constexpr int AHEAD = 6;   // sealed pages that take as long as one of 16 bits before them
constexpr int KINDS = 6;   // of blocks
constexpr int TURBO = 64;  // in a block's kind
constexpr int CUT = 128;   // in a list of pages, beside the kind: a window begins within the page
constexpr float LOG2E = 1.4426950408889634f;
constexpr float HIDDEN = -1e30f;  // the score of a token that is not seen

// How far scores (times log2 e) may be above `top` before sums are scaled anew. A weight times a value's scale has to be
// a number of its dtype: the scale is one of float16, so that there no weight may be above 1.
template <bool F16>
constexpr float SLACK = F16 ? 0 : 8;

// Shared memory, in bytes: of a warp, and behind those of all warps, of a block.
template <int DIM>
struct Room {
    static constexpr int ROW = 2 * DIM + 16;  // of 16 bits, so that 8 rows lie in different banks
    // A slot holds a page of 4 or 2 bits, of turbo keys if these take more, or keys or values of 8 bits or of a chunk.
    static constexpr int PLAIN = 68 * DIM + 4 * PAGE, TURBO_PAGE = 66 * DIM + 8 * PAGE;
    static constexpr int SLOT = PLAIN > TURBO_PAGE ? PLAIN : TURBO_PAGE;
    static constexpr int SCALES = SLOTS * SLOT;  // and centres, float
    static constexpr int BARRIERS = SCALES + 8 * DIM + 16 * 7;
    static constexpr int WARP = (BARRIERS + 8 * SLOTS + 127) / 128 * 128;
    static constexpr int LIST = WARPS * WARP;             // of 32 * WARPS pages, 8 bytes each
    static constexpr int COUNTS = LIST + 8 * 32 * WARPS;  // of each kind, a byte a warp
    static constexpr int QUERIES = COUNTS + 8 * KINDS;    // rotated once and twice
    static_assert(WARPS == 8, "a byte for each warp");
    static constexpr int CUTS = QUERIES + GROUPS * 2 * DIM * 2;  // where this block's piece begins and ends
    static constexpr int BYTES = CUTS + 16;
    static_assert(CHUNK * ROW <= SLOT && 68 * DIM <= SLOT, "keys or values of 16 and of 8 bits fit into a slot");
};
