// A tile of keys and values, fetched from the paged cache once and met by the rows of queries of a task.
#pragma once
#include <algorithm>
#include <vector>

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

// In float32, for every type and processor.
template <typename T>
class PlainTiles {
 public:
  static constexpr int64_t kRows = minivllm::kRows, kTaskRows = 36;

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
        for (int64_t i = 0; i < dim_; i += kLanes) {
          __builtin_prefetch(keys + shift + ahead.at[j] + i, 0, 2);
          __builtin_prefetch(values + shift + ahead.at[j] + i, 0, 2);
        }
    }
    std::fill(keys_.begin() + place.count * dim_, keys_.end(), 0.0f);
    std::fill(values_.begin() + place.count * dim_, values_.end(), 0.0f);  // zero times anything is zero
  }

  // scores[count][kKeys] of some rows, four keys at a time.
  void score(int64_t row, int64_t count, float* scores) const {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < kKeys; j += 4) {
        const float *q = queries_.data() + (row + r) * dim_, *key = keys_.data() + j * dim_;
        Vector a{}, b{}, c{}, d{};
        for (int64_t i = 0; i < dim_; i += kLanes) {
          const Vector x = load(q + i);
          a += x * load(key + i);
          b += x * load(key + dim_ + i);
          c += x * load(key + 2 * dim_ + i);
          d += x * load(key + 3 * dim_ + i);
        }
        float* to = scores + r * kKeys + j;
        to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
      }
  }

  // sums = sums * fade + weights [count][kKeys] times values, of some rows.
  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < dim_; i += kLanes) {
        float* to = sums_.data() + (row + r) * dim_ + i;
        Vector even = load(to) * fades[r], odd{};
        for (int64_t j = 0; j < kKeys; j += 2) {
          even += weights[r * kKeys + j] * load(values_.data() + j * dim_ + i);
          odd += weights[r * kKeys + j + 1] * load(values_.data() + (j + 1) * dim_ + i);
        }
        store(to, even + odd);
      }
  }

  void write(int64_t row, float total, T* out) const { write_row(sums_.data() + row * dim_, dim_, total, out); }

 private:
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
