// See linear.h.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

constexpr int64_t kRowBlock = 192;    // of activations that a panel meets before the next block
constexpr int64_t kPiece = 256;       // inputs of a panel that are multiplied at a time, at most
constexpr int64_t kInt8Piece = 128;   // the same of kInt8: what is converted stays in the first-level cache
constexpr int64_t kAhead = 4096;      // bytes that are asked for before they are needed

// Some rows of activations meet a piece of a panel.
struct Piece {
  const uint16_t* x;  // [rows][stride]
  int64_t stride;
  const uint16_t* weights;     // bfloat16 [pairs of inputs][64][2]
  int64_t pairs;
  const char* next;            // what to ask memory for meanwhile
  const uint16_t *scale, *zero;  // of this group of inputs: bfloat16 [64] or null
  const float* input_sums;     // of this group, [rows][sums_stride]: what the zeros are multiplied by
  int64_t sums_stride;
  bool first;                  // of its panel
  float* totals;               // [rows][64]
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

// Converts `pairs` pairs of inputs of a panel to bfloat16.
void expand(Format format, const uint8_t* from, int64_t pairs, __m512i levels, uint16_t* to) {
  if (format == Format::kInt8) {
    const auto widen = [](const uint8_t* bytes) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    };
    for (int64_t i = 0; i < pairs * kPanel * 2; i += 64) {
      _mm_prefetch(from + i + kAhead, _MM_HINT_T1);
      _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(widen(from + i + 16), widen(from + i)));
      _mm512_store_si512(to + i + 32, (__m512i)_mm512_cvtne2ps_pbh(widen(from + i + 48), widen(from + i + 32)));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; ++p, from += 64, to += 128) {
    _mm_prefetch(from + kAhead, _MM_HINT_T1);
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

// What a piece adds to the totals of M rows.
template <int M, int kLines>
void add_piece(const Piece& piece) {
  __m512 sums[M][4];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n)
      sums[m][n] = piece.first || piece.scale ? _mm512_setzero_ps() : _mm512_load_ps(piece.totals + m * kPanel + 16 * n);
  multiply<M, kLines>(piece.x, piece.stride, piece.weights, piece.pairs, piece.next, sums);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n) {
      float* total = piece.totals + m * kPanel + 16 * n;
      __m512 sum = sums[m][n];
      if (piece.scale) {
        sum = _mm512_mul_ps(sum, widen(piece.scale + 16 * n));
        if (piece.zero)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(piece.input_sums[m * piece.sums_stride]), widen(piece.zero + 16 * n), sum);
        if (!piece.first) sum = _mm512_add_ps(sum, _mm512_load_ps(total));
      }
      _mm512_store_ps(total, sum);
    }
}

template <int kLines>
void add_piece_of(int64_t rows, const Piece& piece) {
  with_rows(rows, [&](auto count) { add_piece<count(), kLines>(piece); });
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

// All rows times one panel. `input_sums` are those of sum_inputs, for weights with zeros.
void panel_product(const uint16_t* x, int64_t stride, int64_t rows, const Weight& weight, int64_t panel,
                   __m512i levels, const std::vector<float>& input_sums, uint16_t* scratch, float* totals,
                   const uint16_t* bias, uint16_t* out) {
  const int64_t inputs = weight.inputs;
  const int64_t padded = (weight.outputs + kPanel - 1) / kPanel * kPanel, groups = inputs / weight.group;
  const uint8_t* data = weight.data + panel * panel_bytes(weight.format, inputs);
  const bool plain = weight.format == Format::kBfloat16, coded = weight.format > Format::kInt8;
  const int64_t width = coded ? weight.group : plain ? kPiece : kInt8Piece;
  const int64_t passes = (rows + kRows - 1) / kRows;
  // The passes over a piece share the asking for the next one, or the first would wait for memory and the others leave
  // it idle.
  const int lines = passes > 3 ? 1 : passes > 1 ? 2 : 4;
  for (int64_t k = 0; k < inputs; k += width) {
    const int64_t pairs = std::min(width, inputs - k) / 2;
    const int64_t size = panel_bytes(weight.format, 2 * pairs);
    const uint8_t* from = data + panel_bytes(weight.format, k);
    if (!plain) expand(weight.format, from, pairs, levels, scratch);
    const char* next = reinterpret_cast<const char*>(from) + (passes == 1 ? kAhead : size);
    const int64_t row = coded ? k / weight.group : 0;
    const uint16_t* scale = coded ? weight.scales + row * padded + panel * kPanel : nullptr;
    const uint16_t* zero = weight.zeros ? weight.zeros + row * padded + panel * kPanel : nullptr;
    for (int64_t m = 0, pass = 0; m < rows; ++pass) {
      const int64_t count = (rows - m + passes - pass - 1) / (passes - pass);
      const Piece piece{x + m * stride + k, stride, plain ? reinterpret_cast<const uint16_t*>(from) : scratch, pairs,
                        next + pass * lines * 64, scale, zero, zero ? input_sums.data() + m * groups + row : nullptr,
                        groups, k == 0, totals + m * kPanel};
      switch (plain && pass * lines < 4 ? lines : 0) {
        case 0: add_piece_of<0>(count, piece); break;
        case 1: add_piece_of<1>(count, piece); break;
        case 2: add_piece_of<2>(count, piece); break;
        default: add_piece_of<4>(count, piece);
      }
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
  const int64_t panels = (weight.outputs + kPanel - 1) / kPanel;
  const __m512i levels = weight.format > Format::kInt8 ? levels_of(weight.format) : _mm512_setzero_si512();
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - begin);
    const uint16_t* block = x + begin * stride;
    std::vector<float> sums;
    if (weight.zeros) sums = sum_inputs(block, stride, count, weight.inputs, weight.group);
#pragma omp parallel
    {
      alignas(64) uint16_t scratch[kPiece * kPanel];
      alignas(64) float totals[kRowBlock * kPanel];
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel)
        panel_product(block, stride, count, weight, panel, levels, sums, scratch, totals, bias,
                      out + begin * weight.outputs);
    }
  }
}

#endif

}  // namespace minivllm
