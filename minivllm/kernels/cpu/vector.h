// As many floats as a register of the processor holds, and their conversion from and to 16 bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace minivllm {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};

// Wider vectors than registers are kept in memory by GCC.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kMostLanes = 16;  // whole multiples of it are whole vectors on every processor
typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef _Float16 Halves __attribute__((vector_size(2 * kLanes), aligned(2)));

inline Vector splat(float value) { return value - Vector{}; }

// What GCC's own conversions do one by one for vectors of 8.
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
inline Integers widened(Shorts from) { return (Integers)_mm256_cvtepu16_epi32((__m128i)from); }
inline Shorts narrowed(Integers from) {  // of values below 65,536
  const __m256i pairs = _mm256_packus_epi32((__m256i)from, (__m256i)from);
  return (Shorts)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}
inline Vector widened(Halves from) { return (Vector)_mm256_cvtph_ps((__m128i)from); }
inline Halves narrowed(Vector from) {
  return (Halves)_mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT);
}
#else
inline Integers widened(Shorts from) { return __builtin_convertvector(from, Integers); }
inline Shorts narrowed(Integers from) { return __builtin_convertvector(from, Shorts); }
inline Vector widened(Halves from) { return __builtin_convertvector(from, Vector); }
inline Halves narrowed(Vector from) { return __builtin_convertvector(from, Halves); }
#endif

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector load(const BFloat16* from) {
  return (Vector)(widened(*reinterpret_cast<const Shorts*>(from)) << 16);
}
inline Vector load(const Half* from) { return widened(*reinterpret_cast<const Halves*>(from)); }

// In a register from here on: GCC would load it again for each use, or all of a kind before the
// first is used.
inline Vector kept(Vector value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
  return value;
}

// a * b + c, rounded once wherever the processor can: GCC would choose anew in each place, and bits
// would differ.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float load_one(const float* from) { return *from; }
inline float load_one(const Half* from) { return static_cast<float>(from->value); }
inline float load_one(const BFloat16* from) {
  const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline void store(BFloat16* to, Vector value) {  // to the nearest, ties to even
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
  auto bits = (Unsigned)value;
  const auto is_number = (Unsigned)(value == value);
  bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) & is_number) | (0x7FC00000 & ~is_number);
  *reinterpret_cast<Shorts*>(to) = narrowed((Integers)(bits >> 16));
#endif
}
inline void store(Half* to, Vector value) { *reinterpret_cast<Halves*>(to) = narrowed(value); }

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

typedef float Four __attribute__((vector_size(16)));

// Four values of a vector's, of which each joins those that lie a multiple of four apart.
template <typename Join>
inline Four fold(Vector v, const Join& join) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight eight = join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
  const auto eight = v;
#endif
#if defined(__AVX2__)
  return join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
              __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  return eight;
#endif
}

// One value of all: their sum, their maximum.
template <typename Join>
inline float reduce(Vector v, const Join& join) {
  const Four four = fold(v, join);
  const Four two = join(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return join(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}

inline float sum(Vector v) {
  return reduce(v, [](auto x, auto y) { return x + y; });
}

// The sums of four vectors.
inline Four sum(Vector a, Vector b, Vector c, Vector d) {
  const auto add = [](auto x, auto y) { return x + y; };
  const Four parts[] = {fold(a, add), fold(b, add), fold(c, add), fold(d, add)};
  const auto pair = [](Four x, Four y) {
    return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  };
  const Four ab = pair(parts[0], parts[1]), cd = pair(parts[2], parts[3]);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

inline float highest(Vector v) {
  return reduce(v, [](auto x, auto y) { return x > y ? x : y; });
}

// e^x to 2 units in the last place for x in [-87, 0]; below that, 0. After Cephes' expf (Moshier).
inline Vector exp_of_negative(Vector x) {
  const Integers tiny = x < -87.0f;
  const Vector turns = x * 1.44269504088896341f;
  const auto whole =
      __builtin_convertvector(turns - 0.5f, Integers);  // towards zero: the nearest, of negatives
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

// log x to 2 units in the last place for normal x in (0, 1]. After Cephes' logf (Moshier).
inline Vector log_of_fraction(Vector x) {
  // x = m * 2^e, m in [sqrt(1/2), sqrt(2))
  const Integers root = (Integers)splat(0.70710678118654752f);
  const Integers exponent = ((Integers)x - root) >> 23;
  const Vector m = (Vector)((Integers)x - (exponent << 23)) - 1.0f;
  const Vector e = __builtin_convertvector(exponent, Vector);
  Vector p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vector square = m * m;
  return m + (p * m * square - e * 2.12194440e-4f - 0.5f * square) + e * 0.693359375f;
}

}  // namespace minivllm
