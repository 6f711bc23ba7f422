// Products of bfloat16 with sums in float32, by AVX512-BF16. Two consecutive inputs of a panel lie
// side by side.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "products.h"

#define MINIVLLM_PRODUCTS 1
#define MINIVLLM_BF16_PRODUCTS 1
#ifdef __AVX512VBMI__
#define MINIVLLM_BYTE_TABLES 1  // tables of bytes are looked up in registers
#endif

namespace minivllm {

using Factor = uint16_t;  // what is multiplied: bfloat16

// Sums of M rows and 64 columns. 24 of them and 4 pieces of a panel lie in 32 registers.
template <int M>
using Sums = __m512[M][4];

// The p-th pair of inputs, for every column.
MINIVLLM_INLINE inline __m512bh pair_of(const Factor* x, int64_t p) {
  int32_t pair;
  std::memcpy(&pair, x + 2 * p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// held[m][n] += x[m][2 p, 2 p + 1] times b[n], 16 columns of two inputs side by side.
template <int M>
MINIVLLM_INLINE inline void multiply_pair(const Factor* x, int64_t stride, int64_t p,
                                          const __m512bh (&b)[4], Sums<M>& held) {
  each<M>([&](auto m) MINIVLLM_INLINE {
    const __m512bh a = pair_of(x + m * stride, p);
    each<4>([&](auto n) MINIVLLM_INLINE { held[m][n] = _mm512_dpbf16_ps(held[m][n], a, b[n]); });
  });
}

// Totals of M rows: what add_pair(p, held) adds for each p < pairs.
template <int M, typename Add>
MINIVLLM_INLINE inline void sum_pairs(int64_t pairs, const Totals& totals, const Add& add_pair) {
  Sums<M> held;
  each<M * 4>([&](auto i) MINIVLLM_INLINE {
    held[i / 4][i % 4] = (__m512)totals.begin(i / 4, i % 4 * kLanes);
  });
  for (int64_t p = 0; p < pairs; ++p) add_pair(p, held);
  each<4>([&](auto n) MINIVLLM_INLINE {
    totals.end<M>(n * kLanes, [&](auto m) MINIVLLM_INLINE { return (Vector)held[m][n]; });
  });
}

// Totals of x[m][2 * pairs] times panel [pairs][64][2], for m < M; asks for kLines lines of memory
// from `next` on for each pair.
template <int M, int kLines>
MINIVLLM_INLINE inline void multiply_into(const Factor* x, int64_t stride, const Factor* panel,
                                          int64_t pairs, const char* next, const Totals& totals) {
  sum_pairs<M>(pairs, totals, [&](int64_t p, Sums<M>& held) MINIVLLM_INLINE {
    __m512bh b[4];
    each<4>([&](auto n) MINIVLLM_INLINE {
      b[n] = (__m512bh)_mm512_loadu_si512(panel + 2 * kColumns * p + 32 * n);
    });
    ask(next, kLines);
    multiply_pair<M>(x, stride, p, b, held);
  });
}

// Totals of x times panel, for up to 6 rows; asks for `lines` lines of memory from `next` on for
// each 16 pairs.
MINIVLLM_INLINE inline void multiply_rows(int64_t rows, const Factor* x, int64_t stride,
                                          const Factor* panel, int64_t pairs, const char* next,
                                          int64_t lines, const Totals& totals) {
  with_rows<kRows>(rows, [&](auto count) MINIVLLM_INLINE {
    switch (lines / kPairs) {
      case 0:
        return multiply_into<count(), 0>(x, stride, panel, pairs, next, totals);
      case 1:
        return multiply_into<count(), 1>(x, stride, panel, pairs, next, totals);
      case 2:
        return multiply_into<count(), 2>(x, stride, panel, pairs, next, totals);
      default:
        return multiply_into<count(), 4>(x, stride, panel, pairs, next, totals);
    }
  });
}

// The sum of a multiple of 32 values.
inline float sum_of(const Factor* x, int64_t count) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += 32)
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + k), ones);
  return _mm512_reduce_add_ps(sum);
}

}  // namespace minivllm
