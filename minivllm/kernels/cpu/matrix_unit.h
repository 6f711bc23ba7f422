// Products of up to 32 rows of bfloat16 with a panel of 64 columns by the matrix unit (AMX) of
// processors that have one. Compiled where there is none, all this does nothing and is not called.
#pragma once
#include "products.h"
#include "tile_unit.h"

#if defined(MINIVLLM_BF16_PRODUCTS) && \
    (defined(MINIVLLM_TWIN_TILES) || (defined(MINIVLLM_MATRIX_UNIT) && defined(__AMX_BF16__)))
#define MINIVLLM_BF16_TILES 1
#endif

#ifdef MINIVLLM_PRODUCTS

namespace minivllm {

constexpr int64_t kTile = 16;        // rows of a tile: of activations, of pairs of inputs, of sums
constexpr int64_t kTileInputs = 32;  // of a tile of activations
constexpr int64_t kTiledRows = 2 * kTile;  // at a time

struct alignas(64) TileRow {
  uint16_t values[kTileInputs];
};

#ifndef MINIVLLM_BF16_TILES

inline bool may_use_bf16_tiles() { return false; }
inline void tile_rows(const Factor*, int64_t, int64_t, int64_t, TileRow*) {}
inline void multiply_tiles(bool, const TileRow*, int64_t, const Factor*, int64_t, const char*,
                           int64_t, bool, float*) {}

#else

inline bool may_use_bf16_tiles() { return may_use_matrix_unit(); }

// Sixteen rows of activations, of which `count` are there, as tiles: [inputs / 32][16].
inline void tile_rows(const uint16_t* x, int64_t stride, int64_t count, int64_t inputs,
                      TileRow* to) {
  for (int64_t k = 0; k < inputs; k += kTileInputs)
    for (int64_t m = 0; m < kTile; ++m, ++to)
      _mm512_store_si512(
          to, m < count ? _mm512_loadu_si512(x + m * stride + k) : _mm512_setzero_si512());
}

// Tiles 0 to 3, which hold sums, from and to rows of `stride` bytes.
inline void load_sums(const void* a, const void* b, const void* c, const void* d, int64_t stride) {
  MINIVLLM_TILE_LOAD(0, a, stride);
  MINIVLLM_TILE_LOAD(1, b, stride);
  MINIVLLM_TILE_LOAD(2, c, stride);
  MINIVLLM_TILE_LOAD(3, d, stride);
}

inline void clear_sums() {
  MINIVLLM_TILE_ZERO(0);
  MINIVLLM_TILE_ZERO(1);
  MINIVLLM_TILE_ZERO(2);
  MINIVLLM_TILE_ZERO(3);
}

inline void store_sums(void* a, void* b, void* c, void* d, int64_t stride) {
  MINIVLLM_TILE_STORE(0, a, stride);
  MINIVLLM_TILE_STORE(1, b, stride);
  MINIVLLM_TILE_STORE(2, c, stride);
  MINIVLLM_TILE_STORE(3, d, stride);
}

// Of multiply_tiles: 16 rows at once with all columns.
inline void multiply_16(const TileRow* x, const uint16_t* panel, int64_t steps, const char* next,
                        int64_t lines, bool clear, float* sums) {
  constexpr int kRowBytes = kColumns * 4;
  if (clear)
    clear_sums();
  else
    load_sums(sums, sums + 16, sums + 32, sums + 48, kRowBytes);
  for (int64_t s = 0; s < steps; ++s, x += kTile, panel += kTileInputs * kColumns) {
    MINIVLLM_TILE_LOAD(4, x, 64);
    MINIVLLM_TILE_LOAD(5, panel, kRowBytes);
    MINIVLLM_TILE_BF16_PRODUCTS(0, 4, 5);
    MINIVLLM_TILE_LOAD(6, panel + 32, kRowBytes);
    MINIVLLM_TILE_BF16_PRODUCTS(1, 4, 6);
    ask(next, lines);
    MINIVLLM_TILE_LOAD(7, panel + 64, kRowBytes);
    MINIVLLM_TILE_BF16_PRODUCTS(2, 4, 7);
    MINIVLLM_TILE_LOAD(5, panel + 96, kRowBytes);
    MINIVLLM_TILE_BF16_PRODUCTS(3, 4, 5);
  }
  store_sums(sums, sums + 16, sums + 32, sums + 48, kRowBytes);
}

// Of multiply_tiles: 32 rows with half of the columns, then with the others.
inline void multiply_32(const TileRow* x, int64_t stride, const uint16_t* panel, int64_t steps,
                        const char* next, int64_t lines, bool clear, float* sums) {
  constexpr int kRowBytes = kColumns * 4;
  for (int half = 0; half < 2; ++half, sums += 32, panel += 64) {
    float* below = sums + kTile * kColumns;
    if (clear)
      clear_sums();
    else
      load_sums(sums, sums + 16, below, below + 16, kRowBytes);
    for (int64_t s = 0; s < steps; ++s) {
      const uint16_t* b = panel + s * kTileInputs * kColumns;
      MINIVLLM_TILE_LOAD(4, x + s * kTile, 64);
      MINIVLLM_TILE_LOAD(6, b, kRowBytes);
      MINIVLLM_TILE_BF16_PRODUCTS(0, 4, 6);
      MINIVLLM_TILE_LOAD(7, b + 32, kRowBytes);
      MINIVLLM_TILE_BF16_PRODUCTS(1, 4, 7);
      ask(next, (lines + half) / 2);
      MINIVLLM_TILE_LOAD(5, x + s * kTile + stride, 64);
      MINIVLLM_TILE_BF16_PRODUCTS(2, 5, 6);
      MINIVLLM_TILE_BF16_PRODUCTS(3, 5, 7);
    }
    store_sums(sums, sums + 16, below, below + 16, kRowBytes);
  }
}

// sums[16][64] or, of `two` tiles, [32][64] = (clear ? 0 : sums) + x times panel [16 *
// steps][64][2]. x is what tile_rows makes, the next 16 rows `stride` on. Each step asks for
// `lines` lines of memory from `next` on.
inline void multiply_tiles(bool two, const TileRow* x, int64_t stride, const uint16_t* panel,
                           int64_t steps, const char* next, int64_t lines, bool clear,
                           float* sums) {
  asm volatile("" : : : "memory");  // GCC's intrinsics do not say that tiles are loaded from memory
  if (two) return multiply_32(x, stride, panel, steps, next, lines, clear, sums);
  multiply_16(x, panel, steps, next, lines, clear, sums);
}

#endif

}  // namespace minivllm
#endif
