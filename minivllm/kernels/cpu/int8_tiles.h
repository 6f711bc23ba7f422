// Products of 8-bit integers by the matrix unit (AMX), from the same panels as other products take; and the unit's twin
// in plain C++ where MINIVLLM_TWIN_TILES is defined, which is for tests.
#pragma once
#include "int8_vectors.h"
#include "matrix_unit.h"

#if defined(MINIVLLM_MATRIX_UNIT) && defined(__AMX_INT8__)
#define MINIVLLM_INT8_TILES 1
#define MINIVLLM_TILE_ZERO(tile) _tile_zero(tile)
#define MINIVLLM_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define MINIVLLM_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define MINIVLLM_TILE_PRODUCTS(sums, x, weights) _tile_dpbsud(sums, x, weights)
#elif defined(MINIVLLM_TWIN_TILES)
#define MINIVLLM_INT8_TILES 1
#define MINIVLLM_TILE_ZERO(tile) minivllm::twin_tiles[tile].zero()
#define MINIVLLM_TILE_LOAD(tile, from, stride) minivllm::twin_tiles[tile].load(from, stride)
#define MINIVLLM_TILE_STORE(tile, to, stride) minivllm::twin_tiles[tile].store(to, stride)
#define MINIVLLM_TILE_PRODUCTS(sums, x, weights) minivllm::add_twins(sums, x, weights)
#endif

namespace minivllm {

constexpr int64_t kTileRows = 16;      // of activations, or of sums
constexpr int64_t kMostTileQuads = 16;  // of inputs that a tile holds

#ifndef MINIVLLM_INT8_TILES

inline bool may_use_int8_tiles() { return false; }
struct Int8Tiles {
  explicit Int8Tiles(int64_t) {}
};
inline void multiply_int8_tiles(bool, const int8_t*, int64_t, const uint8_t*, int64_t, int64_t, const char*, int64_t,
                                int32_t*) {}

#else

#ifdef MINIVLLM_TWIN_TILES

struct TwinTile {
  int64_t rows, bytes;
  uint8_t data[16][64];

  void zero() { std::memset(data, 0, sizeof data); }
  void load(const void* from, int64_t stride) {
    zero();
    for (int64_t r = 0; r < rows; ++r) std::memcpy(data[r], static_cast<const uint8_t*>(from) + r * stride, bytes);
  }
  void store(void* to, int64_t stride) const {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(static_cast<uint8_t*>(to) + r * stride, data[r], bytes);
  }
};
inline thread_local TwinTile twin_tiles[8];

inline void add_twins(int sums, int x, int weights) {
  auto &c = twin_tiles[sums], &a = twin_tiles[x], &b = twin_tiles[weights];
  for (int64_t m = 0; m < c.rows; ++m)
    for (int64_t n = 0; n < c.bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, &c.data[m][4 * n], 4);
      for (int64_t k = 0; k < a.bytes; ++k) sum += static_cast<int8_t>(a.data[m][k]) * b.data[k / 4][4 * n + k % 4];
      std::memcpy(&c.data[m][4 * n], &sum, 4);
    }
}

inline bool may_use_int8_tiles() { return true; }

// Tiles 0 to 3 hold sums, 4 and 5 activations of as many quads, 6 and 7 weights of them.
struct Int8Tiles {
  explicit Int8Tiles(int64_t quads) {
    for (int64_t t = 0; t < 8; ++t) {
      twin_tiles[t].rows = t < 6 ? 16 : quads;
      twin_tiles[t].bytes = t == 4 || t == 5 ? 4 * quads : 64;
    }
  }
};

#else

inline bool may_use_int8_tiles() { return may_use_matrix_unit(); }

// Tiles 0 to 3 hold sums, 4 and 5 activations of as many quads, 6 and 7 weights of them.
class Int8Tiles {
 public:
  explicit Int8Tiles(int64_t quads) : unit_(static_cast<uint16_t>(4 * quads), static_cast<uint8_t>(quads)) {}

 private:
  MatrixUnit unit_;
};

#endif

// Sums [16 or, of `two` tiles of rows, 32][64] of rows x [rows][stride] times `steps` tiles of `quads` inputs of a panel.
// Each step asks for `lines` lines of memory from `next` on.
inline void multiply_int8_tiles(bool two, const int8_t* x, int64_t stride, const uint8_t* panel, int64_t steps,
                                int64_t quads, const char* next, int64_t lines, int32_t* sums) {
  constexpr int64_t kRowBytes = 4 * kColumns;
  asm volatile("" : : : "memory");  // see multiply_tiles
  const int8_t* below = x + kTileRows * stride;
  for (int64_t half = 0; half < 2; ++half, panel += kRowBytes / 2, sums += kColumns / 2) {
    MINIVLLM_TILE_ZERO(0);
    MINIVLLM_TILE_ZERO(1);
    MINIVLLM_TILE_ZERO(2);
    MINIVLLM_TILE_ZERO(3);
    for (int64_t s = 0; s < steps; ++s) {
      const uint8_t* b = panel + s * quads * kRowBytes;
      MINIVLLM_TILE_LOAD(4, x + 4 * s * quads, stride);
      MINIVLLM_TILE_LOAD(6, b, kRowBytes);
      MINIVLLM_TILE_PRODUCTS(0, 4, 6);
      MINIVLLM_TILE_LOAD(7, b + 64, kRowBytes);
      MINIVLLM_TILE_PRODUCTS(1, 4, 7);
      ask(next, (lines + half) / 2);
      if (!two) continue;
      MINIVLLM_TILE_LOAD(5, below + 4 * s * quads, stride);
      MINIVLLM_TILE_PRODUCTS(2, 5, 6);
      MINIVLLM_TILE_PRODUCTS(3, 5, 7);
    }
    MINIVLLM_TILE_STORE(0, sums, kRowBytes);
    MINIVLLM_TILE_STORE(1, sums + 16, kRowBytes);
    if (!two) continue;
    MINIVLLM_TILE_STORE(2, sums + kTileRows * kColumns, kRowBytes);
    MINIVLLM_TILE_STORE(3, sums + kTileRows * kColumns + 16, kRowBytes);
  }
  asm volatile("" : : : "memory");
}

#endif

}  // namespace minivllm
