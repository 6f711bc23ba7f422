// See linear_int8.h.
#include "linear_int8.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "finish.h"
#include "int8_rows.h"
#include "int8_tiles.h"
#include "int8_vectors.h"

namespace minivllm {

void pack_quads(Format format, const uint8_t* rows, int64_t count, int64_t inputs, uint8_t* panel) {
  const auto byte = [&](int64_t n, int64_t k) {
    return n < count ? rows[n * inputs + k] : uint8_t{0};
  };
  for (int64_t k = 0; k < inputs; ++k)
    for (int64_t n = 0; n < kPanel; ++n) {
      if (format == Format::kInt8Quads)
        panel[(k / 4 * kPanel + n) * 4 + k % 4] = byte(n, k) ^ 128;  // from 0 on
      else if (n < kPanel / 2)  // low halves are outputs 0..31, high halves outputs 32..63
        panel[(k / 4 * kPanel / 2 + n) * 4 + k % 4] =
            static_cast<uint8_t>(byte(n, k) | byte(n + kPanel / 2, k) << 4);
    }
}

namespace {

constexpr int64_t kRowBlock = 256;  // of activations that a panel meets before the next block
constexpr int64_t kPiece = 512;  // inputs of a panel at a time: they stay in the second-level cache
constexpr int64_t kQuads = 8;    // that make a step: memory is asked for once in each
constexpr int64_t kAhead = 3072;  // bytes that are asked for before they are needed
#if defined(MINIVLLM_DOT_PRODUCTS) || defined(MINIVLLM_ONE_BY_ONE)
constexpr int kHeld =
    kLanes == 16 ? 4 : 2;  // vectors of columns whose sums of six rows stay in registers
#else
constexpr int kHeld = kLanes == 16 ? 4 : 1;
#endif
// Rows that meet four bits as they are stored (where the weight does not say), and how many at a
// time: converting them takes other execution units than products do, so it is cheaper than storing
// and loading bytes for some passes.
constexpr int kDirectPass = kLanes == 16 ? kRows : 1;
constexpr int64_t kDirectRows = kLanes == 16 ? 8 * kRows : 1;

// How a piece of a panel lies, and what it is multiplied by: a scale for each output in the end, or
// one for each group of its inputs, or a zero too.
enum class Kind { kBytes, kCodes, kHalves };
enum class Scaling { kOutputs, kGroups, kZeros };

// Some rows of activations meet a piece of a panel.
struct Piece {
  const Int8Rows& x;
  int64_t row, input;              // the first
  int64_t groups, quads;           // of inputs; of each group
  const uint8_t* weights;          // [groups * quads][64][4], of kHalves [32][4]
  const BFloat16 *scales, *zeros;  // [groups][64]
  const char* next;                // what to ask memory for meanwhile
  int64_t lines;                   // of 64 bytes, for each step
  float* totals;                   // [rows][64]
};

// What a group's products add to a total: the sum of integers times the scales of activations and
// weight, and the sum of activations times the zero.
template <Scaling kScaling>
MINIVLLM_INLINE inline Vector total_of(Integers products, float x_scale, float x_sum, Vector scale,
                                       Vector zero, Vector total) {
  const Vector sum = __builtin_convertvector(products, Vector) * x_scale;
  total = kScaling == Scaling::kOutputs ? total + sum : total + sum * scale;
  return kScaling == Scaling::kZeros ? total + x_sum * zero : total;
}

// The bytes of kCount vectors of columns from `begin` on.
template <Kind kKind, int kCount>
MINIVLLM_INLINE inline void load_quad(const uint8_t* from, int begin,
                                      Factors<kKind != Kind::kBytes> (&to)[kCount]) {
  if constexpr (kKind == Kind::kHalves) {
    static_assert(kCount == kVectors);
    each<kCount / 2>([&](auto n) MINIVLLM_INLINE {
      const Bytes both = load_bytes(from + 4 * kLanes * n);
      to[n] = factors_of<true>(both & 15);
      to[n + kCount / 2] = factors_of<true>(both >> 4);
    });
  } else {
    each<kCount>([&](auto n) MINIVLLM_INLINE {
      to[n] = factors_of<kKind != Kind::kBytes>(load_bytes(from + 4 * kLanes * (begin + n)));
    });
  }
}

// Adds the products of M rows with kCount vectors of columns, from `begin` on, to their totals.
template <Kind kKind, Scaling kScaling, int M, int kCount>
[[gnu::noinline]] void add_columns(const Piece& piece, int begin) {
  constexpr bool kCodes = kKind != Kind::kBytes;
  constexpr int64_t kBytes = kKind == Kind::kHalves ? 2 * kPanel : 4 * kPanel;  // of four inputs
  const int64_t stride = piece.x.stride(), groups = piece.x.groups();
  const int64_t group = piece.input / 4 / piece.quads;
  const float *x_scales = piece.x.scales(piece.row, group),
              *x_sums = piece.x.sums(piece.row, group);
  const int32_t* starts = piece.x.starts(piece.row, group);
  const int8_t* x = piece.x.values(piece.row, piece.input);
  const uint8_t* weights = piece.weights;
  const char* next = piece.next;
  for (int64_t g = 0; g < piece.groups; ++g) {
    Integers held[M][kCount];
    each<M>([&](auto m) MINIVLLM_INLINE {
      const Integers start = Integers{} + starts[m * groups + g];
      each<kCount>([&](auto n) MINIVLLM_INLINE { held[m][n] = start; });
    });
    for (int64_t q = 0; q < piece.quads; q += kQuads) {
      ask(next, piece.lines);
      const int64_t end = std::min(kQuads, piece.quads - q);
      for (int64_t i = 0; i < end; ++i, weights += kBytes, x += 4) {
        Factors<kCodes> b[kCount];
        load_quad<kKind>(weights, begin, b);
        each<M>([&](auto m) MINIVLLM_INLINE {
          const Bytes a = splat_quad(x + m * stride);
          each<kCount>([&](auto n) MINIVLLM_INLINE {
            held[m][n] = add_products<kCodes>(held[m][n], b[n], a);
          });
        });
      }
    }
    each<kCount>([&](auto n) MINIVLLM_INLINE {
      const int64_t column = (begin + n) * kLanes, at = g * kPanel + column;
      const Vector scale = kScaling == Scaling::kOutputs ? Vector{} : load(piece.scales + at);
      const Vector zero = kScaling == Scaling::kZeros ? load(piece.zeros + at) : Vector{};
      each<M>([&](auto m) MINIVLLM_INLINE {
        float* to = piece.totals + m * kPanel + column;
        const int64_t i = m * groups + g;
        store(to, total_of<kScaling>(held[m][n], x_scales[i], x_sums[i], scale, zero, load(to)));
      });
    });
  }
}

// Adds the products of up to 6 rows with a piece to their totals.
template <Kind kKind, Scaling kScaling>
void add_rows(int64_t rows, const Piece& piece) {
  if constexpr (kKind == Kind::kHalves) {
    with_rows<kDirectPass>(
        rows, [&](auto count) { add_columns<kKind, kScaling, count(), kVectors>(piece, 0); });
  } else if (rows == 1) {
    add_columns<kKind, kScaling, 1, kVectors>(piece, 0);
  } else {
    Piece part = piece;
    for (int begin = 0; begin < kVectors; begin += kHeld, part.lines = 0)
      with_rows<kRows>(
          rows, [&](auto count) { add_columns<kKind, kScaling, count(), kHeld>(part, begin); });
  }
}

template <Kind kKind>
void add_rows(int64_t rows, const Piece& piece) {
  if (piece.zeros) return add_rows<kKind, Scaling::kZeros>(rows, piece);
  if (piece.scales) return add_rows<kKind, Scaling::kGroups>(rows, piece);
  if constexpr (kKind == Kind::kBytes) add_rows<kKind, Scaling::kOutputs>(rows, piece);
}

// The same for up to 32 rows by the matrix unit, whose tiles hold `quads` of inputs.
template <Scaling kScaling>
void add_tiles(int64_t rows, int64_t quads, const Piece& piece) {
  alignas(64) int32_t sums[2 * kTileRows * kPanel];
  const Int8Rows& x = piece.x;
  const bool two = rows > kTileRows;
  const int64_t first = piece.input / 4 / piece.quads, steps = piece.quads / quads;
  const int64_t lines = piece.lines * quads / kQuads;
  for (int64_t g = 0; g < piece.groups; ++g) {
    const int64_t group = first + g;
    multiply_int8_tiles(two, x.values(piece.row, 4 * group * piece.quads), x.stride(),
                        piece.weights + g * piece.quads * 4 * kPanel, steps, quads,
                        piece.next + g * steps * lines * 64, lines, sums);
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const Vector scale =
          kScaling == Scaling::kOutputs ? Vector{} : load(piece.scales + g * kPanel + n);
      const Vector zero =
          kScaling == Scaling::kZeros ? load(piece.zeros + g * kPanel + n) : Vector{};
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t row = piece.row + m;
        const Integers products =
            *reinterpret_cast<const Integers*>(sums + m * kPanel + n) + *x.starts(row, group);
        float* to = piece.totals + m * kPanel + n;
        store(to, total_of<kScaling>(products, *x.scales(row, group), *x.sums(row, group), scale,
                                     zero, load(to)));
      }
    }
  }
}

void add_tiles(int64_t rows, int64_t quads, const Piece& piece) {
  if (piece.zeros) return add_tiles<Scaling::kZeros>(rows, quads, piece);
  if (piece.scales) return add_tiles<Scaling::kGroups>(rows, quads, piece);
  add_tiles<Scaling::kOutputs>(rows, quads, piece);
}

// Codes [quads][32][4], two in a byte, become [quads][64][4].
void expand(const uint8_t* from, int64_t quads, uint8_t* to) {
  for (int64_t q = 0; q < quads; ++q, from += 2 * kPanel, to += 4 * kPanel)
    each<kVectors / 2>([&](auto n) MINIVLLM_INLINE {
      const Bytes both = load_bytes(from + 4 * kLanes * n);
      *reinterpret_cast<Bytes*>(to + 4 * kLanes * n) = both & 15;
      *reinterpret_cast<Bytes*>(to + 4 * kLanes * n + 2 * kPanel) = both >> 4;
    });
}

// All rows times one panel, by the matrix unit if its tiles hold `tile_quads` of inputs; `direct`:
// codes as they are stored.
void panel_product(const Int8Rows& x, int64_t rows, const Weight& weight, bool grouped,
                   int64_t tile_quads, bool direct, int64_t panel, uint8_t* scratch, float* totals,
                   const BFloat16* bias, BFloat16* out) {
  const int64_t inputs = weight.inputs, group = weight.group, groups = inputs / group;
  const bool coded = is_affine(weight.format);
  const int64_t most = tile_quads ? 2 * kTileRows
                       : direct   ? kDirectPass
                                  : kRows,
                passes = (rows + most - 1) / most;
  const int64_t bytes = coded ? kPanel / 2 : kPanel;  // of an input
  const uint8_t* data = weight.data + panel * inputs * bytes;
  const int64_t width = std::max<int64_t>(1, kPiece / group) * group;
  const int64_t all = 4 * kQuads * bytes / 64, lines = (all + passes - 1) / passes;  // of a step
  std::fill_n(totals, rows * kPanel, 0.0f);
  for (int64_t k = 0; k < inputs; k += width) {
    const int64_t here = std::min(width, inputs - k), size = here * bytes,
                  meta = (panel * groups + k / group) * kPanel;
    const uint8_t* from = data + k * bytes;
    const char* next =
        reinterpret_cast<const char*>(from) + (passes == 1 ? kAhead : std::max(size, kAhead));
    const bool expanded = coded && !direct;
    if (expanded) expand(from, here / 4, scratch);
    for (int64_t m = 0, pass = 0; m < rows; ++pass) {
      const int64_t count =
          tile_quads ? std::min(most, rows - m) : (rows - m + passes - pass - 1) / (passes - pass);
      const int64_t asked = pass * lines;
      const Piece piece{x,
                        m,
                        k,
                        here / group,
                        group / 4,
                        expanded ? scratch : from,
                        grouped ? weight.scales + meta : nullptr,
                        weight.zeros ? weight.zeros + meta : nullptr,
                        next + asked * (here / 4 / kQuads) * 64,
                        asked < all ? lines : 0,
                        totals + m * kPanel};
      if (tile_quads)
        add_tiles(count, tile_quads, piece);
      else if (!coded)
        add_rows<Kind::kBytes>(count, piece);
      else if (direct)
        add_rows<Kind::kHalves>(count, piece);
      else
        add_rows<Kind::kCodes>(count, piece);
      m += count;
    }
  }
  finish(totals, rows, std::min(kPanel, weight.outputs - panel * kPanel),
         grouped ? nullptr : weight.scales + panel * kPanel,
         bias == nullptr ? nullptr : bias + panel * kPanel, out + panel * kPanel, weight.outputs);
}

}  // namespace

int64_t few_rows(Format format) {
  if (format < Format::kInt8Quads) return 0;
  return may_use_int8_tiles() ? kRows : is_affine(format) ? kDirectRows : 0;
}

void linear_int8(const BFloat16* x, int64_t stride, int64_t rows, const Weight& weight,
                 const BFloat16* bias, BFloat16* out) {
  const int64_t panels = (weight.outputs + kPanel - 1) / kPanel, inputs = weight.inputs;
  const bool coded = is_affine(weight.format), grouped = coded || weight.scale_groups > 1;
  const int64_t few = weight.few_rows < 0 ? few_rows(weight.format) : weight.few_rows;
  const bool expands = coded && rows > few;
  const int64_t tile_quads =
      weight.group % (4 * kMostTileQuads) == 0 ? kMostTileQuads : kMostTileQuads / 2;
  const int32_t offset = weight.format == Format::kUnsigned4Quads ? 0
                         : coded                                  ? offset_of<true>()
                                                                  : offset_of<false>();
  Int8Rows values(inputs, weight.group, offset);
  values.resize(std::min(rows, kRowBlock));
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - begin);
    const bool tiled = count > few && may_use_int8_tiles(), direct = coded && count <= few;
#pragma omp parallel
    {
      thread_local std::vector<uint8_t> scratch;
      if (expands) scratch.resize(std::max(kPiece, weight.group) * kPanel);
      alignas(64) float totals[kRowBlock * kPanel];
      std::optional<Int8Tiles> tiles;
      if (tiled) tiles.emplace(tile_quads);
#pragma omp for schedule(static)
      for (int64_t m = 0; m < count; ++m) values.set(m, x + (begin + m) * stride);
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel)
        panel_product(values, count, weight, grouped, tiled ? tile_quads : 0, direct, panel,
                      scratch.data(), totals, bias, out + begin * weight.outputs);
    }
  }
}

}  // namespace minivllm
