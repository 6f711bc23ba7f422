// Tiles of bfloat16 keys and values met by the matrix unit (AMX), as they lie in the cache: nothing
// is packed.
//
// Scores come transposed, keys times queries, since a tile of the unit's first operand is rows as
// they are. Its second one has two neighbours of a sum side by side, where values have two
// dimensions of one key. So weights are given twice, each beside a zero: once to sum the even
// dimensions, once the odd ones.
#pragma once
#include "matrix_unit.h"
#include "tiles_bf16.h"

#ifdef MINIVLLM_BF16_TILES

namespace minivllm {

// For heads of a multiple of 64 dimensions.
class MatrixTiles : public CopiedTokens {
 public:
  static constexpr int64_t kRows = kTile;

  void begin(int64_t rows, int64_t dim, int64_t stride) {
    dim_ = dim, stride_ = stride;
    queries_.resize(rows * dim / kTileInputs), weights_.resize(2 * kKeys);
    sums_.assign(rows * dim / kTile, {});
    copies_.resize(2 * kKeys * dim / kTileInputs);
  }
  void clear() { std::fill(sums_.begin(), sums_.end(), SumRow{}); }

  void take_queries(int64_t row, int64_t count, const BFloat16* const* from) {
    const uint16_t* rows[kTile];
    for (int64_t i = 0; i < kTile; ++i)  // scores of rows that are not there are not looked at
      rows[i] = reinterpret_cast<const uint16_t*>(from[std::min(i, count - 1)]);
    auto* to = reinterpret_cast<uint32_t*>(queries_.data() + row * dim_ / kTileInputs);
    for (int64_t d = 0; d < dim_; d += kTileInputs, to += kTile * kTile)
      transpose<kTile>(rows, d, to);
  }

  // `rows` of queries will meet it: few take keys and values from where they lie.
  void take_keys(const BFloat16* keys, const BFloat16* values, const Place& place,
                 const Place& ahead, int64_t shift, int64_t rows) {
    groups_ = (place.count + kTile - 1) / kTile;
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t first = g * kTile, count = std::min(kTile, place.count - first);
      const bool lies = rows <= kTile && count == kTile && place.together % kTile == 0;
      keys_[g] =
          lies ? source(keys + place.at[first], stride_) : copy(keys, place, first, count, g);
      values_[g] = lies ? source(values + place.at[first], stride_)
                        : copy(values, place, first, count, g + kGroups);
    }
    for (int64_t g = groups_; g < kGroups; ++g) keys_[g] = keys_[0];  // their scores are not seen
    ahead_keys_ = keys + shift, ahead_values_ = values + shift, ahead_ = &ahead;
  }

  void score(int64_t row, int64_t, float* scores) {
    alignas(64) float transposed[kKeys * kTile];
    const TileRow* q = queries_.data() + row * dim_ / kTileInputs;
    asm volatile("" : : : "memory");  // see multiply_tiles
    clear_sums();
    for (int64_t d = 0; d < dim_; d += kTileInputs, q += kTile) {
      MINIVLLM_TILE_LOAD(4, q, 64);
      MINIVLLM_TILE_LOAD(5, keys_[0].at + d, keys_[0].stride);
      MINIVLLM_TILE_BF16_PRODUCTS(0, 5, 4);
      MINIVLLM_TILE_LOAD(6, keys_[1].at + d, keys_[1].stride);
      MINIVLLM_TILE_BF16_PRODUCTS(1, 6, 4);
      ask(ahead_keys_, d * kKeys / dim_, kTileInputs * kKeys / dim_);
      MINIVLLM_TILE_LOAD(7, keys_[2].at + d, keys_[2].stride);
      MINIVLLM_TILE_BF16_PRODUCTS(2, 7, 4);
      MINIVLLM_TILE_LOAD(5, keys_[3].at + d, keys_[3].stride);
      MINIVLLM_TILE_BF16_PRODUCTS(3, 5, 4);
    }
    store_sums(transposed, transposed + 256, transposed + 512, transposed + 768, 64);
    for (int64_t j = 0; j < kKeys; j += kTile) {
      const uint16_t* rows[kTile];
      for (int64_t i = 0; i < kTile; ++i)
        rows[i] = reinterpret_cast<const uint16_t*>(transposed + (j + i) * kTile);
      transpose(rows, 0, reinterpret_cast<uint32_t*>(scores) + j);
    }
  }

  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    SumRow* sums = sums_.data() + row * dim_ / kTile;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t g = 0; g < groups_; ++g) {
        const __m512 weight = _mm512_load_ps(weights + r * kKeys + g * kTile);
        const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weight));
        _mm512_store_si512(weights_.data() + 2 * g * kTile + r, even);
        _mm512_store_si512(weights_.data() + (2 * g + 1) * kTile + r, _mm512_slli_epi32(even, 16));
      }
      if (fades[r] == 1.0f) continue;
      for (int64_t i = 0; i < dim_ / kTile; ++i) {
        float* sum = sums[i * kTile + r].values;
        _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(fades[r])));
      }
    }
    asm volatile("" : : : "memory");
    for (int64_t d = 0; d < dim_; d += 2 * kTileInputs, sums += 4 * kTile) {
      load_sums(sums, sums + kTile, sums + 2 * kTile, sums + 3 * kTile, 64);
      for (int64_t g = 0; g < groups_; ++g) {
        MINIVLLM_TILE_LOAD(4, weights_.data() + 2 * g * kTile, 64);
        MINIVLLM_TILE_LOAD(6, values_[g].at + d, values_[g].stride);
        MINIVLLM_TILE_BF16_PRODUCTS(0, 4, 6);
        MINIVLLM_TILE_LOAD(5, weights_.data() + (2 * g + 1) * kTile, 64);
        MINIVLLM_TILE_BF16_PRODUCTS(1, 5, 6);
        ask(ahead_values_, d * kKeys / dim_ + g * kTileInputs * kTile / dim_ * 2,
            kTileInputs * kTile / dim_ * 2);
        MINIVLLM_TILE_LOAD(7, values_[g].at + d + kTileInputs, values_[g].stride);
        MINIVLLM_TILE_BF16_PRODUCTS(2, 4, 7);
        MINIVLLM_TILE_BF16_PRODUCTS(3, 5, 7);
      }
      store_sums(sums, sums + kTile, sums + 2 * kTile, sums + 3 * kTile, 64);
    }
    ahead_ = nullptr;  // asked for
  }

  // Written to `to`: even and odd dimensions lie apart here.
  const float* sums(int64_t row, float* to) const {
    const SumRow* sums = sums_.data() + row / kTile * kTile * dim_ / kTile + row % kTile;
    alignas(64) uint32_t order[16];
    for (int i = 0; i < 16; ++i) order[i] = static_cast<uint32_t>(i / 2 + i % 2 * 16);
    const __m512i low = _mm512_load_si512(order),
                  high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < dim_; d += kTileInputs, sums += 2 * kTile) {
      const __m512 even = _mm512_load_ps(sums[0].values), odd = _mm512_load_ps(sums[kTile].values);
      _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(even, low, odd));
      _mm512_storeu_ps(to + d + kTile, _mm512_permutex2var_ps(even, high, odd));
    }
    return to;
  }

 private:
  static constexpr int64_t kGroups = kKeys / kTile;  // of sixteen keys

  struct Source {
    const uint16_t* at;
    int64_t stride;  // bytes from key to key
  };
  struct alignas(64) SumRow {
    float values[kTile];
  };

  static Source source(const BFloat16* at, int64_t stride) {
    return {reinterpret_cast<const uint16_t*>(at), stride * 2};
  }

  // Sixteen keys or values side by side; those that are not there are zero, which times zero is
  // zero.
  Source copy(const BFloat16* from, const Place& place, int64_t first, int64_t count, int64_t to) {
    auto* rows = reinterpret_cast<uint16_t*>(copies_.data()) + to * kTile * dim_;
    for (int64_t i = 0; i < kTile; ++i)
      for (int64_t d = 0; d < dim_; d += kTileInputs)
        _mm512_store_si512(rows + i * dim_ + d,
                           i < count ? _mm512_loadu_si512(from + place.at[first + i] + d)
                                     : _mm512_setzero_si512());
    return {rows, dim_ * 2};
  }

  // Asks memory for some keys or values of the next tile.
  MINIVLLM_ASKS void ask(const BFloat16* cache, int64_t begin, int64_t count) const {
    if (ahead_ == nullptr) return;
    const int64_t end = std::min(begin + count, ahead_->count);
    for (int64_t j = begin; j < end; ++j) {
      const char* at = reinterpret_cast<const char*>(cache + ahead_->at[j]);
      minivllm::ask(at, dim_ / kTileInputs);
    }
  }

  MatrixUnit unit_;
  int64_t dim_ = 0, stride_ = 0, groups_ = 0;
  const BFloat16 *ahead_keys_ = nullptr, *ahead_values_ = nullptr;
  const Place* ahead_ = nullptr;
  Source keys_[kGroups], values_[kGroups];
  std::vector<TileRow> queries_;  // [rows / 16][dim / 2][16] pairs of dimensions
  std::vector<TileRow> weights_;  // of 16 keys, [keys / 16][beside a zero, behind one][16 rows]
  std::vector<TileRow> copies_;   // of keys, then of values: [2][64][dim]
  std::vector<SumRow> sums_;      // [rows / 16][dim / 32][even, odd][16 rows][16 dimensions]
};

}  // namespace minivllm
#endif
