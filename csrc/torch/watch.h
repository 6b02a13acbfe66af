// Whether Python objects are still what they were, for tle_torch/decode.py.
#pragma once

#include <pybind11/pybind11.h>

namespace tle {

void bind_watch(pybind11::module_& m);

}  // namespace tle
