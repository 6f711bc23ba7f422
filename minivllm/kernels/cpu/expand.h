// Stored weights become factors: a piece of a panel at a time, which stays in the first-level
// cache.
#pragma once
#include "linear.h"
#include "products.h"

namespace minivllm {

// How a panel of int8 holds a byte, and where in a pair of inputs it has the two of an output.
#ifdef MINIVLLM_BYTE_TABLES
// As sign and magnitude. Eight bytes of the first half of 64 are followed by eight of the second,
// which unpacking parts.
inline uint8_t stored_byte(uint8_t byte) {
  return byte < 128 ? byte : static_cast<uint8_t>(128 | -byte);
}
constexpr int64_t place_of_bytes(int64_t output) {
  const int64_t eight = output % 32 / 4;
  return output / 32 * 64 + (2 * (eight % 4) + eight / 4) * 8 + output % 4 * 2;
}
#else
inline uint8_t stored_byte(uint8_t byte) { return byte; }
constexpr int64_t place_of_bytes(int64_t output) { return 2 * output; }
#endif

}  // namespace minivllm

#ifdef MINIVLLM_PRODUCTS

namespace minivllm {

// Of NF4's codes: Dettmers et al. 2023, QLoRA.
constexpr float kLevels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// Of IQ4_NL's codes: ggml (https://github.com/ggml-org/ggml).
constexpr float kIntegerLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

// The bfloat16 of a code: rounded for NF4, else exact.
inline uint16_t level_of(Format format, int code) {
  const float value = format == Format::kAffine4     ? static_cast<float>(code - 8)
                      : format == Format::kUnsigned4 ? static_cast<float>(code)
                      : format == Format::kIQ4NL     ? kIntegerLevels[code]
                                                     : kLevels[code];
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to the nearest
}

// Groups of pairs of inputs of a panel, as they lie: several only where they are multiplied during
// their conversion.
struct Stored {
  Format format;
  const uint8_t* from;
  int64_t pairs;  // of each group
  int64_t groups = 1;
};

#ifdef MINIVLLM_BF16_PRODUCTS

// The bfloat16 of each code, twice: the look-up takes five bits, of which the fifth may be
// anything.
using Levels = __m512i;

inline Levels levels_of(Format format) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = level_of(format, i % 16);
  return _mm512_load_si512(table);
}

#ifdef MINIVLLM_BYTE_TABLES

// The two bytes of the bfloat16 of 0 to 127, in tables of their own.
struct Magnitudes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr Magnitudes() {
    for (int value = 1; value < 128; ++value) {
      int power = 0;
      while (value >> (power + 1)) ++power;
      const int bits = (127 + power) << 7 | (value << (7 - power) & 127);
      low[value] = static_cast<uint8_t>(bits), high[value] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr Magnitudes kMagnitudes;

// The bfloat16 of 64 bytes, each a sign and a magnitude.
MINIVLLM_INLINE inline void convert_bytes(const uint8_t* from, __m512bh& first, __m512bh& second) {
  const __m512i bytes = _mm512_loadu_si512(from);
  const auto look_up = [&](const uint8_t* table) MINIVLLM_INLINE {  // by seven bits
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
  };
  const __m512i low = look_up(kMagnitudes.low);
  constexpr int kFirstOrBoth = 0xF8;  // a | (b & c)
  const __m512i high = _mm512_ternarylogic_epi32(look_up(kMagnitudes.high), bytes,
                                                 _mm512_set1_epi8(-128), kFirstOrBoth);
  first = (__m512bh)_mm512_unpacklo_epi8(low, high);
  second = (__m512bh)_mm512_unpackhi_epi8(low, high);
}

#else

MINIVLLM_INLINE inline void convert_bytes(const uint8_t* from, __m512bh& first, __m512bh& second) {
  const auto widen = [](const uint8_t* bytes) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  };
  first = _mm512_cvtne2ps_pbh(widen(from + 16), widen(from));
  second = _mm512_cvtne2ps_pbh(widen(from + 48), widen(from + 32));
}

#endif

// The bfloat16 of one pair: 64 outputs, four times sixteen, of two inputs side by side.
template <bool coded>
MINIVLLM_INLINE inline void convert(const uint8_t* from, const Levels& levels, __m512bh (&to)[4]) {
  if constexpr (coded) {
    each<2>([&](auto half) MINIVLLM_INLINE {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half));
      const __m512i words = _mm512_cvtepu8_epi16(bytes);
      to[half] = (__m512bh)_mm512_permutexvar_epi16(words, levels);
      to[2 + half] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), levels);
    });
  } else {
    convert_bytes(from, to[0], to[1]);
    convert_bytes(from + 64, to[2], to[3]);
  }
}

// Turns them into [pairs][64][2], and asks for `lines` lines of memory for each 16 of them.
template <bool coded>
inline void expand_all(const uint8_t* from, int64_t pairs, const Levels& levels, const char* next,
                       int64_t lines, Factor* to) {
  for (int64_t p = 0; p < pairs; ++p, from += coded ? 64 : 128, to += 2 * kColumns) {
    if (p % kPairs == 0) ask(next, lines);
    __m512bh both[4];
    convert<coded>(from, levels, both);
    each<4>([&](auto n) MINIVLLM_INLINE { _mm512_store_si512(to + 32 * n, (__m512i)both[n]); });
  }
}

inline void expand(const Stored& stored, const Levels& levels, const char* next, int64_t lines,
                   Factor* to) {
  if (stored.format == Format::kInt8)
    return expand_all<false>(stored.from, stored.pairs, levels, next, lines, to);
  expand_all<true>(stored.from, stored.pairs, levels, next, lines, to);
}

constexpr int64_t kStoredRows = kRows;

template <bool coded, int M>
[[gnu::noinline]] void multiply_stored_into(const Stored& stored, Levels levels, const Factor* x,
                                            int64_t stride, const char* next,
                                            const Totals& totals) {
  constexpr int64_t kBytes = coded ? 64 : 128;  // of a pair
  const uint8_t* from = stored.from;
  for (int64_t g = 0, pairs = stored.pairs; g < stored.groups;
       ++g, from += pairs * kBytes, x += 2 * pairs)
    sum_pairs<M>(pairs, totals.of_group(g), [&](int64_t p, Sums<M>& held) MINIVLLM_INLINE {
      __m512bh b[4];
      ask(next, kBytes / 64);
      convert<coded>(from + p * kBytes, levels, b);
      multiply_pair<M>(x, stride, p, b, held);
    });
}

// Totals of x times as many inputs of a panel, for up to 6 rows: few enough that the panel is
// needed nowhere else.
inline void multiply_stored(int64_t rows, const Stored& stored, const Levels& levels,
                            const Factor* x, int64_t stride, const char* next, int64_t,
                            const Totals& totals) {
  with_rows<kStoredRows>(rows, [&](auto count) {
    constexpr auto by_bytes = multiply_stored_into<false, count()>,
                   by_codes = multiply_stored_into<true, count()>;
    const auto multiply = stored.format == Format::kInt8 ? by_bytes : by_codes;
    multiply(stored, levels, x, stride, next, totals);
  });
}

#else

// The two bytes of each code's bfloat16, in tables of their own.
struct Levels {
  __m256i low, high;
};

inline Levels levels_of(Format format) {
  alignas(32) uint8_t low[32], high[32];
  for (int i = 0; i < 32; ++i)
    low[i] = level_of(format, i % 16) & 255, high[i] = level_of(format, i % 16) >> 8;
  return {_mm256_load_si256(reinterpret_cast<const __m256i*>(low)),
          _mm256_load_si256(reinterpret_cast<const __m256i*>(high))};
}

// Calls take(i, eight outputs of the first input, the same of the second) for both eights of a
// quarter of a pair's outputs.
template <Format format, typename Take>
MINIVLLM_INLINE inline void convert(const uint8_t* from, int quarter, const Levels& levels,
                                    const Take& take) {
  const auto take_both = [&](int i, __m256i both) MINIVLLM_INLINE {  // bfloat16 side by side
    take(i, (__m256)_mm256_slli_epi32(both, 16),
         (__m256)_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  };
  if constexpr (format == Format::kBfloat16) {
    each<2>([&](auto i) MINIVLLM_INLINE {
      take_both(i,
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 64 * quarter + 32 * i)));
    });
  } else if constexpr (format == Format::kInt8) {
    each<2>([&](auto i) MINIVLLM_INLINE {
      const auto* bytes = reinterpret_cast<const __m128i*>(from + 32 * quarter + 16 * i);
      const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128(bytes));
      take(i, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24)),
           _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8)));
    });
  } else {
    // Quarters 0 and 2, 1 and 3 are halves of the same bytes, whose own are put in order: unpacking
    // works on halves.
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * (quarter % 2))), 0xD8);
    const __m256i codes =
        _mm256_and_si256(quarter < 2 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(levels.low, codes),
                  high = _mm256_shuffle_epi8(levels.high, codes);
    take_both(0, _mm256_unpacklo_epi8(low, high));
    take_both(1, _mm256_unpackhi_epi8(low, high));
  }
}

template <typename Code>
inline void with_format(Format format, const Code& code) {
  switch (format) {
    case Format::kBfloat16:
      return code(std::integral_constant<Format, Format::kBfloat16>{});
    case Format::kInt8:
      return code(std::integral_constant<Format, Format::kInt8>{});
    default:
      return code(
          std::integral_constant<Format, Format::kNormal4>{});  // others differ in levels alone
  }
}

// Turns them into [2 * pairs][64], and asks for `lines` lines of memory for each 16 of them.
inline void expand(const Stored& stored, const Levels& levels, const char* next, int64_t lines,
                   Factor* to) {
  with_format(stored.format, [&](auto format) {
    const uint8_t* pair = stored.from;
    for (int64_t p = 0; p < stored.pairs; ++p, pair += panel_bytes(format, 2), to += 2 * kColumns) {
      ask(next, (p + 1) * lines / kPairs - p * lines / kPairs);
      each<4>([&](auto quarter) MINIVLLM_INLINE {
        convert<format()>(pair, quarter, levels,
                          [&](int i, __m256 first, __m256 second) MINIVLLM_INLINE {
                            _mm256_storeu_ps(to + 16 * quarter + 8 * i, first);
                            _mm256_storeu_ps(to + kColumns + 16 * quarter + 8 * i, second);
                          });
      });
    }
  });
}

constexpr int64_t kStoredRows = 2;  // more would convert by quarters, and wait for it

// The sums of all outputs stay in 16 registers, of two rows those of half of them.
template <Format format, int M>
[[gnu::noinline]] void multiply_stored_into(const Stored& stored, const Levels& levels,
                                            const Factor* x, int64_t stride, const char* next,
                                            const Totals& all) {
  constexpr int kQuarters = 4 / M, kEights = 2 * kQuarters;
  alignas(64) float apart[M * kColumns];
  const uint8_t* from = stored.from;
  for (int64_t g = 0; g < stored.groups;
       ++g, from += stored.pairs * panel_bytes(format, 2), x += 2 * stored.pairs) {
    const Totals totals = all.of_group(g);
    const bool fresh = totals.first || totals.scale;
    float* sums = totals.to;
    for (int begin = 0; begin < 4; begin += kQuarters, sums += 8 * kEights) {
      __m256 held[M][kEights];
      each<M * kEights>([&](auto i) MINIVLLM_INLINE {
        constexpr int m = i / kEights, n = i % kEights;
        held[m][n] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + m * kColumns + 8 * n);
      });
      const uint8_t* pair = from;
      for (int64_t p = 0; p < stored.pairs; ++p, pair += panel_bytes(format, 2)) {
        if (begin == 0) ask(next, panel_bytes(format, 2) / 64);
        each<kQuarters>([&](auto quarter) MINIVLLM_INLINE {
          convert<format>(pair, begin + quarter, levels,
                          [&](int i, __m256 first, __m256 second) MINIVLLM_INLINE {
                            each<M>([&](auto m) MINIVLLM_INLINE {
                              held[m][2 * quarter + i] += x[m * stride + 2 * p] * first;
                              held[m][2 * quarter + i] += x[m * stride + 2 * p + 1] * second;
                            });
                          });
        });
      }
      float* to = totals.scale ? apart : sums;
      each<M * kEights>([&](auto i) MINIVLLM_INLINE {
        constexpr int m = i / kEights, n = i % kEights;
        _mm256_storeu_ps(to + m * kColumns + 8 * n, held[m][n]);
      });
      for (int n = 0; totals.scale && n < 8 * kEights; n += kLanes)
        totals.end<M>(16 * begin + n,
                      [&](auto m) MINIVLLM_INLINE { return load(apart + m * kColumns + n); });
    }
  }
}

// Totals of x times as many inputs of a panel, for up to 2 rows: few enough that the panel is
// needed nowhere else.
inline void multiply_stored(int64_t rows, const Stored& stored, const Levels& levels,
                            const Factor* x, int64_t stride, const char* next, int64_t,
                            const Totals& totals) {
  with_format(stored.format, [&](auto format) {
    with_rows<kStoredRows>(rows, [&](auto count) {
      multiply_stored_into<format(), count()>(stored, levels, x, stride, next, totals);
    });
  });
}

#endif

}  // namespace minivllm
#endif
