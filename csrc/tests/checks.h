// What the checks of sanitized.cpp share: operands that end where a page ends, random shapes and values, comparison.
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

inline std::mt19937 random_source;  // NOLINT(bugprone-random-generator-seed): sanitized.cpp seeds it
inline int below(int n) { return int(random_source() % uint32_t(n)); }
template <class T> T one_of(std::initializer_list<T> values) { return values.begin()[below(int(values.size()))]; }
inline DType any_type() { return DType(below(3)); }
inline DType any_cache_type() { return DType(below(4)); }

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

// Numbers of any dtype; filled with ones they are NaN, but for int8.
class Numbers : public Guarded {
  public:
    Numbers(size_t count, DType type) : Guarded(count * item_size(type)), type_(type) {}
    Numbers(size_t count, DType type, double scale) : Numbers(count, type) {
        for (size_t i = 0; i < count; ++i) set(i, any_number(scale));
    }

    void* data() { return data_; }

    double get(size_t i) const {
        if (type_ == DType::i8) return at<int8_t>()[i];
        if (type_ == DType::f32) return at<float>()[i];
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

// A layer's cache of so many frames, keys and values side by side in memory as `transposed` and `pairs` say.
struct GuardedCache {
    Numbers key, value;
    Array<float> key_scale, value_scale;
    LayerCache layer;

    GuardedCache(DType type, int64_t frames, int kv_heads, int block, int dim, bool transposed, bool pairs)
        : key(frames * kv_heads * block * dim, type), value(frames * kv_heads * block * dim, type),
          key_scale(frames * kv_heads * block), value_scale(frames * kv_heads * block) {
        const int64_t side = pairs ? 2 : 1, per_head = int64_t(block) * dim;
        layer.type = type;
        layer.kv_heads = kv_heads;
        layer.block_size = block;
        layer.head_dim = dim;
        layer.key = {.data = key.data(), .token = transposed ? side : dim, .dim = transposed ? side * block : 1};
        layer.value = {.data = value.data(), .token = side * dim, .dim = side};
        layer.key.scale = key_scale.data();
        layer.value.scale = value_scale.data();
        for (CacheView* view : {&layer.key, &layer.value}) {
            view->frame = kv_heads * per_head;
            view->head = per_head;
            view->pairs = pairs;
            view->scale_frame = int64_t(kv_heads) * block;
            view->scale_head = block;
        }
    }

    double key_at(int64_t slot, int64_t head, int64_t d) const {
        const CacheView& view = layer.key;
        const int64_t place = view.pairs ? d / 2 * view.dim + d % 2 : d * view.dim;
        return get(key, key_scale, view, slot, head, place + slot % layer.block_size * view.token);
    }
    double value_at(int64_t slot, int64_t head, int64_t d) const {
        const CacheView& view = layer.value;
        const int64_t token = slot % layer.block_size,
                      place = view.pairs ? token / 2 * view.token + token % 2 : token * view.token;
        return get(value, value_scale, view, slot, head, place + d * view.dim);
    }

  private:
    double get(const Numbers& elements, const Array<float>& scales, const CacheView& view, int64_t slot, int64_t head,
               int64_t place) const {
        const int64_t frame = slot / layer.block_size, token = slot % layer.block_size;
        const double element = elements.get(frame * view.frame + head * view.head + place);
        if (layer.type != DType::i8) return element;
        return element * scales[frame * view.scale_frame + head * view.scale_head + token];
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

inline double tolerance(DType type) { return type == DType::f32 ? 1e-4 : type == DType::f16 ? 3e-3 : 2e-2; }

// Each in the file of its name, or of its subject; a failure ends the process.
void check_linear();
void check_affine();
void check_mlp();
void check_attention();
void check_elementwise();
void check_prepare_heads();
void check_quantized();
void check_dequantize();
void check_sampling();
void check_threads();

}  // namespace pagemill
