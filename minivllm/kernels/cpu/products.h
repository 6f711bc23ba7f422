// Products of a few rows of activations with a panel of 64 columns, all sums in registers: what a
// processor multiplies.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "vector.h"

namespace minivllm {

constexpr int64_t kColumns = 64;  // of a panel
constexpr int64_t kRows = 6;      // at a time
constexpr int64_t kPairs = 16;    // of inputs that make a step: memory is asked for once in each

// Asks memory for some lines of 64 bytes. GCC takes a function that does nothing but that for one
// without effects, and drops calls of it that it has not inlined before it finds out.
#define MINIVLLM_ASKS [[gnu::always_inline]] inline
MINIVLLM_ASKS void ask(const char*& next, int64_t lines) {
  for (int64_t n = 0; n < lines; ++n, next += 64) __builtin_prefetch(next, 0, 2);
}

// Calls code(0) to code(kCount - 1) with constants, in line: sums that a variable indexes GCC keeps
// in memory, and it may unroll a loop too late to see that none does. `code` has to be marked, too.
#define MINIVLLM_INLINE __attribute__((always_inline))
template <typename Code, int... kIndex>
MINIVLLM_INLINE inline void each(const Code& code, std::integer_sequence<int, kIndex...>) {
  (code(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, typename Code>
MINIVLLM_INLINE inline void each(const Code& code) {
  each(code, std::make_integer_sequence<int, kCount>{});
}

// Calls `code` with the number of rows, at most kMost, as a constant.
template <int kMost, typename Code>
MINIVLLM_INLINE inline void with_rows(int64_t rows, const Code& code) {
  if constexpr (kMost > 1)
    if (rows < kMost) return with_rows<kMost - 1>(rows, code);
  code(std::integral_constant<int, kMost>{});
}

// Where the sums of some rows with a panel go: to totals [rows][64], beside what is there unless
// they are the first. Those of a group of inputs are multiplied by a scale for each column first;
// and there may be zeros, for the sum of the inputs.
struct Totals {
  float* to;
  bool first;
  const BFloat16 *scale, *zero;  // [64], or null
  const float* input_sums;       // of each row, `sums_stride` apart
  int64_t sums_stride;

  // Those of a later group of inputs, which are added.
  MINIVLLM_INLINE Totals of_group(int64_t g) const {
    if (g == 0) return *this;
    return {to,
            false,
            scale + g * kColumns,
            zero ? zero + g * kColumns : nullptr,
            input_sums + g,
            sums_stride};
  }

  MINIVLLM_INLINE Vector begin(int64_t m, int64_t column) const {
    return first || scale ? Vector{} : load(to + m * kColumns + column);
  }

  // Ends the sums of a vector of columns: sum_of(m) for each of the rows 0 to kCount - 1.
  template <int kCount, typename Sum>
  MINIVLLM_INLINE void end(int64_t column, const Sum& sum_of) const {
    if (!scale)
      return each<kCount>([&](auto m)
                              MINIVLLM_INLINE { store(to + m * kColumns + column, sum_of(m)); });
    const Vector factor = load(scale + column), shift = zero ? load(zero + column) : Vector{};
    each<kCount>([&](auto m) MINIVLLM_INLINE { add(m, column, sum_of(m), factor, shift); });
  }

  MINIVLLM_INLINE void add(int64_t m, int64_t column, Vector sum, Vector factor,
                           Vector shift) const {
    float* at = to + m * kColumns + column;
    Vector total = first ? Vector{} : load(at);
    if (zero) total = fused(splat(input_sums[m * sums_stride]), shift, total);
    store(at, fused(sum, factor, total));
  }
};

}  // namespace minivllm

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "products_bf16.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "products_float.h"
#endif
