// Steps of a small decoder against the model in fp64, and in two ways of cutting its rows into steps, whose bits must
// be the same.
#include "checks.h"

#include "../decoder.h"

#include <algorithm>
#include <memory>

namespace pagemill {
namespace {

using Vector = std::vector<double>;

// A weight as the decoder takes it, and what it is.
struct Matrix {
    int64_t n, k;
    Vector exact;
    PackedLinear packed;

    Matrix(int64_t n, int64_t k, DType type, bool integers)
        : n(n), k(k), exact(n * k), packed{.n = n, .k = k, .type = type} {
        const double size = std::exp2(-std::round(std::log2(double(k)) / 2));
        if (integers) {
            const int64_t groups = (k + 191) / 192;
            const Array<int8_t> values(n * k);
            Numbers scales(n * groups, DType::bf16);
            for (int64_t i = 0; i < n * groups; ++i) scales.set(i, size / 128 * (1 + below(128) / 128.0));
            for (int64_t i = 0; i < n * k; ++i) {
                values[i] = int8_t(below(255) - 127);
                exact[i] = values[i] * scales.get(i / k * groups + i % k / 192);
            }
            packed.format = Format::int8;
            kernels().pack_quantized(packed,
                                     {values.data(), nullptr, nullptr, static_cast<uint16_t*>(scales.data()), nullptr});
        } else {
            Numbers weight(n * k, type, size);
            for (int64_t i = 0; i < n * k; ++i) exact[i] = weight.get(i);
            kernels().pack_linear(packed, weight.data(), nullptr, type);
        }
    }
    ~Matrix() { release(packed); }
    Matrix(const Matrix&) = delete;

    Projection projection() const { return {&packed, &kernels()}; }
    Vector operator()(const Vector& x) const {
        Vector y(n);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < k; ++j) y[i] += exact[i * k + j] * x[j];
        return y;
    }
};

struct Norm {
    Array<float> weight;

    explicit Norm(int64_t n) : weight(n) {
        for (int64_t i = 0; i < n; ++i) weight[i] = float(0.5 + below(65) / 64.0);
    }
    Vector operator()(Vector x) const {
        const double size = root_mean_square(int64_t(x.size()), [&](int64_t i) { return x[i]; });
        for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i] / size;
        return x;
    }
};

struct Layer {
    Norm input, middle;
    Matrix qkv, o, gate_up, down;
};

using Tokens = std::vector<int64_t>;

struct Model {
    static constexpr int64_t kVocabulary = 50, kPositions = 400;

    DecoderShape shape;
    int64_t hidden = 16 * (1 + below(8)), inner = 32 * (1 + below(4)), half;
    bool integers = below(2);
    Matrix head;
    Norm final_norm{hidden};
    std::vector<std::unique_ptr<Layer>> layers;
    Array<float> cos, sin;

    explicit Model(const DecoderShape& shape)
        : shape(shape), half(shape.head_dim / 2), head(kVocabulary, hidden, shape.type, false), cos(kPositions * half),
          sin(kPositions * half) {
        const int64_t dim = shape.head_dim, own = shape.heads * dim;
        for (int i = 1 + below(3); i > 0; --i)
            layers.emplace_back(new Layer{Norm(hidden),
                                          Norm(hidden),
                                          {own + 2 * shape.kv_heads * dim, hidden, shape.type, integers},
                                          {hidden, own, shape.type, integers},
                                          {2 * inner, hidden, shape.type, integers},
                                          {hidden, inner, shape.type, integers}});
        for (int64_t i = 0; i < kPositions * half; ++i) {
            const double angle = double(i / half) * std::pow(100.0, -double(i % half) / double(half));
            cos[i] = float(std::cos(angle));
            sin[i] = float(std::sin(angle));
        }
    }

    void rotate(double* x, int64_t position) const {
        for (int64_t i = 0; i < half; ++i) {
            const double a = x[i], b = x[half + i], c = cos[position * half + i], s = sin[position * half + i];
            x[i] = a * c - b * s;
            x[half + i] = b * c + a * s;
        }
    }

    // Attention of one position's heads over its own keys and values and those before.
    Vector attend(const std::vector<Vector>& qkv, size_t position) const {
        const int64_t dim = shape.head_dim, own = shape.heads * dim;
        Vector mixed(own);
        for (int h = 0; h < shape.heads; ++h) {
            const int64_t key = own + h / (shape.heads / shape.kv_heads) * dim, value = key + shape.kv_heads * dim;
            double sum = 0;
            for (size_t j = 0; j <= position; ++j) {
                double score = 0;
                for (int64_t d = 0; d < dim; ++d) score += qkv[position][h * dim + d] * qkv[j][key + d];
                const double weight = std::exp(score * shape.scale);
                sum += weight;
                for (int64_t d = 0; d < dim; ++d) mixed[h * dim + d] += weight * qkv[j][value + d];
            }
            for (int64_t d = 0; d < dim; ++d) mixed[h * dim + d] /= sum;
        }
        return mixed;
    }

    // What a step gives for each token of a row.
    std::vector<Vector> in_fp64(const Tokens& tokens) const {
        std::vector<Vector> x, qkv(tokens.size());
        const auto add = [](Vector& to, const Vector& more) {
            for (size_t i = 0; i < to.size(); ++i) to[i] += more[i];
        };
        for (const int64_t token : tokens)
            x.emplace_back(head.exact.begin() + token * hidden, head.exact.begin() + (token + 1) * hidden);
        for (const auto& layer : layers) {
            for (size_t t = 0; t < x.size(); ++t) {
                qkv[t] = layer->qkv(layer->input(x[t]));
                for (int h = 0; h < shape.heads + shape.kv_heads; ++h)
                    rotate(qkv[t].data() + size_t(h) * shape.head_dim, int64_t(t));
            }
            for (size_t t = 0; t < x.size(); ++t) {
                add(x[t], layer->o(attend(qkv, t)));
                Vector wide = layer->gate_up(layer->middle(x[t]));
                for (int64_t i = 0; i < inner; ++i) wide[i] *= wide[inner + i] / (1 + std::exp(-wide[i]));
                wide.resize(inner);
                add(x[t], layer->down(wide));
            }
        }
        for (Vector& row : x) row = final_norm(row);
        return x;
    }

    // The same by steps of the decoder, as bytes; up to so many tokens of a row in a step, of one row or of all.
    std::vector<std::vector<char>> by_steps(const std::vector<Tokens>& rows, DType cached, int most, bool alone) const {
        constexpr int kBlock = 16, kBlocks = kPositions / kBlock;
        const int dim = shape.head_dim, frames = int(rows.size()) * kBlocks;
        CacheTypes types(dim);
        types.key = types.value = cached;
        std::vector<std::unique_ptr<GuardedCache>> caches;
        Decoder decoder(shape, nullptr, head.projection(), final_norm.weight.data());
        DecoderStep step;
        for (const auto& layer : layers) {
            decoder.add_layer({.input_norm = layer->input.weight.data(),
                               .qkv = layer->qkv.projection(),
                               .o = layer->o.projection(),
                               .pre_mlp_norm = layer->middle.weight.data(),
                               .gate_up = layer->gate_up.projection(),
                               .down = layer->down.projection(),
                               .rope = 0});
            caches.emplace_back(new GuardedCache(types, frames, shape.kv_heads, kBlock, dim, true, types.beside()));
            step.caches.push_back(&caches.back()->layer);
        }
        const size_t row_bytes = hidden * item_size(shape.type);
        std::vector<std::vector<char>> outputs(rows.size());
        for (;;) {
            Tokens ids, positions, slots;
            std::vector<int32_t> starts{0}, contexts, tables;
            std::vector<size_t> taken;
            for (size_t r = 0; r < rows.size(); ++r) {
                const size_t done = outputs[r].size() / row_bytes, left = rows[r].size() - done;
                if (left == 0 || (alone && !taken.empty())) continue;
                const size_t count = std::min<size_t>(left, 1 + below(most));
                for (size_t t = done; t < done + count; ++t) {
                    const auto frame = frames - 1 - int64_t(r * kBlocks + t / kBlock);
                    ids.push_back(rows[r][t]);
                    positions.push_back(int64_t(t));
                    slots.push_back(frame * kBlock + int64_t(t % kBlock));
                }
                for (int b = 0; b < kBlocks; ++b) tables.push_back(frames - 1 - int(r) * kBlocks - b);
                taken.push_back(r);
                starts.push_back(int32_t(ids.size()));
                contexts.push_back(int32_t(done + count));
            }
            if (taken.empty()) return outputs;
            const Array<char> output(ids.size() * row_bytes);
            step.token_ids = ids.data();
            step.positions = positions.data();
            step.tokens = int64_t(ids.size());
            step.max_positions = kPositions;
            step.query_start = starts.data();
            step.context_lens = contexts.data();
            step.rows = int(taken.size());
            step.groups = {{.tables = tables.data(), .stride = kBlocks, .slots = slots.data()}};
            step.angles = {{cos.data(), sin.data(), half}};
            step.output = output.data();
            decoder.run(step);
            for (size_t i = 0; i < taken.size(); ++i)
                outputs[taken[i]].insert(outputs[taken[i]].end(), output.data() + starts[i] * row_bytes,
                                         output.data() + starts[i + 1] * row_bytes);
        }
    }
};

}  // namespace

void check_decoder() {
    where = "decoder";
    const int kv_heads = 1 + below(3), dim = one_of({32, 64});
    const Model model({.heads = kv_heads * (1 + below(3)),
                       .kv_heads = kv_heads,
                       .head_dim = dim,
                       .type = any_type(),
                       .eps = 1e-5f,
                       .scale = 1 / std::sqrt(float(dim)),
                       .embedding_scale = 1});
    const DType type = model.shape.type, cached = below(2) ? type : DType::i8;
    std::vector<Tokens> rows(1 + below(3));
    for (Tokens& row : rows) {
        row.resize(below(8) ? 1 + below(30) : 280);  // of two partitions
        for (int64_t& token : row) token = below(Model::kVocabulary);
    }
    const auto outputs = model.by_steps(rows, cached, 300, false), again = model.by_steps(rows, cached, 3, below(2));
    // Of the error's rms, relative to the outputs'.
    double limit = type == DType::f32 ? 1e-5 : type == DType::f16 ? 4e-3 : 3e-2;
    if (model.integers || cached == DType::i8) limit = 0.1;
    for (size_t r = 0; r < rows.size(); ++r) {
        where = "decoder, tokens by themselves";
        expect(outputs[r] == again[r], true, 0);
        where = "decoder";
        const std::vector<Vector> want = model.in_fp64(rows[r]);
        double wrong = 0, all = 0;
        Numbers got(rows[r].size() * model.hidden, type);
        std::memcpy(got.data(), outputs[r].data(), outputs[r].size());
        for (size_t i = 0; i < rows[r].size() * model.hidden; ++i) {
            const double each = want[i / model.hidden][i % model.hidden];
            wrong += std::pow(got.get(i) - each, 2);
            all += each * each;
        }
        expect(std::sqrt(wrong / all), 0, limit);
    }
}

}  // namespace pagemill
