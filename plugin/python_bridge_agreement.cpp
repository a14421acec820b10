// SPDX-License-Identifier: LGPL-3.0-or-later
// The part of the bridge that lets a wait for other ranks end on Ctrl-C, and
// hands a fingerprint on, for which the operator's schema has no place.
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <deepmd_prewarm/plugin/interrupt_check.h>
#include <torch/extension.h>

namespace {

namespace py = pybind11;

// Runs on the waiting thread, which gave the GIL up.
void check_python_signals() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

namespace deepmd_prewarm {

// Declared and called by python_bridge.cpp.
void bind_agreement(py::module_& m) {
  set_interrupt_check(&check_python_signals);
  m.def(
      "meet",
      [](const std::string& group_name, const std::string& phase,
         const std::string& error, const std::string& fingerprint,
         double timeout_s) {
        meet(group_name, Meeting{phase, error, fingerprint, timeout_s});
      },
      py::arg("group_name"), py::arg("phase"), py::arg("error"),
      py::arg("fingerprint"), py::arg("timeout_s"),
      py::call_guard<py::gil_scoped_release>(),
      "sync_ranks with a fingerprint that must be equal on all ranks.");
}

}  // namespace deepmd_prewarm
