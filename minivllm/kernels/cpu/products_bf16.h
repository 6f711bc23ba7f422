// Products of bfloat16 with sums in float32, by AVX512-BF16. Two consecutive inputs of a panel lie side by side.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "products.h"

#define MINIVLLM_PRODUCTS 1
#define MINIVLLM_BF16_PRODUCTS 1

namespace minivllm {

using Factor = uint16_t;  // what is multiplied: bfloat16

// sums[m][16 n] += x[m][2 p, 2 p + 1] times b[n], 16 columns of two inputs side by side, for m < M.
template <int M>
[[gnu::always_inline]] inline void multiply_pair(const Factor* x, int64_t stride, int64_t p, const __m512bh (&b)[4],
                                                 __m512 (&sums)[M][4]) {
  for (int m = 0; m < M; ++m) {
    int32_t pair;
    std::memcpy(&pair, x + m * stride + 2 * p, 4);
    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    for (int n = 0; n < 4; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], a, b[n]);
  }
}

// sums[m][64] += x[m][2 * pairs] times panel [pairs][64][2], for m < M; asks for kLines lines of memory from `next` on
// for each pair. 24 sums and 4 pieces of the panel lie in 32 registers.
template <int M, int kLines>
inline void multiply(const Factor* x, int64_t stride, const Factor* panel, int64_t pairs, const char* next,
                     __m512 (&sums)[M][4]) {
  for (int64_t p = 0; p < pairs; ++p, panel += 2 * kColumns) {
    __m512bh b[4];
    for (int n = 0; n < 4; ++n) b[n] = (__m512bh)_mm512_loadu_si512(panel + 32 * n);
    ask(next, kLines);
    multiply_pair(x, stride, p, b, sums);
  }
}

template <int M, int kLines>
inline void multiply_into(const Factor* x, int64_t stride, const Factor* panel, int64_t pairs, const char* next, bool clear,
                          float* sums) {
  __m512 held[M][4];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n) held[m][n] = clear ? _mm512_setzero_ps() : _mm512_load_ps(sums + m * kColumns + 16 * n);
  multiply<M, kLines>(x, stride, panel, pairs, next, held);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n) _mm512_store_ps(sums + m * kColumns + 16 * n, held[m][n]);
}

// sums[rows][64] = (clear ? 0 : sums) + x times panel, for up to 6 rows; asks for `lines` lines of memory from `next` on
// for each 16 pairs.
inline void multiply_rows(int64_t rows, const Factor* x, int64_t stride, const Factor* panel, int64_t pairs,
                          const char* next, int64_t lines, bool clear, float* sums) {
  with_rows<kRows>(rows, [&](auto count) {
    switch (lines / kPairs) {
      case 0: return multiply_into<count(), 0>(x, stride, panel, pairs, next, clear, sums);
      case 1: return multiply_into<count(), 1>(x, stride, panel, pairs, next, clear, sums);
      case 2: return multiply_into<count(), 2>(x, stride, panel, pairs, next, clear, sums);
      default: return multiply_into<count(), 4>(x, stride, panel, pairs, next, clear, sums);
    }
  });
}

// The sum of a multiple of 32 values.
inline float sum_of(const Factor* x, int64_t count) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += 32) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + k), ones);
  return _mm512_reduce_add_ps(sum);
}

}  // namespace minivllm
