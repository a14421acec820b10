// SPDX-License-Identifier: LGPL-3.0-or-later
// A library with a static that outlives the interpreter and holds a handle, as
// a C++ program or another plugin may (tests/python/test_exit.py loads it).
#include <deepmd_prewarm/plugin/compiled_task.h>
#include <torch/library.h>

#include <vector>

namespace {

using deepmd_prewarm::CompiledTask;

std::vector<c10::intrusive_ptr<CompiledTask>>& held() {
  static std::vector<c10::intrusive_ptr<CompiledTask>> tasks;
  return tasks;
}

}  // namespace

TORCH_LIBRARY(deepmd_prewarm_test, m) {
  m.def("hold(__torch__.torch.classes.deepmd.CompiledTask task) -> ()",
        [](const c10::intrusive_ptr<CompiledTask>& task) {
          held().push_back(task);
        });
}
