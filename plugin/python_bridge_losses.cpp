// SPDX-License-Identifier: LGPL-3.0-or-later
// scalarize_losses for a Python dict of tensors, without the dispatcher. Its
// way of turning a dict into a c10::Dict throws and catches an exception (torch
// 2.11: toIValue tries a ScriptDict first), which costs more than reading
// twenty losses.
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <torch/extension.h>

#include <algorithm>
#include <optional>

namespace {

namespace py = pybind11;
using deepmd_prewarm::NamedLoss;

// nullopt: something that is not a plain tensor under a plain string, which the
// caller has to look at.
std::optional<std::vector<NamedLoss>> plain_losses(
    PyObject* losses,
    const std::optional<std::vector<std::string>>& skip_prefixes,
    std::vector<py::object>& keys) {
  std::vector<NamedLoss> kept;
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(losses, &position, &key, &value) != 0) {
    if (!PyUnicode_CheckExact(key) || !THPVariable_CheckExact(value)) {
      return std::nullopt;
    }
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(key, &size);
    if (text == nullptr) {
      throw py::error_already_set();
    }
    const std::string_view name(text, static_cast<size_t>(size));
    if (!deepmd_prewarm::is_skipped_loss(name, skip_prefixes)) {
      keys.push_back(py::reinterpret_borrow<py::object>(key));
      kept.push_back({name, THPVariable_Unpack(value)});
    }
  }
  return kept;
}

py::object scalarize(
    const py::dict& losses,
    const std::optional<std::vector<std::string>>& skip_prefixes) {
  std::vector<py::object> keys;
  const auto kept = plain_losses(losses.ptr(), skip_prefixes, keys);
  if (!kept) {
    return py::none();
  }
  // A copy from a device may take long; from this host it takes nanoseconds.
  std::optional<py::gil_scoped_release> no_gil;
  if (!std::all_of(kept->begin(), kept->end(), [](const NamedLoss& loss) {
        return loss.tensor.is_cpu();
      })) {
    no_gil.emplace();
  }
  const auto values = deepmd_prewarm::read_losses(*kept);
  no_gil.reset();
  py::dict scalars;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto value =
        py::reinterpret_steal<py::object>(PyFloat_FromDouble(values[i]));
    if (PyDict_SetItem(scalars.ptr(), keys[i].ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return scalars;
}

}  // namespace

namespace deepmd_prewarm {

// Declared and called by python_bridge.cpp.
void bind_losses(py::module_& m) {
  m.def("scalarize_losses", &scalarize, py::arg("losses"),
        py::arg("skip_prefixes"),
        "scalarize_losses for a dict of plain tensors; None for any other.");
}

}  // namespace deepmd_prewarm
