// Vectors of 8-bit integers, four inputs side by side: their products with sums in 32 bits, by VNNI
// (AVX-512 and AVX), by AVX2, or one by one. Every processor gets the same integers.
#pragma once
#include <cstdint>
#include <cstring>

#include "products.h"
#include "vector.h"

namespace minivllm {

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

constexpr int kVectors = kColumns / kLanes;  // of a panel's columns

// What MINIVLLM_ONE_BY_ONE is defined for in tests: the twin below on a processor that has
// instructions.
#if defined(MINIVLLM_ONE_BY_ONE)
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MINIVLLM_DOT_PRODUCTS 1
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
#define MINIVLLM_DOT_PRODUCTS 1
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define MINIVLLM_PAIR_PRODUCTS 1
#endif

// A weight's bytes as the products take them. `kCodes`: they are 0 to 15, else 0 to 255, which mean
// -128 to 127.
template <bool kCodes>
struct Factors {
  Bytes bytes;
#ifdef MINIVLLM_PAIR_PRODUCTS
  Bytes magnitudes;
#endif
};

// What is to be taken from each byte of a weight, where the products have not done so.
template <bool kCodes>
constexpr int32_t offset_of() {
#ifdef MINIVLLM_PAIR_PRODUCTS
  return kCodes ? 8 : 0;
#else
  return kCodes ? 8 : 128;
#endif
}

MINIVLLM_INLINE inline Bytes load_bytes(const uint8_t* from) {
  return *reinterpret_cast<const Bytes*>(from);
}

// Four inputs of a row, for every column.
MINIVLLM_INLINE inline Bytes splat_quad(const int8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, 4);
  return (Bytes)(Integers{} + quad);
}

#ifdef MINIVLLM_DOT_PRODUCTS

template <bool kCodes>
MINIVLLM_INLINE inline Factors<kCodes> factors_of(Bytes bytes) {
  return {bytes};
}

template <bool kCodes>
MINIVLLM_INLINE inline Integers add_products(Integers sums, const Factors<kCodes>& weights,
                                             Bytes x) {
#ifdef __AVX512F__
  return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights.bytes, (__m512i)x);
#else
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights.bytes, (__m256i)x);
#endif
}

#elif defined(MINIVLLM_PAIR_PRODUCTS)

// Two products are added in 16 bits, which 2 * 128 * 127 does not exceed, but 2 * 255 * 127 would:
// so weights of eight bits are magnitudes here, and activations take their signs.
template <bool kCodes>
MINIVLLM_INLINE inline Factors<kCodes> factors_of(Bytes bytes) {
  if constexpr (kCodes) return {bytes, bytes};
  const Bytes signs = bytes ^ 128;
#ifdef __AVX512F__
  return {signs, (Bytes)_mm512_abs_epi8((__m512i)signs)};
#else
  return {signs, (Bytes)_mm256_abs_epi8((__m256i)signs)};
#endif
}

template <bool kCodes>
MINIVLLM_INLINE inline Integers add_products(Integers sums, const Factors<kCodes>& weights,
                                             Bytes x) {
#ifdef __AVX512F__
  __m512i signed_x = (__m512i)x;
  if constexpr (!kCodes)
    signed_x = _mm512_mask_sub_epi8(signed_x, _mm512_movepi8_mask((__m512i)weights.bytes),
                                    _mm512_setzero_si512(), signed_x);
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights.magnitudes, signed_x);
  return sums + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  __m256i signed_x = (__m256i)x;
  if constexpr (!kCodes) signed_x = _mm256_sign_epi8(signed_x, (__m256i)weights.bytes);
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights.magnitudes, signed_x);
  return sums + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

#else

template <bool kCodes>
inline Factors<kCodes> factors_of(Bytes bytes) {
  return {bytes};
}

template <bool kCodes>
inline Integers add_products(Integers sums, const Factors<kCodes>& weights, Bytes x) {
  for (int i = 0; i < 4 * kLanes; ++i) sums[i / 4] += weights.bytes[i] * static_cast<int8_t>(x[i]);
  return sums;
}

#endif

// The low bytes of integers.
inline void store_low_bytes(int8_t* to, Integers from) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)from));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256((__m256i)from, _mm256_set1_epi32(255));
  const __m128i words = (__m128i)narrowed((Integers)low);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(from[i]);
#endif
}

// The largest of unsigned words.
inline uint16_t highest(Shorts words) {
#if defined(__AVX2__)
#ifdef __AVX512F__
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128((__m256i)words),
                                      _mm256_extracti128_si256((__m256i)words, 1));
#else
  const __m128i eight = (__m128i)words;
#endif
  return static_cast<uint16_t>(
      ~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi8(-1))), 0));
#else
  uint16_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = words[i] > most ? words[i] : most;
  return most;
#endif
}

}  // namespace minivllm
