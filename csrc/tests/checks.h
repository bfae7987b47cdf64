// What the checks of sanitized.cpp share: operands that end where a page ends, random shapes and values, comparison.
#pragma once

#include "../kernels.h"

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

constexpr size_t kPage = 4096;

// `count` elements, the last of them just before a page that faults; filled with ones (NaN in every dtype but int8).
class Guarded {
  public:
    Guarded(size_t count, DType type) : type_(type), bytes_(count * item_size(type)) { map(); }
    explicit Guarded(size_t bytes) : type_(DType::f32), bytes_(bytes) { map(); }
    ~Guarded() { munmap(base_, mapped_); }
    Guarded(const Guarded&) = delete;

    void* data() { return data_; }
    template <class T> T* as() { return reinterpret_cast<T*>(data_); }

    double get(size_t i) const {
        if (type_ == DType::i8) return static_cast<signed char>(data_[i]);
        if (type_ == DType::f32) {
            float x;
            std::memcpy(&x, data_ + 4 * i, 4);
            return x;
        }
        uint16_t h;
        std::memcpy(&h, data_ + 2 * i, 2);
        if (type_ == DType::bf16) {
            const uint32_t bits = uint32_t(h) << 16;
            float x;
            std::memcpy(&x, &bits, 4);
            return x;
        }
        const int exponent = h >> 10 & 31, mantissa = h & 1023;
        if (exponent == 31) return mantissa ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
        const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        return h & 0x8000 ? -magnitude : magnitude;
    }

    // Values that all floating dtypes have exactly: seven bits of precision, magnitude up to `scale`, a power of 2.
    void fill(std::mt19937& random, double scale = 1.0) {
        const size_t count = bytes_ / item_size(type_);
        for (size_t i = 0; i < count; ++i) set(i, scale * (int(random() % 129) - 64) / 64.0);
    }

    void set(size_t i, double value) {
        const float x = float(value);
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (type_ == DType::f32) std::memcpy(data_ + 4 * i, &x, 4);
        uint16_t h = uint16_t(bits >> 16);
        if (type_ == DType::f16) {
            int exponent = 0;
            const double fraction = std::frexp(std::fabs(value), &exponent);
            h = value == 0 ? 0 : uint16_t((value < 0) << 15 | (exponent + 14) << 10 | (int(fraction * 2048) & 1023));
        }
        if (type_ != DType::f32) std::memcpy(data_ + 2 * i, &h, 2);
    }

  private:
    void map() {
        const size_t size = (bytes_ + kPage - 1) / kPage * kPage;
        mapped_ = size + kPage;
        base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + size, kPage, PROT_NONE)) std::abort();
        std::memset(base_, 0xff, size);
        data_ = base_ + size - bytes_;
    }

    DType type_;
    size_t bytes_, mapped_ = 0;
    char *base_ = nullptr, *data_ = nullptr;
};

// A layer's cache of so many frames, keys and values side by side in memory as `transposed` and `pairs` say.
struct GuardedCache {
    Guarded key, value, key_scale, value_scale;
    LayerCache layer;

    GuardedCache(DType type, int64_t frames, int kv_heads, int block, int dim, bool transposed, bool pairs)
        : key(frames * kv_heads * block * dim, type), value(frames * kv_heads * block * dim, type),
          key_scale(frames * kv_heads * block, DType::f32), value_scale(frames * kv_heads * block, DType::f32) {
        const int64_t side = pairs ? 2 : 1, per_head = int64_t(block) * dim;
        layer.type = type;
        layer.kv_heads = kv_heads;
        layer.block_size = block;
        layer.head_dim = dim;
        layer.key = {.data = key.data(), .token = transposed ? side : dim, .dim = transposed ? side * block : 1};
        layer.value = {.data = value.data(), .token = side * dim, .dim = side};
        layer.key.scale = key_scale.as<float>();
        layer.value.scale = value_scale.as<float>();
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
    double get(const Guarded& elements, const Guarded& scales, const CacheView& view, int64_t slot, int64_t head,
               int64_t place) const {
        const int64_t frame = slot / layer.block_size, token = slot % layer.block_size;
        const double element = elements.get(frame * view.frame + head * view.head + place);
        if (layer.type != DType::i8) return element;
        return element * scales.get(frame * view.scale_frame + head * view.scale_head + token);
    }
};

inline std::mt19937 random_source;  // NOLINT(bugprone-random-generator-seed): sanitized.cpp seeds it
inline int below(int n) { return int(random_source() % uint32_t(n)); }
template <class T> T one_of(std::initializer_list<T> values) { return values.begin()[below(int(values.size()))]; }
inline DType any_type() { return DType(below(3)); }
inline DType any_cache_type() { return DType(below(4)); }

inline std::string where;

inline void expect(double got, double want, double tolerance) {
    if (std::fabs(got - want) <= tolerance * (1 + std::fabs(want))) return;
    std::fprintf(stderr, "%s on %s: %g instead of %g\n", where.c_str(), kernels().isa, got, want);
    std::exit(1);
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
