// Activations in 8 bits: a row's groups of inputs, each with the scale of its largest value.
#pragma once
#include <algorithm>
#include <vector>

#include "int8_vectors.h"

namespace minivllm {

// Rows of activations x = scale * value, with what the products of a group begin with and end with.
class Int8Rows {
 public:
  // `offset` is what is to be taken from each byte of the weight.
  Int8Rows(int64_t inputs, int64_t group, int32_t offset)
      : inputs_(inputs), group_(group), offset_(offset) {}

  // Room for `rows`; the matrix unit reads values of whole tiles of 16.
  void resize(int64_t rows) {
    const int64_t all = rows * groups();
    values_.resize((rows + 15) / 16 * 16 * inputs_), scales_.resize(all), sums_.resize(all),
        starts_.resize(all);
  }

  int64_t groups() const { return inputs_ / group_; }
  int64_t stride() const { return inputs_; }
  const int8_t* values(int64_t row, int64_t input) const {
    return values_.data() + row * inputs_ + input;
  }
  // Of a row's groups from `group` on: the scale; the sum of the group's activations; minus offset
  // times the values' sum.
  const float* scales(int64_t row, int64_t group) const {
    return scales_.data() + row * groups() + group;
  }
  const float* sums(int64_t row, int64_t group) const {
    return sums_.data() + row * groups() + group;
  }
  const int32_t* starts(int64_t row, int64_t group) const {
    return starts_.data() + row * groups() + group;
  }

  // A value that is not finite makes its group's scale NaN.
  void set(int64_t row, const BFloat16* x) {
    for (int64_t g = 0; g < groups(); ++g, x += group_) {
      Shorts most{};
      for (int64_t k = 0; k < group_; k += kLanes) {
        const Shorts magnitude =
            *reinterpret_cast<const Shorts*>(x + k) & 0x7FFF;  // grows with the number
        most = magnitude > most ? magnitude : most;
      }
      const BFloat16 largest{highest(most)};
      const float limit = load_one(&largest);
      const bool finite = largest.bits < 0x7F80;
      // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the lowest bits.
      const float inverse = limit > 0 && finite ? 127.0f / limit : 0.0f;
      int8_t* to = values_.data() + row * inputs_ + g * group_;
      Integers total{};
      for (int64_t k = 0; k < group_; k += kLanes) {
        const auto bits = (Integers)(kept(load(x + k) * inverse) +
                                     12582912.0f);  // not fused: equal on all processors
        store_low_bytes(to + k, bits);
        total += (bits << 24) >> 24;
      }
      int32_t sum = 0;
      for (int i = 0; i < kLanes; ++i) sum += total[i];
      const int64_t at = row * groups() + g;
      const float scale = finite ? limit / 127.0f : limit - limit;
      scales_[at] = scale, sums_[at] = scale * static_cast<float>(sum),
      starts_[at] = -offset_ * sum;
    }
  }

 private:
  int64_t inputs_, group_;
  int32_t offset_;
  std::vector<int8_t> values_;
  std::vector<float> scales_, sums_;
  std::vector<int32_t> starts_;
};

}  // namespace minivllm
