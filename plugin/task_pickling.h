// SPDX-License-Identifier: LGPL-3.0-or-later
// How a CompiledTask leaves its process. A compiled callable cannot: such a
// handle becomes a token that says so when it is read. Writing never raises,
// because Inductor calls __getstate__ while it compiles.
#pragma once

#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/export.h>

#include <string>
#include <tuple>

namespace deepmd_prewarm {

/// (backend, name).
using TaskToken = std::tuple<std::string, std::string>;

DEEPMD_PREWARM_API TaskToken
task_to_token(const c10::intrusive_ptr<CompiledTask>& task);

DEEPMD_PREWARM_API c10::intrusive_ptr<CompiledTask> task_from_token(
    TaskToken token);

/// What tracing knows of a handle: (("name", name), ("backend", backend)).
using FlatTask = std::tuple<std::tuple<std::string, std::string>,
                            std::tuple<std::string, std::string>>;
DEEPMD_PREWARM_API FlatTask
flatten_task(const c10::intrusive_ptr<CompiledTask>& task);

}  // namespace deepmd_prewarm
