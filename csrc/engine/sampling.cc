#include "csrc/engine/sampling.h"

#include <string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "csrc/runtime/scratch.h"

namespace tle {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Elements that are looked at together.
constexpr int64_t kTogether = 16;
// Sixteen bytes, which compilers for x86-64 and aarch64 keep in one register: they unroll a loop over so few elements
// before they think of registers.
template <class T>
using Lanes [[gnu::vector_size(16)]] = T;

// Whether test(Lanes<float>) is true, not 0, for one of x[kTogether].
template <class Test>
bool any(const float* x, Test test) {
  Lanes<int32_t> found = {};
  for (int64_t i = 0; i < kTogether; i += 4) {
    Lanes<float> v;
    memcpy(&v, x + i, sizeof v);
    found |= test(v);
  }
  const Lanes<int64_t> halves = Lanes<int64_t>(found);
  return (halves[0] | halves[1]) != 0;
}

}  // namespace

void TwisterWords::twist() {
  constexpr int64_t kShift = 397;
  uint32_t* const s = state_.data();
  const auto mixed = [s](int64_t i, int64_t following) {
    const uint32_t y = (s[i] & 0x80000000) | (s[following] & 0x7fffffff);
    return (y >> 1) ^ (-(y & 1) & 0x9908b0df);
  };
  for (int64_t i = 0; i < kSize - kShift; ++i) s[i] = s[i + kShift] ^ mixed(i, i + 1);
  for (int64_t i = kSize - kShift; i < kSize - 1; ++i) s[i] = s[i + kShift - kSize] ^ mixed(i, i + 1);
  s[kSize - 1] = s[kShift - 1] ^ mixed(kSize - 1, 0);
  next_ = 0;
}

void TwisterWords::take(uint32_t* to, int64_t count) {
  while (count > 0) {
    if (next_ == kSize) twist();
    const int64_t some = std::min(count, kSize - next_);
    memcpy(to, state_.data() + next_, size_t(some) * sizeof(uint32_t));
    to += some, count -= some, next_ += some;
  }
}

bool are_probabilities(const float* probabilities, int64_t n) {
  int32_t good = 1, possible = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float p = probabilities[i];
    good &= int32_t(p >= 0) & int32_t(p < kInfinity);
    possible |= int32_t(p > 0);
  }
  return good & possible;
}

int64_t exponential_race(const float* probabilities, int64_t n, TwisterWords& words) {
  constexpr int64_t kBlock = 64 * kTogether;
  // u's 53 bits are the 21 low bits of the first word and all of the second. Without the second it is not larger, and
  // q >= u: so p / q is at most p over that, and most tokens are out of the race before a logarithm is taken.
  constexpr uint32_t kHigh = (1 << 21) - 1;
  // More than the roundings of both sides of the comparison, where neither can be subnormal.
  constexpr float kSlack = 1 + 0x1p-20f, kSmall = 0x1p-100f;
  uint32_t drawn[2 * kBlock];
  int64_t winner = 0;
  float best = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t block = std::min(kBlock, n - start);
    const float* p = probabilities + start;
    words.take(drawn, 2 * block);
    const auto race = [&](int64_t i) {
      if (!(p[i] > 0)) return;
      const uint64_t high = TwisterWords::temper(drawn[2 * i]) & kHigh, low = TwisterWords::temper(drawn[2 * i + 1]);
      const double u = double(int64_t(high << 32 | low)) * 0x1p-53;
      const float q = float(-std::log1p(-u)), ratio = p[i] / q;
      if (ratio > best) best = ratio, winner = start + i;
    };
    int64_t i = 0;
    for (; i + kTogether <= block; i += kTogether) {
      if (!any(p + i, [](Lanes<float> v) { return v > 0; })) continue;
      int32_t racing = 0;
      for (int64_t j = 0; j < kTogether; ++j) {
        const float least = float(int32_t(TwisterWords::temper(drawn[2 * (i + j)]) & kHigh)) * 0x1p-21f;
        racing |= int32_t(p[i + j] * kSlack >= best * least) | (int32_t(p[i + j] > 0) & int32_t(p[i + j] < kSmall));
      }
      if (racing == 0) continue;
      for (int64_t j = 0; j < kTogether; ++j) race(i + j);
    }
    for (; i < block; ++i) race(i);
  }
  return winner;
}

std::optional<float> kth_largest(const float* scores, int64_t n, int64_t k) {
  const size_t room = size_t(std::min(n, 2 * k + 1024));
  std::vector<float> top;
  top.reserve(room);
  float bar = -kInfinity;  // what is not above it is not among the k largest, or equal to the last of them
  const auto settle = [&] {
    if (int64_t(top.size()) < k) return;
    std::nth_element(top.begin(), top.begin() + (k - 1), top.end(), std::greater<>());
    top.resize(size_t(k));
    bar = top.back();
  };
  const auto see = [&](float score) {
    if (score <= bar) return true;
    if (std::isnan(score)) return false;
    if (top.size() == room) settle();
    if (score > bar) top.push_back(score);
    return true;
  };
  int64_t i = 0;
  for (; i + kTogether <= n; i += kTogether) {
    if (!any(scores + i, [bar](Lanes<float> v) { return ~(v <= bar); })) continue;
    for (int64_t j = 0; j < kTogether; ++j)
      if (!see(scores[i + j])) return std::nullopt;
  }
  for (; i < n; ++i)
    if (!see(scores[i])) return std::nullopt;
  settle();
  return bar;
}

std::optional<int64_t> sort_scores(const float* scores, int64_t n, float* sorted) {
  constexpr int64_t kDigit = 11, kDigits = 3, kBuckets = 1 << kDigit;
  // Integers of the same order, whose low bits are 0 where the score's are. -0 becomes 0, its equal.
  constexpr uint32_t kZero = 0x80000000;
  const auto key_of = [](float score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score), magnitude = bits & ~kZero;
    return bits < kZero ? kZero + magnitude : kZero - magnitude;
  };
  const auto score_of = [](uint32_t key) {
    return std::bit_cast<float>(key < kZero ? kZero + (kZero - key) : key - kZero);
  };
  Scratch scratch(ScratchMemory::of_this_thread());
  uint32_t *from = scratch.get<uint32_t>(n), *to = scratch.get<uint32_t>(n);
  // After top-k nearly all are -inf: they are counted.
  int64_t count = 0;
  int32_t orderly = 1;
  for (int64_t start = 0; start < n; start += kTogether) {
    const float* some = scores + start;
    const int64_t block = std::min(kTogether, n - start);
    if (block == kTogether && !any(some, [](Lanes<float> v) { return ~(v <= -kInfinity); })) continue;
    for (int64_t i = 0; i < block; ++i) {
      from[count] = key_of(some[i]);
      count += some[i] > -kInfinity;
      orderly &= int32_t(some[i] < kInfinity);
    }
  }
  if (!orderly) return std::nullopt;
  std::array<std::array<uint32_t, kBuckets>, kDigits> places{};
  for (int64_t i = 0; i < count; ++i)
    for (size_t digit = 0; digit < kDigits; ++digit) ++places[digit][(from[i] >> (kDigit * digit)) % kBuckets];
  for (size_t digit = 0; digit < kDigits; ++digit) {
    auto& place = places[digit];
    // What was bf16 has no low digits.
    if (std::find(place.begin(), place.end(), uint32_t(count)) != place.end()) continue;
    uint32_t next = 0;
    for (uint32_t& p : place) next += std::exchange(p, next);
    for (int64_t i = 0; i < count; ++i) to[place[(from[i] >> (kDigit * digit)) % kBuckets]++] = from[i];
    std::swap(from, to);
  }
  std::fill(sorted, sorted + (n - count), -kInfinity);
  for (int64_t i = 0; i < count; ++i) sorted[n - count + i] = score_of(from[i]);
  return n - count;
}

std::vector<int32_t> end_of_sort(const float* scores, int64_t n, int64_t from) {
  struct Token {
    float score;
    int32_t index;
  };
  constexpr int64_t kSmall = 16;  // what libstdc++ leaves to an insertion sort
  constexpr int64_t kBlock = 64;
  const auto less = [](const Token& a, const Token& b) { return a.score < b.score; };
  Scratch scratch(ScratchMemory::of_this_thread());
  Token* const tokens = scratch.get<Token>(n);
  int64_t impossible = 0;
  for (int64_t i = 0; i < n; ++i) {
    tokens[i] = {scores[i], int32_t(i)};
    impossible += scores[i] == -kInfinity;
  }
  const auto are_impossible = [](const Token* some) {
    int32_t possible = 0;
    for (int64_t k = 0; k < kBlock; ++k) possible |= int32_t(some[k].score > -kInfinity);
    return possible == 0;
  };
  Token *first = tokens, *last = first + n, *const edge = first + from;
  for (int levels = 2 * (std::bit_width(uint64_t(n)) - 1); last - first > kSmall; --levels) {
    if (levels == 0) {
      std::make_heap(first, last, less);
      std::sort_heap(first, last, less);
      break;
    }
    // The pivot, the median of three, changes places with the first element.
    Token *a = first + 1, *b = first + (last - first) / 2, *c = last - 1;
    if (!less(*a, *b)) std::swap(a, b);
    std::swap(*first, less(*b, *c) ? *b : less(*a, *c) ? *c : *a);
    // Hoare's partition: what is not less from the left and what is not greater from the right change places in pairs,
    // until they meet. A processor cannot foresee which those are; so their places are listed first, in blocks.
    const Token pivot = *first;
    Token *left = first + 1, *right = last;
    // After top-k nearly all are impossible, and which of those change places does not matter below the edge.
    const bool alike = pivot.score == -kInfinity && impossible <= from;
    uint8_t lefts[kBlock], rights[kBlock];
    size_t i = 0, left_count = 0, j = 0, right_count = 0;
    while (right - left >= 2 * kBlock) {
      if (alike && are_impossible(left) && are_impossible(right - kBlock)) {
        left += kBlock;
        right -= kBlock;
        continue;
      }
      if (i == left_count) {
        i = left_count = 0;
        for (int64_t k = 0; k < kBlock; ++k) {
          lefts[left_count] = uint8_t(k);
          left_count += !less(left[k], pivot);
        }
      }
      if (j == right_count) {
        j = right_count = 0;
        for (int64_t k = 0; k < kBlock; ++k) {
          rights[right_count] = uint8_t(k);
          right_count += !less(pivot, right[-1 - k]);
        }
      }
      while (i < left_count && j < right_count) std::swap(left[lefts[i++]], right[-1 - rights[j++]]);
      if (i == left_count) left += kBlock;
      if (j == right_count) right -= kBlock;
      if (alike) {
        // The next blocks begin with what was not exchanged, so that they can be passed by.
        if (i < left_count) left += lefts[i];
        if (j < right_count) right -= rights[j];
        i = left_count = j = right_count = 0;
      }
    }
    if (i < left_count) left += lefts[i];
    if (j < right_count) right -= rights[j];
    for (;; ++left) {
      while (less(*left, pivot)) ++left;
      do --right;
      while (less(pivot, *right));
      if (left >= right) break;
      std::swap(*left, *right);
    }
    (edge < left ? last : first) = left;
  }
  std::stable_sort(first, last, less);
  std::vector<int32_t> indices;
  indices.reserve(size_t(n - from));
  for (int64_t i = from; i < n; ++i) indices.push_back(tokens[i].index);
  return indices;
}

}  // namespace tle
