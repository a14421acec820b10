// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/task_pickling.h>

namespace deepmd_prewarm {
namespace {

bool holds(const torch::jit::Module& module, const CompiledTask& task) {
  for (const auto& submodule : module.modules()) {
    for (const auto& slot : submodule._ivalue()->slots()) {
      if (slot.isCustomClass() &&
          slot.toObjectRef().getSlot(0).toCapsule().get() == &task) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

TaskToken task_to_token(const c10::intrusive_ptr<CompiledTask>& task) {
  const auto backend = task->backend_if_open();
  if (const auto script = backend ? backend->portable() : std::nullopt) {
    const auto& [module, method] = *script;
    // Pickling would follow the two into each other until the stack ends.
    TORCH_CHECK(
        !holds(module, *task),
        "CompiledTask: expected a handle outside of its own module, got "
        "task '",
        task->name(),
        "' as an attribute of the module it is made of. "
        "Keep the handle in the trainer that holds the module.");
    return {backend->kind(), task->name(), method, module._ivalue()};
  }
  return {task->backend(), task->name(), "", c10::IValue()};
}

c10::intrusive_ptr<CompiledTask> task_from_token(const TaskToken& token) {
  const auto& [backend, name, method, module] = token;
  TORCH_CHECK(module.isModule(),
              "CompiledTask: expected a handle that can be copied or loaded, "
              "got task '",
              name, "' with a ", backend,
              " callable. Compiled handles are process-local: make a new one "
              "here with CompiledTask.from_callable.");
  return c10::make_intrusive<CompiledTask>(
      name, script_backend(module.toModule(), method, /*owns=*/true));
}

FlatTask flatten_task(const c10::intrusive_ptr<CompiledTask>& task) {
  return {{"name", task->name()}, {"backend", task->backend()}};
}

}  // namespace deepmd_prewarm
