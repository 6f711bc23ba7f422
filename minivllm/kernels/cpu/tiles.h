// A tile of keys and values, fetched from the paged cache once and met by the rows of queries of a
// task.
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

// The cache holds keys and values of tokens one after another, [block_size][kv_heads][head_dim] in
// a block.
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

// In float32, for every type and processor: numbers are converted where they are met. Rows meet
// keys and values three by four, all sums in 16 registers.
template <typename T>
class PlainTiles : public CopiedTokens {
 public:
  static constexpr int64_t kRows = 3;

  void begin(int64_t rows, int64_t dim, int64_t) {
    dim_ = dim;
    queries_.resize(rows * dim), copies_.resize(2 * kKeys * dim);
    sums_.assign(rows * dim, 0.0f);
  }
  void clear() { std::fill(sums_.begin(), sums_.end(), 0.0f); }

  void take_queries(int64_t row, int64_t count, const T* const* from) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < dim_; i += kLanes)
        store(queries_.data() + (row + r) * dim_ + i, load(from[r] + i));
  }

  // The tile at `place`; that at `ahead`, `shift` elements further on, is asked for while the first
  // rows meet this one. What more than kRows rows meet is copied: in the cache the keys of a head
  // lie a power of two apart, and would drive each other out of the first-level cache.
  void take_keys(const T* keys, const T* values, const Place& place, const Place& ahead,
                 int64_t shift, int64_t rows) {
    count_ = (place.count + kTogether - 1) / kTogether * kTogether;
    for (int64_t j = 0; j < count_; ++j) {
      const int64_t at =
          place.at[std::min(j, place.count - 1)];  // keys that are not there are not seen
      keys_[j] = keys + at, values_[j] = values + at;
    }
    ahead_ = ahead.count;
    for (int64_t j = 0; j < ahead_; ++j) {
      next_keys_[j] = keys + shift + ahead.at[j], next_values_[j] = values + shift + ahead.at[j];
      if (j >= count_) ask(next_keys_[j], dim_), ask(next_values_[j], dim_);
    }
    if (rows <= kRows) return;
    for (int64_t j = 0; j < count_; ++j) {
      T *key = copies_.data() + j * dim_, *value = key + kKeys * dim_;
      std::memcpy(key, keys_[j], dim_ * sizeof(T)),
          std::memcpy(value, values_[j], dim_ * sizeof(T));
      keys_[j] = key, values_[j] = value;
    }
  }

  // scores[count][kKeys] of some rows.
  void score(int64_t row, int64_t count, float* scores) {
    with_rows<kRows>(count, [&](auto rows) {
      const float* query = queries_.data() + row * dim_;
      for (int64_t j = 0; j < count_; j += kTogether) {
        for (int64_t n = j; n < std::min(j + kTogether, ahead_); ++n) ask(next_keys_[n], dim_);
        score_at<rows()>(query, j, scores + j);
      }
      for (int m = 0; m < rows(); ++m)
        std::fill(scores + m * kKeys + count_, scores + (m + 1) * kKeys, 0.0f);
    });
  }

  // sums = sums * fade + weights [count][kKeys] times values, of some rows.
  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    with_rows<kRows>(count, [&](auto rows) {
      int64_t i = 0;
      for (; i + 4 * kLanes <= dim_; i += 4 * kLanes) add_at<rows(), 4>(row, i, weights, fades);
      for (; i < dim_; i += kLanes) add_at<rows(), 1>(row, i, weights, fades);
    });
    ahead_ = 0;
  }

  // Of a row: values by weight, [dim]. The second argument has room for them.
  const float* sums(int64_t row, float*) const { return sums_.data() + row * dim_; }

 private:
  static constexpr int kTogether = 4;  // keys at a time

  MINIVLLM_ASKS static void ask(const T* from, int64_t count) {
    const char* next = reinterpret_cast<const char*>(from);
    minivllm::ask(next, (count * sizeof(T) + 63) / 64);
  }

  // Scores of M rows and the keys from j on.
  template <int M>
  [[gnu::noinline]] void score_at(const float* query, int64_t j, float* scores) const {
    Vector sums[M][kTogether] = {};
    const T* const at[] = {keys_[j], keys_[j + 1], keys_[j + 2], keys_[j + 3]};
    for (int64_t i = 0; i < dim_; i += kLanes) {
      Vector queries[M];
      each<M>([&](auto m) MINIVLLM_INLINE { queries[m] = kept(load(query + m * dim_ + i)); });
      each<kTogether>([&](auto n) MINIVLLM_INLINE {
        const Vector key = kept(load(at[n] + i));
        each<M>([&](auto m) MINIVLLM_INLINE { sums[m][n] = fused(queries[m], key, sums[m][n]); });
      });
    }
    each<M>([&](auto m) MINIVLLM_INLINE {
      const Four four = sum(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
      std::memcpy(scores + m * kKeys, &four, sizeof four);
    });
  }

  // What `add` does to N vectors of M rows.
  template <int M, int N>
  [[gnu::noinline]] void add_at(int64_t row, int64_t i, const float* weights, const float* fades) {
    float* to = sums_.data() + row * dim_ + i;
    Vector sums[M][N];
    each<M * N>([&](auto k) MINIVLLM_INLINE {
      sums[k / N][k % N] = load(to + k / N * dim_ + k % N * kLanes) * fades[k / N];
    });
    for (int64_t j = 0; j < count_; ++j) {
      if (j < ahead_) ask(next_values_[j] + i, N * kLanes);
      const T* value = values_[j] + i;
      Vector factors[M];
      each<M>([&](auto m) MINIVLLM_INLINE { factors[m] = kept(splat(weights[m * kKeys + j])); });
      each<N>([&](auto n) MINIVLLM_INLINE {
        const Vector part = kept(load(value + n * kLanes));
        each<M>([&](auto m) MINIVLLM_INLINE { sums[m][n] = fused(factors[m], part, sums[m][n]); });
      });
    }
    each<M * N>([&](auto k) MINIVLLM_INLINE {
      store(to + k / N * dim_ + k % N * kLanes, sums[k / N][k % N]);
    });
  }

  int64_t dim_ = 0, count_ = 0,
          ahead_ = 0;  // of keys: of the tile, of the next one while it has to be asked for
  std::vector<float> queries_, sums_;
  std::vector<T> copies_;
  const T *keys_[kKeys], *values_[kKeys], *next_keys_[kKeys], *next_values_[kKeys];
};

}  // namespace minivllm

#ifdef MINIVLLM_BF16_PRODUCTS
#include "tiles_bf16.h"
#include "tiles_matrix.h"
#endif
