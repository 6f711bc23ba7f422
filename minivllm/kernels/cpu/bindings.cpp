// What torch sees of the kernels: operators of the namespace minivllm_cpu. They check shapes,
// dtypes and strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <vector>

#include "attention.h"
#include "fused.h"
#include "layer.h"
#include "linear.h"
#include "linear_int8.h"
#include "operators.h"
#include "sampling.h"
#include "vector.h"

namespace minivllm {
namespace {

// Calls `code` with T as the type of `tensor`.
template <typename Code>
void by_dtype(const Tensor& tensor, const Code& code) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return code(float{});
    case at::kBFloat16:
      return code(BFloat16{});
    case at::kHalf:
      return code(Half{});
    default:
      TORCH_CHECK(false, "no kernel for ", tensor.scalar_type());
  }
}

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Whether `tensor` is dense and of that type, and of that size where one is given.
bool is_dense(const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes = {}) {
  return tensor.is_contiguous() && tensor.scalar_type() == type &&
         (sizes.empty() || tensor.sizes() == sizes);
}

bool has_linear_op() { return has_linear(); }

int64_t few_rows_op(int64_t format) { return few_rows(static_cast<Format>(format)); }

// Takes the memory of bfloat16 rows that fill their panels.
Tensor pack(const Tensor& rows, int64_t format) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.size(1) % 2 == 0,
              "pack: [outputs, even inputs]");
  const auto kind = static_cast<Format>(format);
  TORCH_CHECK(rows.element_size() == (kind == Format::kBfloat16 ? 2 : 1), "pack: wrong dtype");
  const int64_t outputs = rows.size(0), inputs = rows.size(1),
                panels = (outputs + kPanel - 1) / kPanel;
  const int64_t bytes = panel_bytes(kind, inputs), row_bytes = inputs * rows.element_size();
  const bool in_place = kind == Format::kBfloat16 && outputs % kPanel == 0;
  Tensor packed = in_place ? rows.view(at::kByte).view({panels, bytes})
                           : at::empty({panels, bytes}, rows.options().dtype(at::kByte));
  const auto* from = pointer<uint8_t>(rows);
  auto* to = pointer<uint8_t>(packed);
#pragma omp parallel for
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t count = std::min(kPanel, outputs - p * kPanel);
    const uint8_t* begin = from + p * kPanel * row_bytes;
    const std::vector<uint8_t> copy(begin, begin + count * row_bytes);
    pack_panel(kind, copy.data(), count, inputs, to + p * bytes);
  }
  return packed;
}

// Asks for pages of 2 MB, which a weight that is read from end to end for each token needs 512
// times fewer of. Memory that has its pages already is copied into such ones where the system can
// do that (Linux 6.1); no harm is done where it cannot.
void use_huge_pages(const Tensor& memory) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 1 << 21;
  const auto begin = (reinterpret_cast<uintptr_t>(memory.data_ptr()) + kHuge - 1) / kHuge * kHuge;
  const auto end =
      (reinterpret_cast<uintptr_t>(memory.data_ptr()) + memory.nbytes()) / kHuge * kHuge;
  if (begin >= end) return;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0)
    madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#endif
}

}  // namespace

Tensor linear_op(const Tensor& x, const Tensor& packed, const optional<Tensor>& scales,
                 const optional<Tensor>& zeros, const optional<Tensor>& bias, int64_t format,
                 int64_t outputs, int64_t group, int64_t few_rows) {
  const int64_t inputs = x.size(-1);
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == at::kBFloat16,
              "linear: bfloat16 [rows, inputs]");
  const auto kind = static_cast<Format>(format);
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  TORCH_CHECK(is_dense(packed, at::kByte, {panels, panel_bytes(kind, inputs)}),
              "linear: weight and input do not fit");
  TORCH_CHECK(!bias || is_dense(*bias, at::kBFloat16, {outputs}),
              "linear: bfloat16 bias [outputs]");
  const bool plain = kind == Format::kBfloat16, quads = kind >= Format::kInt8Quads;
  const bool affine = is_affine(kind), bytes = kind == Format::kInt8;
  int64_t scale_groups = 1;
  if (!plain) {
    TORCH_CHECK(group > 0 && inputs % group == 0 && group % (affine || quads ? 32 : 2) == 0 &&
                    (group <= 256 || quads || (bytes && group == inputs)),
                "linear: groups of at most 256 inputs, of a multiple of 32 where they have zeros; "
                "or all inputs of int8");
    scale_groups =
        kind == Format::kInt8Quads && scales && scales->dim() == 3 && scales->size(1) == 1
            ? 1
            : inputs / group;
    for (const auto& values : {scales, affine && zeros ? zeros : scales})
      TORCH_CHECK(values && is_dense(*values, at::kBFloat16, {panels, scale_groups, kPanel}),
                  "linear: bfloat16 scales and zeros [panels, groups, 64]");
  }
  Tensor out = at::empty({x.size(0), outputs}, x.options());
  const Weight weight{kind,
                      pointer<uint8_t>(packed),
                      plain ? nullptr : pointer<BFloat16>(*scales),
                      affine && zeros ? pointer<BFloat16>(*zeros) : nullptr,
                      inputs,
                      outputs,
                      group,
                      scale_groups,
                      few_rows};
  linear(pointer<BFloat16>(x), x.stride(0), x.size(0), weight,
         bias ? pointer<BFloat16>(*bias) : nullptr, pointer<BFloat16>(out));
  return out;
}

namespace {

Tensor embed(const Tensor& packed, const Tensor& token_ids) {
  TORCH_CHECK(packed.dim() == 2 && is_dense(packed, at::kByte) && token_ids.dim() == 1 &&
                  is_dense(token_ids, at::kLong),
              "embed: packed bfloat16, int64 [tokens]");
  const int64_t inputs = packed.size(1) / (2 * kPanel), tokens = token_ids.size(0);
  Tensor out = at::empty({tokens, inputs}, packed.options().dtype(at::kBFloat16));
  const auto* ids = pointer<int64_t>(token_ids);
  auto* to = pointer<uint32_t>(out);
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(ids[t] >= 0 && ids[t] < packed.size(0) * kPanel, "embed: token id ", ids[t]);
    const auto* from =
        pointer<uint32_t>(packed) + ids[t] / kPanel * inputs / 2 * kPanel + ids[t] % kPanel;
    for (int64_t p = 0; p < inputs / 2; ++p) to[t * inputs / 2 + p] = from[p * kPanel];
  }
  return out;
}

}  // namespace

Tensor paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                       const Tensor& v_cache, const Tensor& slots, const Tensor& starts,
                       const Tensor& lengths, const Tensor& table, double scale, int64_t window,
                       double soft_cap) {
  for (const auto& x : {q, k, v})
    TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && x.stride(1) == x.size(2) &&
                    x.dtype() == k_cache.dtype(),
                "paged_attention: q, k and v are [tokens, heads, head_dim], dense within a token, "
                "in the cache's dtype");
  TORCH_CHECK(k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(2) == k.size(2) &&
                  q.size(2) % kMostLanes == 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
              "paged_attention: heads of a multiple of 16, as many queries as keys of each, or a "
              "multiple of them");
  for (const auto& cache : {k_cache, v_cache})
    TORCH_CHECK(cache.dim() == 4 && cache.size(1) > 0 &&
                    is_dense(cache, q.scalar_type(),
                             {cache.size(0), cache.size(1), k.size(1), k.size(2)}) &&
                    cache.sizes() == k_cache.sizes(),
                "paged_attention: caches are [blocks, block_size, key heads, head_dim], dense, in "
                "the dtype of q");
  TORCH_CHECK(lengths.dim() == 1 && is_dense(lengths, at::kInt) &&
                  is_dense(starts, at::kInt, {lengths.size(0) + 1}) &&
                  is_dense(slots, at::kLong, {q.size(0)}) && table.dim() == 2 &&
                  is_dense(table, at::kInt) && table.size(0) == lengths.size(0),
              "paged_attention: int64 slots [tokens], int32 starts [requests + 1], lengths and "
              "table [requests, blocks]");
  Attention a{};
  a.requests = lengths.size(0), a.tokens = q.size(0), a.heads = q.size(1), a.kv_heads = k.size(1);
  a.head_dim = q.size(2), a.block_size = k_cache.size(1), a.table_width = table.size(1);
  a.scale = static_cast<float>(scale), a.window = window, a.soft_cap = static_cast<float>(soft_cap);
  a.q_stride = q.stride(0), a.k_stride = k.stride(0), a.v_stride = v.stride(0);
  a.slots = pointer<int64_t>(slots), a.starts = pointer<int32_t>(starts);
  a.lengths = pointer<int32_t>(lengths), a.table = pointer<int32_t>(table);
  Tensor out = at::empty(q.sizes(), q.options());
  by_dtype(q, [&](auto kind) {
    using T = decltype(kind);
    attend(a, pointer<T>(q), pointer<T>(k), pointer<T>(v), pointer<T>(k_cache), pointer<T>(v_cache),
           pointer<T>(out));
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % kMostLanes == 0 &&
                  is_dense(weight, x.scalar_type(), {x.size(1)}),
              "rms_norm: [rows, multiple of 16], and as many weights");
  Tensor out = at::empty(x.sizes(), x.options());
  by_dtype(x, [&](auto kind) {
    using T = decltype(kind);
    rms_norm(pointer<T>(x), x.stride(0), x.size(0), x.size(1), pointer<T>(weight),
             static_cast<float>(eps), pointer<T>(out));
  });
  return out;
}

void norm_and_rotate_op(const Tensor& x, const optional<Tensor>& weight, double eps,
                        const Tensor& cos, const Tensor& sin) {
  const int64_t rotated = cos.size(-1);
  TORCH_CHECK(
      x.dim() == 3 && x.stride(2) == 1 && x.stride(1) == x.size(2) && x.size(2) % kMostLanes == 0,
      "norm_and_rotate: [tokens, heads, multiple of 16]");
  TORCH_CHECK(rotated % (2 * kMostLanes) == 0 && rotated <= x.size(2) &&
                  cos.numel() == x.size(0) * rotated && cos.stride(-1) == 1 &&
                  sin.sizes() == cos.sizes() && sin.strides() == cos.strides() &&
                  cos.dtype() == x.dtype() && sin.dtype() == x.dtype(),
              "norm_and_rotate: a cosine and a sine for each token; half of the rotated dimensions "
              "is a multiple of 16");
  TORCH_CHECK(!weight || is_dense(*weight, x.scalar_type(), {x.size(1), x.size(2)}),
              "norm_and_rotate: weights [heads, head_dim]");
  by_dtype(x, [&](auto kind) {
    using T = decltype(kind);
    norm_and_rotate(pointer<T>(x), x.stride(0), x.size(0), x.size(1), x.size(2),
                    weight ? pointer<T>(*weight) : nullptr, static_cast<float>(eps),
                    pointer<T>(cos), pointer<T>(sin), cos.stride(0), rotated);
  });
}

Tensor silu_and_multiply_op(const Tensor& gate_up) {
  TORCH_CHECK(
      gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % (2 * kMostLanes) == 0,
      "silu_and_multiply: [rows, two multiples of 16]");
  Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  by_dtype(gate_up, [&](auto kind) {
    using T = decltype(kind);
    silu_and_multiply(pointer<T>(gate_up), out.size(0), out.size(1), pointer<T>(out));
  });
  return out;
}

namespace {

Tensor argmax_op(const Tensor& logits, bool flag) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1,
              "argmax: [rows, vocabulary]");
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  by_dtype(logits, [&](auto kind) {
    using T = decltype(kind);
    argmax(pointer<T>(logits), logits.stride(0), logits.size(0), logits.size(1), flag,
           pointer<int64_t>(out));
  });
  return out;
}

Tensor draw_op(const Tensor& logits, const Tensor& seeds, const Tensor& positions,
               const Tensor& temperatures) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1,
              "draw: [rows, vocabulary]");
  for (const Tensor& column : {seeds, positions, temperatures})
    TORCH_CHECK(column.numel() == logits.size(0) && column.is_contiguous(), "draw: columns [rows]");
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  by_dtype(logits, [&](auto kind) {
    using T = decltype(kind);
    draw(pointer<T>(logits), logits.stride(0), logits.size(0), logits.size(1),
         seeds.const_data_ptr<int64_t>(), positions.const_data_ptr<int32_t>(),
         temperatures.const_data_ptr<float>(), pointer<int64_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace minivllm

TORCH_LIBRARY(minivllm_cpu, library) {
  using namespace minivllm;
  library.def("has_linear() -> bool", has_linear_op);
  library.def("few_rows(int format) -> int", few_rows_op);
  library.def("pack(Tensor(a!) rows, int format) -> Tensor(a!)", pack);
  library.def(
      "linear(Tensor x, Tensor packed, Tensor? scales, Tensor? zeros, Tensor? bias, int format, "
      "int outputs, "
      "int group, int few_rows=-1) -> Tensor",
      linear_op);
  library.def("use_huge_pages_(Tensor(a!) memory) -> ()", use_huge_pages);
  library.def("embed(Tensor packed, Tensor token_ids) -> Tensor", embed);
  library.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slots, "
      "Tensor starts, Tensor lengths, Tensor table, float scale, int window, float soft_cap) -> "
      "Tensor",
      paged_attention);
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_op);
  library.def(
      "norm_and_rotate_(Tensor(a!) x, Tensor? weight, float eps, Tensor cos, Tensor sin) -> ()",
      norm_and_rotate_op);
  library.def("silu_and_multiply(Tensor gate_up) -> Tensor", silu_and_multiply_op);
  library.def("argmax(Tensor logits, bool flag=False) -> Tensor", argmax_op);
  library.def("draw(Tensor logits, Tensor seeds, Tensor positions, Tensor temperatures) -> Tensor",
              draw_op);
  library.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<Norm, Linear, optional<Norm>, Linear, Norm, Linear, Linear, int64_t, int64_t,
                       int64_t>())
      .def("forward", &DecoderLayer::forward);
}
