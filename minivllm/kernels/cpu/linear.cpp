// See linear.h.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VL__)
#include <immintrin.h>
#define MINIVLLM_LINEAR 1
#endif

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
        // Sign and magnitude. Of 64 bytes each quarter has 8 of the first half and 8 of the second: unpacking takes
        // the quarters apart.
        const int64_t i = 2 * n % 64, half = i / 32, j = i % 32;
        uint8_t* byte = panel + p * kPanel * 2 + n / 32 * 64 + j / 8 * 16 + half * 8 + j % 8;
        byte[0] = first & 0x80 ? 0x80 | -first : first;
        byte[1] = second & 0x80 ? 0x80 | -second : second;
      } else {
        // 128 codes of a pair in 64 bytes: low halves are outputs 0..31, high halves outputs 32..63.
        uint8_t* byte = panel + p * kPanel + (n % 32) * 2;
        byte[0] = n < 32 ? first : byte[0] | (first << 4);
        byte[1] = n < 32 ? second : byte[1] | (second << 4);
      }
    }
}

#ifndef MINIVLLM_LINEAR

bool has_linear() { return false; }
void linear(const uint16_t*, int64_t, int64_t, const Weight&, const uint16_t*, uint16_t*) {}

#else

bool has_linear() { return true; }

namespace {

constexpr int64_t kRows = 6;          // of activations in registers: 24 sums, 4 weights
constexpr int64_t kRowBlock = 192;    // of activations that a panel meets before the next block
constexpr int64_t kMaxChunk = 256;    // inputs that are converted at a time, at most: 32 KiB
constexpr int64_t kChunk = 64;        // where no group says how many
constexpr int64_t kAhead = 4096;      // bytes that are asked for before they are needed

struct Chunk {
  const uint16_t* weights;  // bfloat16 [inputs / 2][64][2]
  int64_t pairs;
};

// sums[m][64] (+)= x[m][2 * pairs] times a chunk of a panel, for m < M.
template <int M>
inline void multiply(const uint16_t* x, int64_t stride, Chunk chunk, const char* next, __m512 (&sums)[M][4]) {
  const char* w = reinterpret_cast<const char*>(chunk.weights);
  for (int64_t p = 0; p < chunk.pairs; ++p, w += 256) {
    __m512bh b[4];
    for (int n = 0; n < 4; ++n) b[n] = (__m512bh)_mm512_loadu_si512(w + 64 * n);
    if (next != nullptr) {
      for (int n = 0; n < 4; ++n) _mm_prefetch(next + 64 * n, _MM_HINT_T1);
      next += 256;
    }
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * stride + 2 * p, 4);
      const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      for (int n = 0; n < 4; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], a, b[n]);
    }
  }
}

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

// The upper and lower byte of the bfloat16 of 0..127, in two registers each.
struct Magnitudes {
  alignas(64) uint8_t high[128], low[128];

  Magnitudes() {
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = round_to_bfloat16(static_cast<float>(i));
      high[i] = static_cast<uint8_t>(bits >> 8), low[i] = static_cast<uint8_t>(bits);
    }
  }
};
const Magnitudes kMagnitudes;

// Converts `pairs` pairs of inputs of a panel to bfloat16.
void expand(Format format, const uint8_t* from, int64_t pairs, __m512i levels, uint16_t* to) {
  if (format == Format::kInt8) {
    const __m512i high0 = _mm512_load_si512(kMagnitudes.high), high1 = _mm512_load_si512(kMagnitudes.high + 64);
    const __m512i low0 = _mm512_load_si512(kMagnitudes.low), low1 = _mm512_load_si512(kMagnitudes.low + 64);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int64_t i = 0; i < pairs * kPanel * 2; i += 64) {
      const __m512i bytes = _mm512_loadu_si512(from + i);  // the look-up ignores the sign
      const __m512i high = _mm512_permutex2var_epi8(high0, bytes, high1);
      const __m512i signed_high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xF8);  // high | (bytes & sign)
      const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
      _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, signed_high));
      _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, signed_high));
    }
    return;
  }
  for (int64_t p = 0; p < pairs; ++p, from += 64, to += 128) {
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

// What one chunk adds to the sums of M rows: sums in `totals` [M][64], or none before the first chunk.
template <int M>
void add_chunk(const uint16_t* x, int64_t stride, Chunk chunk, const char* next, const uint16_t* scale,
               const uint16_t* zero, const float* input_sums, int64_t sums_stride, bool first, float* totals) {
  __m512 sums[M][4];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n)
      sums[m][n] = first || scale != nullptr ? _mm512_setzero_ps() : _mm512_load_ps(totals + m * kPanel + 16 * n);
  multiply<M>(x, stride, chunk, next, sums);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 4; ++n) {
      float* total = totals + m * kPanel + 16 * n;
      __m512 sum = sums[m][n];
      if (scale != nullptr) {
        sum = _mm512_mul_ps(sum, widen(scale + 16 * n));
        if (zero != nullptr)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(input_sums[m * sums_stride]), widen(zero + 16 * n), sum);
        if (!first) sum = _mm512_add_ps(sum, _mm512_load_ps(total));
      }
      _mm512_store_ps(total, sum);
    }
}

template <typename... Args>
void add_chunk_of(int64_t count, Args... args) {
  switch (count) {
    case 1: return add_chunk<1>(args...);
    case 2: return add_chunk<2>(args...);
    case 3: return add_chunk<3>(args...);
    case 4: return add_chunk<4>(args...);
    case 5: return add_chunk<5>(args...);
    default: return add_chunk<6>(args...);
  }
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

// All rows times one panel.
void panel_product(const uint16_t* x, int64_t stride, int64_t rows, const Weight& weight, int64_t panel,
                   __m512i levels, const std::vector<float>& input_sums, uint16_t* scratch, float* totals,
                   const uint16_t* bias, uint16_t* out) {
  const int64_t inputs = weight.inputs, bytes = panel_bytes(weight.format, inputs);
  const int64_t padded = (weight.outputs + kPanel - 1) / kPanel * kPanel, groups = inputs / weight.group;
  const uint8_t* data = weight.data + panel * bytes;
  const bool plain = weight.format == Format::kBfloat16, by_group = weight.group < inputs || weight.zeros;
  const int64_t width = by_group ? weight.group : plain ? kMaxChunk : kChunk;
  for (int64_t k = 0; k < inputs; k += width) {
    const int64_t pairs = std::min(width, inputs - k) / 2;
    const int64_t begin = panel_bytes(weight.format, k), size = panel_bytes(weight.format, 2 * pairs);
    Chunk chunk{reinterpret_cast<const uint16_t*>(data + begin), pairs};
    if (!plain) {
      for (int64_t ahead = 0; ahead < size; ahead += 64) _mm_prefetch(data + begin + size + ahead, _MM_HINT_T1);
      expand(weight.format, data + begin, pairs, levels, scratch);
      chunk.weights = scratch;
    }
    const int64_t row = weight.group < inputs ? k / weight.group : 0;
    const uint16_t* scale = by_group ? weight.scales + row * padded + panel * kPanel : nullptr;
    const uint16_t* zero = weight.zeros ? weight.zeros + row * padded + panel * kPanel : nullptr;
    for (int64_t m = 0; m < rows; m += kRows) {
      // What comes from memory next is asked for while this is computed.
      const uint8_t* ahead = plain && m == 0 ? data + begin + (rows <= kRows ? kAhead : size) : nullptr;
      const char* next = reinterpret_cast<const char*>(ahead);
      add_chunk_of(std::min(kRows, rows - m), x + m * stride + k, stride, chunk, next, scale, zero,
                   zero ? input_sums.data() + m * groups + row : nullptr, groups, k == 0, totals + m * kPanel);
    }
  }
  if (!plain && !by_group)  // one scale for each output
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < kPanel; n += 16) {
        float* total = totals + m * kPanel + n;
        _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total),
                                             widen(weight.scales + panel * kPanel + n)));
      }
  store(totals, rows, std::min(kPanel, weight.outputs - panel * kPanel),
        bias == nullptr ? nullptr : bias + panel * kPanel, out + panel * kPanel, weight.outputs);
}

}  // namespace

void linear(const uint16_t* x, int64_t stride, int64_t rows, const Weight& weight, const uint16_t* bias,
            uint16_t* out) {
  const int64_t panels = (weight.outputs + kPanel - 1) / kPanel;
  const bool coded = weight.format == Format::kAffine4 || weight.format == Format::kNormal4;
  const __m512i levels = coded ? levels_of(weight.format) : _mm512_setzero_si512();
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - begin);
    const uint16_t* block = x + begin * stride;
    std::vector<float> sums;
    if (weight.zeros) sums = sum_inputs(block, stride, count, weight.inputs, weight.group);
#pragma omp parallel
    {
      alignas(64) static thread_local uint16_t scratch[kMaxChunk * kPanel];
      alignas(64) static thread_local float totals[kRowBlock * kPanel];
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel)
        panel_product(block, stride, count, weight, panel, levels, sums, scratch, totals, bias,
                      out + begin * weight.outputs);
    }
  }
}

#endif

}  // namespace minivllm
