// SPDX-License-Identifier: LGPL-3.0-or-later
// The part of the bridge that lets a wait for other ranks end on Ctrl-C and log
// through Python, and hands on what the operator's schema has no place for.
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <deepmd_prewarm/plugin/python_gate.h>
#include <deepmd_prewarm/plugin/rank_agreement.h>
#include <deepmd_prewarm/plugin/wait_hooks.h>
#include <torch/extension.h>

namespace {

namespace py = pybind11;

// Both run on the waiting thread, which gave the GIL up.
void check_python_signals() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void log_to_python(const std::string& line) {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  py::module_::import("logging")
      .attr("getLogger")("deepmd_prewarm")
      .attr("warning")("%s", py::str(line));
}

}  // namespace

namespace deepmd_prewarm {

// Declared and called by python_bridge.cpp.
void bind_agreement(py::module_& m) {
  set_wait_hooks({&check_python_signals, &log_to_python});
  // An exit must not find our threads at work: Python's own atexit comes before
  // the interpreter and the Store objects go.
  py::module_::import("atexit").attr("register")(py::cpp_function(
      [] { leave_all(1.); }, py::call_guard<py::gil_scoped_release>()));
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def(
      "meet",
      [](const std::string& group_name, const std::string& phase,
         const std::string& error, const std::string& fingerprint,
         double timeout_s) {
        const ReturnToPython gate;
        meet(group_name, Meeting{phase, error, fingerprint, timeout_s});
      },
      py::arg("group_name"), py::arg("phase"), py::arg("error"),
      py::arg("fingerprint"), py::arg("timeout_s"), Released(),
      "sync_ranks with a fingerprint that must be equal on all ranks.");
  m.def("start_beats", py::overload_cast<const std::string&>(&start_beats),
        py::arg("group_name"), Released());
  m.def("requests_sent", py::overload_cast<const std::string&>(&requests_sent),
        py::arg("group_name"), Released());
  m.def("enter_phase", &enter_phase, py::arg("phase"), Released());
  m.def("rest", &rest, Released());
  m.def("leave_all", &leave_all, py::arg("patience_s"), Released());
}

}  // namespace deepmd_prewarm
