// SPDX-License-Identifier: LGPL-3.0-or-later
// How code that knows no Python lets go of an interpreter lock while it waits.
// A caller may hold the lock (a C++ extension, Inductor's cpp_wrapper), and
// whoever we wait for may need it: without this both wait for ever.
#pragma once

#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// Two functions of the Python bridge; without the bridge there is no lock.
struct PythonGate {
  /// Lets the lock go if this thread holds it; returns what take_back needs.
  void* (*let_go)();
  void (*take_back)(void*);
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

}  // namespace deepmd_prewarm
