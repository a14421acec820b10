// SPDX-License-Identifier: LGPL-3.0-or-later
// What code that knows no Python owes to an interpreter: to let go of its lock
// while it waits (a caller may hold it - a C++ extension, Inductor's
// cpp_wrapper
// - and whoever we wait for may need it), and not to come back to it once it
// ends.
#pragma once

#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// Functions of the Python bridge; without the bridge there is no interpreter.
struct PythonGate {
  /// Lets the lock go if this thread holds it; returns what take_back needs.
  void* (*let_go)();
  void (*take_back)(void*);
  /// No other thread gets the lock any more.
  bool (*is_finalizing)();
};

/// Called once, by the bridge. `gate` must live as long as the process.
DEEPMD_PREWARM_API void set_python_gate(const PythonGate* gate);

/// While one lives, this thread holds no interpreter lock.
class DEEPMD_PREWARM_API OutsidePython {
 public:
  OutsidePython();
  ~OutsidePython();
  OutsidePython(const OutsidePython&) = delete;
  OutsidePython& operator=(const OutsidePython&) = delete;

 private:
  const PythonGate* gate_;
  void* held_;
};

/// Called once, by the thread that ends the interpreter.
DEEPMD_PREWARM_API void python_ends();

/// Its destructor keeps the thread from returning to an interpreter that ends.
/// A daemon thread that asks for the lock then is unwound through torch's
/// destructors, which aborts the process ("terminate called without an active
/// exception"). Blocks until the process has gone, but not for more than 5 s if
/// it does not go: somebody may be waiting for this thread.
class DEEPMD_PREWARM_API ReturnToPython {
 public:
  ReturnToPython() = default;
  ~ReturnToPython();
  ReturnToPython(const ReturnToPython&) = delete;
  ReturnToPython& operator=(const ReturnToPython&) = delete;
};

}  // namespace deepmd_prewarm
