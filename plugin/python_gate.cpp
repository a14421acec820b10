// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/python_gate.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace deepmd_prewarm {
namespace {
std::atomic<const PythonGate*> python_gate{nullptr};
std::atomic<bool> ending{false};
std::atomic<std::thread::id> ends_it{};
constexpr std::chrono::milliseconds pause{20};
constexpr std::chrono::seconds patience{5};
}  // namespace

void set_python_gate(const PythonGate* gate) { python_gate = gate; }

OutsidePython::OutsidePython()
    : gate_(python_gate), held_(gate_ ? gate_->let_go() : nullptr) {}

OutsidePython::~OutsidePython() {
  if (held_) {
    gate_->take_back(held_);
  }
}

void python_ends() {
  ends_it = std::this_thread::get_id();
  ending = true;
}

ReturnToPython::~ReturnToPython() {
  if (!ending || ends_it.load() == std::this_thread::get_id()) {
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  const PythonGate* gate = python_gate;
  while (gate->is_finalizing() ||
         std::chrono::steady_clock::now() - start < patience) {
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace deepmd_prewarm
