#include "decoder.h"

#include "kernels.h"
#include "memory.h"
#include "shared_prefixes.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagemill {
namespace {

void check_range(const char* what, const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= limit)
            throw std::out_of_range(std::string(what) + " " + std::to_string(values[i]) + " is not in 0 .. " +
                                    std::to_string(limit - 1));
}

constexpr int64_t kSlice = 256;

void apply(const Projection& projection, const void* x, void* y, DType type, int64_t tokens) {
    const PackedLinear& weight = *projection.weight;
    projection.set->linear(weight, x, weight.k, y, weight.n, type, tokens);
}

}  // namespace

// Adds the time since the last operator ended to the one that has ended now.
struct Decoder::Stopwatch {
    using Clock = std::chrono::steady_clock;
    double* seconds;
    Clock::time_point last = Clock::now();

    void lap(Operator op) {
        const auto now = Clock::now();
        seconds[op] += std::chrono::duration<double>(now - last).count();
        last = now;
    }
};

const char* const Decoder::kOperatorNames[kOperators] = {"embedding", "norms", "qkv",      "heads",
                                                         "attention", "o",     "gate_up",  "activation",
                                                         "down",      "mlp",   "adapters", "exchange"};

// A step's intermediate results, each [tokens, ...] and contiguous.
struct Decoder::Workspace {
    void* x;        // [hidden]: the residual stream
    void* y;        // [hidden]: what has been normed, then what is to be added
    void* wide;     // q, k and v; gate and up
    void* context;  // attention's output; the activation's
    void* whole;    // of a model in parts: all ranks' contexts
    void* part;     // the same: this rank's part of what is to be added
};

Decoder::~Decoder() { std::free(memory_); }

Decoder::Workspace Decoder::workspace(int64_t tokens) {
    int64_t wide = 0, context = 0, part = 0;
    for (const DecoderLayer& layer : layers_) {
        wide = std::max({wide, layer.qkv.weight->n, layer.gate_up.weight->n});
        context = std::max({context, layer.o.weight->k, layer.down.weight->k});
        if (parts_.exchange) part = std::max({part, layer.o.weight->n, layer.down.weight->n});
    }
    const auto bytes = [&](int64_t columns) {
        return (size_t(tokens) * columns * item_size(shape_.type) + 4095) / 4096 * 4096;
    };
    const size_t whole = parts_.exchange ? bytes(context) : 0;
    const size_t needed = 2 * bytes(head_.weight->k) + bytes(wide) + bytes(context) + whole + bytes(part);
    if (needed > bytes_) {
        std::free(memory_);
        memory_ = static_cast<char*>(allocate_huge(needed));
        bytes_ = memory_ ? needed : 0;
        if (!memory_) throw std::bad_alloc();
    }
    char* y = memory_ + bytes(head_.weight->k);
    char* rows = y + bytes(head_.weight->k);
    char* contexts = rows + bytes(wide);
    return {memory_, y, rows, contexts, contexts + bytes(context), contexts + bytes(context) + whole};
}

const PackedLinear& Decoder::weight(size_t layer, Adapter::Place place) const {
    const DecoderLayer& of = layers_.at(layer);
    const Projection* const places[] = {&of.qkv, &of.o, &of.gate_up, &of.down};
    return *places[place]->weight;
}

void Decoder::adapt(const DecoderStep& step, size_t layer, Adapter::Place place, const void* x, void* y, int64_t first,
                    int64_t count) const {
    std::vector<LowRankRun> runs;
    for (const AdapterTokens& each : step.adapters) {
        const LowRank* added = each.adapter->additions[layer * Adapter::kPlaces + place];
        const int64_t* const begin = std::lower_bound(each.tokens, each.tokens + each.count, first);
        const int64_t* const end = std::lower_bound(begin, each.tokens + each.count, first + count);
        if (added && begin < end) runs.push_back({added, begin, end - begin});
    }
    if (runs.empty()) return;
    const PackedLinear& adapted = weight(layer, place);
    kernels().add_low_rank({.x = x,
                            .x_row = adapted.k,
                            .y = y,
                            .y_row = adapted.n,
                            .first = first,
                            .type = shape_.type,
                            .runs = runs.data(),
                            .num_runs = int(runs.size())});
}

void Decoder::close(const DecoderStep& step, const Projection& projection, const void* x, void* y,
                    const std::vector<int64_t>& inputs, Operator op, const Workspace& at, Stopwatch& watch) {
    if (parts_.exchange) {
        parts_.exchange->gather(x, at.whole, inputs, step.tokens, step.idle);
        watch.lap(kExchange);
    }
    apply(projection, parts_.exchange ? at.whole : x, parts_.exchange ? at.part : y, shape_.type, step.tokens);
    watch.lap(op);
    if (parts_.exchange) {
        parts_.exchange->gather(at.part, y, parts_.hidden, step.tokens, step.idle);
        watch.lap(kExchange);
    }
}

// In slices of the tokens, whose gate and up stay in the caches until they have been added to and multiplied.
void Decoder::adapted_mlp(const DecoderStep& step, size_t layer, const Workspace& at, Stopwatch& watch) {
    const DecoderLayer& of = layers_[layer];
    const PackedLinear &gate_up = *of.gate_up.weight, &down = *of.down.weight;
    const DType type = shape_.type;
    for (int64_t first = 0; first < step.tokens; first += kSlice) {
        const int64_t count = std::min(kSlice, step.tokens - first);
        char* const y = static_cast<char*>(at.y) + first * gate_up.k * item_size(type);
        apply(of.gate_up, y, at.wide, type, count);
        watch.lap(kGateUp);
        adapt(step, layer, Adapter::kGateUp, y, at.wide, first, count);
        watch.lap(kAdapters);
        kernels().gated(at.wide, gate_up.n, at.context, type, shape_.activation, count, down.k);
        watch.lap(kActivation);
        apply(of.down, at.context, y, type, count);
        watch.lap(kDown);
        adapt(step, layer, Adapter::kDown, at.context, y, first, count);
        watch.lap(kAdapters);
    }
}

void Decoder::run(const DecoderStep& step) {
    const int64_t tokens = step.tokens, hidden = head_.weight->k;
    const DType type = shape_.type;
    if (!step.embedded) check_range("token id", step.token_ids, tokens, head_.weight->n);
    check_range("position", step.positions, tokens, step.max_positions);
    for (const AdapterTokens& each : step.adapters) check_range("token", each.tokens, each.count, tokens);
    const Workspace at = workspace(tokens);
    const Kernels& set = kernels();
    const size_t head_bytes = shape_.head_dim * item_size(type);
    const int64_t head_dim = shape_.head_dim, row = (shape_.heads + 2 * shape_.kv_heads) * head_dim;
    char* const qkv = static_cast<char*>(at.wide);
    char* const keys = qkv + shape_.heads * head_bytes;
    char* const values = keys + shape_.kv_heads * head_bytes;

    std::vector<std::unique_ptr<SharedPrefixes>> prefixes(step.groups.size());
    Stopwatch watch{seconds_};
    if (step.embedded) std::memcpy(at.x, step.embedded, size_t(tokens) * hidden * item_size(type));
    else if (embedding_) set.embed(embedding_, step.token_ids, shape_.embedding_scale, at.x, type, tokens, hidden);
    else head_.set->embed_packed(*head_.weight, step.token_ids, shape_.embedding_scale, at.x, type, tokens);
    watch.lap(kEmbed);
    set.rms_norm(at.x, hidden, 0, layers_.front().input_norm, shape_.eps, at.y, type, tokens, 1, hidden);
    watch.lap(kNorm);
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (step.on_layer) step.on_layer(int(i));
        const DecoderLayer& layer = layers_[i];
        const GroupTables& group = step.groups[layer.group];
        const LayerCache& cache = *step.caches[i];
        const AngleTable angles = layer.rope < 0 ? AngleTable{} : step.angles[layer.rope];

        const auto add = [&](Adapter::Place place, const void* x, void* y) {
            if (step.adapters.empty()) return;
            adapt(step, i, place, x, y, 0, tokens);
            watch.lap(kAdapters);
        };

        apply(layer.qkv, at.y, qkv, type, tokens);
        watch.lap(kQkv);
        add(Adapter::kQkv, at.y, qkv);
        const WriteArgs write{.key = {keys, row, head_dim},
                              .value = {values, row, head_dim},
                              .type = type,
                              .cache = cache,
                              .slots = group.slots,
                              .remainder_slots = group.remainder_slots,
                              .tokens = tokens};
        set.prepare_heads({.qkv = qkv,
                           .heads = shape_.heads,
                           .q_norm = layer.q_norm,
                           .k_norm = layer.k_norm,
                           .eps = shape_.eps,
                           .cos = angles.cos,
                           .sin = angles.sin,
                           .half = angles.half,
                           .positions = step.positions,
                           .write = write});
        watch.lap(kHeads);
        AttentionArgs attention{.query = {qkv, row, head_dim},
                                .type = type,
                                .output = at.context,
                                .cache = cache,
                                .tables = group.tables,
                                .table_stride = group.stride,
                                .query_start = step.query_start,
                                .context_lens = step.context_lens,
                                .positions = step.positions,
                                .rows = step.rows,
                                .heads = shape_.heads,
                                .scale = shape_.scale,
                                .window = layer.window,
                                .soft_cap = shape_.soft_cap,
                                .remainders = group.remainders};
        // A group's layers have one window.
        if (!prefixes[layer.group]) prefixes[layer.group] = std::make_unique<SharedPrefixes>(attention, true);
        prefixes[layer.group]->apply(attention);
        set.attend(attention);
        watch.lap(kAttention);
        close(step, layer.o, at.context, at.y, parts_.heads, kO, at, watch);
        add(Adapter::kO, at.context, at.y);
        set.add_norm(at.x, at.y, layer.post_attention_norm, layer.pre_mlp_norm, shape_.eps, at.y, type, tokens, hidden);
        watch.lap(kNorm);
        const PackedLinear &gate_up = *layer.gate_up.weight, &down = *layer.down.weight;
        const bool adapted = std::any_of(step.adapters.begin(), step.adapters.end(), [&](const AdapterTokens& each) {
            const auto* added = &each.adapter->additions[i * Adapter::kPlaces];
            return added[Adapter::kGateUp] || added[Adapter::kDown];
        });
        if (adapted) {
            adapted_mlp(step, i, at, watch);
        } else if (!parts_.exchange &&
                   layer.gate_up.set->mlp(gate_up, down, at.y, hidden, at.y, hidden, type, shape_.activation, tokens)) {
            watch.lap(kMlp);
        } else {
            apply(layer.gate_up, at.y, at.wide, type, tokens);
            watch.lap(kGateUp);
            set.gated(at.wide, gate_up.n, at.context, type, shape_.activation, tokens, gate_up.n / 2);
            watch.lap(kActivation);
            close(step, layer.down, at.context, at.y, parts_.intermediate, kDown, at, watch);
        }
        const bool last = i + 1 == layers_.size();
        set.add_norm(at.x, at.y, layer.post_mlp_norm, last ? final_norm_ : layers_[i + 1].input_norm, shape_.eps,
                     last ? step.output : at.y, type, tokens, hidden);
        watch.lap(kNorm);
    }
}

}  // namespace pagemill
