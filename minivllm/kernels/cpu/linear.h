// Products of bfloat16 activations with packed weights, for processors with AVX2 or more.
//
// A packed weight is cut into panels of 64 outputs. Within a panel two consecutive inputs lie side
// by side, output after output: [panels][inputs / 2][64][2], which is what both the dot-product
// instructions and the matrix unit take.
#pragma once
#include <cstdint>

#include "vector.h"

namespace minivllm {

constexpr int64_t kPanel = 64;  // outputs

enum class Format : int64_t {
  kBfloat16 = 0,  // bfloat16, 128 bytes for an input of a panel
  kInt8 = 1,      // -127..127, 64 bytes; one scale for each output, or for each group of its inputs
  kAffine4 = 2,   // codes 0..15, 32 bytes; w = (code - 8) * scale + zero for each group of inputs
  kNormal4 = 3,   // codes of NF4's levels, 32 bytes; w = level * scale for each group of inputs
  kUnsigned4 = 4,  // as kAffine4, but w = code * scale + zero
  kIQ4NL = 5,      // as kNormal4, of IQ4_NL's levels
  // For activations in 8 bits, four inputs side by side; see linear_int8.h.
  kInt8Quads = 6,       // as kInt8
  kAffine4Quads = 7,    // as kAffine4
  kUnsigned4Quads = 8,  // as kUnsigned4
};

// Whether a weight may have zeros.
constexpr bool is_affine(Format format) {
  return format == Format::kAffine4 || format == Format::kUnsigned4 || format > Format::kInt8Quads;
}

struct Weight {
  Format format;
  const uint8_t* data;
  const BFloat16* scales;  // bfloat16 [panels][groups][64]; null for kBfloat16
  const BFloat16* zeros;   // the same, of affine formats, where they are not all zero; else null
  int64_t inputs, outputs;
  int64_t group;  // inputs that share a scale: at most 256, or all of them (kInt8); of activations
                  // in 8 bits
  int64_t scale_groups;  // of the weight: inputs / group, or 1
  // Rows up to which the formats of linear_int8.h are multiplied in the way for few rows; -1:
  // `few_rows` of the format.
  int64_t few_rows = -1;
};

// Whether this processor and build have the kernel.
bool has_linear();

// out[rows][outputs] = x[rows][inputs] W^T + bias; bfloat16, sums in float32. bias may be null.
// The order of each sum depends on nothing but the weight: a row's result is the same in any batch.
void linear(const BFloat16* x, int64_t row_stride, int64_t rows, const Weight& weight,
            const BFloat16* bias, BFloat16* out);

// Bytes of one panel.
constexpr int64_t panel_bytes(Format format, int64_t inputs) {
  const bool bytes = format == Format::kInt8 || format == Format::kInt8Quads;
  return inputs * kPanel * (format == Format::kBfloat16 ? 4 : bytes ? 2 : 1) / 2;
}

// One panel from up to 64 rows of bfloat16 [count][inputs] (kBfloat16), int8 or codes, a byte each.
// It may not overlap them.
void pack_panel(Format format, const uint8_t* rows, int64_t count, int64_t inputs, uint8_t* panel);

}  // namespace minivllm
