// Sixteen floats at once, in whatever registers the processor has, and their conversion from and to 16 bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace minivllm {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};

constexpr int kLanes = 16;
typedef float Vector __attribute__((vector_size(64), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef _Float16 Halves __attribute__((vector_size(32), aligned(2)));

inline Vector splat(float value) { return value - Vector{}; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector load(const BFloat16* from) {
  const auto wide = __builtin_convertvector(*reinterpret_cast<const Shorts*>(from), Integers) << 16;
  return (Vector)wide;
}
inline Vector load(const Half* from) {
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Vector);
}

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline void store(BFloat16* to, Vector value) {  // to the nearest, ties to even
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
  auto bits = (Integers)value;
  const Integers is_number = value == value;
  bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) & is_number) | (0x7FC00000 & ~is_number);
  *reinterpret_cast<Shorts*>(to) = __builtin_convertvector(bits >> 16, Shorts);
#endif
}
inline void store(Half* to, Vector value) {
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(value, Halves);
}

// The value as the type would hold it.
template <typename T>
inline Vector rounded(Vector value) {
  T held[kLanes];
  store(held, value);
  return load(held);
}
template <>
inline Vector rounded<float>(Vector value) {
  return value;
}

// One value of all sixteen: their sum, their maximum.
template <typename Join>
inline float reduce(Vector v, const Join& join) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  const Eight eight = join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  const Four four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  const Four two = join(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return join(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}

inline float sum(Vector v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}

inline float highest(Vector v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to 2 units in the last place for x in [-87, 0]; below that, 0. After Cephes' expf (Moshier).
inline Vector exp_of_negative(Vector x) {
  const Integers tiny = x < -87.0f;
  const Vector turns = x * 1.44269504088896341f;
  const auto whole = __builtin_convertvector(turns - 0.5f, Integers);  // towards zero: the nearest, of negatives
  const Vector k = __builtin_convertvector(whole, Vector);
  const Vector r = x - k * 0.693359375f + k * 2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers power = (whole + 127) << 23;
  const Vector result = p * (Vector)power;
  const Integers kept = (Integers)result & ~tiny;
  return (Vector)kept;
}

}  // namespace minivllm
