#include "csrc/torch/watch.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

namespace py = pybind11;

namespace tle {

namespace {

// A few thousand pointers of Python objects, compared before every token. The objects are all over the heap and the
// weights of the last token went through the caches since, so each comparison would wait for memory: as a Python loop
// they cost a small model half a millisecond a token. Here everything is asked for first and then compared.
class Watch {
 public:
  // dicts: their values must stay the same objects, none added or removed. typed: objects whose class must stay.
  // without_forward: dicts that must not get a key "forward". empty: dicts that must stay empty. settings: (dict, key)
  // whose value must stay.
  Watch(const std::vector<py::dict>& dicts, const std::vector<py::object>& typed, std::vector<py::dict> without_forward,
        std::vector<py::dict> empty, const std::vector<std::pair<py::dict, py::str>>& settings)
      : without_forward_(std::move(without_forward)), empty_(std::move(empty)), forward_("forward") {
    for (const py::dict& d : dicts) {
      contents_.push_back({d, {}});
      for (const auto& item : d) contents_.back().values.push_back(py::reinterpret_borrow<py::object>(item.second));
    }
    for (const py::object& object : typed) types_.push_back({object, py::type::of(object)});
    for (const auto& [d, key] : settings) settings_.push_back({d, key, value_of(d, key)});
  }

  bool unchanged() const {
    prefetch();
    for (const Contents& c : contents_) {
      PyObject *key, *value;
      Py_ssize_t position = 0;
      size_t i = 0;
      while (PyDict_Next(c.dict.ptr(), &position, &key, &value))
        if (i == c.values.size() || c.values[i++].ptr() != value) return false;
      if (i != c.values.size()) return false;
    }
    for (const Typed& t : types_)
      if (Py_TYPE(t.object.ptr()) != reinterpret_cast<PyTypeObject*>(t.type.ptr())) return false;
    for (const py::dict& d : empty_)
      if (PyDict_Size(d.ptr()) != 0) return false;
    for (const py::dict& d : without_forward_)
      if (PyDict_GetItemWithError(d.ptr(), forward_.ptr()) != nullptr) return false;
    for (const Setting& s : settings_)
      if (value_of(s.dict, s.key).ptr() != s.value.ptr()) return false;
    return true;
  }

 private:
  struct Contents {
    py::dict dict;
    std::vector<py::object> values;
  };
  struct Typed {
    py::object object;
    py::type type;
  };
  struct Setting {
    py::dict dict;
    py::str key;
    py::object value;
  };

  static py::object value_of(const py::dict& d, const py::str& key) {
    return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(d.ptr(), key.ptr()));
  }

  template <class Visit>
  void each_dict(Visit visit) const {
    for (const Contents& c : contents_) visit(c.dict.ptr());
    for (const py::dict& d : empty_) visit(d.ptr());
    for (const py::dict& d : without_forward_) visit(d.ptr());
  }

  static void prefetch_lines(const void* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
  }

  void prefetch() const {
    each_dict([](PyObject* d) { prefetch_lines(d, sizeof(PyDictObject)); });
    for (const Typed& t : types_) __builtin_prefetch(t.object.ptr());
    // A dict's table, whose address stands in the dict. Sizes are guesses: a hint may miss.
    for (const Contents& c : contents_) prefetch_lines(reinterpret_cast<PyDictObject*>(c.dict.ptr())->ma_keys, 128);
    for (const py::dict& d : without_forward_) prefetch_lines(reinterpret_cast<PyDictObject*>(d.ptr())->ma_keys, 128);
  }

  std::vector<Contents> contents_;
  std::vector<Typed> types_;
  std::vector<py::dict> without_forward_, empty_;
  std::vector<Setting> settings_;
  py::str forward_;
};

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<Watch>(m, "Watch")
      .def(py::init<const std::vector<py::dict>&, const std::vector<py::object>&, std::vector<py::dict>,
                    std::vector<py::dict>, const std::vector<std::pair<py::dict, py::str>>&>(),
           py::arg("dicts"), py::arg("typed"), py::arg("without_forward"), py::arg("empty"), py::arg("settings"))
      .def("unchanged", &Watch::unchanged);
}

}  // namespace tle
