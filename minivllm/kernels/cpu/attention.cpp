// See attention.h. Online softmax over tiles of keys: Milakov and Gimelshein 2018; Dao et al. 2022 (FlashAttention).
#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kTasks = 2;  // for each thread, at least, where there are so many heads
// Rows of queries of a task, whole blocks of all tiles: fewer would take a long context's keys and values from memory faster
// than it gives them, as each task reads all of them.
constexpr int64_t kTaskRows = 144;

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
  place.together = a.block_size;
  const int32_t* table = a.table + task.request * a.table_width;
  const int64_t width = a.kv_heads * a.head_dim;
  int64_t within = begin % a.block_size;
  for (int64_t j = 0, block = begin / a.block_size; j < place.count; ++block, within = 0) {
    const int64_t there = std::min(a.block_size - within, place.count - j);
    const int64_t at = (table[block] * a.block_size + within) * width;
    for (int64_t i = 0; i < there; ++i) place.at[j + i] = at + i * width;
    j += there;
  }
  return place;
}

// One row of scores becomes weights, of the keys [from, to) that its query sees.
float weigh(const Attention& a, int64_t from, int64_t to, float* scores, float& peak, float& total) {
  if (from >= to) {
    std::fill(scores, scores + kKeys, 0.0f);
    return 1.0f;
  }
  constexpr int kParts = kKeys / kLanes;
  Vector parts[kParts], most = splat(peak);
  for (int i = 0; i < kParts; ++i) {
    parts[i] = load(scores + i * kLanes) * a.scale;
    if (a.soft_cap > 0)
      for (int j = 0; j < kLanes; ++j) parts[i][j] = a.soft_cap * std::tanh(parts[i][j] / a.soft_cap);
  }
  if (from > 0 || to < kKeys) {
    Vector key;
    for (int j = 0; j < kLanes; ++j) key[j] = static_cast<float>(j);
    for (int i = 0; i < kParts; ++i, key += static_cast<float>(kLanes)) {
      const Integers seen = (key >= static_cast<float>(from)) & (key < static_cast<float>(to));
      parts[i] = seen ? parts[i] : splat(-INFINITY);
    }
  }
  for (int i = 0; i < kParts; ++i) most = parts[i] > most ? parts[i] : most;
  const float top = highest(most);
  Vector added{};
  for (int i = 0; i < kParts; ++i) {
    const Vector weight = exp_of_negative(parts[i] - top);
    store(scores + i * kLanes, weight);
    added += weight;
  }
  const float fade = top > peak ? std::exp(peak - top) : 1.0f;  // of a first tile: 0
  total = total * fade + sum(added);
  peak = top;
  return fade;
}

// One task; the first tile of the next one is asked for at the end.
template <typename Tiles, typename T>
void run(const Attention& a, const Task& task, const Task& next, const T* q, const T* k_cache, const T* v_cache,
         T* out, Tiles& tiles, std::vector<float>& state) {
  constexpr int64_t kRows = Tiles::kRows;
  const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, apart = Tiles::head_stride(a);
  const Extent e = extent_of(a, task), after = extent_of(a, next);
  const int64_t room = (e.rows + kRows - 1) / kRows * kRows, rows = task.kv_heads * room;  // of a head, of all
  tiles.begin(rows, dim, a.kv_heads * dim);
  state.assign(2 * rows, 0.0f);
  float *peak = state.data(), *total = peak + rows;
  std::fill(peak, total, -INFINITY);
  const auto head_of = [&](int64_t h, int64_t row) { return (task.kv_head + h) * group + row % group; };
  for (int64_t h = 0; h < task.kv_heads; ++h)
    for (int64_t row = 0; row < e.rows; row += kRows) {
      const T* from[kRows];
      const int64_t count = std::min(kRows, e.rows - row);
      for (int64_t r = row; r < row + count; ++r)
        from[r - row] = q + (e.token + r / group) * a.q_stride + head_of(h, r) * dim;
      tiles.take_queries(h * room + row, count, from);
    }
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
      tiles.take_keys(k_cache + head * apart, v_cache + head * apart, here, stays ? here : later,
                      (next_head - head) * apart, e.rows);
      for (int64_t row = 0; row < e.rows; row += kRows) {
        alignas(64) float scores[kRows * kKeys];
        float fades[kRows];
        const int64_t count = std::min(kRows, e.rows - row), place = h * room + row;
        if (e.position + (row + count - 1) / group < tile) continue;  // it lies in the future of all
        tiles.score(place, count, scores);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = e.position + (row + i) / group - tile;  // of the query, from the tile's beginning
          const int64_t from = a.window ? std::max<int64_t>(0, at + 1 - a.window) : 0;
          fades[i] = weigh(a, from, std::min(at + 1, kKeys), scores + i * kKeys, peak[place + i], total[place + i]);
        }
        tiles.add(place, count, scores, fades);
      }
    }
    here = later;
  }
  for (int64_t h = 0; h < task.kv_heads; ++h)
    for (int64_t row = 0; row < e.rows; ++row)
      tiles.write_out(h * room + row, total[h * room + row],
                  out + ((e.token + row / group) * a.heads + head_of(h, row)) * dim);
}

template <typename Tiles, typename T>
void attend_by(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache, T* out) {
  std::vector<Task> tasks;
  tasks.reserve(a.requests * a.kv_heads);
  // Memory is read best from end to end, all heads of a key together; where requests are few the heads are shared out.
  const int64_t together = std::clamp<int64_t>(a.requests * a.kv_heads / (kTasks * omp_get_max_threads()), 1, a.kv_heads);
  const int64_t most = std::max<int64_t>(1, kTaskRows / (a.heads / a.kv_heads));  // queries of a task
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t count = a.starts[r + 1] - a.starts[r];
    const int64_t heads = count == 1 ? together : 1;
    for (int64_t h = 0; h < a.kv_heads; h += heads)
      for (int64_t first = 0; first < count; first += most)
        tasks.push_back({r, h, std::min(heads, a.kv_heads - h), first, std::min(most, count - first)});
  }
  const auto count = static_cast<int64_t>(tasks.size());
#pragma omp parallel
  {
    Tiles tiles;
    std::vector<float> state;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; ++t) Tiles::write(a, t, k, v, k_cache, v_cache);
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
    if (a.head_dim % kColumns == 0) {
#ifdef MINIVLLM_BF16_TILES
      if (may_use_bf16_tiles()) return attend_by<MatrixTiles>(a, q, k, v, k_cache, v_cache, out);
#endif
      return attend_by<PanelTiles>(a, q, k, v, k_cache, v_cache, out);
    }
#endif
  attend_by<PlainTiles<T>>(a, q, k, v, k_cache, v_cache, out);
}

template void attend(const Attention&, const float*, const float*, const float*, float*, float*, float*);
template void attend(const Attention&, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, BFloat16*,
                     BFloat16*);
template void attend(const Attention&, const Half*, const Half*, const Half*, Half*, Half*, Half*);

}  // namespace minivllm
