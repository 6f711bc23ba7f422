// Products of a few rows of bfloat16 with a panel of 64 columns, all sums in registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace minivllm {

constexpr int64_t kColumns = 64;  // of a panel
constexpr int64_t kRows = 6;      // at a time: 24 sums, 4 pieces of the panel, in 32 registers

}  // namespace minivllm

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define MINIVLLM_BF16_PRODUCTS 1

namespace minivllm {

// Asks memory for some lines of 64 bytes. GCC takes a function that does nothing but that for one without effects, and
// drops calls of it that it has not inlined before it finds out.
#define MINIVLLM_ASKS [[gnu::always_inline]] inline
MINIVLLM_ASKS void ask(const char*& next, int64_t lines) {
  for (int64_t n = 0; n < lines; ++n, next += 64) _mm_prefetch(next, _MM_HINT_T1);
}

// sums[m][64] += x[m][2 * pairs] times panel [pairs][64][2], for m < M; asks for kLines lines of memory from `next` on
// for each pair.
template <int M, int kLines>
inline void multiply(const uint16_t* x, int64_t stride, const uint16_t* panel, int64_t pairs, const char* next,
                     __m512 (&sums)[M][4]) {
  for (int64_t p = 0; p < pairs; ++p, panel += 2 * kColumns) {
    __m512bh b[4];
    for (int n = 0; n < 4; ++n) b[n] = (__m512bh)_mm512_loadu_si512(panel + 32 * n);
    ask(next, kLines);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * stride + 2 * p, 4);
      const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      for (int n = 0; n < 4; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], a, b[n]);
    }
  }
}

// Calls `code` with the number of rows, at most kRows, as a constant.
template <typename Code>
inline void with_rows(int64_t rows, const Code& code) {
  switch (rows) {
    case 1: return code(std::integral_constant<int, 1>{});
    case 2: return code(std::integral_constant<int, 2>{});
    case 3: return code(std::integral_constant<int, 3>{});
    case 4: return code(std::integral_constant<int, 4>{});
    case 5: return code(std::integral_constant<int, 5>{});
    default: return code(std::integral_constant<int, 6>{});
  }
}

}  // namespace minivllm
#endif
