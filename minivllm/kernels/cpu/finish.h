// The end of a product: sums in float32 become outputs.
#pragma once
#include <cstring>

#include "products.h"
#include "vector.h"

namespace minivllm {

// Totals [rows][64], times the scale of each output where there are any, plus bias.
inline void finish(const float* totals, int64_t rows, int64_t columns, const BFloat16* scale,
                   const BFloat16* bias, BFloat16* out, int64_t out_stride) {
  for (int64_t m = 0; m < rows; ++m, totals += kColumns, out += out_stride)
    for (int64_t n = 0; n < columns; n += kLanes) {
      Vector sum = load(totals + n);
      if (scale != nullptr) sum *= load(scale + n);
      if (columns - n >= kLanes) {
        store(out + n, bias != nullptr ? sum + load(bias + n) : sum);
        continue;
      }
      BFloat16 last[kLanes] = {};
      const size_t bytes = (columns - n) * sizeof(BFloat16);
      if (bias != nullptr) std::memcpy(last, bias + n, bytes);
      store(last, bias != nullptr ? sum + load(last) : sum);
      std::memcpy(out + n, last, bytes);
    }
}

}  // namespace minivllm
