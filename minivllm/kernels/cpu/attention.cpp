// See attention.h. Online softmax over tiles of keys: Milakov and Gimelshein 2018; Dao et al. 2022 (FlashAttention).
#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kQueries = 16;  // tokens of a task, at most
constexpr int64_t kTasks = 2;     // for each thread, at least, where there are so many heads

struct Task {
  int64_t request, kv_head, kv_heads;  // heads [kv_head, kv_head + kv_heads) of the keys
  int64_t first, count;                // queries [first, first + count) of the request's new ones
};

// The rows of a head are the task's tokens times the heads that share keys; keys [oldest, last) are seen by some query.
struct Extent {
  int64_t rows, token, position, oldest, last;
};

Extent extent_of(const Attention& a, const Task& task) {
  const int64_t fresh = a.starts[task.request + 1] - a.starts[task.request];
  const int64_t position = a.lengths[task.request] - fresh + task.first;
  return {task.count * (a.heads / a.kv_heads), a.starts[task.request] + task.first, position,
          a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0, position + task.count};
}

// Where the keys [begin, begin + kKeys) of a request lie, as far as they are before `last`.
Place locate(const Attention& a, const Task& task, int64_t begin, int64_t last) {
  Place place;
  place.count = std::min(kKeys, last - begin);
  const int32_t* table = a.table + task.request * a.table_width;
  int64_t block = begin / a.block_size, within = begin % a.block_size;
  for (int64_t j = 0; j < place.count; ++j) {
    place.at[j] = (table[block] * a.block_size + within) * a.kv_heads * a.head_dim;
    if (++within == a.block_size) ++block, within = 0;
  }
  return place;
}

// One row of scores becomes weights, of the keys [from, to) that its query sees.
float weigh(const Attention& a, int64_t from, int64_t to, float* scores, float& peak, float& total) {
  if (from >= to) {
    std::fill(scores, scores + kKeys, 0.0f);
    return 1.0f;
  }
  Vector lanes, highest = splat(peak);
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    Vector score = load(scores + j) * a.scale;
    if (a.soft_cap > 0)
      for (int i = 0; i < kLanes; ++i) score[i] = a.soft_cap * std::tanh(score[i] / a.soft_cap);
    const Vector key = lanes + static_cast<float>(j);
    const Integers seen = (key >= static_cast<float>(from)) & (key < static_cast<float>(to));
    score = seen ? score : splat(-INFINITY);
    highest = score > highest ? score : highest;
    store(scores + j, score);
  }
  float top = highest[0];
  for (int i = 1; i < kLanes; ++i) top = std::max(top, highest[i]);
  Vector added{};
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const Vector weight = exp_of_negative(load(scores + j) - top);
    store(scores + j, weight);
    added += weight;
  }
  const float fade = std::exp(peak - top);  // of a first tile: 0
  total = total * fade + sum(added);
  peak = top;
  return fade;
}

// One task; the first tile of the next one is asked for at the end.
template <typename Tiles, typename T>
void run(const Attention& a, const Task& task, const Task& next, const T* q, const T* k_cache, const T* v_cache,
         T* out, Tiles& tiles, std::vector<float>& state) {
  const int64_t group = a.heads / a.kv_heads, dim = a.head_dim;
  const Extent e = extent_of(a, task), after = extent_of(a, next);
  const int64_t rows = task.kv_heads * e.rows;
  tiles.begin(rows, dim);
  state.assign(2 * rows, 0.0f);
  float *peak = state.data(), *total = peak + rows;
  std::fill(peak, total, -INFINITY);
  const auto token_of = [&](int64_t row) { return e.token + row % e.rows / group; };
  const auto head_of = [&](int64_t row) { return (task.kv_head + row / e.rows) * group + row % group; };
  for (int64_t row = 0; row < rows; ++row) tiles.take_query(row, q + token_of(row) * a.q_stride + head_of(row) * dim);
  const int64_t first = e.oldest / kKeys * kKeys;
  Place here = locate(a, task, first, e.last);
  for (int64_t tile = first; tile < e.last; tile += kKeys) {
    const bool ends = tile + kKeys >= e.last;
    const Place later = ends ? locate(a, next, after.oldest / kKeys * kKeys, after.last)
                             : locate(a, task, tile + kKeys, e.last);
    for (int64_t h = 0; h < task.kv_heads; ++h) {  // of one tile after another: they lie side by side
      const int64_t head = task.kv_head + h;
      const bool stays = h + 1 < task.kv_heads;
      const int64_t next_head = stays ? head + 1 : ends ? next.kv_head : task.kv_head;
      tiles.take_keys(k_cache + head * dim, v_cache + head * dim, here, stays ? here : later, (next_head - head) * dim);
      for (int64_t row = h * e.rows; row < (h + 1) * e.rows; row += kRows) {
        alignas(64) float scores[kRows * kKeys];
        float fades[kRows];
        const int64_t count = std::min(kRows, (h + 1) * e.rows - row);
        tiles.score(row, count, scores);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = e.position + (row + i) % e.rows / group - tile;  // of the query, from the tile's beginning
          const int64_t from = a.window ? std::max<int64_t>(0, at + 1 - a.window) : 0;
          fades[i] = weigh(a, from, std::min(at + 1, kKeys), scores + i * kKeys, peak[row + i], total[row + i]);
        }
        tiles.add(row, count, scores, fades);
      }
    }
    here = later;
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* to = out + (token_of(row) * a.heads + head_of(row)) * dim;
    const float* sums = tiles.sums(row);
    for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(sums + i) / total[row]);
  }
}

template <typename Tiles, typename T>
void attend_by(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache, T* out) {
  const int64_t width = a.kv_heads * a.head_dim;
  std::vector<Task> tasks;
  tasks.reserve(a.requests * a.kv_heads);
  // Memory is read best from end to end, all heads of a key together; where requests are few the heads are shared out.
  const int64_t together = std::clamp<int64_t>(a.requests * a.kv_heads / (kTasks * omp_get_max_threads()), 1, a.kv_heads);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t count = a.starts[r + 1] - a.starts[r];
    const int64_t heads = count == 1 ? together : 1;
    for (int64_t h = 0; h < a.kv_heads; h += heads)
      for (int64_t first = 0; first < count; first += kQueries)
        tasks.push_back({r, h, std::min(heads, a.kv_heads - h), first, std::min(kQueries, count - first)});
  }
  const auto count = static_cast<int64_t>(tasks.size());
#pragma omp parallel
  {
    Tiles tiles;
    std::vector<float> state;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; ++t) {
      std::memcpy(k_cache + a.slots[t] * width, k + t * a.k_stride, width * sizeof(T));
      std::memcpy(v_cache + a.slots[t] * width, v + t * a.v_stride, width * sizeof(T));
    }
#pragma omp for schedule(dynamic, count > 128 ? 4 : 1)
    for (int64_t i = 0; i < count; ++i)
      run(a, tasks[i], tasks[std::min(i + 1, count - 1)], q, k_cache, v_cache, out, tiles, state);
  }
}

}  // namespace

template <typename T>
void attend(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache, T* out) {
#ifdef MINIVLLM_BF16_PRODUCTS
  if constexpr (std::is_same_v<T, BFloat16>)
    if (a.head_dim % kColumns == 0) return attend_by<PanelTiles>(a, q, k, v, k_cache, v_cache, out);
#endif
  attend_by<PlainTiles<T>>(a, q, k, v, k_cache, v_cache, out);
}

template void attend(const Attention&, const float*, const float*, const float*, float*, float*, float*);
template void attend(const Attention&, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, BFloat16*,
                     BFloat16*);
template void attend(const Attention&, const Half*, const Half*, const Half*, Half*, Half*, Half*);

}  // namespace minivllm
