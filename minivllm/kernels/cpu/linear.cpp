// See linear.h.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "expand.h"
#include "finish.h"
#include "linear_int8.h"
#include "matrix_unit.h"
#include "products.h"
#include "vector.h"

namespace minivllm {

void pack_panel(Format format, const uint8_t* rows, int64_t count, int64_t inputs, uint8_t* panel) {
  const int64_t pairs = inputs / 2;
  if (format >= Format::kInt8Quads) return pack_quads(format, rows, count, inputs, panel);
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
        uint8_t* byte = panel + p * kPanel * 2 + place_of_bytes(n);
        byte[0] = stored_byte(first);
        byte[1] = stored_byte(second);
      } else {
        // 128 codes of a pair in 64 bytes: low halves are outputs 0..31, high halves
        // outputs 32..63.
        uint8_t* byte = panel + p * kPanel + (n % 32) * 2;
        byte[0] = n < 32 ? first : byte[0] | (first << 4);
        byte[1] = n < 32 ? second : byte[1] | (second << 4);
      }
    }
}

#ifndef MINIVLLM_PRODUCTS

bool has_linear() { return false; }
void linear(const BFloat16*, int64_t, int64_t, const Weight&, const BFloat16*, BFloat16*) {}

#else

bool has_linear() { return true; }

namespace {

constexpr bool kFloats = std::is_same_v<Factor, float>;
constexpr int64_t kRowBlock =
    256;  // of activations that a panel meets before the next block; whole tiles
constexpr int64_t kPiece =
    256 / sizeof(Factor);        // inputs of a panel at a time: they stay in the first-level cache
constexpr int64_t kGroup = 256;  // the same of a weight that has its scales by groups, at most
constexpr int64_t kAhead =
    3072;  // bytes that are asked for before they are needed; whole pages ahead were slower

// Some rows of activations meet a piece of a panel.
struct Piece {
  const Factor* x;        // [rows][stride]
  const TileRow* tiles;   // the same rows for the matrix unit, or null
  int64_t stride;         // of x; of tiles from 16 rows to the next
  const Factor* weights;  // as multiply_rows takes them
  const Stored* stored;   // the same as they lie, where they are converted on the way; else null
  const Levels* levels;   // of these
  int64_t pairs;          // of inputs
  const char* next;       // what to ask memory for meanwhile
  int64_t lines;          // of 64 bytes, for each step
  Totals totals;
};

// Adds the products of up to 6 rows, or 32 of tiles, to their totals, which have room for whole
// tiles.
void add(int64_t rows, const Piece& piece) {
  const Totals& totals = piece.totals;
  if (piece.stored)
    return multiply_stored(rows, *piece.stored, *piece.levels, piece.x, piece.stride, piece.next,
                           piece.lines, totals);
  if (!piece.tiles)
    return multiply_rows(rows, piece.x, piece.stride, piece.weights, piece.pairs, piece.next,
                         piece.lines, totals);
  alignas(64) float apart[kTiledRows * kPanel];
  float* sums = totals.scale ? apart : totals.to;
  multiply_tiles(rows > kTile, piece.tiles, piece.stride, piece.weights, piece.pairs / kPairs,
                 piece.next, piece.lines, totals.first || totals.scale, sums);
  if (!totals.scale) return;
  for (int64_t n = 0; n < kPanel; n += kLanes) {
    const Vector scale = load(totals.scale + n),
                 zero = totals.zero ? load(totals.zero + n) : Vector{};
    for (int64_t m = 0; m < rows; ++m) totals.add(m, n, load(sums + m * kPanel + n), scale, zero);
  }
}

// A block of activations, and what is made of them.
struct Block {
  const BFloat16* given;  // [rows][given_stride]
  int64_t given_stride, rows, inputs, group;
  const Factor* x;  // the same as factors, [rows][stride]
  int64_t stride;
  TileRow* tiles;  // the same for the matrix unit, [rows / 16][inputs / 32][16]; null where it is
                   // not used
  float* floats;   // the memory of x, where factors are floats
  float* input_sums;  // of each group, [rows][groups], for weights with zeros; else null
};

// Fills in what is made of up to 16 rows from m on.
void prepare(const Block& block, int64_t m) {
  const int64_t count = std::min(kTile, block.rows - m), groups = block.inputs / block.group;
  if (block.tiles)
    tile_rows(block.x + m * block.stride, block.stride, count, block.inputs,
              block.tiles + m * block.inputs / kTileInputs);
  for (int64_t row = m; row < m + count; ++row) {
    if (block.floats) {
      const BFloat16* from = block.given + row * block.given_stride;
      float* to = block.floats + row * block.inputs;
      int64_t k = 0;
      for (; k + kLanes <= block.inputs; k += kLanes) store(to + k, load(from + k));
      for (; k < block.inputs; ++k) to[k] = load_one(from + k);
    }
    if (block.input_sums)
      for (int64_t g = 0; g < groups; ++g)
        block.input_sums[row * groups + g] =
            sum_of(block.x + row * block.stride + g * block.group, block.group);
  }
}

// All rows times one panel.
void panel_product(const Block& block, const Weight& weight, int64_t panel, const Levels& levels,
                   Factor* scratch, float* totals, const BFloat16* bias, BFloat16* out) {
  const int64_t inputs = weight.inputs, rows = block.rows, groups = inputs / weight.group;
  const uint8_t* data = weight.data + panel * panel_bytes(weight.format, inputs);
  const bool tiled = block.tiles;
  // Scales of groups multiply the sums of each group; those of whole outputs the totals.
  const bool grouped =
      weight.format > Format::kInt8 || (weight.format == Format::kInt8 && groups > 1);
  const bool plain =
      weight.format == Format::kBfloat16 && !kFloats;  // weights are factors as they lie
  const int64_t most = tiled ? kTiledRows : kRows, passes = (rows + most - 1) / most;
  const bool once = rows <= (tiled ? kTile : kRows);            // a weight is read once
  const bool direct = !plain && !tiled && rows <= kStoredRows;  // and converted on the way
  // All groups of a panel that is converted on the way are multiplied in one call.
  const bool whole = direct ? grouped || !kFloats : plain && tiled && once;
  const int64_t width = whole ? inputs : grouped ? weight.group : kPiece;
  // Converting a piece and the passes over it share the asking for the next one, or some would wait
  // for memory while others leave it idle.
  const int64_t all = panel_bytes(weight.format, 2 * kPairs) / 64;  // lines of a step
  const int64_t sharers = plain ? passes : tiled || kFloats ? passes + 1 : 1;
  const int64_t lines = tiled || !plain ? (all + sharers - 1) / sharers
                        : passes > 3    ? 16
                        : passes > 1    ? 32
                                        : 64;
  for (int64_t k = 0; k < inputs; k += width) {
    const int64_t pairs = std::min(width, inputs - k) / 2, steps = (pairs + kPairs - 1) / kPairs;
    const int64_t size = panel_bytes(weight.format, direct ? kPiece : 2 * pairs);
    const uint8_t* from = data + panel_bytes(weight.format, k);
    const char* next =
        reinterpret_cast<const char*>(from) + (once && plain ? kAhead : std::max(size, kAhead));
    const int64_t together = direct && grouped ? 2 * pairs / weight.group : 1;  // groups
    const Stored stored{weight.format, from, pairs / together, together};
    if (!plain && !direct) expand(stored, levels, next, lines, scratch);
    const int64_t group = k / weight.group, meta = (panel * groups + group) * kPanel;
    for (int64_t m = 0, pass = 0; m < rows; ++pass) {
      const int64_t count =
          tiled ? std::min(most, rows - m) : (rows - m + passes - pass - 1) / (passes - pass);
      const int64_t asked = (plain || direct ? pass : pass + 1) * lines;
      add(count,
          {block.x + m * block.stride + k,
           tiled ? block.tiles + m * inputs / kTileInputs + k / kTileInputs * kTile : nullptr,
           tiled ? kTile * inputs / kTileInputs : block.stride,
           plain ? reinterpret_cast<const Factor*>(from) : scratch,
           direct ? &stored : nullptr,
           &levels,
           pairs,
           next + asked * steps * 64,
           asked < all ? lines : 0,
           {totals + m * kPanel, k == 0, grouped ? weight.scales + meta : nullptr,
            weight.zeros ? weight.zeros + meta : nullptr,
            weight.zeros ? block.input_sums + m * groups + group : nullptr, groups}});
      m += count;
    }
  }
  finish(totals, rows, std::min(kPanel, weight.outputs - panel * kPanel),
         weight.format == Format::kInt8 && !grouped ? weight.scales + panel * kPanel : nullptr,
         bias == nullptr ? nullptr : bias + panel * kPanel, out + panel * kPanel, weight.outputs);
}

}  // namespace

void linear(const BFloat16* x, int64_t stride, int64_t rows, const Weight& weight,
            const BFloat16* bias, BFloat16* out) {
  if (weight.format >= Format::kInt8Quads) return linear_int8(x, stride, rows, weight, bias, out);
  const int64_t panels = (weight.outputs + kPanel - 1) / kPanel, inputs = weight.inputs;
  const int64_t most =
      (std::min(rows, kRowBlock) + kTile - 1) / kTile * kTile;  // rows of a block, in whole tiles
  const Levels levels = levels_of(weight.format);
  const bool tiled =
      may_use_bf16_tiles() && inputs % kTileInputs == 0 && weight.group % kTileInputs == 0;
  thread_local std::vector<TileRow> tiles;
  thread_local std::vector<float> floats, input_sums;
  if (tiled) tiles.resize(most * inputs / kTileInputs);
  if (kFloats) floats.resize(most * inputs);
  if (weight.zeros) input_sums.resize(most * inputs / weight.group);
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const BFloat16* given = x + begin * stride;
    const Block block{given,
                      stride,
                      std::min(kRowBlock, rows - begin),
                      inputs,
                      weight.group,
                      kFloats ? reinterpret_cast<const Factor*>(floats.data())
                              : reinterpret_cast<const Factor*>(given),
                      kFloats ? inputs : stride,
                      tiled ? tiles.data() : nullptr,
                      kFloats ? floats.data() : nullptr,
                      weight.zeros ? input_sums.data() : nullptr};
#pragma omp parallel
    {
      alignas(64) Factor scratch[kGroup * kPanel];
      alignas(64) float totals[kRowBlock * kPanel];
      std::optional<MatrixUnit> unit;
      if (tiled) unit.emplace();
      if (tiled || kFloats || weight.zeros) {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < block.rows; m += kTile) prepare(block, m);
      }
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel)
        panel_product(block, weight, panel, levels, scratch, totals, bias,
                      out + begin * weight.outputs);
    }
  }
}

#endif

}  // namespace minivllm
