// Stored weights become factors: a piece of a panel at a time, which stays in the first-level cache.
#pragma once
#include "linear.h"
#include "products.h"

#ifdef MINIVLLM_PRODUCTS

namespace minivllm {

// Of NF4's codes: Dettmers et al. 2023, QLoRA.
constexpr float kLevels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

// The bfloat16 of a code: exact for int4, rounded for NF4.
inline uint16_t level_of(Format format, int code) {
  const float value = format == Format::kAffine4 ? static_cast<float>(code - 8) : kLevels[code];
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to the nearest
}

#ifdef MINIVLLM_BF16_PRODUCTS

// The bfloat16 of each code, twice: the look-up takes five bits, of which the fifth may be anything.
using Levels = __m512i;

inline Levels levels_of(Format format) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = level_of(format, i % 16);
  return _mm512_load_si512(table);
}

// Turns `pairs` pairs of inputs of a panel into [pairs][64][2], and asks for `lines` lines of memory for each 16 of them.
inline void expand(Format format, const uint8_t* from, int64_t pairs, const Levels& levels, const char* next,
                   int64_t lines, Factor* to) {
  if (format == Format::kInt8) {
    const auto widen = [](const uint8_t* bytes) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    };
    for (int64_t p = 0; p < pairs; ++p, from += 128, to += 128) {
      if (p % 16 == 0) ask(next, lines);
      for (int i = 0; i < 128; i += 32)
        _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(widen(from + i + 16), widen(from + i)));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; ++p, from += 64, to += 128) {
    if (p % 16 == 0) ask(next, lines);
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half));
      const __m512i words = _mm512_cvtepu8_epi16(bytes);
      _mm512_store_si512(to + 32 * half, _mm512_permutexvar_epi16(words, levels));
      _mm512_store_si512(to + 64 + 32 * half,
                         _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), levels));
    }
  }
}

#else

// The two bytes of each code's bfloat16, in tables of their own.
struct Levels {
  __m256i low, high;
};

inline Levels levels_of(Format format) {
  alignas(32) uint8_t low[32], high[32];
  for (int i = 0; i < 32; ++i) low[i] = level_of(format, i % 16) & 255, high[i] = level_of(format, i % 16) >> 8;
  return {_mm256_load_si256(reinterpret_cast<const __m256i*>(low)),
          _mm256_load_si256(reinterpret_cast<const __m256i*>(high))};
}

// Eight outputs of a pair of inputs, bfloat16 side by side.
inline void store_pair(__m256i both, float* to) {
  _mm256_storeu_ps(to, (__m256)_mm256_slli_epi32(both, 16));
  _mm256_storeu_ps(to + kColumns, (__m256)_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
}

// Turns `pairs` pairs of inputs of a panel into [2 * pairs][64], and asks for `lines` lines of memory for each 16 pairs.
inline void expand(Format format, const uint8_t* from, int64_t pairs, const Levels& levels, const char* next,
                   int64_t lines, Factor* to) {
  const auto load_bytes = [](const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
  for (int64_t p = 0; p < pairs; ++p, from += panel_bytes(format, 2), to += 2 * kColumns) {
    if (p % 16 == 0) ask(next, lines);
    switch (format) {
      case Format::kBfloat16:
        for (int64_t n = 0; n < kColumns; n += 8) store_pair(load_bytes(from + 4 * n), to + n);
        break;
      case Format::kInt8:
        for (int64_t n = 0; n < kColumns; n += 8) {
          const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * n)));
          _mm256_storeu_ps(to + n, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24)));
          _mm256_storeu_ps(to + kColumns + n, _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8)));
        }
        break;
      default:
        for (int64_t n = 0; n < kColumns / 2; n += 16) {
          // Quarters 0 and 2, 1 and 3 together: unpacking works on halves.
          const __m256i bytes = _mm256_permute4x64_epi64(load_bytes(from + 2 * n), 0xD8);
          for (int half = 0; half < 2; ++half) {
            const __m256i codes = _mm256_and_si256(half ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
            const __m256i low = _mm256_shuffle_epi8(levels.low, codes), high = _mm256_shuffle_epi8(levels.high, codes);
            float* at = to + half * kColumns / 2 + n;
            store_pair(_mm256_unpacklo_epi8(low, high), at);
            store_pair(_mm256_unpackhi_epi8(low, high), at + 8);
          }
        }
    }
  }
}

#endif

}  // namespace minivllm
#endif
