// What this CPU can do, and which level TLE_ISA allows.
#pragma once

#include <string>
#include <vector>

#include "csrc/kernels/common/isa.h"

namespace tle {

const char* isa_name(Isa isa);

// Whether the CPU (and the operating system) can run code of this level. kRef always can.
bool cpu_supports(Isa isa);

// Whether scalable vectors are longer than NEON's 128 bits. Where they are not, they do what NEON does.
bool sve_is_wide();

// Whether a loop over weights that come from memory should ask for every line ahead, however little it does with it.
// Intel's cores read 1.3 to 1.5 times as fast then (Emerald Rapids); on AMD's (Zen 4) their own prefetching is as fast
// and some hints too many cost a third.
bool weight_hints_pay();

// The levels that this CPU can run, worst first.
std::vector<Isa> supported_isas();

// The highest level that kernels may use: TLE_ISA, or the best that the CPU has.
// Throws std::runtime_error for an unknown name and for a level that the CPU lacks.
Isa isa_cap();
void set_isa_cap(const std::string& name);  // "" returns to the best that the CPU has

// Usable performance cores: the affinity mask, cut to those of the largest cpu_capacity, and to the cgroup's quota.
int default_num_threads();

// One line for people: vendor and model where the system tells it.
std::string cpu_model();

}  // namespace tle
