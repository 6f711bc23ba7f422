// See fused.h. Every intermediate is rounded where the plain operations round it.
#include "fused.h"

#include <cmath>

#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kWorthwhile = 16384;  // values, below which threads cost more than they save

template <typename T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
  Vector squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector value = load(x + i);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

template <typename T>
inline void norm_row(const T* x, int64_t size, const T* weight, float eps, T* out) {
  const float factor = inverse_rms(x, size, eps);
  for (int64_t i = 0; i < size; i += kLanes)
    store(out + i, rounded<T>(load(x + i) * factor) * load(weight + i));
}

}  // namespace

template <typename T>
void rms_norm(const T* x, int64_t stride, int64_t rows, int64_t size, const T* weight, float eps,
              T* out) {
#pragma omp parallel for if (rows * size > kWorthwhile)
  for (int64_t row = 0; row < rows; ++row)
    norm_row(x + row * stride, size, weight, eps, out + row * size);
}

template <typename T>
void norm_and_rotate(T* x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t dim,
                     const T* weight, float eps, const T* cos, const T* sin, int64_t table_stride,
                     int64_t rotated) {
  const int64_t half = rotated / 2;
#pragma omp parallel for if (tokens * heads * dim > kWorthwhile)
  for (int64_t t = 0; t < tokens; ++t) {
    const T *c = cos + t * table_stride, *s = sin + t * table_stride;
    for (int64_t h = 0; h < heads; ++h) {
      T* row = x + t * token_stride + h * dim;
      if (weight != nullptr) norm_row(row, dim, weight + h * dim, eps, row);
      for (int64_t i = 0; i < half; i += kLanes) {
        const Vector low = load(row + i), high = load(row + half + i);
        store(row + i, rounded<T>(low * load(c + i)) + high * load(s + i));
        store(row + half + i, rounded<T>(high * load(c + half + i)) + low * load(s + half + i));
      }
    }
  }
}

template <typename T>
void silu_and_multiply(const T* gate_up, int64_t rows, int64_t width, T* out) {
#pragma omp parallel for if (rows * width > kWorthwhile)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vector g = load(gate + i);
      // g / (1 + e^-g), with a power of e that cannot overflow.
      const Vector negative = g > 0.0f ? -g : g;
      const Vector power = exp_of_negative(negative);
      const Vector one = splat(1.0f);
      const Vector sigmoid = (g > 0.0f ? one : power) / (1.0f + power);
      store(out + row * width + i, rounded<T>(g * sigmoid) * load(up + i));
    }
  }
}

#define MINIVLLM_INSTANTIATE(T)                                                                    \
  template void rms_norm(const T*, int64_t, int64_t, int64_t, const T*, float, T*);                \
  template void norm_and_rotate(T*, int64_t, int64_t, int64_t, int64_t, const T*, float, const T*, \
                                const T*, int64_t, int64_t);                                       \
  template void silu_and_multiply(const T*, int64_t, int64_t, T*);
MINIVLLM_INSTANTIATE(float)
MINIVLLM_INSTANTIATE(BFloat16)
MINIVLLM_INSTANTIATE(Half)

}  // namespace minivllm
