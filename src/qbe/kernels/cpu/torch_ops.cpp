// The CPU ops of QBE called by torch without Python in between: what a decode step calls some 150 times.
//
// Written to torch's stable ABI. What the compiled kernels do not serve (many rows, odd dtypes, wrong arguments) goes to the Python implementations, which are ops of their own: qbe::<name>_python.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Integers = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

namespace {

// The structures of store.c, nested.c and attention.c.
struct Shape {
    int32_t total_bits, precisions, parts, precision[8], first[8], width[8], exponent;
    int64_t k, n, kp, groups;
};
struct Matrix {
    const void *packed, *meta, *bits, *original, *bias;
    void *y;
    const Shape *shape;
    int64_t y_stride;
    int32_t bias_dtype, y_dtype;
};
struct AttentionShape {
    int64_t batch, heads, kv_heads, key_dim, value_dim, bytes, table_width;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head, table_row, entropy_row;
    int64_t window;
    float scaling, softcap;
    int32_t dtype;
};
using Multiply = int64_t(const void *, const Matrix *, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t);
using Square = void(const void *, float *, int64_t);
using Norm = void(const void *, const float *, float, const void *, void *, int64_t, int64_t);
using Rotate = void(const void *, int64_t, int64_t, const void *, const void *, void *, int64_t, int64_t, int64_t);
using Attend = int64_t(const void *, const void *, const void *, void *, const int32_t *, const int64_t *,
                       const int64_t *, const int64_t *, const float *, float *, void *, const AttentionShape *, int32_t, int32_t);

Multiply *multiply;
Attend *attend;
Square *square_rows; // these three: of the AVX-512 paths
Norm *norm_rows;
Rotate *rotate_rows;
int32_t backend;
int64_t many_rows[3], many_full[3]; // of float32, bfloat16, float16: from here on Python chooses

constexpr int AVX512 = 2, BLOCK = 64, FULL_BITS = 16, FORMATS = 256, ROUTED = 16, UNITS = 256, CASCADE = 1; // of qbe.blueprint's steerers

// float32 0, bfloat16 1 (store.c), else -1
int dtype_of(const Tensor &t) {
    return t.scalar_type() == ScalarType::Float ? 0 : t.scalar_type() == ScalarType::BFloat16 ? 1 : -1;
}

// The same, and float16 2
int row_dtype_of(const Tensor &t) { return t.scalar_type() == ScalarType::Half ? 2 : dtype_of(t); }

Tensor empty_like(const Tensor &t, int dims, const int64_t *sizes, bool float32_output = false) {
    int64_t strides[8];
    for (int64_t d = dims - 1, stride = 1; d >= 0; stride *= sizes[d--]) strides[d] = stride;
    int32_t dtype;
    AtenTensorHandle out;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    if (float32_output) dtype = aoti_torch_dtype_float32();
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &out));
    return Tensor(out);
}

// geometry.py and `check` of linear/nested.py; false: Python says what is wrong. bits: of the rows, or of more.
bool fill(Matrix &m, Shape &s, const Tensor &x, int64_t rows, const Tensor &packed, const Tensor &meta, const Tensor &bits,
          const Tensor *original, const Tensor *bias, const Integers &slices, int64_t exponent, bool float32_output = false) {
    if (packed.dim() != 2 || meta.dim() != 3 || slices.empty() || slices.size() > 8 || exponent < 1 || exponent > 254)
        return false;
    const int64_t k = x.size(x.dim() - 1);
    s = Shape{};
    for (int64_t slice : slices) {
        if (slice < 1 || s.total_bits + slice > 8) return false;
        for (int64_t left = slice, width; left; left -= width) {
            width = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            s.first[s.parts] = s.total_bits, s.width[s.parts++] = (int32_t)width, s.total_bits += (int32_t)width;
        }
        s.precision[s.precisions++] = s.total_bits;
    }
    s.exponent = (int32_t)exponent, s.k = k, s.n = meta.size(1), s.groups = meta.size(2);
    if (s.n < 1 || s.groups < 1) return false;
    s.kp = packed.size(1) * 8 / s.n;
    const bool fits = packed.size(0) == s.total_bits && meta.size(0) == 2 * s.precisions &&
                      s.kp * s.n == packed.size(1) * 8 && s.kp % (s.groups * BLOCK) == 0 && k <= s.kp &&
                      k > s.kp - s.kp / s.groups;
    if (!fits || packed.scalar_type() != ScalarType::Byte || meta.scalar_type() != ScalarType::Byte ||
        !packed.is_contiguous() || !meta.is_contiguous())
        return false;
    if (bits.scalar_type() != ScalarType::Int || bits.dim() != 1 || bits.size(0) < rows || !bits.is_contiguous())
        return false;
    if (original && (original->dim() != 2 || original->size(0) != s.n || original->size(1) != k)) return false;
    if (bias && (bias->dim() != 1 || bias->size(0) != s.n || !bias->is_contiguous())) return false;
    if (bias && dtype_of(*bias) < 0 && row_dtype_of(*bias) != row_dtype_of(x)) return false;
    const int32_t *wanted = (const int32_t *)bits.data_ptr();
    const bool readable = original && row_dtype_of(*original) == row_dtype_of(x) && original->is_contiguous();
    int64_t full = 0;
    for (int64_t r = 0; r < rows; r++) full += (wanted[r] & 255) >= FULL_BITS;
    const int dtype = row_dtype_of(x);
    if (full && (!readable || (full >= many_full[dtype] && !(float32_output && dtype == 1 && backend >= AVX512)))) return false;
    m = Matrix{packed.data_ptr(), meta.data_ptr(), wanted, readable ? original->data_ptr() : nullptr,
               bias ? bias->data_ptr() : nullptr, nullptr, &s, 0, bias ? row_dtype_of(*bias) : 0, float32_output ? 0 : dtype};
    return true;
}

// The rows of x if the compiled kernel serves them, else 0.
int64_t rows_of(const Tensor &x, bool float32_output = false) {
    const int dtype = row_dtype_of(x);
    if (dtype < 0 || x.dim() < 1 || x.dim() > 8 || !x.is_contiguous() || x.numel() == 0) return 0;
    const int64_t rows = x.numel() / x.size(x.dim() - 1);
    return rows < many_rows[dtype] || (float32_output && backend >= AVX512) ? rows : 0;
}

Tensor run(const Tensor &x, Matrix *m, int64_t count, int64_t rows, bool batch_invariant = true) {
    const int64_t dims = x.dim();
    int64_t sizes[8], n = 0;
    for (int64_t i = 0; i < count; i++) n += m[i].shape->n;
    for (int64_t d = 0; d < dims; d++) sizes[d] = d + 1 < dims ? x.size(d) : n;
    Tensor y = empty_like(x, (int)dims, sizes, m->y_dtype == 0);
    char *to = (char *)y.data_ptr();
    for (int64_t i = 0; i < count; i++) {
        m[i].y = to, m[i].y_stride = n;
        to += m[i].shape->n * (m->y_dtype == 0 ? 4 : 2);
    }
    const int64_t done =
        multiply(x.data_ptr(), m, count, rows, row_dtype_of(x), batch_invariant, (int32_t)torch::stable::get_num_threads(), backend);
    STD_TORCH_CHECK(done == 0, "the CPU kernel found no memory for its working buffers");
    return y;
}

template <typename... A> Tensor python(const char *name, const A &...arguments) {
    std::array<StableIValue, sizeof...(A)> stack{torch::stable::detail::from(arguments)...};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor nested_linear(Tensor x, Tensor packed, Tensor meta, Tensor bits, std::optional<Tensor> original,
                     std::optional<Tensor> bias, Integers slices, int64_t exponent, bool float32_output,
                     bool batch_invariant) {
    const int64_t rows = rows_of(x, float32_output);
    Matrix m;
    Shape s;
    if (rows && bits.dim() == 1 && bits.size(0) == rows &&
        fill(m, s, x, rows, packed, meta, bits, original ? &*original : nullptr,
             bias ? &*bias : nullptr, slices, exponent, float32_output))
        return run(x, &m, 1, rows, batch_invariant);
    return python("qbe::nested_linear_python", x, packed, meta, bits, original, bias, slices, exponent, float32_output,
                  batch_invariant);
}

Tensor nested_linears(Tensor x, Tensors packed, Tensors meta, Tensors bits, Tensors originals, Tensors biases,
                      Integers slices, Integers exponents, bool batch_invariant) {
    constexpr size_t MOST = 16;
    const size_t count = packed.size();
    Matrix m[MOST];
    Shape s[MOST];
    const int64_t rows = count <= MOST ? rows_of(x) : 0;
    bool fits = rows && count && meta.size() == count && bits.size() == count && exponents.size() == count &&
                (originals.empty() || originals.size() == count) && (biases.empty() || biases.size() == count);
    for (size_t i = 0; fits && i < count; i++)
        fits = bits[i].dim() == 1 && bits[i].size(0) == rows &&
               fill(m[i], s[i], x, rows, packed[i], meta[i], bits[i],
                    originals.empty() ? nullptr : &originals[i], biases.empty() ? nullptr : &biases[i], slices, exponents[i]);
    if (fits) return run(x, m, (int64_t)count, rows, batch_invariant);
    return python("qbe::nested_linears_python", x, packed, meta, bits, originals, biases, slices, exponents,
                  batch_invariant);
}

// What numbered_ops.py has told of its layers.
struct Kept {
    Tensors packed, meta, precision_words;
    Integers slices, exponents;
};
std::vector<Kept> kept;

void keep_linear(int64_t layer, Tensors packed, Tensors meta, Tensors precision_words, Integers slices, Integers exponents) {
    if ((size_t)layer >= kept.size()) kept.resize((size_t)layer + 1);
    kept[(size_t)layer] = Kept{packed, meta, precision_words, slices, exponents};
}

// The product of rows none of which is at 16 bits.
Tensor numbered_linear(Tensor x, std::optional<Tensor> bias, int64_t outputs, int64_t layer) {
    constexpr size_t MOST = 16;
    Matrix m[MOST];
    Shape s[MOST];
    const int64_t rows = layer >= 0 && (size_t)layer < kept.size() ? rows_of(x) : 0;
    if (rows) {
        const Kept &k = kept[(size_t)layer];
        const size_t count = k.packed.size();
        const int bias_dtype = bias ? row_dtype_of(*bias) : 0;
        bool fits = count && count <= MOST && (!bias || (bias_dtype == row_dtype_of(x) && bias->is_contiguous()));
        int64_t n = 0;
        for (size_t i = 0; fits && i < count; i++) {
            fits = fill(m[i], s[i], x, rows, k.packed[i], k.meta[i], k.precision_words[i], nullptr, nullptr, k.slices, k.exponents[i]);
            if (!fits) break;
            if (bias) {
                m[i].bias = (const char *)bias->data_ptr() + n * (bias_dtype == 0 ? 4 : 2), m[i].bias_dtype = bias_dtype;
                fits = n + s[i].n <= bias->numel();
            }
            n += s[i].n;
        }
        if (fits && n == outputs) return run(x, m, (int64_t)count, rows);
    }
    return python("qbe::numbered_linear_python", x, bias, outputs, layer);
}

Tensor paged_attention(Tensor query, Tensor key, Tensor value, Tensor memory, Tensor blocks, Tensor slots, Tensor block_tables,
                       Tensor lengths, Tensor entropy, double scaling, int64_t window, double softcap,
                       std::optional<Tensor> sinks) {
    const int dtype = dtype_of(query);
    bool fits = dtype >= 0 && query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && memory.dim() == 1 &&
                blocks.dim() == 2 && block_tables.dim() == 2 && slots.dim() == 1 && lengths.dim() == 1 && entropy.dim() == 2 &&
                window >= 0;
    for (const Tensor *t : {&key, &value}) fits = fits && dtype_of(*t) == dtype;
    for (const Tensor *t : {&query, &key, &value}) fits = fits && t->stride(2) == 1 && t->size(0) == query.size(0);
    for (const Tensor *t : {&slots, &lengths})
        fits = fits && t->scalar_type() == ScalarType::Long && t->is_contiguous() && t->size(0) == query.size(0);
    fits = fits && block_tables.scalar_type() == ScalarType::Long && block_tables.stride(1) == 1 && block_tables.size(0) == query.size(0) &&
           entropy.scalar_type() == ScalarType::Float && entropy.stride(1) == 1 && entropy.size(0) == query.size(0) &&
           entropy.size(1) == query.size(1) && memory.scalar_type() == ScalarType::Byte && memory.is_contiguous() &&
           blocks.scalar_type() == ScalarType::Int && blocks.is_contiguous() && blocks.size(0) == FORMATS &&
           blocks.size(1) == key.size(1) && key.size(1) == value.size(1) && query.size(2) == key.size(2) &&
           key.size(1) > 0 && query.size(1) % key.size(1) == 0;
    if (sinks)
        fits = fits && sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() && sinks->dim() == 1 &&
               sinks->size(0) == query.size(1);
    if (fits) {
        const AttentionShape s{query.size(0), query.size(1), key.size(1), key.size(2), value.size(2), memory.size(0),
                               block_tables.size(1), query.stride(0), query.stride(1), key.stride(0), key.stride(1),
                               value.stride(0), value.stride(1), block_tables.stride(0), entropy.stride(0), window,
                               (float)scaling, (float)softcap, dtype};
        const int64_t sizes[3] = {s.batch, s.heads, s.value_dim};
        Tensor out = empty_like(query, 3, sizes);
        const int64_t failed =
            attend(query.data_ptr(), key.data_ptr(), value.data_ptr(), memory.data_ptr(),
                   (const int32_t *)blocks.data_ptr(), (const int64_t *)slots.data_ptr(),
                   (const int64_t *)block_tables.data_ptr(), (const int64_t *)lengths.data_ptr(),
                   sinks ? (const float *)sinks->data_ptr() : nullptr, (float *)entropy.data_ptr(),
                   out.data_ptr(), &s, (int32_t)torch::stable::get_num_threads(), backend);
        STD_TORCH_CHECK(failed != -1, "a slot, length or page lies outside of the KV cache's memory");
        STD_TORCH_CHECK(failed == 0, "the CPU kernel found no memory for its working buffers");
        return out;
    }
    return python("qbe::paged_attention_python", query, key, value, memory, blocks, slots, block_tables, lengths, entropy,
                  scaling, window, softcap, sinks);
}

// A number of a row of x as float64; bfloat16 is the upper half of a float32.
double number(const void *x, int64_t at, int dtype) {
    if (dtype == 0) return ((const float *)x)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)x)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__x86_64__) && defined(__linux__)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

// unit[h] += sum over i of x[i] * inner[i][h], for a multiple of 8 of them
CLONES void add_units(double *unit, const double *x, int64_t k, const float *inner, int64_t hidden) {
    for (int64_t h = 0; h < hidden; h += 8) {
        double sum[8];
        for (int j = 0; j < 8; j++) sum[j] = unit[h + j];
        for (int64_t i = 0; i < k; i++)
            for (int j = 0; j < 8; j++) sum[j] += x[i] * (double)inner[i * hidden + h + j];
        for (int j = 0; j < 8; j++) unit[h + j] = sum[j];
    }
}

// A network's choice for one row: `unit` holds its hidden units, `each(site, chosen)` hears the slices of every site.
template <class Each>
void choose(const double *unit, int64_t hidden, const float *outer, const float *outer_bias, int64_t sites, int64_t slices,
            float threshold, const int32_t *gears, int32_t *precision_words, int64_t stride, Each each) {
    double score[UNITS];
    std::copy(outer_bias, outer_bias + sites * slices, score);
    for (int64_t h = 0; h < hidden; h++)
        for (int64_t o = 0; unit[h] > 0 && o < sites * slices; o++)
            score[o] += unit[h] * (double)outer[h * sites * slices + o];
    for (int64_t s = 0; s < sites; s++) {
        double worth = score[s * slices];
        int64_t chosen = 0;
        for (int64_t e = 0; e < slices; e++) {
            const double fall = score[s * slices + e];
            if (e) worth -= fall > 20 ? fall : std::log1p(std::exp(fall));
            chosen += (float)worth > threshold;
        }
        precision_words[s * stride] = (precision_words[s * stride] & ~255) | gears[chosen];
        each(s, chosen);
    }
}

bool of_floats(std::initializer_list<const Tensor *> tensors) {
    bool fits = true;
    for (const Tensor *t : tensors) fits = fits && t->scalar_type() == ScalarType::Float && t->is_contiguous();
    return fits;
}

// `qbe.kernels.ops.routing`, for the few rows of a decode step. Written there in torch, that is a dozen calls a block.
Tensor route(Tensor x, Tensor inner, Tensor inner_bias, Tensor outer, Tensor outer_bias, Tensor thresholds, Tensor gears,
             Tensor sizes, Tensor steering, Tensor precision_words, Tensor spent, int64_t who) {
    const int dtype = dtype_of(x);
    const bool shaped = dtype >= 0 && x.dim() > 0 && x.is_contiguous() && x.numel() && inner.dim() == 2 && outer.dim() == 2;
    const int64_t k = shaped ? x.size(x.dim() - 1) : 1, rows = shaped ? x.numel() / k : 0;
    const int64_t hidden = shaped ? inner.size(1) : 0, slices = gears.numel() - 1, sites = sizes.numel();
    bool fits = rows && rows <= ROUTED && hidden <= UNITS && hidden % 8 == 0 && sites * slices <= UNITS && inner.size(0) == k &&
                outer.size(0) == hidden && outer.size(1) == sites * slices && inner_bias.numel() == hidden &&
                outer_bias.numel() == sites * slices && thresholds.numel() == 256 && steering.dim() == 1 &&
                steering.size(0) >= rows && precision_words.dim() == 2 && precision_words.size(0) == sites && precision_words.size(1) >= rows &&
                spent.dim() == 2 && spent.size(0) == slices + 1 && spent.size(1) >= rows && precision_words.stride(1) == 1 &&
                spent.stride(1) == 1 && thresholds.scalar_type() == ScalarType::Float;
    fits = fits && of_floats({&inner, &inner_bias, &outer, &outer_bias});
    for (const Tensor *t : {&gears, &steering, &precision_words}) fits = fits && t->scalar_type() == ScalarType::Int;
    for (const Tensor *t : {&sizes, &spent}) fits = fits && t->scalar_type() == ScalarType::Long;
    for (const Tensor *t : {&thresholds, &gears, &sizes, &steering}) fits = fits && t->is_contiguous();
    if (!fits)
        return python("qbe::route_python", x, inner, inner_bias, outer, outer_bias, thresholds, gears, sizes, steering,
                      precision_words, spent, who);
    int64_t shape[8];
    for (int64_t d = 0; d < x.dim(); d++) shape[d] = x.size(d);
    Tensor out = empty_like(x, (int)x.dim(), shape);
    memcpy(out.data_ptr(), x.data_ptr(), (size_t)x.numel() * (dtype == 0 ? 4 : 2));
    const float *in = (const float *)inner.data_ptr(), *on = (const float *)outer.data_ptr();
    const float *first = (const float *)inner_bias.data_ptr(), *last = (const float *)outer_bias.data_ptr();
    int64_t *total = (int64_t *)spent.data_ptr();
    std::vector<double> row((size_t)k);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t g = 0; g <= slices; g++) total[g * spent.stride(0) + r] = 0;
        const int32_t steered = ((const int32_t *)steering.data_ptr())[r];
        if (steered >> 8 != who) continue;
        const float threshold = ((const float *)thresholds.data_ptr())[steered & 255];
        double unit[UNITS];
        std::copy(first, first + hidden, unit);
        for (int64_t i = 0; i < k; i++) row[(size_t)i] = number(x.data_ptr(), r * k + i, dtype);
        add_units(unit, row.data(), k, in, hidden);
        choose(unit, hidden, on, last, sites, slices, threshold, (const int32_t *)gears.data_ptr(),
               (int32_t *)precision_words.data_ptr() + r, precision_words.stride(0), [&](int64_t s, int64_t chosen) {
                   total[chosen * spent.stride(0) + r] += ((const int64_t *)sizes.data_ptr())[s];
               });
    }
    return out;
}

// `qbe.kernels.ops.cascade`.
Tensor cascade(Tensor attended, Tensor entropy, Tensor lengths, std::optional<Tensor> rows, Tensor seen, Tensor inner,
               Tensor inner_bias, Tensor outer, Tensor outer_bias, Tensor thresholds, Tensor gears, Tensor steering,
               Tensor precision_words, int64_t point) {
    const int64_t heads = entropy.dim() == 2 ? entropy.size(1) : 0, n = heads ? entropy.size(0) : 0;
    const int64_t k = (point + 1) * heads, slices = gears.numel() - 1, hidden = inner.dim() == 2 ? inner.size(1) : 0;
    const int64_t sites = precision_words.dim() == 2 ? precision_words.size(0) : 0, most = sites ? precision_words.size(1) : 0;
    bool fits = n && sites && attended.dim() == 3 && attended.is_contiguous() && attended.size(0) == n &&
                (rows ? rows->numel() == n && rows->is_contiguous() && rows->scalar_type() == ScalarType::Long : n <= most) &&
                lengths.numel() == n && lengths.is_contiguous() && lengths.scalar_type() == ScalarType::Long &&
                seen.dim() == 2 && seen.size(0) >= most && seen.size(1) >= k && point >= 0 && hidden <= UNITS &&
                hidden % 8 == 0 && inner.size(0) == k && inner_bias.numel() == hidden && sites * slices <= UNITS &&
                outer.dim() == 2 && outer.size(0) == hidden && outer.size(1) == sites * slices &&
                outer_bias.numel() == sites * slices && thresholds.numel() == 256 && steering.numel() >= most &&
                precision_words.stride(1) == 1 && entropy.stride(1) == 1 && entropy.scalar_type() == ScalarType::Float &&
                of_floats({&seen, &inner, &inner_bias, &outer, &outer_bias, &thresholds});
    for (const Tensor *t : {&gears, &steering, &precision_words}) fits = fits && t->scalar_type() == ScalarType::Int;
    const ScalarType dtype = attended.scalar_type();
    fits = fits && gears.is_contiguous() && steering.is_contiguous() &&
           (dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
    if (!fits)
        return python("qbe::cascade_python", attended, entropy, lengths, rows, seen, inner, inner_bias, outer, outer_bias,
                      thresholds, gears, steering, precision_words, point);
    const int64_t shape[3] = {n, attended.size(1), attended.size(2)};
    Tensor out = empty_like(attended, 3, shape);
    memcpy(out.data_ptr(), attended.data_ptr(), (size_t)attended.numel() * (dtype == ScalarType::Float ? 4 : 2));
    std::vector<double> x((size_t)k);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = rows ? ((const int64_t *)rows->data_ptr())[i] : i;
        STD_TORCH_CHECK(row >= 0 && row < most, "a row lies outside of the plan");
        const int32_t steered = ((const int32_t *)steering.data_ptr())[row];
        if (steered >> 8 != CASCADE) continue;
        const float *own = (const float *)entropy.data_ptr() + i * entropy.stride(0);
        float *kept = (float *)seen.data_ptr() + row * seen.stride(0);
        const float of = (float)std::log((double)std::max<int64_t>(2, ((const int64_t *)lengths.data_ptr())[i]));
        for (int64_t h = 0; h < heads; h++) kept[point * heads + h] = own[h] / of;
        bool numbers = true;
        for (int64_t j = 0; j < k; j++) numbers = numbers && std::isfinite(kept[j]), x[(size_t)j] = kept[j];
        if (!numbers) continue;
        double unit[UNITS];
        std::copy((const float *)inner_bias.data_ptr(), (const float *)inner_bias.data_ptr() + hidden, unit);
        add_units(unit, x.data(), k, (const float *)inner.data_ptr(), hidden);
        choose(unit, hidden, (const float *)outer.data_ptr(), (const float *)outer_bias.data_ptr(), sites, slices,
               ((const float *)thresholds.data_ptr())[steered & 255], (const int32_t *)gears.data_ptr(),
               (int32_t *)precision_words.data_ptr() + row, precision_words.stride(0), [](int64_t, int64_t) {});
    }
    return out;
}

// `qbe.kernels.ops.rms_norm`. Means are torch's own, who knows in which order it adds.
Tensor rms_norm(Tensor x, Tensor weight, double eps) {
    const int64_t dims = x.dim(), k = dims ? x.size(dims - 1) : 0, rows = k ? x.numel() / k : 0;
    if (backend < AVX512 || dims > 8 || !rows || dtype_of(x) != 1 || dtype_of(weight) != 1 || !x.is_contiguous() ||
        !weight.is_contiguous() || weight.dim() != 1 || weight.size(0) != k)
        return python("qbe::rms_norm_python", x, weight, eps);
    const int64_t shape[2] = {rows, k}, strides[2] = {k, 1};
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
    Tensor squares(made);
    square_rows(x.data_ptr(), (float *)squares.data_ptr(), rows * k);
    std::array<StableIValue, 4> stack{torch::stable::detail::from(squares),
                                      torch::stable::detail::from(std::optional<Integers>(Integers{-1})),
                                      torch::stable::detail::from(false),
                                      torch::stable::detail::from(std::optional<ScalarType>())};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mean", "dim", stack.data(), TORCH_ABI_VERSION));
    const Tensor means = torch::stable::detail::to<Tensor>(stack[0]);
    int64_t sizes[8];
    for (int64_t d = 0; d < dims; d++) sizes[d] = x.size(d);
    Tensor y = empty_like(x, (int)dims, sizes);
    norm_rows(x.data_ptr(), (const float *)means.data_ptr(), (float)eps, weight.data_ptr(), y.data_ptr(), rows, k);
    return y;
}

// `qbe.kernels.ops.rotary`; the result lies in memory as x does: token by token.
Tensor rotate(Tensor x, Tensor cos, Tensor sin) {
    bool fits = backend >= AVX512 && dtype_of(x) == 1 && x.dim() == 4 && x.size(0) == 1 && x.size(3) % 2 == 0 &&
                x.stride(3) == 1 && x.numel() > 0;
    for (const Tensor *t : {&cos, &sin})
        fits = fits && dtype_of(*t) == 1 && t->dim() == 3 && t->size(0) == 1 && t->size(1) == x.size(2) &&
               t->size(2) == x.size(3) && t->is_contiguous();
    if (!fits) return python("qbe::rotate_python", x, cos, sin);
    const int64_t heads = x.size(1), tokens = x.size(2), width = x.size(3);
    const int64_t sizes[4] = {1, heads, tokens, width}, strides[4] = {heads * tokens * width, width, heads * width, 1};
    int32_t dtype;
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(4, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
    Tensor y(made);
    rotate_rows(x.data_ptr(), x.stride(2), x.stride(1), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), tokens, heads,
                width / 2);
    return y;
}

} // namespace

// Called before the first op: the kernels of nested.c and what they are asked for.
extern "C" void qbe_bind(Multiply *m, Attend *a, void *const *around, int32_t path, const int64_t *many, const int64_t *full) {
    multiply = m, attend = a, backend = path;
    square_rows = (Square *)around[0], norm_rows = (Norm *)around[1], rotate_rows = (Rotate *)around[2];
    for (int dtype = 0; dtype < 3; dtype++) many_rows[dtype] = many[dtype], many_full[dtype] = full[dtype];
}

STABLE_TORCH_LIBRARY_IMPL(qbe, CPU, m) {
    m.impl("nested_linear", TORCH_BOX(&nested_linear));
    m.impl("nested_linears", TORCH_BOX(&nested_linears));
    m.impl("paged_attention", TORCH_BOX(&paged_attention));
    m.impl("route", TORCH_BOX(&route));
    m.impl("cascade", TORCH_BOX(&cascade));
    m.impl("numbered_linear", TORCH_BOX(&numbered_linear));
    m.impl("keep_linear", TORCH_BOX(&keep_linear));
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("rotate", TORCH_BOX(&rotate));
}
