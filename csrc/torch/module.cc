// The Python module _C: what is not a tensor operator. Importing it registers the operators of torch.ops.tle.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/kernels/tables.h"
#include "csrc/runtime/bandwidth.h"
#include "csrc/runtime/cpu.h"
#include "csrc/runtime/gguf_blocks.h"
#include "csrc/runtime/packed_weight.h"
#include "csrc/runtime/scratch.h"
#include "csrc/runtime/threads.h"
#include "csrc/torch/watch.h"

namespace py = pybind11;

namespace tle {

namespace {

std::vector<std::string> names(const std::vector<Isa>& isas) {
  std::vector<std::string> found;
  for (Isa isa : isas) found.emplace_back(isa_name(isa));
  return found;
}

py::dict variants() {
  py::dict all;
  for (KernelTableBase* table : KernelTableBase::all()) {
    py::list rows;
    for (Isa isa : table->isas()) {
      py::dict row;
      row["name"] = isa_name(isa);
      row["supported"] = cpu_supports(isa);
      row["chosen"] = table->chosen_isa() == isa;
      rows.append(row);
    }
    all[table->op()] = rows;
  }
  return all;
}

py::dict packed_info(const std::string& bytes, int64_t total_bytes) {
  const PackedHeader h =
      read_header(bytes.data(), bytes.size() < sizeof(PackedHeader) ? int64_t(bytes.size()) : total_bytes);
  py::dict info;
  info["scheme"] = scheme_name(h);
  info["version"] = h.version;
  info["out_features"] = h.n;
  info["in_features"] = h.k;
  info["code_bits"] = h.code_bits;
  info["group_size"] = h.group;
  return info;
}

py::dict cpu_info() {
  py::dict info;
  info["model"] = cpu_model();
  info["isas"] = names(supported_isas());
  info["isa"] = isa_name(isa_cap());
  info["usable_cores"] = default_num_threads();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  isa_cap();      // a TLE_ISA or TLE_NUM_THREADS that cannot be met is an error of the import, not of the first call
  num_threads();
  m.def("set_num_threads", &set_num_threads);
  m.def("get_num_threads", &num_threads);
  m.def("default_num_threads", &default_num_threads);
  m.def("cpu_info", &cpu_info);
  m.def("isa", [] { return std::string(isa_name(isa_cap())); });
  m.def("set_isa", &set_isa_cap);
  m.def("isas", [] { return names(supported_isas()); });
  m.def("variants", &variants);
  m.def("parallel_regions", &parallel_regions);
  m.def("read_bandwidth", &read_bandwidth, py::arg("bytes"), py::arg("repeats") = 3,
        py::call_guard<py::gil_scoped_release>());
  m.def("scratch_allocations", &scratch_allocations);
  m.def("packed_info", &packed_info);
  // wide: fp32 scales by groups, which pack_linear_weight keeps where they are given.
  m.def("packed_bytes", [](const std::string& scheme, int64_t n, int64_t k, int64_t group_size, bool wide) {
    PackedHeader header = make_header(parse_scheme(scheme, group_size), n, k);
    if (wide) header.scale_type = ScaleType::kF32;
    if (wide && header.min_type != ScaleType::kNone) header.min_type = ScaleType::kF32;
    return layout_of(header).total_bytes;
  }, py::arg("scheme"), py::arg("n"), py::arg("k"), py::arg("group_size") = 0, py::arg("wide") = false);
  m.def("gguf_types", [] {
    py::dict types;
    for (const GgufType& type : gguf_types()) {
      PackedHeader header = gguf_header(type, 1, type.block_k);
      types[type.name] = py::make_tuple(scheme_name(header), type.take != nullptr);
    }
    return types;
  });
  m.def("gguf_packed_bytes", [](const std::string& type, int64_t n, int64_t k) {
    return layout_of(gguf_header(gguf_type(type), n, k)).total_bytes;
  });
  m.def("schemes", &scheme_names);
  bind_watch(m);
}

}  // namespace tle
