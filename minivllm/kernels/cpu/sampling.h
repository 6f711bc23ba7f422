// A step's tokens: the largest of a row of logits, or a draw from all of a row's tokens.
#pragma once
#include <cstdint>

namespace minivllm {

// Where the largest value of each row of logits [rows][size] lies; of several the first, and a NaN
// is larger than all. With `flag`, -1 - place where that value is not finite.
template <typename T>
void argmax(const T* logits, int64_t stride, int64_t rows, int64_t size, bool flag, int64_t* out);

// A draw from each row of logits [rows][size]: the first of the largest p / e, with p = e^((logit -
// largest) / temperature) and noise e, Exponential(1), that depends on (seed, position, token)
// alone: that of engine/sampler.py. Rows whose logits are not finite, or whose temperature is 0,
// get any token below `size`.
template <typename T>
void draw(const T* logits, int64_t stride, int64_t rows, int64_t size, const int64_t* seeds,
          const int32_t* positions, const float* temperatures, int64_t* out);

}  // namespace minivllm
