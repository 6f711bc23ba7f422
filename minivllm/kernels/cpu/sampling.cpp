// See sampling.h. Rows are cut into parts, so that few rows keep all threads busy.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

namespace minivllm {
namespace {

constexpr int64_t kWorthwhile = 16384;      // values, below which threads cost more than they save
constexpr int64_t kWorthwhileDraws = 4096;  // of which each takes several times as long
constexpr int64_t kPart = 1024;             // values of a part

inline bool exceeds(float x, float y) { return x > y || (x != x && y == y); }

// The largest of up to kPart values, NaN if there is one.
template <typename T>
inline float largest(const T* values, int64_t size) {
  T few[kLanes];
  if (size < kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) few[i] = values[i < size ? i : 0];
    values = few, size = kLanes;
  }
  Vector best = load(values + size - kLanes);  // all that a loop of whole vectors leaves out
  Integers odd = best != best;
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) {
    const Vector value = load(values + i);
    odd |= value != value;
    best = value > best ? value : best;
  }
  const Vector ones = (Vector)(odd & (Integers)splat(1.0f));
  return sum(ones) > 0 ? std::numeric_limits<float>::quiet_NaN() : highest(best);
}

// A 32-bit integer hash (lowbias32, Wellons 2018), of one value or of a vector.
template <typename Bits>
inline Bits mix(Bits x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// What of a row's noise does not depend on the token.
inline uint32_t noise_key(int64_t seed, int32_t position) {
  const auto bits = static_cast<uint64_t>(seed);
  const uint32_t state = mix(static_cast<uint32_t>(bits) ^ mix(static_cast<uint32_t>(bits >> 32)));
  return mix(mix(state ^ static_cast<uint32_t>(position)) ^ 0x9E3779B9u);
}

// -log1p(-u) of u = (mix(mix(token) ^ key) + 0.5) / 2^32.
inline Vector exponential_noise(Unsigned tokens, uint32_t key) {
  const Unsigned bits = mix(mix(tokens) ^ key);
  const Vector u = (__builtin_convertvector(bits, Vector) + 0.5f) * 0x1p-32f;
  // What was lost when 1 - u was rounded is small and is added as it is.
  const Vector rest = kept(1.0f - u);
  const Vector noise = u - (1.0f - rest) - log_of_fraction(rest);
  return rest > 0.0f ? noise : splat(std::numeric_limits<float>::infinity());
}

struct Best {
  float score;
  int64_t token;
};

// The best of the tokens from `begin`, at most kPart of them.
template <typename T>
inline Best best_of_part(const T* logits, int64_t begin, int64_t size, float top, float temperature,
                         uint32_t key) {
  Vector scores = splat(-1.0f);
  Unsigned lanes{}, tokens{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  const auto race = [&](Vector logit, int64_t i) {
    const Unsigned own = lanes + static_cast<uint32_t>(begin + i);
    const Vector score = exp_of_negative((logit - top) / temperature) / exponential_noise(own, key);
    const Integers better = score > scores;
    scores = better ? score : scores;
    tokens = better ? own : tokens;
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) race(load(logits + begin + i), i);
  if (i < size) {
    Vector rest = splat(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; i + j < size; ++j) rest[j] = load_one(logits + begin + i + j);
    race(rest, i);
  }
  Best best{-1.0f, begin};
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool first = scores[lane] == best.score && tokens[lane] < best.token;
    if (scores[lane] > best.score || first) best = {scores[lane], tokens[lane]};
  }
  best.token =
      std::min(best.token, begin + size - 1);  // beyond it only where scores are no numbers
  return best;
}

}  // namespace

template <typename T>
void argmax(const T* logits, int64_t stride, int64_t rows, int64_t size, bool flag, int64_t* out) {
  const int64_t parts = (size + kPart - 1) / kPart;
  std::vector<float> tops(rows * parts);
#pragma omp parallel for if (rows * size > kWorthwhile)
  for (int64_t i = 0; i < rows * parts; ++i) {
    const int64_t begin = i % parts * kPart;
    tops[i] = largest(logits + i / parts * stride + begin, std::min(kPart, size - begin));
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = &tops[row * parts];
    const float* top =
        std::max_element(own, own + parts, [](float x, float y) { return exceeds(y, x); });
    int64_t at = (top - own) * kPart;
    while (exceeds(*top, load_one(logits + row * stride + at))) ++at;
    out[row] = flag && !std::isfinite(*top) ? -1 - at : at;
  }
}

template <typename T>
void draw(const T* logits, int64_t stride, int64_t rows, int64_t size, const int64_t* seeds,
          const int32_t* positions, const float* temperatures, int64_t* out) {
  const int64_t parts = (size + kPart - 1) / kPart;
  std::vector<float> tops(rows * parts);
  std::vector<Best> bests(rows * parts);
#pragma omp parallel if (rows * size > kWorthwhileDraws)
  {
#pragma omp for
    for (int64_t i = 0; i < rows * parts; ++i) {
      const int64_t begin = i % parts * kPart;
      tops[i] = largest(logits + i / parts * stride + begin, std::min(kPart, size - begin));
    }
#pragma omp for
    for (int64_t i = 0; i < rows * parts; ++i) {
      const int64_t row = i / parts, begin = i % parts * kPart;
      const float top = *std::max_element(&tops[row * parts], &tops[row * parts] + parts);
      bests[i] = best_of_part(logits + row * stride, begin, std::min(kPart, size - begin), top,
                              temperatures[row], noise_key(seeds[row], positions[row]));
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const Best* own = &bests[row * parts];
    const auto worse = [](const Best& x, const Best& y) { return x.score < y.score; };
    out[row] = std::max_element(own, own + parts, worse)->token;
  }
}

#define MINIVLLM_INSTANTIATE(T)                                                           \
  template void argmax(const T*, int64_t, int64_t, int64_t, bool, int64_t*);              \
  template void draw(const T*, int64_t, int64_t, int64_t, const int64_t*, const int32_t*, \
                     const float*, int64_t*);
MINIVLLM_INSTANTIATE(float)
MINIVLLM_INSTANTIATE(BFloat16)
MINIVLLM_INSTANTIATE(Half)

}  // namespace minivllm
