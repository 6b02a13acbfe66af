#include "csrc/engine/rotary.h"

#include <math.h>

#include "csrc/kernels/common/scalar.h"

namespace tle {

void cos_sin(double angle, double* cos_out, double* sin_out) {
  // angle = n * pi/2 + r, |r| <= pi/4; pi/2 in three parts of 33 bits, so that n times a part is exact for n < 2^20.
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  constexpr double kPart1 = 0x1.921fb544p+0, kPart2 = 0x1.0b4611a6p-34, kPart3 = 0x1.3198a2e037073p-69;
  const double n = nearbyint(angle * kTwoOverPi);
  const double r = ((angle - n * kPart1) - n * kPart2) - n * kPart3;
  const double z = r * r;

  // Taylor: the first terms left out are below 2e-18 (cos, z^9 / 18!) and 1e-19 (sin, z^9 / 19!).
  double c = 1.0 / 20922789888000.0;       // 1 / 16!
  c = c * z - 1.0 / 87178291200.0;         // 1 / 14!
  c = c * z + 1.0 / 479001600.0;           // 1 / 12!
  c = c * z - 1.0 / 3628800.0;             // 1 / 10!
  c = c * z + 1.0 / 40320.0;               // 1 / 8!
  c = c * z - 1.0 / 720.0;                 // 1 / 6!
  c = c * z + 1.0 / 24.0;                  // 1 / 4!
  c = c * z - 0.5;
  c = c * z + 1.0;
  double s = 1.0 / 355687428096000.0;      // 1 / 17!
  s = s * z - 1.0 / 1307674368000.0;       // 1 / 15!
  s = s * z + 1.0 / 6227020800.0;          // 1 / 13!
  s = s * z - 1.0 / 39916800.0;            // 1 / 11!
  s = s * z + 1.0 / 362880.0;              // 1 / 9!
  s = s * z - 1.0 / 5040.0;                // 1 / 7!
  s = s * z + 1.0 / 120.0;                 // 1 / 5!
  s = s * z - 1.0 / 6.0;
  s = s * z * r + r;

  const double table[4] = {c, -s, -c, s};  // cos of quadrant 0 .. 3
  const int quadrant = int(int64_t(n) & 3);
  *cos_out = table[quadrant];
  *sin_out = table[(quadrant + 3) & 3];
}

void rotary_tables(const int64_t* positions, int64_t tokens, const float* inv_freq, int64_t frequencies, float scaling,
                   DType dtype, void* cos, void* sin) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < frequencies; ++i) {
      double c, s;
      cos_sin(double(float(positions[t]) * inv_freq[i]), &c, &s);
      const int64_t first = t * 2 * frequencies + i, second = first + frequencies;
      scalar::store(dtype, cos, first, float(c) * scaling);
      scalar::store(dtype, cos, second, float(c) * scaling);
      scalar::store(dtype, sin, first, float(s) * scaling);
      scalar::store(dtype, sin, second, float(s) * scaling);
    }
  }
}

}  // namespace tle
