// See linear.h.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "matrix_unit.h"
#include "products.h"

namespace minivllm {

int64_t panel_bytes(Format format, int64_t inputs) {
  switch (format) {
    case Format::kBfloat16: return inputs * kPanel * 2;
    case Format::kInt8: return inputs * kPanel;
    default: return inputs * kPanel / 2;
  }
}

void pack_panel(Format format, const uint8_t* rows, int64_t count, int64_t inputs, uint8_t* panel) {
  const int64_t pairs = inputs / 2;
  if (format == Format::kBfloat16) {
    const auto* from = reinterpret_cast<const uint32_t*>(rows);
    auto* to = reinterpret_cast<uint32_t*>(panel);
    for (int64_t p = 0; p < pairs; ++p)
      for (int64_t n = 0; n < kPanel; ++n) to[p * kPanel + n] = n < count ? from[n * pairs + p] : 0;
    return;
  }
  for (int64_t p = 0; p < pairs; ++p)
    for (int64_t n = 0; n < kPanel; ++n) {
      const uint8_t first = n < count ? rows[n * inputs + 2 * p] : 0;
      const uint8_t second = n < count ? rows[n * inputs + 2 * p + 1] : 0;
      if (format == Format::kInt8) {
        panel[(p * kPanel + n) * 2] = first;
        panel[(p * kPanel + n) * 2 + 1] = second;
      } else {
        // 128 codes of a pair in 64 bytes: low halves are outputs 0..31, high halves outputs 32..63.
        uint8_t* byte = panel + p * kPanel + (n % 32) * 2;
        byte[0] = n < 32 ? first : byte[0] | (first << 4);
        byte[1] = n < 32 ? second : byte[1] | (second << 4);
      }
    }
}

#ifndef MINIVLLM_BF16_PRODUCTS

bool has_linear() { return false; }
void linear(const uint16_t*, int64_t, int64_t, const Weight&, const uint16_t*, uint16_t*) {}

#else

bool has_linear() { return true; }

namespace {

constexpr int64_t kRowBlock = 256;  // of activations that a panel meets before the next block; whole tiles
constexpr int64_t kPiece = 128;     // inputs of a panel that are multiplied at a time: they stay in the first-level cache
constexpr int64_t kGroup = 256;     // the same of a weight that has its scales by groups, at most
constexpr int64_t kPairs = kTileInputs / 2;  // of inputs that make a step
constexpr int64_t kAhead = 3072;    // bytes that are asked for before they are needed; whole pages ahead were slower

// Some rows of activations meet a piece of a panel.
struct Piece {
  const uint16_t* x;             // [rows][stride]
  const TileRow* tiles;          // the same rows for the matrix unit, or null
  int64_t stride;                // of x; of tiles from 16 rows to the next
  const uint16_t* weights;       // bfloat16 [pairs of inputs][64][2]
  int64_t pairs;
  const char* next;              // what to ask memory for meanwhile
  int64_t lines;                 // of 64 bytes, for each step
  const uint16_t *scale, *zero;  // of this group of inputs: bfloat16 [64] or null
  const float* input_sums;       // of this group, [rows][sums_stride]: what the zeros are multiplied by
  int64_t sums_stride;
  bool first;                    // of its panel
  float* totals;                 // [rows][64]
};

const float kLevels[16] = {-1.0f,
                           -0.6961928009986877f,
                           -0.5250730514526367f,
                           -0.39491748809814453f,
                           -0.28444138169288635f,
                           -0.18477343022823334f,
                           -0.09105003625154495f,
                           0.0f,
                           0.07958029955625534f,
                           0.16093020141124725f,
                           0.24611230194568634f,
                           0.33791524171829224f,
                           0.44070982933044434f,
                           0.5626170039176941f,
                           0.7229568362236023f,
                           1.0f};

uint16_t round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The bfloat16 of each code, twice: the look-up takes five bits, of which the fifth may be anything.
__m512i levels_of(Format format) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i)
    table[i] = round_to_bfloat16(format == Format::kAffine4 ? static_cast<float>(i % 16 - 8) : kLevels[i % 16]);
  return _mm512_load_si512(table);
}

// Converts `pairs` pairs of inputs of a panel to bfloat16, and asks for `lines` lines of memory for each 16 of them.
void expand(Format format, const uint8_t* from, int64_t pairs, __m512i levels, const char* next, int64_t lines,
            uint16_t* to) {
  if (format == Format::kInt8) {
    const auto widen = [](const uint8_t* bytes) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    };
    for (int64_t p = 0; p < pairs; ++p, from += 128, to += 128) {
      if (p % kPairs == 0) ask(next, lines);
      for (int i = 0; i < 128; i += 32)
        _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(widen(from + i + 16), widen(from + i)));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; ++p, from += 64, to += 128) {
    if (p % kPairs == 0) ask(next, lines);
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * half));
      const __m512i words = _mm512_cvtepu8_epi16(bytes);
      _mm512_store_si512(to + 32 * half, _mm512_permutexvar_epi16(words, levels));
      _mm512_store_si512(to + 64 + 32 * half,
                         _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), levels));
    }
  }
}

__m512 widen(const uint16_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Adds the sums of `count` rows, 16 columns from `n` on, to their totals.
template <typename Sums>
inline void settle(const Piece& piece, int64_t count, int64_t n, const Sums& sum_of) {
  const __m512 zeros = _mm512_setzero_ps();
  const __m512 scale = piece.scale ? widen(piece.scale + n) : zeros, zero = piece.zero ? widen(piece.zero + n) : zeros;
  for (int64_t m = 0; m < count; ++m) {
    float* total = piece.totals + m * kPanel + n;
    __m512 sum = sum_of(m);
    if (piece.scale) {
      sum = _mm512_mul_ps(sum, scale);
      if (piece.zero) sum = _mm512_fmadd_ps(_mm512_set1_ps(piece.input_sums[m * piece.sums_stride]), zero, sum);
      if (!piece.first) sum = _mm512_add_ps(sum, _mm512_load_ps(total));
    }
    _mm512_store_ps(total, sum);
  }
}

// What a piece adds to the totals of M rows.
template <int M, int kLines>
void add_piece(const Piece& piece) {
  __m512 sums[M][4];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n)
      sums[m][n] = piece.first || piece.scale ? _mm512_setzero_ps() : _mm512_load_ps(piece.totals + m * kPanel + 16 * n);
  multiply<M, kLines>(piece.x, piece.stride, piece.weights, piece.pairs, piece.next, sums);
  for (int n = 0; n < 4; ++n) settle(piece, M, 16 * n, [&](int64_t m) { return sums[m][n]; });
}

// The same of up to 6 rows.
void add_rows(int64_t rows, const Piece& piece) {
  with_rows(rows, [&](auto count) {
    switch (piece.lines / kPairs) {
      case 0: return add_piece<count(), 0>(piece);
      case 1: return add_piece<count(), 1>(piece);
      case 2: return add_piece<count(), 2>(piece);
      default: return add_piece<count(), 4>(piece);
    }
  });
}

// The same of up to 32 rows by the matrix unit; the totals have room for whole tiles.
void add_tiles(int64_t rows, const Piece& piece) {
  alignas(64) float apart[kTiledRows * kPanel];
  float* sums = piece.scale ? apart : piece.totals;
  multiply_tiles(rows > kTile, piece.tiles, piece.stride, piece.weights, piece.pairs / kPairs, piece.next, piece.lines,
                 piece.first || piece.scale, sums);
  if (!piece.scale) return;
  for (int64_t n = 0; n < kPanel; n += 16)
    settle(piece, rows, n, [&](int64_t m) { return _mm512_load_ps(sums + m * kPanel + n); });
}

void store(const float* totals, int64_t rows, int64_t columns, const uint16_t* bias, uint16_t* out,
           int64_t out_stride) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; n += 16) {
      const auto mask = static_cast<__mmask16>(columns - n >= 16 ? 0xFFFF : (1 << (columns - n)) - 1);
      __m512 sum = _mm512_load_ps(totals + m * kPanel + n);
      if (bias != nullptr) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias + n));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
      }
      _mm256_mask_storeu_epi16(out + m * out_stride + n, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

// Sums of each group of inputs, [rows][groups], for weights with zeros.
std::vector<float> sum_inputs(const uint16_t* x, int64_t stride, int64_t rows, int64_t inputs, int64_t group) {
  const int64_t groups = inputs / group;
  std::vector<float> sums(rows * groups);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t g = 0; g < groups; ++g) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t k = 0; k < group; k += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + m * stride + g * group + k), ones);
      sums[m * groups + g] = _mm512_reduce_add_ps(sum);
    }
  return sums;
}

// A block of activations.
struct Block {
  const uint16_t* x;
  int64_t stride, rows;
  TileRow* tiles;                 // the same for the matrix unit, [rows / 16][inputs / 32][16]; null where it is not used
  std::vector<float> input_sums;  // of sum_inputs, for weights with zeros
};

// All rows times one panel.
void panel_product(const Block& block, const Weight& weight, int64_t panel, __m512i levels, uint16_t* scratch,
                   float* totals, const uint16_t* bias, uint16_t* out) {
  const int64_t inputs = weight.inputs, rows = block.rows, groups = inputs / weight.group;
  const uint8_t* data = weight.data + panel * panel_bytes(weight.format, inputs);
  const bool plain = weight.format == Format::kBfloat16, coded = weight.format > Format::kInt8, tiled = block.tiles;
  const int64_t most = tiled ? kTiledRows : kRows, passes = (rows + most - 1) / most;
  const bool once = rows <= (tiled ? kTile : kRows);  // a weight is read once
  const int64_t width = coded ? weight.group : plain && tiled && once ? inputs : kPiece;
  // Converting a piece and the passes over it share the asking for the next one, or some would wait for memory while
  // others leave it idle.
  const int64_t all = panel_bytes(weight.format, 2 * kPairs) / 64;  // lines of a step
  const int64_t sharers = plain ? passes : tiled ? passes + 1 : 1;
  const int64_t lines = tiled || !plain ? (all + sharers - 1) / sharers : passes > 3 ? 16 : passes > 1 ? 32 : 64;
  for (int64_t k = 0; k < inputs; k += width) {
    const int64_t pairs = std::min(width, inputs - k) / 2, steps = (pairs + kPairs - 1) / kPairs;
    const int64_t size = panel_bytes(weight.format, 2 * pairs);
    const uint8_t* from = data + panel_bytes(weight.format, k);
    const char* next = reinterpret_cast<const char*>(from) + (once && plain ? kAhead : std::max(size, kAhead));
    if (!plain) expand(weight.format, from, pairs, levels, next, lines, scratch);
    const int64_t group = k / weight.group, meta = (panel * groups + group) * kPanel;
    for (int64_t m = 0, pass = 0; m < rows; ++pass) {
      const int64_t count = tiled ? std::min(most, rows - m) : (rows - m + passes - pass - 1) / (passes - pass);
      const int64_t asked = (plain ? pass : pass + 1) * lines;
      const Piece piece{block.x + m * block.stride + k,
                        tiled ? block.tiles + m * inputs / kTileInputs + k / kTileInputs * kTile : nullptr,
                        tiled ? kTile * inputs / kTileInputs : block.stride,
                        plain ? reinterpret_cast<const uint16_t*>(from) : scratch,
                        pairs,
                        next + asked * steps * 64,
                        asked < all ? lines : 0,
                        coded ? weight.scales + meta : nullptr,
                        weight.zeros ? weight.zeros + meta : nullptr,
                        weight.zeros ? block.input_sums.data() + m * groups + group : nullptr,
                        groups,
                        k == 0,
                        totals + m * kPanel};
      tiled ? add_tiles(count, piece) : add_rows(count, piece);
      m += count;
    }
  }
  if (weight.format == Format::kInt8)  // one scale for each output
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < kPanel; n += 16) {
        float* total = totals + m * kPanel + n;
        _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), widen(weight.scales + panel * kPanel + n)));
      }
  store(totals, rows, std::min(kPanel, weight.outputs - panel * kPanel),
        bias == nullptr ? nullptr : bias + panel * kPanel, out + panel * kPanel, weight.outputs);
}

}  // namespace

void linear(const uint16_t* x, int64_t stride, int64_t rows, const Weight& weight, const uint16_t* bias,
            uint16_t* out) {
  const int64_t panels = (weight.outputs + kPanel - 1) / kPanel, inputs = weight.inputs;
  const __m512i levels = weight.format > Format::kInt8 ? levels_of(weight.format) : _mm512_setzero_si512();
  const bool tiled = may_use_matrix_unit() && inputs % kTileInputs == 0 && weight.group % kTileInputs == 0;
  thread_local std::vector<TileRow> room;
  if (tiled) room.resize((std::min(rows, kRowBlock) + kTile - 1) / kTile * kTile * inputs / kTileInputs);
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    Block block{x + begin * stride, stride, std::min(kRowBlock, rows - begin), tiled ? room.data() : nullptr, {}};
    if (weight.zeros) block.input_sums = sum_inputs(block.x, stride, block.rows, inputs, weight.group);
#pragma omp parallel
    {
      alignas(64) uint16_t scratch[kGroup * kPanel];
      alignas(64) float totals[kRowBlock * kPanel];
      std::optional<MatrixUnit> unit;
      if (tiled) {
        unit.emplace();
#pragma omp for schedule(static)
        for (int64_t m = 0; m < block.rows; m += kTile)
          tile_rows(block.x + m * stride, stride, block.rows - m, inputs, block.tiles + m * inputs / kTileInputs);
      }
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel)
        panel_product(block, weight, panel, levels, scratch, totals, bias, out + begin * weight.outputs);
    }
  }
}

#endif

}  // namespace minivllm
