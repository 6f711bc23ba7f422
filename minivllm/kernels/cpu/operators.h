// The operators of bindings.cpp that C++ calls, too. What does not fit raises c10::Error.
#pragma once
#include <ATen/core/Tensor.h>

namespace minivllm {

using at::Tensor;
using c10::optional;

// bfloat16 [rows, inputs] to [rows, outputs], on panels that `pack` made; `few_rows` as of Weight.
Tensor linear_op(const Tensor& x, const Tensor& packed, const optional<Tensor>& scales,
                 const optional<Tensor>& zeros, const optional<Tensor>& bias, int64_t format,
                 int64_t outputs, int64_t group, int64_t few_rows);

// Writes the keys and values of a step to their slots, then attends: [tokens, heads, head_dim].
Tensor paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                       const Tensor& v_cache, const Tensor& slots, const Tensor& starts,
                       const Tensor& lengths, const Tensor& table, double scale, int64_t window,
                       double soft_cap);

// fused.h has the others.
Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps);
void norm_and_rotate_op(const Tensor& x, const optional<Tensor>& weight, double eps,
                        const Tensor& cos, const Tensor& sin);
Tensor silu_and_multiply_op(const Tensor& gate_up);

}  // namespace minivllm
