// Products in float32, for processors that multiply nothing smaller. A panel is [inputs][64].
#pragma once
#include "products.h"
#include "vector.h"

#define MINIVLLM_PRODUCTS 1

namespace minivllm {

using Factor = float;  // what is multiplied

// Totals of x[m][inputs] times panel [inputs][64], for m < M: N vectors of columns at a time, each
// time after its share of the `lines` of memory from `next` on has been asked for. Not in line,
// where some registers would be others'.
template <int M>
[[gnu::noinline]] void multiply_into(const Factor* x, int64_t stride, const Factor* panel,
                                     int64_t inputs, const char* next, int64_t lines,
                                     const Totals& totals) {
  constexpr int kAll = kColumns / kLanes,
                kMost = (kLanes == 16 ? 24 : 12) / M;  // what 32 or 16 registers hold
  constexpr int N = kMost >= kAll ? kAll : kMost >= 4 ? 4 : 2;
  for (int64_t n = 0; n < kColumns; n += N * kLanes, panel += N * kLanes) {
    ask(next, (lines * N + kAll - 1) / kAll);
    Vector held[M][N];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i) held[m][i] = totals.begin(m, n + i * kLanes);
    for (int64_t k = 0; k < inputs; ++k) {
      const auto factor = [&](int m) { return kept(splat(x[m * stride + k])); };
      const auto weight = [&](int i) { return kept(load(panel + k * kColumns + i * kLanes)); };
      if constexpr (M > N) {  // the fewer wait in registers for each of the others
        Vector weights[N];
        for (int i = 0; i < N; ++i) weights[i] = weight(i);
        for (int m = 0; m < M; ++m) {
          const Vector a = factor(m);
          for (int i = 0; i < N; ++i) held[m][i] += a * weights[i];
        }
      } else {
        Vector factors[M];
        for (int m = 0; m < M; ++m) factors[m] = factor(m);
        for (int i = 0; i < N; ++i) {
          const Vector b = weight(i);
          for (int m = 0; m < M; ++m) held[m][i] += factors[m] * b;
        }
      }
    }
    each<N>([&](auto i) MINIVLLM_INLINE {
      totals.end<M>(n + i * kLanes, [&](auto m) MINIVLLM_INLINE { return held[m][i]; });
    });
  }
}

// The same for up to 6 rows and twice `pairs` inputs, `lines` being of each 16 pairs.
inline void multiply_rows(int64_t rows, const Factor* x, int64_t stride, const Factor* panel,
                          int64_t pairs, const char* next, int64_t lines, const Totals& totals) {
  with_rows<kRows>(rows, [&](auto count) {
    multiply_into<count()>(x, stride, panel, 2 * pairs, next, lines * pairs / kPairs, totals);
  });
}

// The sum of a multiple of 32 values.
inline float sum_of(const Factor* x, int64_t count) {
  Vector total{};
  for (int64_t k = 0; k < count; k += kLanes) total += load(x + k);
  return sum(total);
}

}  // namespace minivllm
