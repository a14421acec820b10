// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/python_gate.h>

#include <atomic>

namespace deepmd_prewarm {
namespace {
std::atomic<const PythonGate*> python_gate{nullptr};
}  // namespace

void set_python_gate(const PythonGate* gate) { python_gate = gate; }

OutsidePython::OutsidePython()
    : gate_(python_gate), held_(gate_ ? gate_->let_go() : nullptr) {}

OutsidePython::~OutsidePython() {
  if (held_) {
    gate_->take_back(held_);
  }
}

}  // namespace deepmd_prewarm
