// A decoder layer in one call: the operators in the order of models/layers.py. At batch 1 Python
// takes longer to call them one by one than the small ones take to run.
#pragma once
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <tuple>
#include <utility>

#include "operators.h"

namespace minivllm {

// The operators are not dispatched here: without this, torch's profiler would not see them.
template <typename Code>
auto named(const char* name, const Code& code) {
  RECORD_FUNCTION(name, {});
  return code();
}

// The arguments of an operator after x, as Python gives them.
using Norm = std::tuple<Tensor, double>;
using Linear = std::tuple<Tensor, optional<Tensor>, optional<Tensor>, optional<Tensor>, int64_t,
                          int64_t, int64_t, int64_t>;

inline Tensor compute(const Norm& norm, const Tensor& x) {
  return named("minivllm_cpu::rms_norm",
               [&] { return rms_norm_op(x, std::get<0>(norm), std::get<1>(norm)); });
}

inline Tensor compute(const Linear& linear, const Tensor& x) {
  return named("minivllm_cpu::linear", [&] {
    return std::apply([&](const auto&... rest) { return linear_op(x, rest...); }, linear);
  });
}

struct DecoderLayer : torch::CustomClassHolder {
  // Pre-norm, grouped-query attention, SwiGLU. `head_norm`: weights [heads + kv_heads, head_dim]
  // for queries and keys.
  DecoderLayer(Norm input_norm, Linear qkv_proj, optional<Norm> head_norm, Linear o_proj,
               Norm post_attention_norm, Linear gate_up_proj, Linear down_proj, int64_t heads,
               int64_t kv_heads, int64_t head_dim)
      : input_norm(std::move(input_norm)),
        qkv_proj(std::move(qkv_proj)),
        head_norm(std::move(head_norm)),
        o_proj(std::move(o_proj)),
        post_attention_norm(std::move(post_attention_norm)),
        gate_up_proj(std::move(gate_up_proj)),
        down_proj(std::move(down_proj)),
        heads(heads),
        kv_heads(kv_heads),
        head_dim(head_dim) {}

  // [tokens, hidden] to the same, or to the rows of `rows` alone; what follows sin is what
  // paged_attention takes after q, k and v.
  Tensor forward(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
                 const Tensor& v_cache, const Tensor& slots, const Tensor& starts,
                 const Tensor& lengths, const Tensor& table, double scale, int64_t window,
                 double soft_cap, const optional<Tensor>& rows) const {
    const int64_t tokens = x.size(0);
    const Tensor qkv =
        compute(qkv_proj, compute(input_norm, x)).view({tokens, heads + 2 * kv_heads, head_dim});
    const Tensor q = qkv.narrow(1, 0, heads), k = qkv.narrow(1, heads, kv_heads);
    const Tensor v = qkv.narrow(1, heads + kv_heads, kv_heads);
    named("minivllm_cpu::norm_and_rotate_", [&] {
      const auto weight = head_norm ? optional<Tensor>(std::get<0>(*head_norm)) : std::nullopt;
      norm_and_rotate_op(qkv.narrow(1, 0, heads + kv_heads), weight,
                         head_norm ? std::get<1>(*head_norm) : 0, cos, sin);
    });
    Tensor attended = named("minivllm_cpu::paged_attention", [&] {
                        return paged_attention(q, k, v, k_cache, v_cache, slots, starts, lengths,
                                               table, scale, window, soft_cap);
                      }).view({tokens, heads * head_dim});
    if (rows) attended = attended.index_select(0, *rows);
    const Tensor between = compute(o_proj, attended).add_(rows ? x.index_select(0, *rows) : x);
    const Tensor gate_up = compute(gate_up_proj, compute(post_attention_norm, between));
    const Tensor gated =
        named("minivllm_cpu::silu_and_multiply", [&] { return silu_and_multiply_op(gate_up); });
    return compute(down_proj, gated).add_(between);
  }

  Norm input_norm;
  Linear qkv_proj;
  optional<Norm> head_norm;
  Linear o_proj;
  Norm post_attention_norm;
  Linear gate_up_proj, down_proj;
  int64_t heads, kv_heads, head_dim;
};

}  // namespace minivllm
