// Products of activations in 8 bits with packed weights of 8 or 4 bits (the formats from kInt8Quads
// on).
//
// Four consecutive inputs of a panel lie side by side: [panels][inputs / 4][64][4], which both the
// dot products and the matrix unit take. Sums of a group are integers, so they are the same by
// whatever instructions.
#pragma once
#include "linear.h"

namespace minivllm {

// As `linear`, for these formats. `weight.group` inputs of a row share a scale; the weight has as
// many scales, or one for each output (kInt8Quads).
void linear_int8(const BFloat16* x, int64_t row_stride, int64_t rows, const Weight& weight,
                 const BFloat16* bias, BFloat16* out);

// Rows up to which the way for few rows is taken where the weight does not say. It multiplies
// bytes, or codes as they are stored, by dot products; the other way by the matrix unit, or codes
// after they have become bytes. Both give the same bits. 0: there is one way.
int64_t few_rows(Format format);

// Of pack_panel: one panel of these formats, from up to 64 rows of a byte for each input.
void pack_quads(Format format, const uint8_t* rows, int64_t count, int64_t inputs, uint8_t* panel);

}  // namespace minivllm
