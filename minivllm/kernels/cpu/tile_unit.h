// The instructions of the matrix unit (AMX) of processors that have one; and their twin in plain
// C++ where MINIVLLM_TWIN_TILES is defined, which is for tests. Compiled without either, there is
// no unit.
#pragma once
#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(MINIVLLM_TWIN_TILES)
#define MINIVLLM_MATRIX_UNIT 1
#define MINIVLLM_TILE_ZERO(tile) minivllm::twin_tiles[tile].zero()
#define MINIVLLM_TILE_LOAD(tile, from, stride) minivllm::twin_tiles[tile].load(from, stride)
#define MINIVLLM_TILE_STORE(tile, to, stride) minivllm::twin_tiles[tile].store(to, stride)
#define MINIVLLM_TILE_BF16_PRODUCTS(sums, x, weights) minivllm::add_bf16_twins(sums, x, weights)
#define MINIVLLM_TILE_INT8_PRODUCTS(sums, x, weights) minivllm::add_int8_twins(sums, x, weights)
#elif defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MINIVLLM_MATRIX_UNIT 1
#define MINIVLLM_TILE_ZERO(tile) _tile_zero(tile)
#define MINIVLLM_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define MINIVLLM_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define MINIVLLM_TILE_BF16_PRODUCTS(sums, x, weights) _tile_dpbf16ps(sums, x, weights)
#define MINIVLLM_TILE_INT8_PRODUCTS(sums, x, weights) _tile_dpbsud(sums, x, weights)
#endif

namespace minivllm {

#if defined(MINIVLLM_TWIN_TILES)

struct TwinTile {
  int64_t rows, bytes;
  uint8_t data[16][64];

  void zero() { std::memset(data, 0, sizeof data); }
  void load(const void* from, int64_t stride) {
    zero();
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(data[r], static_cast<const uint8_t*>(from) + r * stride, bytes);
  }
  void store(void* to, int64_t stride) const {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<uint8_t*>(to) + r * stride, data[r], bytes);
  }
};
inline thread_local TwinTile twin_tiles[8];

// sums += x times weights, [rows][k / 4][4] signed bytes and [k / 4][columns][4] unsigned ones.
inline void add_int8_twins(int sums, int x, int weights) {
  auto &c = twin_tiles[sums], &a = twin_tiles[x], &b = twin_tiles[weights];
  for (int64_t m = 0; m < c.rows; ++m)
    for (int64_t n = 0; n < c.bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, &c.data[m][4 * n], 4);
      for (int64_t k = 0; k < a.bytes; ++k)
        sum += static_cast<int8_t>(a.data[m][k]) * b.data[k / 4][4 * n + k % 4];
      std::memcpy(&c.data[m][4 * n], &sum, 4);
    }
}

// The same of pairs of bfloat16, with sums in float32.
inline void add_bf16_twins(int sums, int x, int weights) {
  auto &c = twin_tiles[sums], &a = twin_tiles[x], &b = twin_tiles[weights];
  const auto number = [](const uint8_t* from) {
    BFloat16 value;
    std::memcpy(&value, from, sizeof value);
    return load_one(&value);
  };
  for (int64_t m = 0; m < c.rows; ++m)
    for (int64_t n = 0; n < c.bytes / 4; ++n) {
      float sum;
      std::memcpy(&sum, &c.data[m][4 * n], 4);
      for (int64_t k = 0; k < a.bytes; k += 2)
        sum += number(&a.data[m][k]) * number(&b.data[k / 4][4 * n + k % 4]);
      std::memcpy(&c.data[m][4 * n], &sum, 4);
    }
}

inline bool may_use_matrix_unit() { return true; }

// The unit's twin of this thread, with the same shapes of tiles as the class below sets.
struct MatrixUnit {
  explicit MatrixUnit(uint16_t bytes = 64, uint8_t rows_of_second = 16) {
    for (int t = 0; t < 8; ++t) {
      twin_tiles[t].rows = t < 6 ? 16 : rows_of_second;
      twin_tiles[t].bytes = t == 4 || t == 5 ? bytes : 64;
    }
  }
};

#elif defined(MINIVLLM_MATRIX_UNIT)

// Whether the system lets this process use the matrix unit, which it must be asked (Linux 5.16).
inline bool may_use_matrix_unit() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// This thread's matrix unit, set to eight tiles of 16 rows of 64 bytes for as long as this lives;
// or with other rows of tiles 4 and 5, and as many rows of tiles 6 and 7 as make a product with
// these.
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
    asm volatile("ldtilecfg %0"
                 :
                 : "m"(shape));  // GCC's intrinsic reads but 8 bytes of it, as far as GCC knows
  }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

#else

inline bool may_use_matrix_unit() { return false; }
class MatrixUnit {};

#endif

}  // namespace minivllm
