/* Rows of a recurrent state at their precision: qbe/format/state_rows.py has the layout. Included by mamba2_step.c. */

#define MOST_STATE 1024 /* numbers of a row */

enum { CODE_BITS = 8, STATE_FULL = 32 };

/* Bytes behind the codes: what error feedback keeps of 16 numbers at a time, `more` bits of each. */
INLINE int64_t feedback_bytes(int64_t size, int more) { return more ? (size / LANES * more + 7) / 8 * LANES : 0; }

/* One state at a gear: `rows` rows of `size` numbers, a multiple of 16. */
typedef struct {
    char *codes;
    uint8_t *feedback;
    uint16_t *scales; /* bfloat16 */
    int64_t size, feedback_row;
    int bits, more;
} StateRows;

INLINE int64_t state_bytes(int64_t rows, int64_t size, int bits) {
    if (bits == STATE_FULL) return rows * size * 4;
    return rows * ((bits == 16 ? 2 : 1) * size + feedback_bytes(size, bits < 16 ? bits - CODE_BITS : 0) + 2);
}

INLINE StateRows state_rows(char *at, int64_t rows, int64_t size, int bits) {
    StateRows s = {.codes = at, .size = size, .bits = bits, .more = bits < 16 ? bits - CODE_BITS : 0};
    s.feedback_row = feedback_bytes(size, s.more);
    s.feedback = (uint8_t *)at + rows * size * (bits == 16 ? 2 : 1);
    s.scales = (uint16_t *)(s.feedback + rows * s.feedback_row);
    return s;
}

typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
typedef int16_t SignedHalves __attribute__((vector_size(2 * LANES)));

/* Numbers [i, i + 16) of a row below 32 bits. */
INLINE Floats read_state(const StateRows *s, int64_t row, int64_t i, float scale) {
    Integers code;
    if (s->bits == 16) {
        SignedHalves h;
        memcpy(&h, s->codes + 2 * (row * s->size + i), sizeof h);
        code = __builtin_convertvector(h, Integers);
    } else {
        SignedBytes b;
        memcpy(&b, s->codes + row * s->size + i, sizeof b);
        code = __builtin_convertvector(b, Integers);
        if (s->more) {
            const int64_t bit = i / LANES * s->more;
            Bytes kept;
            memcpy(&kept, s->feedback + row * s->feedback_row + bit / 8 * LANES, sizeof kept);
            const Integers low = __builtin_convertvector(kept, Integers) >> (int)(bit % 8);
            code = (code << s->more) | (low & ((1 << s->more) - 1));
        }
    }
    return __builtin_convertvector(code, Floats) * scale;
}

/* Numbers in [-1/2, 1/2) that look drawn, by the place in the state and the token's position. */
INLINE Floats dither(int64_t row, int64_t size, int64_t i, uint32_t position) {
    Words h = (Words){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (uint32_t)(row * size + i);
    h = h * 0x85EBCA77u + position * 0xC2B2AE3Du;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return __builtin_convertvector((Integers)(h >> 8), Floats) * 0x1p-24f - 0.5f;
}

/* A whole row below 32 bits, quantised by its largest number; below 16 rounded stochastically. What is not finite makes the row
   NaN. */
INLINE void write_state(const StateRows *s, int64_t row, const float *v, uint32_t position) {
    Floats highest = {0}, poison = {0};
    for (int64_t i = 0; i < s->size; i += LANES) {
        Floats f;
        memcpy(&f, v + i, sizeof f);
        poison += f * 0.0f;
        f = (Floats)((Integers)f & 0x7FFFFFFF);
        highest = pick(f > highest, f, highest);
    }
    float most = 0, poisoned = 0;
    for (int k = 0; k < LANES; k++) most = highest[k] > most ? highest[k] : most, poisoned += poison[k];
    const float levels = (float)((1 << (s->bits - 1)) - 1);
    uint32_t scale = (float_to_bits(most / levels) + 0xFFF0) & 0xFFFF0000u; /* up, but for what rounding adds */
    float inverse = 1.0f / bits_to_float(scale);
    if (most < 1e-30f) scale = 0, inverse = 0;
    if (poisoned != 0) scale = 0x7FC00000u, inverse = 0;
    s->scales[row] = (uint16_t)(scale >> 16);
    const Floats magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    Bytes kept = {0};
    for (int64_t i = 0; i < s->size; i += LANES) {
        Floats f;
        memcpy(&f, v + i, sizeof f);
        Floats whole = f * inverse;
        if (s->bits < 16) whole += dither(row, s->size, i, position);
        whole = (whole + magic) - magic;
        whole = pick(whole > splat(levels), splat(levels), pick(whole < splat(-levels), splat(-levels), whole));
        Integers code = __builtin_convertvector(whole, Integers);
        if (poisoned != 0) code = (Integers){0};
        if (s->bits == 16) {
            const SignedHalves h = __builtin_convertvector(code, SignedHalves);
            memcpy(s->codes + 2 * (row * s->size + i), &h, sizeof h);
            continue;
        }
        const SignedBytes b = __builtin_convertvector(code >> s->more, SignedBytes);
        memcpy(s->codes + row * s->size + i, &b, sizeof b);
        if (!s->more) continue;
        const int64_t bit = i / LANES * s->more;
        if (bit % 8 == 0) kept = (Bytes){0};
        kept |= __builtin_convertvector((code & ((1 << s->more) - 1)) << (int)(bit % 8), Bytes);
        memcpy(s->feedback + row * s->feedback_row + bit / 8 * LANES, &kept, sizeof kept);
    }
}
