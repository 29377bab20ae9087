/* Quantising and reading of whole pages. Included by attention.c. */

typedef void SealBlock(const uint8_t *from, uint8_t *to, int kind, int64_t key_dim, int64_t value_dim, int dtype, float *work);
typedef void ReadBlock(const uint8_t *from, int kind, int64_t key_dim, int64_t value_dim, int dtype, uint8_t *keys,
                       uint8_t *values, float *work);

#define DEFINE_BLOCKS(NAME, TARGET)                                                                                    \
    TARGET static void NAME##_quantise(const uint8_t *from, uint8_t *to, int kind, int64_t key_dim, int64_t value_dim,     \
                                   int dtype, float *work) {                                                           \
        quantise_block(from, to, kind, key_dim, value_dim, dtype, work);                                                   \
    }                                                                                                                  \
    TARGET static void NAME##_read(const uint8_t *from, int kind, int64_t key_dim, int64_t value_dim, int dtype,       \
                                   uint8_t *keys, uint8_t *values, float *work) {                                      \
        read_block(from, kind, key_dim, value_dim, dtype, keys, values, work);                                         \
    }

DEFINE_BLOCKS(scalar, )
#ifdef X86
DEFINE_BLOCKS(avx2, TARGET_AVX2)
DEFINE_BLOCKS(avx512, TARGET_AVX512)
#define QUANTISE(BACKEND) ((BACKEND) >= AVX512 ? avx512_quantise : (BACKEND) == AVX2 ? avx2_quantise : scalar_quantise)
#define READ(BACKEND) ((BACKEND) >= AVX512 ? avx512_read : (BACKEND) == AVX2 ? avx2_read : scalar_read)
#else
#define QUANTISE(BACKEND) scalar_quantise
#define READ(BACKEND) scalar_read
#endif

/* `quantise_pages` of qbe/kernels/ops/kv_pages.py, head_offsets int32 [layers, ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_quantise_pages(uint8_t *memory, const int32_t *head_offsets, const int64_t *sources, const int64_t *targets,
                       int64_t layers, int64_t pages, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                       int32_t dtype, int32_t backend) {
    const Block full = block_layout(FULL_BITS, key_dim, value_dim, dtype == FLOAT32 ? 4 : 2);
    SealBlock *quantise = QUANTISE(backend);
    float *work = malloc(sizeof *work * (size_t)work_size(key_dim, value_dim));
    if (!work) return -2;
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t page = 0; page < pages; page++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int32_t *own = head_offsets + layer * ALIGN * kv_heads;
                int kind;
                const uint8_t *from = memory + find_block(own, kv_heads, sources[page], head, &kind);
                uint8_t *to = memory + find_block(own, kv_heads, targets[page], head, &kind);
                if (kind == FULL_BITS) memcpy(to, from, (size_t)full.nbytes);
                else quantise(from, to, kind, key_dim, value_dim, dtype, work);
            }
    free(work);
    return 0;
}

/* `read_pages` of qbe/kernels/ops/kv_pages.py, head_offsets int32 [ALIGN, kv_heads]. Returns 0; -2: out of memory. */
int64_t qbe_read_pages(const uint8_t *memory, const int32_t *head_offsets, const int64_t *block_ids, int64_t pages,
                       int64_t kv_heads, int64_t key_dim, int64_t value_dim, int32_t dtype, uint8_t *keys,
                       uint8_t *values, int32_t backend) {
    const int64_t number = dtype == FLOAT32 ? 4 : 2;
    ReadBlock *read = READ(backend);
    float *work = malloc(sizeof *work * (size_t)work_size(key_dim, value_dim));
    if (!work) return -2;
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t page = 0; page < pages; page++) {
            int kind;
            const int64_t at = find_block(head_offsets, kv_heads, block_ids[page], head, &kind);
            const int64_t row = (head * pages + page) * PAGE;
            read(memory + at, kind, key_dim, value_dim, dtype, keys + row * key_dim * number, values + row * value_dim * number,
                 work);
        }
    free(work);
    return 0;
}
