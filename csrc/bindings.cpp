// Python's view of the kernels. Vectors and tables come as arrays, whose dtype, shape and contiguity are checked here.
// Elements of a model's dtypes come as addresses and strides, checked by the callers in pagemill.ops and
// pagemill.attention: NumPy has no bfloat16, and DLPack takes 8 microseconds for each of torch's tensors, an address
// 0.1. The interpreter lock is released while a kernel runs.
#include "decoder.h"
#include "kernels.h"
#include "shared_prefixes.h"
#include "threads.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>  // IWYU pragma: keep
#include <nanobind/stl/tuple.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagemill;

namespace {

using Address = uintptr_t;
template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }
DType dtype(int type) { return static_cast<DType>(type); }

using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

template <class T> const char* type_name() {
    if (std::is_same<T, float>::value) return "float32";
    if (std::is_same<T, double>::value) return "float64";
    if (std::is_same<T, uint8_t>::value) return "uint8";
    return sizeof(T) == 4 ? "int32" : "int64";
}

template <class Array> std::string shape_of(const Array& array) {
    std::string shape;
    for (size_t i = 0; i < array.ndim(); ++i) shape += (i ? ", " : "") + std::to_string(array.shape(i));
    return "[" + shape + "]";
}

// The elements of a [size] vector. Raises ValueError for another dtype or shape, or gaps between elements.
template <class T, class Array> auto* vector(const char* name, const Array& array, int64_t size) {
    const bool fits = array.dtype() == nb::dtype<T>() && array.ndim() == 1 && int64_t(array.shape(0)) == size;
    if (!fits || (size > 1 && array.stride(0) != 1))
        throw std::invalid_argument(std::string(name) + " must be contiguous " + type_name<T>() + " [" +
                                    std::to_string(size) + "]; the array given has " +
                                    std::to_string(array.dtype().bits) + " bits an element and shape " +
                                    shape_of(array));
    return static_cast<std::conditional_t<std::is_same<Array, Input>::value, const T, T>*>(array.data());
}

// The elements of a table of at least `rows` rows without gaps between elements, nor between rows unless they may be
// `apart`. Raises ValueError.
template <class T, class Array> auto* table(const char* name, const Array& array, int64_t rows, bool apart = false) {
    const bool fits = array.dtype() == nb::dtype<T>() && array.ndim() == 2 && int64_t(array.shape(0)) >= rows;
    if (!fits || (array.shape(1) > 1 && array.stride(1) != 1) ||
        (!apart && array.shape(0) > 1 && array.stride(0) != int64_t(array.shape(1))))
        throw std::invalid_argument(std::string(name) + " must be " + type_name<T>() + " [" + std::to_string(rows) +
                                    ", ..] with contiguous rows; the array given has " +
                                    std::to_string(array.dtype().bits) + " bits an element and shape " +
                                    shape_of(array));
    return static_cast<std::conditional_t<std::is_same<Array, Input>::value, const T, T>*>(array.data());
}

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
    Linear(Address values, Address slopes, Address offsets, Address scales, Address bias, int64_t n, int64_t k,
           int type)
        : set(kernels()) {
        weight.n = n;
        weight.k = k;
        weight.type = dtype(type);
        weight.format = slopes ? Format::int4 : Format::int8;
        Run run;
        QuantizedSource from;
        from.values = at<void>(values);
        from.slopes = at<int16_t>(slopes);
        from.offsets = at<int16_t>(offsets);
        from.scales = at<uint16_t>(scales);
        from.bias = at<float>(bias);
        if (!set.pack_quantized(weight, from)) {
            release(weight);
            throw std::bad_alloc();
        }
    }
    Linear(Address values, Address scale, Address low, Address bias, int64_t n, int64_t k, int bits) : set(kernels()) {
        weight.n = n;
        weight.k = k;
        weight.format = bits == 4 ? Format::affine4 : Format::affine8;
        Run run;
        AffineSource from;
        from.values = at<uint8_t>(values);
        from.scale = at<float>(scale);
        from.low = at<float>(low);
        from.bias = at<float>(bias);
        if (!set.pack_affine(weight, from)) {
            release(weight);
            throw std::bad_alloc();
        }
    }
    ~Linear() { release(weight); }
    Linear(const Linear&) = delete;

    void rows(const Input& ids, Address y) const {
        const auto count = int64_t(ids.size());
        const int64_t* each = vector<int64_t>("ids", ids, count);
        Run run;
        set.embed_packed(weight, each, 1.0f, at<void>(y), weight.type, count);
    }

    void call(Address x, int64_t x_row, Address y, int64_t y_row, int type, int64_t rows) {
        Run run;
        set.linear(weight, at<void>(x), x_row, at<void>(y), y_row, dtype(type), rows);
    }

    void argmax(Address x, int64_t x_row, int type, const Output& tokens) const {
        const auto rows = int64_t(tokens.size());
        int64_t* each = vector<int64_t>("tokens", tokens, rows);
        Run run;
        set.linear_argmax(weight, at<void>(x), x_row, dtype(type), rows, each);
    }
};

// Address, strides (frame, head, token, dim) and whether in pairs of elements, address and strides (frame, head) of
// scales.
using Elements = std::tuple<Address, int64_t, int64_t, int64_t, int64_t, bool>;
using Scales = std::tuple<Address, int64_t, int64_t>;
CacheView view(const Elements& elements, const Scales& scales) {
    const auto& [data, frame, head, token, dim, pairs] = elements;
    const auto& [scale, scale_frame, scale_head] = scales;
    CacheView all;
    all.data = at<void>(data);
    all.frame = frame;
    all.head = head;
    all.token = token;
    all.dim = dim;
    all.pairs = pairs;
    all.scale = at<float>(scale);
    all.scale_frame = scale_frame;
    all.scale_head = scale_head;
    return all;
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

    void write(Address k, int64_t k_token, int64_t k_head, Address v, int64_t v_token, int64_t v_head, int source,
               Address slots, int64_t tokens) const {
        WriteArgs args;
        args.key = at<void>(k);
        args.value = at<void>(v);
        args.type = dtype(source);
        args.key_token = k_token;
        args.key_head = k_head;
        args.value_token = v_token;
        args.value_head = v_head;
        args.key_cache = key;
        args.value_cache = value;
        args.cache_type = type;
        args.slots = at<int64_t>(slots);
        args.tokens = tokens;
        args.kv_heads = kv_heads;
        args.head_dim = head_dim;
        args.block_size = block_size;
        Run run;
        kernels().write_kv(args);
    }

    void attend(Address query, int query_type, int64_t query_token, int64_t query_head, int heads, Address output,
                Address lse, Address tables, int64_t table_stride, Address query_start, Address context_lens,
                Address positions, Address key_start, Address key_end, int rows, float scale, int64_t window,
                float soft_cap, bool share) const {
        AttentionArgs args;
        args.query = at<void>(query);
        args.query_type = dtype(query_type);
        args.query_token = query_token;
        args.query_head = query_head;
        args.output = at<void>(output);
        args.lse = at<float>(lse);
        args.key = key;
        args.value = value;
        args.cache_type = type;
        args.tables = at<int32_t>(tables);
        args.table_stride = table_stride;
        args.query_start = at<int32_t>(query_start);
        args.context_lens = at<int32_t>(context_lens);
        args.positions = at<int64_t>(positions);
        args.key_start = at<int32_t>(key_start);
        args.key_end = at<int32_t>(key_end);
        args.rows = rows;
        args.heads = heads;
        args.kv_heads = kv_heads;
        args.head_dim = head_dim;
        args.block_size = block_size;
        args.scale = scale;
        args.window = window;
        args.soft_cap = soft_cap;
        Run run;
        const SharedPrefixes prefixes(args, share);
        prefixes.apply(args);
        kernels().attend(args);
    }
};

Projection projection(const Linear& linear) {
    Projection packed;
    packed.weight = &linear.weight;
    packed.set = &linear.set;
    return packed;
}

// The linears and norms of its layers belong to Python, which keeps them.
void add_layer(Decoder& decoder, Address input_norm, const Linear& qkv, const Linear& o, Address pre_mlp_norm,
               const Linear& gate_up, const Linear& down, Address q_norm, Address k_norm, Address post_attention_norm,
               Address post_mlp_norm, int rope, int group, int64_t window) {
    DecoderLayer layer;
    layer.input_norm = at<float>(input_norm);
    layer.qkv = projection(qkv);
    layer.o = projection(o);
    layer.pre_mlp_norm = at<float>(pre_mlp_norm);
    layer.gate_up = projection(gate_up);
    layer.down = projection(down);
    layer.q_norm = at<float>(q_norm);
    layer.k_norm = at<float>(k_norm);
    layer.post_attention_norm = at<float>(post_attention_norm);
    layer.post_mlp_norm = at<float>(post_mlp_norm);
    layer.rope = rope;
    layer.group = group;
    layer.window = window;
    decoder.add_layer(layer);
}

// (tables, slots) of each layer group; (cos, sin) of each rotary embedding.
using Pairs = std::vector<std::tuple<Input, Input>>;

void run_step(Decoder& decoder, const Input& token_ids, const Input& positions, int64_t max_positions,
              const Input& query_start, const Input& context_lens, const Pairs& groups, const Pairs& angles,
              const std::vector<const Cache*>& caches, Address output, const nb::object& on_layer) {
    DecoderStep step;
    step.tokens = int64_t(token_ids.size());
    step.rows = int(context_lens.size());
    step.max_positions = max_positions;
    step.token_ids = vector<int64_t>("token_ids", token_ids, step.tokens);
    step.positions = vector<int64_t>("positions", positions, step.tokens);
    step.query_start = vector<int32_t>("query_start", query_start, step.rows + 1);
    step.context_lens = vector<int32_t>("context_lens", context_lens, step.rows);
    for (const auto& [tables, slots] : groups) {
        GroupTables group;
        group.tables = table<int32_t>("tables", tables, step.rows, true);
        group.stride = tables.stride(0);
        group.slots = vector<int64_t>("slots", slots, step.tokens);
        step.groups.push_back(group);
    }
    for (const auto& [cos, sin] : angles) {
        AngleTable angle;
        angle.cos = table<float>("cos", cos, max_positions);
        angle.sin = table<float>("sin", sin, max_positions);
        angle.half = int64_t(cos.shape(1));
        step.angles.push_back(angle);
    }
    for (const Cache* cache : caches) {
        LayerCache layer;
        layer.key = cache->key;
        layer.value = cache->value;
        layer.type = cache->type;
        layer.block_size = cache->block_size;
        step.caches.push_back(layer);
    }
    step.output = at<void>(output);
    if (!on_layer.is_none())
        step.on_layer = [&](int layer) {
            nb::gil_scoped_acquire held;
            on_layer(layer);
        };
    Run run;
    decoder.run(step);
}

// Sampling's inputs [items] each, from rows `places` of logits [rows, n].
void choose(const Input& logits, const Input& places, const Input& temperature, const Input& top_k, const Input& top_p,
            const Input& min_p, const Input& uniforms, const Output& tokens) {
    ChooseArgs args;
    args.logits = table<float>("logits", logits, 0);
    args.n = int64_t(logits.shape(1));
    args.items = int64_t(places.size());
    args.places = vector<int64_t>("places", places, args.items);
    args.temperature = vector<float>("temperature", temperature, args.items);
    args.top_k = vector<int64_t>("top_k", top_k, args.items);
    args.top_p = vector<float>("top_p", top_p, args.items);
    args.min_p = vector<float>("min_p", min_p, args.items);
    args.uniforms = vector<double>("uniforms", uniforms, args.items);
    args.tokens = vector<int64_t>("tokens", tokens, args.items);
    Run run;
    kernels().choose_tokens(args);
}

void log_probabilities(const Input& logits, const Input& places, const Input& tokens, const Output& own,
                       const Output& ranks, const Output& top_tokens, const Output& top_logprobs) {
    LogprobArgs args;
    args.logits = table<float>("logits", logits, 0);
    args.n = int64_t(logits.shape(1));
    args.items = int64_t(places.size());
    args.places = vector<int64_t>("places", places, args.items);
    args.tokens = vector<int64_t>("tokens", tokens, args.items);
    args.own = vector<float>("own", own, args.items);
    args.ranks = vector<int64_t>("ranks", ranks, args.items);
    args.top_tokens = table<int64_t>("top_tokens", top_tokens, args.items);
    args.top_logprobs = table<float>("top_logprobs", top_logprobs, args.items);
    args.k = int64_t(top_tokens.shape(1));
    if (int64_t(top_logprobs.shape(1)) != args.k || args.k > args.n)
        throw std::invalid_argument("top_tokens and top_logprobs must have equal columns, at most those of logits");
    Run run;
    kernels().log_probabilities(args);
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.doc() =
        "CPU kernels. Arguments are arrays, or addresses, strides in elements and dtypes (0 fp32, 1 bf16, 2 fp16; 3 "
        "int8, of caches only).";
    m.attr("interface") = PAGEMILL_INTERFACE;
    m.attr("sources") = PAGEMILL_SOURCES;
    m.def("isa", [] { return std::string(kernels().isa); }, "Name of the instruction set whose kernels run.");
    m.def(
        "available_isas",
        [] {
            nb::list names;
            for (auto name = available_isas(); *name; ++name) names.append(*name);
            return names;
        },
        "Instruction sets of this CPU that there are kernels for, best first.");
    m.def(
        "use_isa",
        [](const std::string& name) {
            if (!use_isa(name.c_str())) throw std::invalid_argument("this CPU has no kernels named " + name);
        },
        "Makes another set's kernels run; weights packed before keep theirs.");
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        if (count < 1) throw std::invalid_argument("num_threads must be at least 1, not " + std::to_string(count));
        Run run;
        set_num_threads(count);
    });
    m.def("rms_norm", [](Address x, int64_t x_outer, int64_t x_inner, Address weight, float eps, Address y, int type,
                         int64_t outer, int64_t inner, int64_t n) {
        Run run;
        kernels().rms_norm(at<void>(x), x_outer, x_inner, at<float>(weight), eps, at<void>(y), dtype(type), outer,
                           inner, n);
    });
    m.def("rotate", [](Address x, int64_t x_token, int64_t x_head, int type, Address cos, Address sin, int64_t tokens,
                       int64_t heads, int64_t half) {
        Run run;
        kernels().rotate(at<void>(x), x_token, x_head, dtype(type), at<float>(cos), at<float>(sin), tokens, heads,
                         half);
    });
    m.def("gated", [](Address x, int64_t x_row, Address y, int type, int activation, int64_t rows, int64_t n) {
        Run run;
        kernels().gated(at<void>(x), x_row, at<void>(y), dtype(type), static_cast<Activation>(activation), rows, n);
    });
    m.def("exp", [](Address x, Address y, int64_t n) { kernels().exp(at<float>(x), at<float>(y), n); });
    m.def("tanh", [](Address x, Address y, int64_t n) { kernels().tanh(at<float>(x), at<float>(y), n); });
    m.def(
        "copy_frames",
        [](Address base, int64_t pieces, int64_t piece_stride, int64_t frame_stride, int64_t bytes, const Input& source,
           const Input& target) {
            const auto count = int64_t(source.size());
            const int64_t *from = vector<int64_t>("source", source, count),
                          *to = vector<int64_t>("target", target, count);
            Run run;
            copy_frames(at<void>(base), pieces, piece_stride, frame_stride, bytes, from, to, count);
        },
        "Strides in bytes; see kernels.h.");
    m.def(
        "dequantize",
        [](int format, const Input& blocks, const Output& out) {
            const auto weights = int64_t(out.size());
            const auto* stored = vector<uint8_t>("blocks", blocks, int64_t(blocks.size()));
            float* wide = vector<float>("out", out, weights);
            Run run;
            if (!dequantize(format, stored, wide, weights))
                throw std::invalid_argument("no GGUF format has the number " + std::to_string(format));
        },
        "From whole blocks of a GGUF format, by its number, to fp32.");
    m.def("choose_tokens", &choose);
    m.def("log_probabilities", &log_probabilities);
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<Address, Address, int64_t, int64_t, int, int>(), "weight", "bias", "n", "k", "dtype", "x_dtype")
        .def(nb::init<Address, Address, Address, Address, int64_t, int64_t, int>(), "values", "scale", "low", "bias",
             "n", "k", "bits")
        .def(nb::init<Address, Address, Address, Address, Address, int64_t, int64_t, int>(), "values", "slopes",
             "offsets", "scales", "bias", "n", "k", "dtype")
        .def("__call__", &Linear::call)
        .def("argmax", &Linear::argmax)
        .def("rows", &Linear::rows)
        .def_prop_ro("nbytes", [](const Linear& linear) { return linear.weight.bytes; });
    nb::class_<Cache>(m, "Cache")
        .def(nb::init<const Elements&, const Elements&, const Scales&, const Scales&, int, int, int, int>())
        .def("write", &Cache::write)
        .def("attend", &Cache::attend);
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__",
             [](Decoder* self, Address embedding, const Linear& head, int64_t vocab, int64_t hidden, Address final_norm,
                int heads, int kv_heads, int head_dim, int type, float eps, int activation, float scale, float soft_cap,
                float embedding_scale) {
                 DecoderShape shape;
                 shape.vocab = vocab;
                 shape.hidden = hidden;
                 shape.heads = heads;
                 shape.kv_heads = kv_heads;
                 shape.head_dim = head_dim;
                 shape.type = dtype(type);
                 shape.eps = eps;
                 shape.activation = static_cast<Activation>(activation);
                 shape.scale = scale;
                 shape.soft_cap = soft_cap;
                 shape.embedding_scale = embedding_scale;
                 new (self) Decoder(shape, at<void>(embedding), projection(head), at<float>(final_norm));
             })
        .def("add_layer", &add_layer)
        .def("run", &run_step, "token_ids"_a, "positions"_a, "max_positions"_a, "query_start"_a, "context_lens"_a,
             "groups"_a, "angles"_a, "caches"_a, "output"_a, "on_layer"_a.none() = nb::none())
        .def_prop_ro(
            "seconds",
            [](const Decoder& decoder) {
                nb::dict seconds;
                for (int op = 0; op < Decoder::kOperators; ++op)
                    seconds[Decoder::kOperatorNames[op]] = decoder.seconds()[op];
                return seconds;
            },
            "Seconds spent in each operator so far.");
}
