#include "csrc/runtime/kernel_table.h"

namespace tle {

KernelTableBase::KernelTableBase(const char* op) : op_(op) { all().push_back(this); }

std::vector<KernelTableBase*>& KernelTableBase::all() {
  static auto* tables = new std::vector<KernelTableBase*>;  // never destroyed: tables of other files outlive this one
  return *tables;
}

}  // namespace tle
