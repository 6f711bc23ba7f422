// Products of 8-bit integers by the matrix unit (AMX), from the same panels as other products take.
#pragma once
#include "int8_vectors.h"
#include "tile_unit.h"

#if defined(MINIVLLM_TWIN_TILES) || (defined(MINIVLLM_MATRIX_UNIT) && defined(__AMX_INT8__))
#define MINIVLLM_INT8_TILES 1
#endif

namespace minivllm {

constexpr int64_t kTileRows = 16;       // of activations, or of sums
constexpr int64_t kMostTileQuads = 16;  // of inputs that a tile holds

#ifndef MINIVLLM_INT8_TILES

inline bool may_use_int8_tiles() { return false; }
struct Int8Tiles {
  explicit Int8Tiles(int64_t) {}
};
inline void multiply_int8_tiles(bool, const int8_t*, int64_t, const uint8_t*, int64_t, int64_t,
                                const char*, int64_t, int32_t*) {}

#else

inline bool may_use_int8_tiles() { return may_use_matrix_unit(); }

// Tiles 0 to 3 hold sums, 4 and 5 activations of as many quads, 6 and 7 weights of them.
class Int8Tiles {
 public:
  explicit Int8Tiles(int64_t quads)
      : unit_(static_cast<uint16_t>(4 * quads), static_cast<uint8_t>(quads)) {}

 private:
  MatrixUnit unit_;
};

// Sums [16 or, of `two` tiles of rows, 32][64] of rows x [rows][stride] times `steps` tiles of
// `quads` inputs of a panel. Each step asks for `lines` lines of memory from `next` on.
inline void multiply_int8_tiles(bool two, const int8_t* x, int64_t stride, const uint8_t* panel,
                                int64_t steps, int64_t quads, const char* next, int64_t lines,
                                int32_t* sums) {
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
      MINIVLLM_TILE_INT8_PRODUCTS(0, 4, 6);
      MINIVLLM_TILE_LOAD(7, b + 64, kRowBytes);
      MINIVLLM_TILE_INT8_PRODUCTS(1, 4, 7);
      ask(next, (lines + half) / 2);
      if (!two) continue;
      MINIVLLM_TILE_LOAD(5, below + 4 * s * quads, stride);
      MINIVLLM_TILE_INT8_PRODUCTS(2, 5, 6);
      MINIVLLM_TILE_INT8_PRODUCTS(3, 5, 7);
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
