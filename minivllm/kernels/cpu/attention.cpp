// See attention.h. Online softmax over tiles of keys: Milakov and Gimelshein 2018; Dao et al. 2022
// (FlashAttention). A long context's pieces are shared out and joined: Dao et al. 2023
// (Flash-Decoding).
#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kTasks = 2;  // for each thread, at least, where there are so many heads
// Rows of queries of a task, whole blocks of all tiles: fewer would take a long context's keys and
// values from memory faster than it gives them, as each task reads all of them.
constexpr int64_t kTaskRows = 144;
// Rows of a request, of one head, whose keys and values are read rather than computed with: of one
// token or a few.
constexpr int64_t kFewRows = 16;
// Keys of a piece, which begins at a multiple of this. Its sums begin anew and are joined with
// those of the pieces before it, whoever computes them: so a result does not depend on how a
// context is shared out.
constexpr int64_t kPiece = 32 * kKeys;

int64_t divided(int64_t all, int64_t by) { return (all + by - 1) / by; }

struct Task {
  int64_t request, kv_head, kv_heads;  // heads [kv_head, kv_head + kv_heads) of the keys
  int64_t first, count;                // queries [first, first + count) of the request's new ones
  int64_t piece, pieces;               // of the keys that they see
  int64_t apart;                       // first row of the pieces' sums; -1: no other has pieces
};

// The rows of a head are the task's tokens times the heads that share keys; keys [oldest, last) are
// seen by some query.
struct Extent {
  int64_t rows, token, position, oldest, last;
};

Extent extent_of(const Attention& a, int64_t request, int64_t first, int64_t count) {
  const int64_t fresh = a.starts[request + 1] - a.starts[request];
  const int64_t position = a.lengths[request] - fresh + first;
  return {count * (a.heads / a.kv_heads), a.starts[request] + first, position,
          a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0, position + count};
}

// Of that the part in a task's pieces, beginning with a tile.
Extent extent_of(const Attention& a, const Task& task) {
  Extent e = extent_of(a, task.request, task.first, task.count);
  e.oldest = std::max(e.oldest / kKeys * kKeys, task.piece * kPiece);
  e.last = std::min(e.last, (task.piece + task.pieces) * kPiece);
  return e;
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
float weigh(const Attention& a, int64_t from, int64_t to, float* scores, float& peak,
            float& total) {
  if (from >= to) {
    std::fill(scores, scores + kKeys, 0.0f);
    return 1.0f;
  }
  constexpr int kParts = kKeys / kLanes;
  Vector parts[kParts], most = splat(peak);
  for (int i = 0; i < kParts; ++i) {
    parts[i] = load(scores + i * kLanes) * a.scale;
    if (a.soft_cap > 0)
      for (int j = 0; j < kLanes; ++j)
        parts[i][j] = a.soft_cap * std::tanh(parts[i][j] / a.soft_cap);
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

// A row of sums: its largest score, the total of its weights, and from kValues on the sums of
// values by weight.
constexpr int64_t kValues = kLanes;

void clear(float* sums, int64_t dim) {
  std::fill(sums, sums + kValues + dim, 0.0f);
  sums[0] = -INFINITY;
}

// Joins a row with what it has summed of later keys. One that sees none of them has a total of 0.
void join(float* sums, float peak, float total, const float* values, int64_t dim) {
  if (total == 0) return;
  const float top = std::max(sums[0], peak), before = std::exp(sums[0] - top),
              now = std::exp(peak - top);
  for (int64_t i = 0; i < dim; i += kLanes)
    store(sums + kValues + i, load(sums + kValues + i) * before + load(values + i) * now);
  sums[0] = top, sums[1] = sums[1] * before + total * now;
}

template <typename T>
void write_row(float total, const float* values, int64_t dim, T* out) {
  for (int64_t i = 0; i < dim; i += kLanes) store(out + i, load(values + i) / total);
}

// What a thread keeps from task to task.
template <typename Tiles>
struct Scratch {
  Tiles tiles;
  // Of the rows the largest scores, then the totals; their sums; the values of one row.
  std::vector<float> weights, joined, row;
};

// One task; the first tile of the next one is asked for at the end. What is joined with others'
// pieces goes to `apart`.
template <typename Tiles, typename T>
void run(const Attention& a, const Task& task, const Task& next, const T* q, const T* k_cache,
         const T* v_cache, T* out, float* apart, Scratch<Tiles>& scratch) {
  constexpr int64_t kRows = Tiles::kRows;
  const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, head_stride = Tiles::head_stride(a),
                width = kValues + dim;
  const Extent e = extent_of(a, task), after = extent_of(a, next);
  const int64_t head_rows = divided(e.rows, kRows) * kRows;  // whole blocks of them
  const int64_t rows = task.kv_heads * head_rows;
  Tiles& tiles = scratch.tiles;
  tiles.begin(rows, dim, a.kv_heads * dim);
  scratch.weights.resize(2 * rows), scratch.joined.resize(rows * width), scratch.row.resize(dim);
  float *peaks = scratch.weights.data(), *totals = peaks + rows, *joined = scratch.joined.data();
  const bool alone = task.apart < 0 && e.oldest / kPiece == (e.last - 1) / kPiece;  // of pieces
  for (int64_t r = 0; r < rows && !alone; ++r) clear(joined + r * width, dim);
  const auto begin_piece = [&] {
    std::fill(peaks, totals, -INFINITY), std::fill(totals, totals + rows, 0.0f);
  };
  begin_piece();
  const auto head_of = [&](int64_t h, int64_t row) {
    return (task.kv_head + h) * group + row % group;
  };
  const auto out_of = [&](int64_t h, int64_t row) {
    return out + ((e.token + row / group) * a.heads + head_of(h, row)) * dim;
  };
  for (int64_t h = 0; h < task.kv_heads; ++h)
    for (int64_t row = 0; row < e.rows; row += kRows) {
      const T* from[kRows];
      const int64_t count = std::min(kRows, e.rows - row);
      for (int64_t r = row; r < row + count; ++r)
        from[r - row] = q + (e.token + r / group) * a.q_stride + head_of(h, r) * dim;
      tiles.take_queries(h * head_rows + row, count, from);
    }
  Place here = locate(a, task, e.oldest, e.last);
  for (int64_t tile = e.oldest; tile < e.last; tile += kKeys) {
    const bool ends = tile + kKeys >= e.last;
    const Place later =
        ends ? locate(a, next, after.oldest, after.last) : locate(a, task, tile + kKeys, e.last);
    // Heads of one tile after another: they lie side by side.
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      const int64_t head = task.kv_head + h;
      const bool stays = h + 1 < task.kv_heads;
      const int64_t next_head = stays ? head + 1 : ends ? next.kv_head : task.kv_head;
      tiles.take_keys(k_cache + head * head_stride, v_cache + head * head_stride, here,
                      stays ? here : later, (next_head - head) * head_stride, e.rows);
      for (int64_t row = 0; row < e.rows; row += kRows) {
        alignas(64) float scores[kRows * kKeys];
        float fades[kRows];
        const int64_t count = std::min(kRows, e.rows - row), place = h * head_rows + row;
        if (e.position + (row + count - 1) / group < tile)
          continue;  // it lies in the future of all
        tiles.score(place, count, scores);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at =
              e.position + (row + i) / group - tile;  // of the query, from the tile's beginning
          const int64_t from = a.window ? std::max<int64_t>(0, at + 1 - a.window) : 0;
          fades[i] = weigh(a, from, std::min(at + 1, kKeys), scores + i * kKeys, peaks[place + i],
                           totals[place + i]);
        }
        tiles.add(place, count, scores, fades);
      }
    }
    here = later;
    if (!ends && (tile + kKeys) % kPiece != 0) continue;
    for (int64_t h = 0; h < task.kv_heads; ++h)
      for (int64_t row = 0; row < e.rows; ++row) {
        const int64_t r = h * head_rows + row;
        const float* values = tiles.sums(r, scratch.row.data());
        if (alone) {
          write_row(totals[r], values, dim, out_of(h, row));
        } else if (task.apart < 0) {
          join(joined + r * width, peaks[r], totals[r], values, dim);
        } else {
          const int64_t piece = tile / kPiece - task.piece,
                        at = (piece * task.count + row / group) * a.heads;
          float* to = apart + (task.apart + at + head_of(h, row)) * width;
          to[0] = peaks[r], to[1] = totals[r];
          std::memcpy(to + kValues, values, dim * sizeof(float));
        }
      }
    if (ends) break;
    tiles.clear(), begin_piece();
  }
  if (alone || task.apart >= 0) return;
  for (int64_t h = 0; h < task.kv_heads; ++h)
    for (int64_t row = 0; row < e.rows; ++row) {
      const float* sums = joined + (h * head_rows + row) * width;
      write_row(sums[1], sums + kValues, dim, out_of(h, row));
    }
}

// A request whose pieces are computed apart: [pieces][rows] of sums, a row for each new token and
// head.
struct Apart {
  int64_t request, tokens, pieces, at;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Apart> apart;
  int64_t rows = 0;  // of sums that are joined afterwards
};

// Memory is read best from end to end, all heads of a key together. Where requests are few, or one
// has most of the keys, the pieces of a context are shared out, and its heads where it has few
// pieces. A prompt has enough rows to be shared out.
Plan plan_of(const Attention& a) {
  Plan plan;
  plan.tasks.reserve(a.requests * a.kv_heads);
  const int64_t group = a.heads / a.kv_heads,
                most = std::max<int64_t>(1, kTaskRows / group);  // queries of a task
  const auto extent = [&](int64_t r) { return extent_of(a, r, 0, a.starts[r + 1] - a.starts[r]); };
  int64_t keys = 0;  // that requests with few rows see
  for (int64_t r = 0; r < a.requests; ++r)
    if (const Extent e = extent(r); 0 < e.rows && e.rows <= kFewRows) keys += e.last - e.oldest;
  const int64_t wanted = kTasks * omp_get_max_threads();
  for (int64_t r = 0; r < a.requests; ++r) {
    const Extent e = extent(r);
    const int64_t count = e.rows / group;
    if (count == 0) continue;
    const int64_t oldest = e.oldest / kPiece, pieces = (e.last - 1) / kPiece + 1 - oldest;
    if (e.rows > kFewRows) {
      for (int64_t h = 0; h < a.kv_heads; ++h)
        for (int64_t first = 0; first < count; first += most)
          plan.tasks.push_back(
              {r, h, 1, first, std::min(most, count - first), 0, oldest + pieces, -1});
      continue;
    }
    const int64_t parts = divided((e.last - e.oldest) * wanted, keys);
    const int64_t splits = std::min(pieces, parts),
                  heads = divided(a.kv_heads, std::min(a.kv_heads, divided(parts, splits)));
    const int64_t length = divided(pieces, splits), last = oldest + pieces;
    for (int64_t piece = oldest; piece < last; piece += length)
      for (int64_t h = 0; h < a.kv_heads; h += heads) {
        const int64_t at = splits == 1 ? -1 : plan.rows + (piece - oldest) * count * a.heads;
        plan.tasks.push_back({r, h, std::min(heads, a.kv_heads - h), 0, count, piece,
                              std::min(length, last - piece), at});
      }
    if (splits == 1) continue;
    plan.apart.push_back({r, count, pieces, plan.rows});
    plan.rows += pieces * count * a.heads;
  }
  return plan;
}

template <typename Tiles, typename T>
void attend_by(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache,
               T* out) {
  const Plan plan = plan_of(a);
  const auto count = static_cast<int64_t>(plan.tasks.size());
  const int64_t dim = a.head_dim, width = kValues + dim;
  std::vector<float> apart(plan.rows * width);
#pragma omp parallel
  {
    Scratch<Tiles> scratch;
    std::vector<float> sums(width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; ++t) Tiles::write(a, t, k, v, k_cache, v_cache);
#pragma omp for schedule(dynamic, count > 128 ? 4 : 1)
    for (int64_t i = 0; i < count; ++i)
      run(a, plan.tasks[i], plan.tasks[std::min(i + 1, count - 1)], q, k_cache, v_cache, out,
          apart.data(), scratch);
    for (const Apart& one : plan.apart) {
      const int64_t rows = one.tokens * a.heads;
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < rows; ++row) {
        clear(sums.data(), dim);
        for (int64_t piece = 0; piece < one.pieces; ++piece) {
          const float* part = apart.data() + (one.at + piece * rows + row) * width;
          join(sums.data(), part[0], part[1], part + kValues, dim);
        }
        write_row(sums[1], sums.data() + kValues, dim,
                  out + (a.starts[one.request] * a.heads + row) * dim);
      }
    }
  }
}

}  // namespace

template <typename T>
void attend(const Attention& a, const T* q, const T* k, const T* v, T* k_cache, T* v_cache,
            T* out) {
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

template void attend(const Attention&, const float*, const float*, const float*, float*, float*,
                     float*);
template void attend(const Attention&, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*,
                     BFloat16*, BFloat16*);
template void attend(const Attention&, const Half*, const Half*, const Half*, Half*, Half*, Half*);

}  // namespace minivllm
