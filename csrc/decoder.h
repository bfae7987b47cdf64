// One step of a dense decoder as one call: embedding, all layers, final norm, over the rows of a batch. It runs the
// kernels in the order, and rounds between them to the dtypes, of the torch executor (models/decoder.py), whose bits it
// has.
#pragma once

#include "exchange.h"
#include "kernels.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace pagemill {

// A packed weight, and the kernels that know its format.
struct Projection {
    const PackedLinear* weight = nullptr;
    const Kernels* set = nullptr;
};

// Weights are the caller's. Norms fp32: [hidden], those of queries and keys [head_dim]; null where the model has none.
struct DecoderLayer {
    const float* input_norm = nullptr;
    Projection qkv, o;  // qkv: rows of q, then k, then v
    const float* pre_mlp_norm = nullptr;
    Projection gate_up, down;  // gate_up: gate rows first
    const float *q_norm = nullptr, *k_norm = nullptr, *post_attention_norm = nullptr, *post_mlp_norm = nullptr;
    int rope = -1;  // index into a step's angles; -1: without positions
    int group = 0;  // index into a step's groups
    int64_t window = 0;  // 0: none
};

struct DecoderShape {
    int heads = 0, kv_heads = 0, head_dim = 0;
    DType type = DType::f32;  // of weights in `embedding`, and of all that is passed from operator to operator
    float eps = 0;
    Activation activation = Activation::silu;
    float scale = 1, soft_cap = 0;  // soft_cap 0: none
    float embedding_scale = 1;  // rounded to `type`
};

// cos and sin by position, [positions, half] fp32 each.
struct AngleTable {
    const float *cos = nullptr, *sin = nullptr;
    int64_t half = 0;
};

// A layer group's part of a step.
struct GroupTables {
    const int32_t* tables = nullptr;  // [rows, ...]
    int64_t stride = 0;
    const int64_t* slots = nullptr;  // [tokens]
    Remainders remainders = {};
    const int64_t* remainder_slots = nullptr;  // [tokens], or null: there are none
};

// What an adapter adds to each of a decoder's layers; null where it adds nothing. The additions are the caller's.
struct Adapter {
    enum Place { kQkv, kO, kGateUp, kDown, kPlaces };

    std::vector<const LowRank*> additions;  // [layers, kPlaces]
};

struct AdapterTokens {
    const Adapter* adapter = nullptr;
    const int64_t* tokens = nullptr;
    int64_t count = 0;
};

// What a decoder of one rank needs to know of the others: by rank, the bytes of its part of a token's heads, hidden
// state and activations between the MLP's projections. Without an exchange, the model is in one piece.
struct Parts {
    Exchange* exchange = nullptr;  // the caller's
    std::vector<int64_t> heads, hidden, intermediate;
};

// A step's batch, as in attention/interface.py.
struct DecoderStep {
    const int64_t* token_ids = nullptr;  // [tokens]
    const int64_t* positions = nullptr;  // [tokens], each below max_positions
    int64_t tokens = 0, max_positions = 0;
    const int32_t *query_start = nullptr, *context_lens = nullptr;  // [rows + 1], [rows]
    int rows = 0;
    std::vector<GroupTables> groups = {};
    std::vector<AngleTable> angles = {};
    std::vector<const LayerCache*> caches;  // by layer
    std::vector<AdapterTokens> adapters = {};  // ascending tokens; none in two
    void* output = nullptr;  // [tokens, hidden], dtype of the shape
    std::function<void(int)> on_layer = {};  // if given, called as each layer begins
    const void* embedded = nullptr;  // of a model in parts: the tokens' rows of the embedding, [tokens, hidden]
    Exchange::Idle idle = {};  // the same
};

class Decoder {
  public:
    enum Operator {
        kEmbed,
        kNorm,
        kQkv,
        kHeads,
        kAttention,
        kO,
        kGateUp,
        kActivation,
        kDown,
        kMlp,
        kAdapters,
        kExchange,
        kOperators
    };
    // kMlp: gate_up, activation and down in one.
    static const char* const kOperatorNames[kOperators];

    // The embedding [vocab, hidden], as the head's weight is, or null: the rows of the head.
    Decoder(const DecoderShape& shape, const void* embedding, const Projection& head, const float* final_norm)
        : shape_(shape), embedding_(embedding), head_(head), final_norm_(final_norm) {}
    ~Decoder();
    Decoder(const Decoder&) = delete;

    const DecoderShape& shape() const { return shape_; }
    size_t num_layers() const { return layers_.size(); }
    // The weight that an adapter adds to.
    const PackedLinear& weight(size_t layer, Adapter::Place place) const;
    void add_layer(const DecoderLayer& layer) { layers_.push_back(layer); }
    // Makes it that of one rank. Its layers' o and down take what all ranks have, and give this one's part of the
    // hidden state; all others have this rank's heads, and activations, alone.
    void set_parts(Parts parts) { parts_ = std::move(parts); }
    const Parts& parts() const { return parts_; }
    // The caller holds `Exclusive`. Throws std::out_of_range for a token id or position outside its table, before
    // anything is written, and std::bad_alloc.
    void run(const DecoderStep& step);
    // Seconds spent in each operator since the decoder was made.
    const double* seconds() const { return seconds_; }

  private:
    struct Workspace;
    struct Stopwatch;

    Workspace workspace(int64_t tokens);
    // Adds what the step's adapters add to outputs y of a layer's weight, for `count` tokens from `first` on.
    void adapt(const DecoderStep& step, size_t layer, Adapter::Place place, const void* x, void* y, int64_t first,
               int64_t count) const;
    // A projection back to the hidden state: y of x, of which this rank has the part whose bytes `inputs` says.
    void close(const DecoderStep& step, const Projection& projection, const void* x, void* y,
               const std::vector<int64_t>& inputs, Operator op, const Workspace& at, Stopwatch& watch);
    // A layer's MLP of what is in `at.y`, in its place, with what the step's adapters add.
    void adapted_mlp(const DecoderStep& step, size_t layer, const Workspace& at, Stopwatch& watch);

    DecoderShape shape_;
    const void* embedding_;
    Projection head_;
    const float* final_norm_;
    std::vector<DecoderLayer> layers_;
    Parts parts_;
    char* memory_ = nullptr;  // kept between steps
    size_t bytes_ = 0;
    double seconds_[kOperators] = {};
};

}  // namespace pagemill
