// Choosing a token from scores, with the results of torch's and transformers' own code, whose time for a vocabulary of
// 150,000 is that of a small model's whole step: torch.multinomial draws an exponential for every token, most of them
// impossible, and a nucleus is found by sorting tokens with their indices.
//
// Nothing here is approximate: what decides is compared or computed as torch does it.
#pragma once

#include <stdint.h>

#include <array>
#include <optional>
#include <vector>

namespace tle {

// The words of an MT19937 generator as they stand in its state, without the tempering that makes random numbers of
// them: most words are skipped. (Matsumoto and Nishimura 1998, doi:10.1145/272991.272995.)
class TwisterWords {
 public:
  static constexpr int64_t kSize = 624;

  // state: as it is after `next` of its words have been used, 0 <= next <= kSize.
  TwisterWords(const std::array<uint32_t, kSize>& state, int64_t next) : state_(state), next_(next) {}

  void take(uint32_t* to, int64_t count);

  const std::array<uint32_t, kSize>& state() const { return state_; }
  int64_t next() const { return next_; }

  static uint32_t temper(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680;
    word ^= (word << 15) & 0xefc60000;
    return word ^ (word >> 18);
  }

 private:
  void twist();

  std::array<uint32_t, kSize> state_;
  int64_t next_;
};

// Whether probabilities[n] are what torch.multinomial accepts: not negative, finite, not all zero.
bool are_probabilities(const float* probabilities, int64_t n);

// The index that torch.multinomial(probabilities, 1) draws on the CPU: the first largest of probabilities[i] / q[i],
// where q[i] = -log1p(-u) as a float, u in [0, 1) from the 53 low bits of two words: 2 n words are taken.
// are_probabilities must hold. Only possible tokens are looked at. torch itself chooses an impossible one whose u is 0,
// because 0 / 0 is the largest: once in 2^53 tokens.
int64_t exponential_race(const float* probabilities, int64_t n, TwisterWords& words);

// The k-th largest of scores[n], 1 <= k <= n, or nothing if there is a NaN.
std::optional<float> kth_largest(const float* scores, int64_t n, int64_t k);

// scores[n] in ascending order to sorted[n], and the number of those that are -inf. Nothing if there is a NaN or +inf.
std::optional<int64_t> sort_scores(const float* scores, int64_t n, float* sorted);

// Where equal scores straddle the edge of a nucleus, it is the sort that decides which of them are in: the indices at
// the places from .. n of what std::sort makes of (scores[i], i), compared by score alone, in any order. torch.sort is
// std::sort, and libstdc++'s an introspective quicksort (Musser 1997), of which only the parts that hold the edge need
// to be done. No NaN; 0 <= from < n < 2^31.
std::vector<int32_t> end_of_sort(const float* scores, int64_t n, int64_t from);

}  // namespace tle
