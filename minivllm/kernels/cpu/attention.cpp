// See attention.h. Online softmax over tiles of keys: Milakov and Gimelshein 2018; Dao et al. 2022 (FlashAttention).
#include "attention.h"

#include <algorithm>
#include <vector>

#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kKeys = 32;      // of a tile
constexpr int64_t kQueries = 16;   // tokens of a task, at most

struct Task {
  int64_t request, kv_head, first, count;  // queries [first, first + count) of the request's new ones
};

struct Scratch {
  std::vector<float> q, keys, values, out, scores, peak, total;

  void fit(int64_t rows, int64_t head_dim) {
    q.resize(rows * head_dim), out.resize(rows * head_dim);
    keys.resize(kKeys * head_dim), values.resize(kKeys * head_dim);
    scores.resize(kKeys), peak.resize(rows), total.resize(rows);
  }
};

// scores[0..kKeys) = q . keys, four keys at a time.
inline void dot(const float* q, const float* keys, int64_t head_dim, float* scores) {
  for (int64_t j = 0; j < kKeys; j += 4) {
    const float* key = keys + j * head_dim;
    Vector a{}, b{}, c{}, d{};
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      const Vector x = load(q + i);
      a += x * load(key + i);
      b += x * load(key + head_dim + i);
      c += x * load(key + 2 * head_dim + i);
      d += x * load(key + 3 * head_dim + i);
    }
    scores[j] = sum(a), scores[j + 1] = sum(b), scores[j + 2] = sum(c), scores[j + 3] = sum(d);
  }
}

// out = out * fade + weights . values, the weights of the keys [begin, end); 64 dimensions at a time.
inline void accumulate(const float* weights, const float* values, int64_t begin, int64_t end, int64_t head_dim,
                       float fade, float* out) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= head_dim; i += 4 * kLanes) {
    Vector a = load(out + i) * fade, b = load(out + i + 16) * fade;
    Vector c = load(out + i + 32) * fade, d = load(out + i + 48) * fade;
    for (int64_t j = begin; j < end; ++j) {
      const float* value = values + j * head_dim + i;
      a += weights[j] * load(value), b += weights[j] * load(value + 16);
      c += weights[j] * load(value + 32), d += weights[j] * load(value + 48);
    }
    store(out + i, a), store(out + i + 16, b), store(out + i + 32, c), store(out + i + 48, d);
  }
  for (; i < head_dim; i += kLanes) {
    Vector a = load(out + i) * fade;
    for (int64_t j = begin; j < end; ++j) a += weights[j] * load(values + j * head_dim + i);
    store(out + i, a);
  }
}

// One row of queries meets one tile, of which it sees the keys [begin, end).
inline void meet(const Attention& a, const float* q, const Scratch& s, int64_t begin, int64_t end, float* scores,
                 float& peak, float& total, float* out) {
  dot(q, s.keys.data(), a.head_dim, scores);
  if (a.soft_cap > 0)
    for (int64_t j = begin; j < end; ++j) scores[j] = a.soft_cap * std::tanh(scores[j] / a.soft_cap);
  float highest = peak;
  for (int64_t j = 0; j < kKeys; ++j) {
    scores[j] = j >= begin && j < end ? scores[j] : -INFINITY;
    highest = std::max(highest, scores[j]);
  }
  Vector added{};
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const Vector weight = exp_of_negative(load(scores + j) - highest);
    store(scores + j, weight);
    added += weight;
  }
  const float fade = std::exp(peak - highest);  // of a first tile: 0
  total = total * fade + sum(added);
  peak = highest;
  accumulate(scores, s.values.data(), begin, end, a.head_dim, fade, out);
}

template <typename T>
void fetch(const Attention& a, const T* cache, const int32_t* table, int64_t kv_head, int64_t begin, int64_t end,
           float* tile) {
  for (int64_t j = begin; j < end; ++j) {
    const int64_t slot = table[j / a.block_size] * a.block_size + j % a.block_size;
    const T* from = cache + (slot * a.kv_heads + kv_head) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += kLanes) store(tile + (j - begin) * a.head_dim + i, load(from + i));
  }
  std::fill(tile + (end - begin) * a.head_dim, tile + kKeys * a.head_dim, 0.0f);  // zero times anything is zero
}

template <typename T>
void run(const Attention& a, const Task& task, const T* q, const T* k_cache, const T* v_cache, T* out, Scratch& s) {
  const int64_t group = a.heads / a.kv_heads, rows = task.count * group, dim = a.head_dim;
  const int64_t token = a.starts[task.request] + task.first, head = task.kv_head * group;
  const int64_t length = a.lengths[task.request];
  const int64_t position = length - (a.starts[task.request + 1] - a.starts[task.request]) + task.first;
  const int32_t* table = a.table + task.request * a.table_width;
  s.fit(rows, dim);
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = q + (token + row / group) * a.q_stride + (head + row % group) * dim;
    for (int64_t i = 0; i < dim; i += kLanes) store(s.q.data() + row * dim + i, load(from + i) * a.scale);
    s.peak[row] = -INFINITY, s.total[row] = 0;
  }
  std::fill(s.out.begin(), s.out.begin() + rows * dim, 0.0f);
  const int64_t last = position + task.count;
  const int64_t oldest = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
  for (int64_t tile = oldest / kKeys * kKeys; tile < last; tile += kKeys) {
    const int64_t end = std::min(tile + kKeys, last);
    fetch(a, k_cache, table, task.kv_head, tile, end, s.keys.data());
    fetch(a, v_cache, table, task.kv_head, tile, end, s.values.data());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = position + row / group;
      const int64_t from = a.window ? std::max<int64_t>(0, at + 1 - a.window - tile) : 0;
      const int64_t to = std::min(at + 1 - tile, kKeys);
      if (from >= to) continue;
      meet(a, s.q.data() + row * dim, s, from, to, s.scores.data(), s.peak[row], s.total[row],
           s.out.data() + row * dim);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* to = out + ((token + row / group) * a.heads + head + row % group) * dim;
    for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(s.out.data() + row * dim + i) / s.total[row]);
  }
}

}  // namespace

template <typename T>
void attend(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache, T* out) {
  const int64_t width = a.kv_heads * a.head_dim;
  std::vector<Task> tasks;
  tasks.reserve(a.requests * a.kv_heads);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t count = a.starts[r + 1] - a.starts[r];
    for (int64_t h = 0; h < a.kv_heads; ++h)
      for (int64_t first = 0; first < count; first += kQueries)
        tasks.push_back({r, h, first, std::min(kQueries, count - first)});
  }
  const auto count = static_cast<int64_t>(tasks.size());
#pragma omp parallel
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; ++t) {
      std::memcpy(k_cache + a.slots[t] * width, k + t * a.k_stride, width * sizeof(T));
      std::memcpy(v_cache + a.slots[t] * width, v + t * a.v_stride, width * sizeof(T));
    }
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < count; ++i) run(a, tasks[i], q, k_cache, v_cache, out, scratch);
  }
}

template void attend(const Attention&, const float*, const float*, const float*, float*, float*, float*);
template void attend(const Attention&, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, BFloat16*,
                     BFloat16*);
template void attend(const Attention&, const Half*, const Half*, const Half*, Half*, Half*, Half*);

}  // namespace minivllm
