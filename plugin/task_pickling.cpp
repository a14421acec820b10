// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/task_pickling.h>

namespace deepmd_prewarm {

TaskToken task_to_token(const c10::intrusive_ptr<CompiledTask>& task) {
  return {task->backend(), task->name()};
}

c10::intrusive_ptr<CompiledTask> task_from_token(TaskToken token) {
  const auto& [backend, name] = token;
  TORCH_CHECK(false,
              "CompiledTask: expected a handle that can be copied or "
              "loaded, got task '",
              name, "' with a ", backend,
              " callable. Compiled handles are process-local: make a new one "
              "here with CompiledTask.from_callable.");
}

FlatTask flatten_task(const c10::intrusive_ptr<CompiledTask>& task) {
  return {{"name", task->name()}, {"backend", task->backend()}};
}

}  // namespace deepmd_prewarm
