// What the checks share: operands that end where a page ends, random shapes and values, comparison.
#pragma once

#include "../kernels.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>

namespace pagemill {

inline std::mt19937 random_source;  // NOLINT(bugprone-random-generator-seed): checks.cpp seeds it
inline int below(int n) { return int(random_source() % uint32_t(n)); }
template <class T> T one_of(std::initializer_list<T> values) { return values.begin()[below(int(values.size()))]; }
inline DType any_type() { return DType(below(3)); }

// Of a cache's keys and values. 4-bit values are in heads of multiples of 32.
struct CacheTypes {
    DType key, value;

    explicit CacheTypes(int dim) {
        constexpr DType kKeys[] = {DType::f32,  DType::bf16, DType::f16, DType::i8,
                                   DType::e4m3, DType::e5m2, DType::i8,  DType::u4};
        const int choice = below(dim % 32 ? 6 : 8);
        key = kKeys[choice];
        value = choice < 6 ? key : DType::u4;
    }
    // Elements that may lie side by side.
    int beside() const { return key == DType::bf16 ? 2 : is_integer(key) ? 4 : 1; }
};

constexpr size_t kPage = 4096;

// Memory that ends just before a page that faults; filled with ones.
class Guarded {
  public:
    explicit Guarded(size_t bytes) {
        const size_t size = (bytes + kPage - 1) / kPage * kPage;
        mapped_ = size + kPage;
        base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + size, kPage, PROT_NONE)) std::abort();
        std::memset(base_, 0xff, size);
        data_ = base_ + size - bytes;
    }
    ~Guarded() { munmap(base_, mapped_); }
    Guarded(const Guarded&) = delete;

  protected:
    size_t mapped_ = 0;
    char *base_ = nullptr, *data_ = nullptr;
};

// One that all floating dtypes have exactly: seven bits of precision, magnitude up to `scale`, a power of 2.
inline double any_number(double scale) { return scale * (below(129) - 64) / 64.0; }

template <class T> struct Array : Guarded {
    explicit Array(size_t count) : Guarded(count * sizeof(T)) {}
    Array(size_t count, double scale) : Array(count) {
        for (size_t i = 0; i < count; ++i) (*this)[i] = T(any_number(scale));
    }

    T* data() const { return reinterpret_cast<T*>(data_); }
    T& operator[](size_t i) const { return data()[i]; }
};

// Numbers of any dtype; filled with ones they are NaN, but for integers; 4-bit ones are read by bytes.
class Numbers : public Guarded {
  public:
    Numbers(size_t count, DType type) : Guarded(count * item_size(type)), type_(type) {}
    Numbers(size_t count, DType type, double scale) : Numbers(count, type) {
        for (size_t i = 0; i < count; ++i) set(i, any_number(scale));
    }

    void* data() { return data_; }

    double get(size_t i) const {
        if (type_ == DType::i8) return at<int8_t>()[i];
        if (type_ == DType::u4) return at<uint8_t>()[i];
        if (type_ == DType::f32) return at<float>()[i];
        if (type_ == DType::e4m3 || type_ == DType::e5m2) {
            const int bits = at<uint8_t>()[i], width = type_ == DType::e4m3 ? 3 : 2,
                      bias = type_ == DType::e4m3 ? 7 : 15;
            const int exponent = (bits & 127) >> width, mantissa = bits & ((1 << width) - 1);
            const double magnitude = exponent ? std::ldexp((1 << width) + mantissa, exponent - bias - width)
                                              : std::ldexp(mantissa, 1 - bias - width);
            if ((bits & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
            return bits & 128 ? -magnitude : magnitude;
        }
        const uint16_t h = at<uint16_t>()[i];
        if (type_ == DType::bf16) return std::bit_cast<float>(uint32_t(h) << 16);
        const int exponent = h >> 10 & 31, mantissa = h & 1023;
        if (exponent == 31) return mantissa ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
        const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        return h & 0x8000 ? -magnitude : magnitude;
    }

    void set(size_t i, double value) {
        if (type_ == DType::f32) at<float>()[i] = float(value);
        if (type_ == DType::bf16) at<uint16_t>()[i] = uint16_t(std::bit_cast<uint32_t>(float(value)) >> 16);
        if (type_ != DType::f16) return;
        int exponent = 0;
        const int mantissa = int(std::frexp(std::fabs(value), &exponent) * 2048) & 1023;
        at<uint16_t>()[i] = value == 0 ? 0 : uint16_t((value < 0) << 15 | (exponent + 14) << 10 | mantissa);
    }

  private:
    template <class T> T* at() const { return reinterpret_cast<T*>(data_); }

    DType type_;
};

// A layer's cache of so many frames, keys and values side by side in memory as `transposed` and `beside` say.
struct GuardedCache {
    Numbers key, value;
    Array<float> key_scales, value_scales;
    LayerCache layer;

    GuardedCache(CacheTypes types, int64_t frames, int kv_heads, int block, int dim, bool transposed, int beside)
        : key(frames * kv_heads * block * bytes_of(types.key, dim), types.key),
          value(frames * kv_heads * block * bytes_of(types.value, dim), types.value),
          key_scales(frames * kv_heads * block * groups_of(types.key, dim)), value_scales(frames * kv_heads * block) {
        const int64_t key_dim = bytes_of(types.key, dim), value_dim = bytes_of(types.value, dim);
        layer.kv_heads = kv_heads;
        layer.block_size = block;
        layer.head_dim = dim;
        layer.key = {.data = key.data(),
                     .token = transposed ? beside : key_dim,
                     .dim = transposed ? beside * block : 1,
                     .type = types.key};
        layer.value = {.data = value.data(), .token = beside * value_dim, .dim = beside, .type = types.value};
        layer.key.scales = key_scales.data();
        layer.value.scales = value_scales.data();
        for (CacheView* view : {&layer.key, &layer.value}) {
            view->head = block * (view == &layer.key ? key_dim : value_dim);
            view->frame = kv_heads * view->head;
            view->beside = beside;
            view->scale_head = block * int64_t(view == &layer.key ? groups_of(types.key, dim) : 1);
            view->scale_frame = kv_heads * view->scale_head;
        }
    }

    // A slot's key or value of one head, as it was before it was rotated.
    std::vector<double> vector_at(bool is_key, int64_t slot, int64_t head) const {
        const CacheView& view = is_key ? layer.key : layer.value;
        const Numbers& elements = is_key ? key : value;
        const int64_t frame = slot / layer.block_size, token = slot % layer.block_size, beside = view.beside,
                      first = frame * view.frame + head * view.head +
                              (is_key ? token * view.token : token / beside * view.token + token % beside);
        const auto* scales = static_cast<const float*>(view.scales) + frame * view.scale_frame + head * view.scale_head;
        std::vector<double> all;
        for (int d = 0; d < layer.head_dim; ++d) {
            const int64_t i = view.type == DType::u4 ? d / 32 * 16 + d % 16 : d;
            const double element = elements.get(first + (is_key ? i / beside * view.dim + i % beside : i * view.dim));
            if (view.type == DType::u4) {
                const int64_t group = is_key ? d / kKeyGroup : 0;
                const auto word = std::bit_cast<uint32_t>(scales[group * layer.block_size + token]);
                const double n = int(element) >> (d / 16 % 2 * 4) & 15;
                all.push_back(n * std::bit_cast<float>(word & 0xffff0000u) + std::bit_cast<float>(word << 16));
            } else {
                all.push_back(view.type == DType::i8 ? element * scales[token] : element);
            }
        }
        return is_key && view.type == DType::u4 ? turned_back(all) : all;
    }

  private:
    static int64_t bytes_of(DType type, int dim) { return type == DType::u4 ? dim / 2 : dim; }
    static int groups_of(DType type, int dim) { return type == DType::u4 ? dim / kKeyGroup : 1; }

    static std::vector<double> turned_back(std::vector<double> x) {
        const int count = int(x.size()), together = count & -count;
        std::vector<double> back(count);
        for (int i = 0; i < count; ++i)
            for (int j = i / together * together; j < i / together * together + together; ++j)
                back[i] += (std::popcount(unsigned(i % together & j % together)) % 2 ? -x[j] : x[j]) / together;
        return back;
    }
};

inline std::string where;

inline void expect(double got, double want, double tolerance) {
    if (std::fabs(got - want) <= tolerance * (1 + std::fabs(want))) return;
    std::fprintf(stderr, "%s on %s: %g instead of %g\n", where.c_str(), kernels().isa, got, want);
    std::exit(1);
}

// What a norm divides by.
template <class Get> double root_mean_square(int64_t n, const Get& get) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += get(i) * get(i);
    return std::sqrt(squares / n + 1e-5);
}

// Rows of a packed weight come back as `weight(i)`, i its place in [n, k].
template <class Weight> void expect_row(const PackedLinear& packed, DType type, double off, const Weight& weight) {
    Array<int64_t> ids(1);
    ids[0] = below(int(packed.n));
    Numbers row(packed.k, type);
    kernels().embed_packed(packed, ids.data(), 1.0f, row.data(), type, 1);
    for (int64_t i = 0; i < packed.k; ++i) expect(row.get(i), weight(ids[0] * packed.k + i), off);
}

// A linear layer gives rows the same bits by themselves as together.
inline void expect_same_alone(const PackedLinear& packed, Numbers& x, int64_t x_row, DType type, int64_t m) {
    Numbers together(m * packed.n, type), alone(packed.n, type);
    const size_t bytes = packed.n * item_size(type);
    kernels().linear(packed, x.data(), x_row, together.data(), packed.n, type, m);
    for (int64_t row = 0; row < m; ++row) {
        const char* const from = static_cast<char*>(x.data()) + row * x_row * item_size(type);
        kernels().linear(packed, from, x_row, alone.data(), packed.n, type, 1);
        expect(std::memcmp(alone.data(), static_cast<char*>(together.data()) + row * bytes, bytes) == 0, true, 0);
    }
}

// What rounding numbers of up to 1 to a cache's integers may change: half a step. A step of 4 bits is a 15th of up to
// 2; where keys are rotated, errors of all dimensions meet in one. Floating point of 8 bits loses a share.
inline double step_off(DType type, bool is_key) {
    if (type == DType::e4m3 || type == DType::e5m2) return type == DType::e4m3 ? 1.0 / 16 : 1.0 / 8;
    return type == DType::u4 ? is_key ? 0.4 : 0.09 : type == DType::i8 ? 1.0 / 250 : 0;
}

inline double tolerance(DType type) {
    return type == DType::f32 || type >= DType::i8 ? 1e-4 : type == DType::f16 ? 3e-3 : 2e-2;
}

// Each in the file of its name, or of its subject; a failure ends the process.
void check_linear();
void check_rows_alone();
void check_affine();
void check_mlp();
void check_attention();
void check_elementwise();
void check_prepare_heads();
void check_quantized();
void check_rounding();
void check_dequantize();
void check_stored();
void check_sampling();
void check_decoder();
void check_threads();

}  // namespace pagemill
