// SPDX-License-Identifier: LGPL-3.0-or-later
// How a CompiledTask leaves its process. One on a TorchScript module takes the
// module along. Any other callable cannot: it becomes a token that says so when
// it is read. Writing a token never raises, because Inductor calls
// __getstate__ while it compiles.
#pragma once

#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/export.h>

#include <string>
#include <tuple>

namespace deepmd_prewarm {

/// (backend, name, method, module); module is None where it cannot go along.
using TaskToken =
    std::tuple<std::string, std::string, std::string, c10::IValue>;

/// RuntimeError if the handle is part of the module that it would take along.
DEEPMD_PREWARM_API TaskToken
task_to_token(const c10::intrusive_ptr<CompiledTask>& task);

/// The handle that comes out owns its module, as nobody else may. RuntimeError
/// for a token of a process-local callable.
DEEPMD_PREWARM_API c10::intrusive_ptr<CompiledTask> task_from_token(
    const TaskToken& token);

/// What tracing knows of a handle: (("name", name), ("backend", backend)).
using FlatTask = std::tuple<std::tuple<std::string, std::string>,
                            std::tuple<std::string, std::string>>;
DEEPMD_PREWARM_API FlatTask
flatten_task(const c10::intrusive_ptr<CompiledTask>& task);

}  // namespace deepmd_prewarm
