// Choosing tokens (engine/sampling.h) against plain formulations: std::mt19937, whole sorts, one division per token.
#include "csrc/engine/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace tle::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The state of std::mt19937(seed), which is what a new generator of torch has, before any of its words is used.
TwisterWords new_words(uint32_t seed) {
  std::array<uint32_t, TwisterWords::kSize> state = {seed};
  for (uint32_t i = 1; i < state.size(); ++i) state[i] = 1812433253 * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
  return {state, TwisterWords::kSize};
}

constexpr int kKinds = 4;

// n scores: all different, some equal, and most of them -inf, nearly all of them.
std::vector<float> scores_of(int kind, size_t n) {
  std::mt19937 random(uint32_t(n) + 1000 * uint32_t(kind));
  std::vector<float> scores(n);
  const uint32_t distinct = kind == 0 ? 1 << 30 : kind == 3 ? 3 : uint32_t(1 + n / 4);
  for (float& s : scores) s = float(random() % distinct) / float(distinct) * 8 - 5;
  if (kind >= 2)
    for (float& s : scores) s = random() % (kind == 2 ? 8 : 300) == 0 ? s : -kInfinity;
  return scores;
}

constexpr size_t kSizes[] = {1, 2, 15, 16, 17, 31, 33, 100, 624, 1000, 2049, 5003};

TEST(Sampling, WordsAreThoseOfTheStandardGenerator) {
  for (const int64_t step : {1, 7, 623, 624, 625, 2000}) {
    std::mt19937 standard(17);
    TwisterWords words = new_words(17);
    std::vector<uint32_t> taken(static_cast<size_t>(step));
    for (int64_t used = 0; used < 4000; used += step) {
      words.take(taken.data(), step);
      for (const uint32_t word : taken) ASSERT_EQ(TwisterWords::temper(word), standard());
      EXPECT_EQ(words.next(), (used + step - 1) % TwisterWords::kSize + 1);
    }
  }
}

TEST(Sampling, ProbabilitiesAreFinitePositiveOrZeroAndNotAllZero) {
  for (const size_t n : kSizes)
    for (const size_t place : {size_t(0), n / 2, n - 1}) {
      std::vector<float> p(n, 0.0f);
      EXPECT_FALSE(are_probabilities(p.data(), int64_t(n)));
      for (const float value : {1.0f, 1e-45f, std::numeric_limits<float>::max()}) {
        p[place] = value;
        EXPECT_TRUE(are_probabilities(p.data(), int64_t(n))) << value;
      }
      for (const float value : {-1.0f, -1e-45f, kInfinity, -kInfinity, std::nanf("")}) {
        std::fill(p.begin(), p.end(), 0.5f);
        p[place] = value;
        EXPECT_FALSE(are_probabilities(p.data(), int64_t(n))) << value;
      }
    }
}

void expect_the_first_largest_quotient(const std::vector<float>& p, uint32_t seed) {
  std::mt19937 standard(seed);
  int64_t winner = 0;
  float best = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const uint64_t high = standard(), low = standard();
    const double u = double((high << 32 | low) & ((uint64_t(1) << 53) - 1)) / 9007199254740992.0;
    const float quotient = p[i] / float(-std::log1p(-u));
    if (quotient > best) best = quotient, winner = int64_t(i);
  }
  TwisterWords words = new_words(seed);
  ASSERT_EQ(exponential_race(p.data(), int64_t(p.size()), words), winner) << p.size() << " " << seed;
  uint32_t following;
  words.take(&following, 1);
  ASSERT_EQ(TwisterWords::temper(following), standard());
}

TEST(Sampling, TheRaceHasTheFirstLargestQuotient) {
  for (const size_t n : kSizes)
    for (uint32_t seed = 0; seed < 6; ++seed) {
      std::mt19937 random(seed);
      std::vector<float> p(n);
      for (float& x : p) x = float(random()) * 0x1p-32f;
      expect_the_first_largest_quotient(p, seed);
      for (float& x : p) x = std::exp(40 * (x - 1));
      expect_the_first_largest_quotient(p, seed);
      for (float& x : p) x = random() % 50 == 0 ? x * 1e30f : 0.0f;
      p[n / 2] = 1.0f;
      expect_the_first_largest_quotient(p, seed);
      // Subnormal numbers, and quotients that are, or 0, or infinite.
      for (float& x : p) x = std::ldexp(1.0f, -int(random() % 10) - 140);
      expect_the_first_largest_quotient(p, seed);
      for (float& x : p) x = std::numeric_limits<float>::max() / float(1 + random() % 3);
      expect_the_first_largest_quotient(p, seed);
    }
}

TEST(Sampling, KthLargestIsThatOfASort) {
  for (const size_t n : kSizes)
    for (int kind = 0; kind < kKinds; ++kind) {
      const std::vector<float> scores = scores_of(kind, n);
      std::vector<float> sorted = scores;
      std::sort(sorted.rbegin(), sorted.rend());
      for (const size_t k : {size_t(1), size_t(2), size_t(20), n / 2, n - 1, n})
        if (k >= 1 && k <= n) {
          ASSERT_EQ(kth_largest(scores.data(), int64_t(n), int64_t(k)), sorted[k - 1]) << n << " " << k;
        }
      for (const size_t place : {size_t(0), n - 1}) {
        std::vector<float> bad = scores;
        bad[place] = std::nanf("");
        EXPECT_EQ(kth_largest(bad.data(), int64_t(n), 1), std::nullopt);
      }
    }
}

TEST(Sampling, ScoresAreSorted) {
  for (const size_t n : kSizes)
    for (int kind = 0; kind < kKinds; ++kind) {
      std::vector<float> scores = scores_of(kind, n), sorted = scores, got(n);
      std::sort(sorted.begin(), sorted.end());
      const auto impossible = std::count(scores.begin(), scores.end(), -kInfinity);
      ASSERT_EQ(sort_scores(scores.data(), int64_t(n), got.data()), impossible);
      ASSERT_EQ(got, sorted) << n << " " << kind;
      for (const float bad : {kInfinity, std::nanf("")}) {
        scores[n / 2] = bad;
        EXPECT_EQ(sort_scores(scores.data(), int64_t(n), got.data()), std::nullopt);
      }
    }
}

// The places from .. n of std::sort's result, as a set: the order in which it leaves equal ones is its own.
void expect_the_end_of_a_sort(const std::vector<float>& scores) {
  const int64_t n = int64_t(scores.size());
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[size_t(a)] < scores[size_t(b)]; });
  for (const int64_t from : {int64_t(0), n / 3, n / 2, n * 9 / 10, n - 17, n - 2, n - 1}) {
    if (from < 0) continue;
    std::vector<int32_t> got = end_of_sort(scores.data(), n, from), wanted(order.begin() + from, order.end());
    std::sort(got.begin(), got.end());
    std::sort(wanted.begin(), wanted.end());
    ASSERT_EQ(got, wanted) << n << " " << from;
  }
}

TEST(Sampling, TheEndOfASortHasTheEqualScoresThatItHas) {
  for (const size_t n : kSizes) {
    for (int kind = 0; kind < kKinds; ++kind) expect_the_end_of_a_sort(scores_of(kind, n));
    std::vector<float> rising(n), organ(n);
    for (size_t i = 0; i < n; ++i) rising[i] = float(i / 3), organ[i] = float(std::min(i, n - i) / 2);
    expect_the_end_of_a_sort(rising);
    expect_the_end_of_a_sort(organ);
    expect_the_end_of_a_sort(std::vector<float>(n, 1.5f));
    std::reverse(rising.begin(), rising.end());
    expect_the_end_of_a_sort(rising);
  }
}

// What makes medians of three bad pivots (Musser 1997), so that the sort goes over to a heap.
TEST(Sampling, TheEndOfASortThatGoesOverToAHeap) {
  constexpr size_t kHalf = 1024;
  std::vector<float> killer(2 * kHalf);
  for (size_t i = 1; i <= kHalf; ++i) {
    killer[i - 1] = float(i % 2 == 1 ? i : kHalf + i - 1);
    killer[kHalf + i - 1] = float(2 * i);
  }
  for (float& score : killer) score = std::floor(score / 4);
  expect_the_end_of_a_sort(killer);
}

}  // namespace
}  // namespace tle::test
