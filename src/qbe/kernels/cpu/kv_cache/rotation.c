/* The rotation of quantised pages (qbe/kernels/reference/rotation.py) as a fast Walsh-Hadamard transform.
   Included by blocks.c. */

/* 1 or -1, of Rudin and Shapiro; i < 2^16. */
INLINE float sign_of(int i) {
    int parity = i & i >> 1;
    parity ^= parity >> 8;
    parity ^= parity >> 4;
    return (float)(1 - (0x6996 >> (parity & 15) & 1) * 2); /* the parity of four bits, looked up */
}

/* x[i * inner + j] for i < dim rotated along i, in place, for every j. */
INLINE void rotate(float *x, int64_t dim, int64_t inner, int signs) {
    const int64_t n = dim & -dim, size = n * inner;
    const float factor = (float)__builtin_sqrt(1.0 / (double)n);
    for (float *block = x; block < x + dim * inner; block += size) {
        for (int i = 0; signs && i < n; i++)
            for (int64_t j = 0; j < inner; j++) block[i * inner + j] *= sign_of(i);
        for (int64_t half = inner; half < size; half *= 2)
            for (float *low = block; low < block + size; low += 2 * half)
                for (int64_t j = 0; j < half; j++) {
                    const float a = low[j], b = low[half + j];
                    low[j] = a + b, low[half + j] = a - b;
                }
        for (int i = 0; i < n; i++) {
            const float own = signs ? sign_of(i) * factor : factor;
            for (int64_t j = 0; j < inner; j++) block[i * inner + j] *= own;
        }
    }
}

/* The same of a query, compiled once for all paths: it runs once for each. */
static __attribute__((noinline)) void rotate_query(float *x, int64_t dim, int signs) { rotate(x, dim, 1, signs); }
