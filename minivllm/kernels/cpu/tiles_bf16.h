// Tiles of bfloat16 keys and values, met by products of bfloat16 with sums in float32 (products.h).
// Weights are rounded to bfloat16, as FlashAttention rounds them to the values' type.
#pragma once
#include "tiles.h"

namespace minivllm {

// to[16][kStride] of 32-bit words = the transpose of 16 words of each of 16 rows.
template <int kStride = kColumns>
inline void transpose(const uint16_t* const (&rows)[16], int64_t offset, uint32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + offset);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + n]: word n of each quarter, of rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int n = 0; n < 4; ++n) {
    const __m512i low = _mm512_shuffle_i32x4(a[n], a[n + 4], 0x88),
                  high = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(a[n], a[n + 4], 0xDD),
                  high2 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0xDD);
    _mm512_storeu_si512(to + n * kStride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (n + 8) * kStride, _mm512_shuffle_i32x4(low, high, 0xDD));
    _mm512_storeu_si512(to + (n + 4) * kStride, _mm512_shuffle_i32x4(low2, high2, 0x88));
    _mm512_storeu_si512(to + (n + 12) * kStride, _mm512_shuffle_i32x4(low2, high2, 0xDD));
  }
}

// For heads of a multiple of 64 dimensions. Keys and values are met as panels. Blocks of a multiple
// of 16 tokens hold them so already: 16 tokens are [kv_heads][dim / 2][16][2] of keys, two
// dimensions of one key side by side, and [kv_heads][8][dim][2] of values, two values of one
// dimension side by side. Those of other blocks become such here.
class PanelTiles {
 public:
  static constexpr int64_t kRows = minivllm::kRows;

  static int64_t head_stride(const Attention& a) {
    return lies(a.block_size) ? kGroup * a.head_dim : a.head_dim;
  }

  // Sixteen new tokens that are a panel are written by the first of them. Of values two tokens
  // share each word: who writes the first half clears the second, since zero times what was left
  // there need not be zero, or writes it too where both tokens are new.
  static void write(const Attention& a, int64_t t, const BFloat16* k, const BFloat16* v,
                    BFloat16* k_cache, BFloat16* v_cache) {
    if (!lies(a.block_size)) return CopiedTokens::write(a, t, k, v, k_cache, v_cache);
    const int64_t slot = a.slots[t], at = slot % kGroup, dim = a.head_dim,
                  begin = (slot - at) * a.kv_heads * dim;
    const int64_t first = t - at, last = first + kGroup - 1;
    if (first >= 0 && last < a.tokens && a.slots[first] == slot - at &&
        a.slots[last] == slot - at + kGroup - 1) {
      if (at == 0) write_panels(a, t, k, v, k_cache + begin, v_cache + begin);
      return;
    }
    const bool second = at % 2 == 1, after_first = second && t > 0 && a.slots[t - 1] == slot - 1;
    const bool both = !second && t + 1 < a.tokens && a.slots[t + 1] == slot + 1;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const int64_t head = begin + h * kGroup * dim;
      const auto* key = reinterpret_cast<const uint32_t*>(k + t * a.k_stride + h * dim);
      auto* keys = reinterpret_cast<uint32_t*>(k_cache + head) + at;
      for (int64_t p = 0; p < dim / 2; ++p) keys[p * kGroup] = key[p];
      if (after_first) continue;
      const BFloat16 *value = v + t * a.v_stride + h * dim,
                     *next = both ? value + a.v_stride : nullptr;
      auto* values = reinterpret_cast<uint32_t*>(v_cache + head) + at / 2 * dim;
      const auto words = [](const BFloat16* from) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      };
      for (int64_t d = 0; d < dim; d += 16) {
        __m512i low = second ? _mm512_loadu_si512(values + d) : words(value + d);
        if (second) low = _mm512_and_si512(low, _mm512_set1_epi32(0xFFFF));
        const __m512i high = second ? words(value + d)
                             : both ? words(next + d)
                                    : _mm512_setzero_si512();
        _mm512_storeu_si512(values + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }

  void begin(int64_t rows, int64_t dim, int64_t) {
    dim_ = dim;
    queries_.resize(rows * dim);
    sums_.assign(rows * dim, 0.0f);
  }
  void clear() { std::fill(sums_.begin(), sums_.end(), 0.0f); }

  void take_queries(int64_t row, int64_t count, const BFloat16* const* from) {
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(queries_.data() + (row + r) * dim_, from[r], dim_ * sizeof(uint16_t));
  }

  void take_keys(const BFloat16* keys, const BFloat16* values, const Place& place,
                 const Place& ahead, int64_t shift, int64_t) {
    pairs_ = (place.count + 1) / 2, asked_ = asked_values_ = false;
    if (!lies(place.together)) {
      make_panels(keys, values, place, ahead, shift);
      asked_ = asked_values_ = true;
      return;
    }
    for (int64_t g = 0; g < kGroups; ++g) {
      const int64_t here =
          place.at[g * kGroup < place.count ? g * kGroup
                                            : 0];  // keys that are not there are not seen
      const int64_t there = g * kGroup < ahead.count ? ahead.at[g * kGroup] + shift : here;
      keys_[g] = reinterpret_cast<const uint16_t*>(keys + here), next_keys_[g] = keys + there;
      values_[g] = reinterpret_cast<const uint16_t*>(values + here),
      next_values_[g] = values + there;
    }
  }

  void score(int64_t row, int64_t count, float* scores) {
    with_rows<kRows>(count, [&](auto rows) {
      if (asked_) return score_rows<rows(), false>(row, scores);
      score_rows<rows(), true>(row, scores);
    });
    asked_ = true;
  }

  void add(int64_t row, int64_t count, const float* weights, const float* fades) {
    alignas(64) uint16_t rounded[kRows * kKeys];
    for (int64_t i = 0; i < count * kKeys; i += 32)
      _mm512_store_si512(rounded + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(weights + i + 16),
                                                                   _mm512_load_ps(weights + i)));
    with_rows<kRows>(count, [&](auto rows) {
      // Values are read from end to end where the sums of whole rows stay in registers.
      if constexpr (rows() <= 3)
        if (dim_ % (2 * kColumns) == 0) return add_rows<rows(), 2 * kColumns>(row, rounded, fades);
      add_rows<rows(), kColumns>(row, rounded, fades);
    });
    asked_values_ = true;
  }

  const float* sums(int64_t row, float*) const { return sums_.data() + row * dim_; }

 private:
  static constexpr int64_t kGroup = 16, kGroups = kKeys / kGroup;  // keys of a panel

  static bool lies(int64_t block_size) { return block_size % kGroup == 0; }

  static void write_panels(const Attention& a, int64_t t, const BFloat16* k, const BFloat16* v,
                           BFloat16* k_panels, BFloat16* v_panels) {
    const int64_t dim = a.head_dim;
    for (int64_t h = 0; h < a.kv_heads; ++h, k_panels += kGroup * dim, v_panels += kGroup * dim) {
      const uint16_t *keys[kGroup], *values[kGroup];
      for (int64_t i = 0; i < kGroup; ++i) {
        keys[i] = reinterpret_cast<const uint16_t*>(k + (t + i) * a.k_stride + h * dim);
        values[i] = reinterpret_cast<const uint16_t*>(v + (t + i) * a.v_stride + h * dim);
      }
      for (int64_t d = 0; d < dim; d += 32)
        transpose<kGroup>(keys, d, reinterpret_cast<uint32_t*>(k_panels) + d / 2 * kGroup);
      for (int64_t i = 0; i < kGroup; i += 2)
        interleave(values[i], values[i + 1], dim, reinterpret_cast<uint16_t*>(v_panels) + i * dim);
    }
  }

  // Each line of a tile that is read is followed by asking for one of the next tile: of keys while
  // scores are computed, of values while they are added, one panel after another, so that memory is
  // busy throughout.
  template <int M, bool kAsks>
  [[gnu::noinline]] void score_rows(int64_t row, float* scores) const {
    const Factor* query = queries_.data() + row * dim_;
    Sums<M> sums;
    each<M * 4>([&](auto i) MINIVLLM_INLINE { sums[i / 4][i % 4] = _mm512_setzero_ps(); });
    const int64_t panels = kAsks ? kGroups : 1, pairs = dim_ / 2 / panels;
    for (int64_t g = 0, p = 0; g < panels; ++g) {
      const char* next = reinterpret_cast<const char*>(next_keys_[g]);
      for (const int64_t end = p + pairs; p < end; ++p) {
        __m512bh b[4];
        each<4>([&](auto n) MINIVLLM_INLINE {
          b[n] = load_kept(keys_[n] + p * 2 * kGroup);
          if constexpr (kAsks) minivllm::ask(next, 1);
        });
        multiply_pair<M>(query, dim_, p, b, sums);
      }
    }
    each<M * 4>([&](auto i) MINIVLLM_INLINE {
      _mm512_store_ps(scores + i / 4 * kKeys + i % 4 * 16, sums[i / 4][i % 4]);
    });
  }

  template <int M, int64_t kWidth>
  void add_rows(int64_t row, const uint16_t* weights, const float* fades) {
    for (int64_t d = 0; d < dim_; d += kWidth) {
      if (asked_values_)
        add_columns<M, kWidth, false>(row, d, weights, fades);
      else
        add_columns<M, kWidth, true>(row, d, weights, fades);
    }
  }

  template <int M, int64_t kWidth, bool kAsks>
  [[gnu::noinline]] void add_columns(int64_t row, int64_t d, const uint16_t* weights,
                                     const float* fades) {
    constexpr int kCount = kWidth / 16;
    __m512 sums[M][kCount];
    float* to = sums_.data() + row * dim_ + d;
    each<M * kCount>([&](auto i) MINIVLLM_INLINE {
      constexpr int m = i / kCount, n = i % kCount;
      sums[m][n] = _mm512_mul_ps(_mm512_loadu_ps(to + m * dim_ + 16 * n), _mm512_set1_ps(fades[m]));
    });
    for (int64_t g = 0; g < kGroups && g * kGroup / 2 < pairs_; ++g) {
      const int64_t line = (d / kWidth * kGroups + g) * kGroup / 2 * kCount, lines = dim_ / 2;
      const char* next =
          reinterpret_cast<const char*>(next_values_[line / lines] + line % lines * 32);
      const uint16_t* from = values_[g] + 2 * d;
      const int64_t pairs = std::min(kGroup / 2, pairs_ - g * kGroup / 2);
      for (int64_t p = 0; p < pairs; ++p, from += 2 * dim_) {
        const uint16_t* x = weights + g * kGroup;
        if constexpr (kCount == 4) {
          __m512bh b[4];
          each<4>([&](auto n) MINIVLLM_INLINE { b[n] = load_kept(from + 32 * n); });
          if constexpr (kAsks) minivllm::ask(next, 4);
          multiply_pair<M>(x, kKeys, p, b, sums);
        } else {
          __m512bh a[M];
          each<M>([&](auto m) MINIVLLM_INLINE { a[m] = pair_of(x + m * kKeys, p); });
          each<kCount>([&](auto n) MINIVLLM_INLINE {
            const __m512bh b = load_kept(from + 32 * n);
            if constexpr (kAsks) minivllm::ask(next, 1);
            each<M>([&](auto m)
                        MINIVLLM_INLINE { sums[m][n] = _mm512_dpbf16_ps(sums[m][n], a[m], b); });
          });
        }
      }
    }
    each<M * kCount>([&](auto i) MINIVLLM_INLINE {
      _mm512_storeu_ps(to + i / kCount * dim_ + i % kCount * 16, sums[i / kCount][i % kCount]);
    });
  }

  // In a register from here on, see `kept`.
  MINIVLLM_INLINE static __m512bh load_kept(const uint16_t* from) {
    return (__m512bh)kept((Vector)_mm512_loadu_si512(from));
  }

  void make_panels(const BFloat16* keys, const BFloat16* values, const Place& place,
                   const Place& ahead, int64_t shift) {
    panels_.resize(2 * kKeys * dim_ + 32), zeros_.resize(dim_);
    auto* to =
        reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(panels_.data()) + 63) / 64 * 64);
    for (int64_t g = 0; g < kGroups; ++g) {
      uint16_t *own = to + g * kGroup * dim_, *own_values = own + kKeys * dim_;
      keys_[g] = own, values_[g] = own_values;
      const int64_t first = g * kGroup;
      for (int64_t j = first; j < std::min(first + kGroup, ahead.count); ++j)
        for (const auto* cache : {keys, values}) {
          const char* next = reinterpret_cast<const char*>(cache + shift + ahead.at[j]);
          minivllm::ask(next, dim_ / 32);
        }
      if (first >= place.count) continue;
      const uint16_t* rows[kGroup];
      for (int64_t i = 0; i < kGroup; ++i)  // keys that are not there are not seen
        rows[i] = reinterpret_cast<const uint16_t*>(keys +
                                                    place.at[std::min(first + i, place.count - 1)]);
      for (int64_t d = 0; d < dim_; d += 32)
        transpose<kGroup>(rows, d, reinterpret_cast<uint32_t*>(own) + d / 2 * kGroup);
      for (int64_t i = 0; i < kGroup; i += 2)
        if (first + i < place.count) {
          const auto* one = reinterpret_cast<const uint16_t*>(values + place.at[first + i]);
          const auto* two =
              first + i + 1 < place.count
                  ? reinterpret_cast<const uint16_t*>(values + place.at[first + i + 1])
                  : zeros_.data();  // zero times anything is zero
          interleave(one, two, dim_, own_values + i * dim_);
        }
    }
  }

  // Two values side by side: numbers 0, 32, 1, 33, ... of a pair of rows.
  static void interleave(const uint16_t* one, const uint16_t* two, int64_t dim, uint16_t* to) {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    const __m512i low = _mm512_load_si512(order),
                  high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < dim; d += 32, to += 64) {
      const __m512i a = _mm512_loadu_si512(one + d), b = _mm512_loadu_si512(two + d);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
    }
  }

  int64_t dim_ = 0, pairs_ = 0;
  bool asked_ = false, asked_values_ = false;  // for the next tile's keys and values
  std::vector<uint16_t> queries_, panels_, zeros_;
  std::vector<float> sums_;
  const uint16_t *keys_[kGroups], *values_[kGroups];            // [dim / 2][16][2], [8][dim][2]
  const BFloat16 *next_keys_[kGroups], *next_values_[kGroups];  // of the next tile
};

}  // namespace minivllm
