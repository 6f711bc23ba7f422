// Products of up to 32 rows of bfloat16 with a panel of 64 columns by the matrix unit (AMX) of processors that have one.
// Compiled where there is none, all this does nothing and is not called.
#pragma once
#include "products.h"

#if defined(MINIVLLM_BF16_PRODUCTS) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MINIVLLM_MATRIX_UNIT 1
#endif

#ifdef MINIVLLM_PRODUCTS

namespace minivllm {

constexpr int64_t kTile = 16;             // rows of a tile: of activations, of pairs of inputs, of sums
constexpr int64_t kTileInputs = 32;       // of a tile of activations
constexpr int64_t kTiledRows = 2 * kTile;  // at a time

struct alignas(64) TileRow {
  uint16_t values[kTileInputs];
};

#ifndef MINIVLLM_MATRIX_UNIT

inline bool may_use_matrix_unit() { return false; }
class MatrixUnit {};
inline void tile_rows(const Factor*, int64_t, int64_t, int64_t, TileRow*) {}
inline void multiply_tiles(bool, const TileRow*, int64_t, const Factor*, int64_t, const char*, int64_t, bool, float*) {}

#else

// Whether the system lets this process use the matrix unit, which it must be asked (Linux 5.16).
inline bool may_use_matrix_unit() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// This thread's matrix unit, set to eight tiles of 16 rows of 64 bytes for as long as this lives; or with other rows of
// tiles 4 and 5, and as many rows of tiles 6 and 7 as make a product with these.
class MatrixUnit {
 public:
  explicit MatrixUnit(uint16_t bytes = 64, uint8_t rows_of_second = 16) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    shape.row_bytes[4] = shape.row_bytes[5] = bytes;
    shape.rows[6] = shape.rows[7] = rows_of_second;
    asm volatile("ldtilecfg %0" : : "m"(shape));  // GCC's intrinsic reads but 8 bytes of it, as far as GCC knows
  }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// Sixteen rows of activations, of which `count` are there, as tiles: [inputs / 32][16].
inline void tile_rows(const uint16_t* x, int64_t stride, int64_t count, int64_t inputs, TileRow* to) {
  for (int64_t k = 0; k < inputs; k += kTileInputs)
    for (int64_t m = 0; m < kTile; ++m, ++to)
      _mm512_store_si512(to, m < count ? _mm512_loadu_si512(x + m * stride + k) : _mm512_setzero_si512());
}

// Tiles 0 to 3, which hold sums, from and to rows of `stride` bytes.
inline void load_sums(const void* a, const void* b, const void* c, const void* d, int64_t stride) {
  _tile_loadd(0, a, stride);
  _tile_loadd(1, b, stride);
  _tile_loadd(2, c, stride);
  _tile_loadd(3, d, stride);
}

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_sums(void* a, void* b, void* c, void* d, int64_t stride) {
  _tile_stored(0, a, stride);
  _tile_stored(1, b, stride);
  _tile_stored(2, c, stride);
  _tile_stored(3, d, stride);
}

// Of multiply_tiles: 16 rows at once with all columns.
inline void multiply_16(const TileRow* x, const uint16_t* panel, int64_t steps, const char* next, int64_t lines,
                        bool clear, float* sums) {
  constexpr int kRowBytes = kColumns * 4;
  if (clear)
    clear_sums();
  else
    load_sums(sums, sums + 16, sums + 32, sums + 48, kRowBytes);
  for (int64_t s = 0; s < steps; ++s, x += kTile, panel += kTileInputs * kColumns) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, panel, kRowBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, panel + 32, kRowBytes);
    _tile_dpbf16ps(1, 4, 6);
    ask(next, lines);
    _tile_loadd(7, panel + 64, kRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, panel + 96, kRowBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  store_sums(sums, sums + 16, sums + 32, sums + 48, kRowBytes);
}

// Of multiply_tiles: 32 rows with half of the columns, then with the others.
inline void multiply_32(const TileRow* x, int64_t stride, const uint16_t* panel, int64_t steps, const char* next,
                        int64_t lines, bool clear, float* sums) {
  constexpr int kRowBytes = kColumns * 4;
  for (int half = 0; half < 2; ++half, sums += 32, panel += 64) {
    float* below = sums + kTile * kColumns;
    if (clear)
      clear_sums();
    else
      load_sums(sums, sums + 16, below, below + 16, kRowBytes);
    for (int64_t s = 0; s < steps; ++s) {
      const uint16_t* b = panel + s * kTileInputs * kColumns;
      _tile_loadd(4, x + s * kTile, 64);
      _tile_loadd(6, b, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 32, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      ask(next, (lines + half) / 2);
      _tile_loadd(5, x + s * kTile + stride, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(sums, sums + 16, below, below + 16, kRowBytes);
  }
}

// sums[16][64] or, of `two` tiles, [32][64] = (clear ? 0 : sums) + x times panel [16 * steps][64][2]. x is what tile_rows
// makes, the next 16 rows `stride` on. Each step asks for `lines` lines of memory from `next` on.
inline void multiply_tiles(bool two, const TileRow* x, int64_t stride, const uint16_t* panel, int64_t steps,
                           const char* next, int64_t lines, bool clear, float* sums) {
  asm volatile("" : : : "memory");  // GCC's intrinsics do not say that tiles are loaded from memory
  if (two) return multiply_32(x, stride, panel, steps, next, lines, clear, sums);
  multiply_16(x, panel, steps, next, lines, clear, sums);
}

#endif

}  // namespace minivllm
#endif
