// Tiles of bfloat16 keys and values, met by products of bfloat16 with sums in float32 (products.h). Weights are rounded
// to bfloat16, as FlashAttention rounds them to the values' type.
#pragma once
#include "tiles.h"

namespace minivllm {

// to[16][kStride] of 32-bit words = the transpose of 16 words of each of 16 rows.
template <int kStride = kColumns>
inline void transpose(const uint16_t* const (&rows)[16], int64_t offset, uint32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + offset);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + n]: word n of each quarter, of rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int n = 0; n < 4; ++n) {
    const __m512i low = _mm512_shuffle_i32x4(a[n], a[n + 4], 0x88), high = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(a[n], a[n + 4], 0xDD), high2 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0xDD);
    _mm512_store_si512(to + n * kStride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_store_si512(to + (n + 8) * kStride, _mm512_shuffle_i32x4(low, high, 0xDD));
    _mm512_store_si512(to + (n + 4) * kStride, _mm512_shuffle_i32x4(low2, high2, 0x88));
    _mm512_store_si512(to + (n + 12) * kStride, _mm512_shuffle_i32x4(low2, high2, 0xDD));
  }
}

// For heads of a multiple of 64 dimensions.
class PanelTiles {
 public:
  static constexpr int64_t kRows = minivllm::kRows, kTaskRows = 36;

  void begin(int64_t rows, int64_t dim, int64_t) {
    dim_ = dim;
    queries_.resize(rows * dim);
    sums_.assign(rows * dim, 0.0f);
    panels_.resize(2 * kKeys * dim + 32), zeros_.resize(dim);
    const auto address = reinterpret_cast<uintptr_t>(panels_.data());
    keys_ = reinterpret_cast<uint16_t*>((address + 63) / 64 * 64);
    values_ = keys_ + kKeys * dim;
  }

  void take_queries(int64_t row, int64_t count, const BFloat16* const* from) {
    for (int64_t r = 0; r < count; ++r) std::memcpy(queries_.data() + (row + r) * dim_, from[r], dim_ * sizeof(uint16_t));
  }

  void take_keys(const BFloat16* keys, const BFloat16* values, const Place& place, const Place& ahead, int64_t shift,
                 int64_t) {
    pairs_ = (place.count + 1) / 2;
    for (int64_t j = 0; j < kKeys; j += 16) {
      ask(keys + shift, ahead, j, 16);
      if (j >= place.count) continue;
      const uint16_t* rows[16];
      for (int64_t i = 0; i < 16; ++i)  // keys that are not there are not seen
        rows[i] = reinterpret_cast<const uint16_t*>(keys + place.at[std::min(j + i, place.count - 1)]);
      for (int64_t d = 0; d < dim_; d += 32)
        transpose(rows, d, reinterpret_cast<uint32_t*>(keys_) + d / 2 * kColumns + j);
    }
    // Two keys of a dimension side by side: words 0, 32, 1, 33, ... of a pair of rows.
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < kKeys; j += 2) {
      ask(values + shift, ahead, j, 2);
      if (j >= place.count) continue;
      const auto* first = reinterpret_cast<const uint16_t*>(values + place.at[j]);
      const auto* second = j + 1 < place.count ? reinterpret_cast<const uint16_t*>(values + place.at[j + 1])
                                               : zeros_.data();  // zero times anything is zero
      uint16_t* to = values_ + j * kColumns;
      for (int64_t d = 0; d < dim_; d += kColumns, to += kColumns * kKeys)
        for (int64_t i = 0; i < kColumns; i += 32) {
          const __m512i a = _mm512_loadu_si512(first + d + i), b = _mm512_loadu_si512(second + d + i);
          _mm512_store_si512(to + 2 * i, _mm512_permutex2var_epi16(a, low, b));
          _mm512_store_si512(to + 2 * i + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    }
  }

  void score(int64_t row, int64_t count, float* scores) const {
    with_rows<kRows>(count, [&](auto rows) {
      __m512 sums[rows()][4] = {};
      multiply<rows(), 0>(queries_.data() + row * dim_, dim_, keys_, dim_ / 2, nullptr, sums);
      for (int m = 0; m < rows(); ++m)
        for (int n = 0; n < 4; ++n) _mm512_store_ps(scores + m * kKeys + 16 * n, sums[m][n]);
    });
  }

  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    alignas(64) uint16_t rounded[kRows * kKeys];
    for (int64_t i = 0; i < count * kKeys; i += 32)
      _mm512_store_si512(rounded + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(weights + i + 16),
                                                                   _mm512_load_ps(weights + i)));
    with_rows<kRows>(count, [&](auto rows) {
      for (int64_t d = 0; d < dim_; d += kColumns) {
        __m512 sums[rows()][4];
        float* to = sums_.data() + row * dim_ + d;
        for (int m = 0; m < rows(); ++m)
          for (int n = 0; n < 4; ++n)
            sums[m][n] = _mm512_mul_ps(_mm512_loadu_ps(to + m * dim_ + 16 * n), _mm512_set1_ps(fades[m]));
        multiply<rows(), 0>(rounded, kKeys, values_ + d * kKeys, pairs_, nullptr, sums);
        for (int m = 0; m < rows(); ++m)
          for (int n = 0; n < 4; ++n) _mm512_storeu_ps(to + m * dim_ + 16 * n, sums[m][n]);
      }
    });
  }

  void write(int64_t row, float total, BFloat16* out) const {
    write_row(sums_.data() + row * dim_, dim_, total, out);
  }

 private:
  // Asks memory for some keys or values of the next tile.
  MINIVLLM_ASKS void ask(const BFloat16* cache, const Place& ahead, int64_t begin, int64_t count) const {
    const int64_t end = std::min(begin + count, ahead.count);
    for (int64_t j = begin; j < end; ++j) {
      const BFloat16* at = cache + ahead.at[j];
      for (int64_t d = 0; d < dim_; d += kColumns) __builtin_prefetch(at + d, 0, 2), __builtin_prefetch(at + d + 32, 0, 2);
    }
  }

  int64_t dim_ = 0, pairs_ = 0;
  std::vector<uint16_t> queries_, panels_, zeros_;
  std::vector<float> sums_;
  uint16_t* keys_ = nullptr;    // [dim / 2][64][2], 64-byte aligned
  uint16_t* values_ = nullptr;  // [dim / 64][pairs of keys][64][2]
};

}  // namespace minivllm
