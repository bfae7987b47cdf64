// Python's view of the kernels: addresses and strides as integers, checked by the callers in pagemill.ops and
// pagemill.attention. The interpreter lock is released while a kernel runs.
#include "decoder.h"
#include "kernels.h"
#include "shared_prefixes.h"
#include "threads.h"

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagemill;

namespace {

using Address = uintptr_t;
template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }
DType dtype(int type) { return static_cast<DType>(type); }

struct Run {
    nb::gil_scoped_release released;
    Exclusive exclusive;
};

struct Linear {
    PackedLinear weight;
    const Kernels& set;  // the panels' format is this set's

    Linear(Address data, Address bias, int64_t n, int64_t k, int type, int x_type) : set(kernels()) {
        weight.n = n;
        weight.k = k;
        weight.type = dtype(type);
        Run run;
        if (!set.pack_linear(weight, at<void>(data), at<float>(bias), dtype(x_type))) {
            release(weight);
            throw std::bad_alloc();
        }
    }
    Linear(Address values, Address slopes, Address offsets, Address scales, Address bias, int64_t n, int64_t k, int type)
        : set(kernels()) {
        weight.n = n;
        weight.k = k;
        weight.type = dtype(type);
        weight.format = slopes ? Format::int4 : Format::int8;
        Run run;
        if (!set.pack_quantized(weight, {at<void>(values), at<int16_t>(slopes), at<int16_t>(offsets), at<uint16_t>(scales),
                                         at<float>(bias)})) {
            release(weight);
            throw std::bad_alloc();
        }
    }
    Linear(Address values, Address scale, Address low, Address bias, int64_t n, int64_t k, int bits) : set(kernels()) {
        weight.n = n;
        weight.k = k;
        weight.format = bits == 4 ? Format::affine4 : Format::affine8;
        Run run;
        if (!set.pack_affine(weight, {at<uint8_t>(values), at<float>(scale), at<float>(low), at<float>(bias)})) {
            release(weight);
            throw std::bad_alloc();
        }
    }
    ~Linear() { release(weight); }
    Linear(const Linear&) = delete;

    void rows(Address ids, Address y, int64_t count) const {
        Run run;
        set.embed_packed(weight, at<int64_t>(ids), 1.0f, at<void>(y), weight.type, count);
    }

    void call(Address x, int64_t x_row, Address y, int64_t y_row, int type, int64_t rows) {
        Run run;
        set.linear(weight, at<void>(x), x_row, at<void>(y), y_row, dtype(type), rows);
    }

    void likeliest(Address x, int64_t x_row, int type, int64_t rows, Address tokens) const {
        Run run;
        set.linear_likeliest(weight, at<void>(x), x_row, dtype(type), rows, at<int64_t>(tokens));
    }
};

// Address, strides (frame, head, token, dim) and whether in pairs of elements, address and strides (frame, head) of scales.
using Elements = std::tuple<Address, int64_t, int64_t, int64_t, int64_t, bool>;
using Scales = std::tuple<Address, int64_t, int64_t>;
CacheView view(const Elements& elements, const Scales& scales) {
    const auto& [data, frame, head, token, dim, pairs] = elements;
    const auto& [scale, scale_frame, scale_head] = scales;
    return {at<void>(data), frame, head, token, dim, pairs, at<float>(scale), scale_frame, scale_head};
}

// One layer's cache as the kernels need it, made once per layer.
struct Cache {
    CacheView key, value;
    DType type;
    int kv_heads, block_size, head_dim;

    Cache(const Elements& keys, const Elements& values, const Scales& key_scales, const Scales& value_scales, int type,
          int kv_heads, int block_size, int head_dim)
        : key(view(keys, key_scales)), value(view(values, value_scales)), type(dtype(type)), kv_heads(kv_heads),
          block_size(block_size), head_dim(head_dim) {}

    void write(Address k, int64_t k_token, int64_t k_head, Address v, int64_t v_token, int64_t v_head, int source, Address slots,
               int64_t tokens) const {
        Run run;
        kernels().write_kv({at<void>(k), at<void>(v), dtype(source), k_token, k_head, v_token, v_head, key, value, type,
                            at<int64_t>(slots), tokens, kv_heads, head_dim, block_size});
    }

    void attend(Address query, int query_type, int64_t query_token, int64_t query_head, int heads, Address output, Address lse,
                Address tables, int64_t table_stride, Address query_start, Address context_lens, Address positions,
                Address key_start, Address key_end, int rows, float scale, int64_t window, float soft_cap, bool share) const {
        Run run;
        AttentionArgs args{at<void>(query), dtype(query_type), query_token, query_head, at<void>(output), at<float>(lse), key,
                          value, type, at<int32_t>(tables), table_stride, at<int32_t>(query_start), at<int32_t>(context_lens),
                          at<int64_t>(positions), at<int32_t>(key_start), at<int32_t>(key_end), rows, heads, kv_heads,
                          head_dim, block_size, scale, window, soft_cap};
        const SharedPrefixes prefixes(args, share);
        prefixes.apply(args);
        kernels().attend(args);
    }
};

// One (tables, table stride, slots) per layer group, one (cos, sin, half) per rotary embedding.
using Group = std::tuple<Address, int64_t, Address>;
using Angles = std::tuple<Address, Address, int64_t>;

Projection projection(const Linear& linear) { return {&linear.weight, &linear.set}; }

// The linears and norms of its layers belong to Python, which keeps them.
void add_layer(Decoder& decoder, Address input_norm, const Linear& qkv, const Linear& o, Address pre_mlp_norm,
               const Linear& gate_up, const Linear& down, Address q_norm, Address k_norm, Address post_attention_norm,
               Address post_mlp_norm, int rope, int group, int64_t window) {
    decoder.add_layer({at<float>(input_norm), projection(qkv), projection(o), at<float>(pre_mlp_norm), projection(gate_up),
                       projection(down), at<float>(q_norm), at<float>(k_norm), at<float>(post_attention_norm),
                       at<float>(post_mlp_norm), rope, group, window});
}

void run_step(Decoder& decoder, Address token_ids, Address positions, int64_t tokens, int64_t max_positions,
              Address query_start, Address context_lens, int rows, const std::vector<Group>& groups,
              const std::vector<Angles>& angles, const std::vector<const Cache*>& caches, Address output,
              const nb::object& on_layer) {
    DecoderStep step{at<int64_t>(token_ids), at<int64_t>(positions), tokens, max_positions, at<int32_t>(query_start),
                     at<int32_t>(context_lens), rows, {}, {}, {}, at<void>(output), {}};
    for (const auto& [tables, stride, slots] : groups) step.groups.push_back({at<int32_t>(tables), stride, at<int64_t>(slots)});
    for (const auto& [cos, sin, half] : angles) step.angles.push_back({at<float>(cos), at<float>(sin), half});
    if (!on_layer.is_none())
        step.on_layer = [&](int layer) {
            nb::gil_scoped_acquire held;
            on_layer(layer);
        };
    for (const Cache* cache : caches) step.caches.push_back({cache->key, cache->value, cache->type, cache->block_size});
    Run run;
    decoder.run(step);
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.doc() = "CPU kernels. Arguments are addresses, strides in elements and dtypes (0 fp32, 1 bf16, 2 fp16; 3 int8, of caches only).";
    m.attr("interface") = PAGEMILL_INTERFACE;
    m.attr("sources") = PAGEMILL_SOURCES;
    m.def("isa", [] { return std::string(kernels().isa); }, "Name of the instruction set whose kernels run.");
    m.def("available_isas", [] {
        nb::list names;
        for (auto name = available_isas(); *name; ++name) names.append(*name);
        return names;
    }, "Instruction sets of this CPU that there are kernels for, best first.");
    m.def("use_isa", [](const std::string& name) {
        if (!use_isa(name.c_str())) throw std::invalid_argument("this CPU has no kernels named " + name);
    }, "Makes another set's kernels run; weights packed before keep theirs.");
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        if (count < 1) throw std::invalid_argument("num_threads must be at least 1, not " + std::to_string(count));
        Run run;
        set_num_threads(count);
    });
    m.def("rms_norm", [](Address x, int64_t x_outer, int64_t x_inner, Address weight, float eps, Address y, int type, int64_t outer,
                         int64_t inner, int64_t n) {
        Run run;
        kernels().rms_norm(at<void>(x), x_outer, x_inner, at<float>(weight), eps, at<void>(y), dtype(type), outer, inner, n);
    });
    m.def("rotate", [](Address x, int64_t x_token, int64_t x_head, int type, Address cos, Address sin, int64_t tokens,
                       int64_t heads, int64_t half) {
        Run run;
        kernels().rotate(at<void>(x), x_token, x_head, dtype(type), at<float>(cos), at<float>(sin), tokens, heads, half);
    });
    m.def("gated", [](Address x, int64_t x_row, Address y, int type, int activation, int64_t rows, int64_t n) {
        Run run;
        kernels().gated(at<void>(x), x_row, at<void>(y), dtype(type), static_cast<Activation>(activation), rows, n);
    });
    m.def("exp", [](Address x, Address y, int64_t n) { kernels().exp(at<float>(x), at<float>(y), n); });
    m.def("tanh", [](Address x, Address y, int64_t n) { kernels().tanh(at<float>(x), at<float>(y), n); });
    m.def("copy_frames", [](Address base, int64_t pieces, int64_t piece_stride, int64_t frame_stride, int64_t bytes,
                            Address source, Address target, int64_t count) {
        Run run;
        copy_frames(at<void>(base), pieces, piece_stride, frame_stride, bytes, at<int64_t>(source), at<int64_t>(target), count);
    }, "Strides in bytes; see kernels.h.");
    m.def("dequantize", [](int format, Address blocks, Address out, int64_t weights) {
        Run run;
        if (!dequantize(format, at<void>(blocks), at<float>(out), weights))
            throw std::invalid_argument("no GGUF format has the number " + std::to_string(format));
    }, "From whole blocks of a GGUF format, by its number, to fp32.");
    m.def("choose_tokens", [](Address logits, int64_t n, Address places, int64_t items, Address temperature, Address top_k,
                              Address top_p, Address min_p, Address uniforms, Address tokens) {
        Run run;
        kernels().choose_tokens({at<float>(logits), n, at<int64_t>(places), items, at<float>(temperature), at<int64_t>(top_k),
                                 at<float>(top_p), at<float>(min_p), at<double>(uniforms), at<int64_t>(tokens)});
    });
    m.def("log_probabilities", [](Address logits, int64_t n, Address places, int64_t items, int64_t k, Address tokens, Address own,
                                  Address ranks, Address likely, Address likely_logprobs) {
        Run run;
        kernels().log_probabilities({at<float>(logits), n, at<int64_t>(places), items, k, at<int64_t>(tokens), at<float>(own),
                                     at<int64_t>(ranks), at<int64_t>(likely), at<float>(likely_logprobs)});
    });
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<Address, Address, int64_t, int64_t, int, int>(), "weight", "bias", "n", "k", "dtype", "x_dtype")
        .def(nb::init<Address, Address, Address, Address, int64_t, int64_t, int>(), "values", "scale", "low", "bias", "n", "k", "bits")
        .def(nb::init<Address, Address, Address, Address, Address, int64_t, int64_t, int>(), "values", "slopes", "offsets",
             "scales", "bias", "n", "k", "dtype")
        .def("__call__", &Linear::call)
        .def("likeliest", &Linear::likeliest)
        .def("rows", &Linear::rows)
        .def_prop_ro("nbytes", [](const Linear& linear) { return linear.weight.bytes; });
    nb::class_<Cache>(m, "Cache")
        .def(nb::init<const Elements&, const Elements&, const Scales&, const Scales&, int, int, int, int>())
        .def("write", &Cache::write)
        .def("attend", &Cache::attend);
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* self, Address embedding, const Linear& head, int64_t vocab, int64_t hidden, Address final_norm, int heads,
                            int kv_heads, int head_dim, int type, float eps, int activation, float scale, float soft_cap,
                            float embedding_scale) {
            new (self) Decoder({vocab, hidden, heads, kv_heads, head_dim, dtype(type), eps, static_cast<Activation>(activation),
                                scale, soft_cap, embedding_scale}, at<void>(embedding), projection(head), at<float>(final_norm));
        })
        .def("add_layer", &add_layer)
        .def("run", &run_step, "token_ids"_a, "positions"_a, "tokens"_a, "max_positions"_a, "query_start"_a, "context_lens"_a,
             "rows"_a, "groups"_a, "angles"_a, "caches"_a, "output"_a, "on_layer"_a.none() = nb::none())
        .def_prop_ro("seconds", [](const Decoder& decoder) {
            nb::dict seconds;
            for (int op = 0; op < Decoder::kOperators; ++op) seconds[Decoder::kOperatorNames[op]] = decoder.seconds()[op];
            return seconds;
        }, "Seconds spent in each operator so far.");
}
