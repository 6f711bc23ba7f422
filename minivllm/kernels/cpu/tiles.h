// A tile of keys and values, fetched from the paged cache once and met by the rows of queries of a task.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "products.h"
#include "vector.h"

namespace minivllm {

constexpr int64_t kKeys = 64;  // of a tile

// Where the keys of a tile lie in the cache, in elements.
struct Place {
  int64_t at[kKeys];
  int64_t count;
  int64_t together;  // from each multiple of this on as many lie side by side
};

// A row of sums of weighted values becomes what its query attends to.
template <typename T>
inline void write_row(const float* sums, int64_t dim, float total, T* out) {
  for (int64_t i = 0; i < dim; i += kLanes) store(out + i, load(sums + i) / total);
}

// The cache holds keys and values of tokens one after another, [block_size][kv_heads][head_dim] in a block.
struct CopiedTokens {
  static int64_t head_stride(const Attention& a) { return a.head_dim; }

  // Writes those of one new token.
  template <typename T>
  static void write(const Attention& a, int64_t t, const T* k, const T* v, T* k_cache, T* v_cache) {
    const int64_t width = a.kv_heads * a.head_dim;
    std::memcpy(k_cache + a.slots[t] * width, k + t * a.k_stride, width * sizeof(T));
    std::memcpy(v_cache + a.slots[t] * width, v + t * a.v_stride, width * sizeof(T));
  }
};

// In float32, for every type and processor. Rows meet keys and values three by four, all sums in 16 registers.
template <typename T>
class PlainTiles : public CopiedTokens {
 public:
  static constexpr int64_t kRows = 3;

  void begin(int64_t rows, int64_t dim, int64_t) {
    dim_ = dim;
    queries_.resize(rows * dim), keys_.resize(kKeys * dim), values_.resize(kKeys * dim);
    sums_.assign(rows * dim, 0.0f);
  }

  void take_queries(int64_t row, int64_t count, const T* const* from) {
    for (int64_t r = 0; r < count; ++r) copy(from[r], queries_.data() + (row + r) * dim_);
  }

  // The tile at `place`; that at `ahead`, `shift` elements further on, is asked for meanwhile.
  void take_keys(const T* keys, const T* values, const Place& place, const Place& ahead, int64_t shift, int64_t) {
    for (int64_t j = 0; j < place.count; ++j) {
      copy(keys + place.at[j], keys_.data() + j * dim_);
      copy(values + place.at[j], values_.data() + j * dim_);
      if (j < ahead.count)
        for (int64_t i = 0; i < dim_; i += kMostLanes) {
          __builtin_prefetch(keys + shift + ahead.at[j] + i, 0, 2);
          __builtin_prefetch(values + shift + ahead.at[j] + i, 0, 2);
        }
    }
    std::fill(keys_.begin() + place.count * dim_, keys_.end(), 0.0f);
    std::fill(values_.begin() + place.count * dim_, values_.end(), 0.0f);  // zero times anything is zero
  }

  // scores[count][kKeys] of some rows.
  void score(int64_t row, int64_t count, float* scores) const {
    with_rows<kRows>(count, [&](auto rows) {
      const float* q = queries_.data() + row * dim_;
      for (int64_t j = 0; j < kKeys; j += 4) {
        const float* key = keys_.data() + j * dim_;
        Vector sums[rows()][4] = {};
        for (int64_t i = 0; i < dim_; i += kLanes)
          for (int n = 0; n < 4; ++n)
            for (int m = 0; m < rows(); ++m) sums[m][n] += load(q + m * dim_ + i) * load(key + n * dim_ + i);
        for (int m = 0; m < rows(); ++m) {
          const Four four = sum(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
          std::memcpy(scores + m * kKeys + j, &four, sizeof four);
        }
      }
    });
  }

  // sums = sums * fade + weights [count][kKeys] times values, of some rows.
  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    with_rows<kRows>(count, [&](auto rows) {
      int64_t i = 0;
      for (; i + 4 * kLanes <= dim_; i += 4 * kLanes) add_at<rows(), 4>(row, i, weights, fades);
      for (; i < dim_; i += kLanes) add_at<rows(), 1>(row, i, weights, fades);
    });
  }

  void write_out(int64_t row, float total, T* out) const { write_row(sums_.data() + row * dim_, dim_, total, out); }

 private:
  // What `add` does to N vectors of M rows.
  template <int M, int N>
  void add_at(int64_t row, int64_t i, const float* weights, const float* fades) {
    float* to = sums_.data() + row * dim_ + i;
    Vector sums[M][N];
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) sums[m][n] = load(to + m * dim_ + n * kLanes) * fades[m];
    const float* value = values_.data() + i;
    for (int64_t j = 0; j < kKeys; ++j, value += dim_)
      for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) sums[m][n] += weights[m * kKeys + j] * load(value + n * kLanes);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) store(to + m * dim_ + n * kLanes, sums[m][n]);
  }

  void copy(const T* from, float* to) const {
    for (int64_t i = 0; i < dim_; i += kLanes) store(to + i, load(from + i));
  }

  int64_t dim_ = 0;
  std::vector<float> queries_, keys_, values_, sums_;
};

}  // namespace minivllm

#ifdef MINIVLLM_BF16_PRODUCTS
#include "tiles_bf16.h"
#include "tiles_matrix.h"
#endif
