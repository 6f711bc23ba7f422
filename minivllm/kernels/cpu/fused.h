// Small operations between the products, each one pass over its data.
#pragma once
#include <cstdint>

namespace minivllm {

// out[rows][size] = x / rms(x), rounded to T, times weight[row % weight_rows][size]. In place if
// out is x. size is a multiple of 16.
template <typename T>
void rms_norm(const T* x, int64_t row_stride, int64_t rows, int64_t size, const T* weight,
              float eps, T* out);

// Queries and keys of every token, [tokens][heads][dim] in place: normed as above by weight
// [heads][dim] (or not, if it is null), then the first `rotated` dimensions turned by cosines and
// signed sines, rows of `table_stride`.
template <typename T>
void norm_and_rotate(T* x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t dim,
                     const T* weight, float eps, const T* cos, const T* sin, int64_t table_stride,
                     int64_t rotated);

// out[rows][width] = silu(gate) * up, of rows [gate | up].
template <typename T>
void silu_and_multiply(const T* gate_up, int64_t rows, int64_t width, T* out);

}  // namespace minivllm
