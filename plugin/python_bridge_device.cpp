// SPDX-License-Identifier: LGPL-3.0-or-later
// The part of the bridge that tells what the device side of this process is
// like: for `doctor` and the report, no operator needs it.
#include <deepmd_prewarm/plugin/device_extension.h>
#include <deepmd_prewarm/plugin/group_backends.h>
#include <deepmd_prewarm/plugin/pinned_memory.h>
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace deepmd_prewarm {
namespace {

namespace py = pybind11;

// (state, text, versions) of libdeepmd_prewarm_cuda.so.
py::tuple describe_extension() {
  const auto& loaded = device_extension();
  const char* state = "absent";
  if (loaded.state == ExtensionState::kLoaded) {
    state = "loaded";
  } else if (loaded.state == ExtensionState::kFailed) {
    state = "failed";
  }
  const auto versions = loaded.extension == nullptr
                            ? decltype(loaded.extension->versions())()
                            : loaded.extension->versions();
  return py::make_tuple(state, loaded.text, versions);
}

std::vector<int> contexts() {
  const auto* extension = device_extension().extension;
  return extension == nullptr ? std::vector<int>() : extension->contexts();
}

std::string probe(int index) {
  const auto& loaded = device_extension();
  return loaded.extension == nullptr ? loaded.text
                                     : loaded.extension->probe(index);
}

// One dict a backend, with the names that the report uses.
py::list describe_backends(const std::string& group_name, int index) {
  std::vector<BackendState> states;
  {
    const py::gil_scoped_release released;
    states = backend_states(*c10d::resolve_process_group(group_name),
                            static_cast<c10::DeviceIndex>(index));
  }
  py::list said;
  for (const auto& state : states) {
    py::dict one;
    one["device"] = state.device_type;
    one["name"] = state.name;
    one["timeout_s"] = state.timeout_s < 0
                           ? py::object(py::none())
                           : py::object(py::float_(state.timeout_s));
    one["error"] = state.error;
    one["communicator"] = state.communicator;
    said.append(one);
  }
  return said;
}

int64_t pinned_bytes(const std::string& type) {
  return pinned_figures(c10::Device(type).type()).reserved;
}

}  // namespace

// Declared and called by python_bridge.cpp.
void bind_device(py::module_& m) {
  m.def("device_extension", &describe_extension);
  m.def("device_contexts", &contexts);
  m.def("probe_device", &probe, py::arg("index"));
  m.def("pinned_bytes", &pinned_bytes, py::arg("device_type"));
  m.def("backend_states", &describe_backends, py::arg("group_name"),
        py::arg("index"));
  m.def(
      "connect_backend",
      [](const std::string& group_name, const std::string& device) {
        return connect_backend(*c10d::resolve_process_group(group_name),
                               c10::Device(device));
      },
      py::arg("group_name"), py::arg("device"),
      py::call_guard<py::gil_scoped_release>(),
      "Lets a group's backend connect its communicators; a collective.");
}

}  // namespace deepmd_prewarm
