// Attention over the paged cache: prompts, pieces of them and decoding alike.
#pragma once
#include <cstdint>

namespace minivllm {

struct Attention {
  int64_t requests, tokens, heads, kv_heads, head_dim;
  int64_t block_size, table_width;
  float scale;
  int64_t window;  // a token sees this many positions, its own included; 0: all
  float soft_cap;  // 0: none
  int64_t q_stride, k_stride, v_stride;  // elements from token to token
  const int64_t* slots;                  // [tokens], where each new key and value goes
  const int32_t* starts;                 // [requests + 1], first token of each
  const int32_t* lengths;                // [requests], cached and new
  const int32_t* table;                  // [requests][table_width], cache blocks
};

// Writes k and v into the caches [blocks][block_size][kv_heads][head_dim], then attends: out
// [tokens][heads][head_dim]. Within a block they may lie in another order (PanelTiles), always the
// same for one cache. T is float, BFloat16 or Half (vector.h); head_dim is a multiple of 16.
// Scores, weights and sums are float32. A query's result depends on its own keys alone, to the bit:
// tiles of keys begin at fixed places of the sequence.
template <typename T>
void attend(const Attention& shape, const T* q, const T* k, const T* v, T* k_cache, T* v_cache,
            T* out);

}  // namespace minivllm
