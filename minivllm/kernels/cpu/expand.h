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

// Pairs of inputs of a panel, as they lie.
struct Stored {
  Format format;
  const uint8_t* from;
  int64_t pairs;
};

#ifdef MINIVLLM_BF16_PRODUCTS

// The bfloat16 of each code, twice: the look-up takes five bits, of which the fifth may be anything.
using Levels = __m512i;

inline Levels levels_of(Format format) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = level_of(format, i % 16);
  return _mm512_load_si512(table);
}

// Turns them into [pairs][64][2], and asks for `lines` lines of memory for each 16 of them.
inline void expand(const Stored& stored, const Levels& levels, const char* next, int64_t lines, Factor* to) {
  auto [format, from, pairs] = stored;
  if (format == Format::kInt8) {
    const auto widen = [](const uint8_t* bytes) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    };
    for (int64_t p = 0; p < pairs; ++p, from += 128, to += 128) {
      if (p % kPairs == 0) ask(next, lines);
      for (int i = 0; i < 128; i += 32)
        _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(widen(from + i + 16), widen(from + i)));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; ++p, from += 64, to += 128) {
    if (p % kPairs == 0) ask(next, lines);
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half));
      const __m512i words = _mm512_cvtepu8_epi16(bytes);
      _mm512_store_si512(to + 32 * half, _mm512_permutexvar_epi16(words, levels));
      _mm512_store_si512(to + 64 + 32 * half,
                         _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), levels));
    }
  }
}

constexpr bool kMultipliesStored = false;
void multiply_stored(const Stored&, const Levels&, const Factor*, const char*, int64_t, bool, float*);

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

// The pairs of a panel are taken by halves of its outputs, four times eight: this is where the i-th eight begin.
constexpr int64_t column_of(Format format, int half, int i) {
  return format > Format::kInt8 ? kColumns / 2 * (i / 2) + 16 * half + 8 * (i % 2) : kColumns / 2 * half + 8 * i;
}

// Calls take(i, eight outputs of the first input, the same of the second) for each i below 4.
template <Format format, typename Take>
[[gnu::always_inline]] inline void convert(const uint8_t* from, int half, const Levels& levels, const Take& take) {
  const auto take_both = [&](int i, __m256i both) {  // bfloat16 side by side
    take(i, (__m256)_mm256_slli_epi32(both, 16),
         (__m256)_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  };
  if constexpr (format == Format::kBfloat16) {
    for (int i = 0; i < 4; ++i)
      take_both(i, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4 * column_of(format, half, i))));
  } else if constexpr (format == Format::kInt8) {
    for (int i = 0; i < 4; ++i) {
      const auto* bytes = reinterpret_cast<const __m128i*>(from + 2 * column_of(format, half, i));
      const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128(bytes));
      take(i, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24)),
           _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8)));
    }
  } else {
    // Quarters 0 and 2, 1 and 3 together: unpacking works on halves.
    const __m256i bytes =
        _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half)), 0xD8);
    for (int high = 0; high < 2; ++high) {
      const __m256i codes = _mm256_and_si256(high ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
      const __m256i low_bytes = _mm256_shuffle_epi8(levels.low, codes);
      const __m256i high_bytes = _mm256_shuffle_epi8(levels.high, codes);
      take_both(2 * high, _mm256_unpacklo_epi8(low_bytes, high_bytes));
      take_both(2 * high + 1, _mm256_unpackhi_epi8(low_bytes, high_bytes));
    }
  }
}

template <typename Code>
inline void with_format(Format format, const Code& code) {
  switch (format) {
    case Format::kBfloat16: return code(std::integral_constant<Format, Format::kBfloat16>{});
    case Format::kInt8: return code(std::integral_constant<Format, Format::kInt8>{});
    default: return code(std::integral_constant<Format, Format::kNormal4>{});  // int4 differs in its levels alone
  }
}

// Turns them into [2 * pairs][64], and asks for `lines` lines of memory for each 16 of them.
inline void expand(const Stored& stored, const Levels& levels, const char* next, int64_t lines, Factor* to) {
  with_format(stored.format, [&](auto format) {
    const uint8_t* pair = stored.from;
    for (int64_t p = 0; p < stored.pairs; ++p, pair += panel_bytes(format, 2), to += 2 * kColumns) {
      if (p % kPairs == 0) ask(next, lines);
      for (int half = 0; half < 2; ++half)
        convert<format()>(pair, half, levels, [&](int i, __m256 first, __m256 second) {
          _mm256_storeu_ps(to + column_of(format, half, i), first);
          _mm256_storeu_ps(to + kColumns + column_of(format, half, i), second);
        });
    }
  });
}

constexpr bool kMultipliesStored = true;

// sums[64] = (clear ? 0 : sums) + x[2 * pairs] times as many inputs of a panel, which one row alone needs nowhere else.
// By halves: the sums of all outputs would not stay in 16 registers.
inline void multiply_stored(const Stored& stored, const Levels& levels, const Factor* x, const char* next, int64_t lines,
                            bool clear, float* sums) {
  with_format(stored.format, [&](auto format) {
    for (int half = 0; half < 2; ++half) {
      __m256 held[4];
      for (int i = 0; i < 4; ++i)
        held[i] = clear ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + column_of(format, half, i));
      const uint8_t* pair = stored.from;
      for (int64_t p = 0; p < stored.pairs; ++p, pair += panel_bytes(format, 2)) {
        if (half == 0 && p % kPairs == 0) ask(next, lines);
        convert<format()>(pair, half, levels, [&](int i, __m256 first, __m256 second) {
          held[i] += x[2 * p] * first;
          held[i] += x[2 * p + 1] * second;
        });
      }
      for (int i = 0; i < 4; ++i) _mm256_storeu_ps(sums + column_of(format, half, i), held[i]);
    }
  });
}

#endif

}  // namespace minivllm
#endif
