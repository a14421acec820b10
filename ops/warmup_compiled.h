// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/export.h>

#include <optional>

namespace deepmd_prewarm {

/// Runs the task's callable once on sample inputs, forward and, if `backward`
/// and an output requires grad, backward from the sum of its floating outputs;
/// drops the outputs and synchronizes the devices that took part.
///
/// Inputs are handed on as they are. Runs in the grad, inference and autocast
/// mode of the caller. Leaves no trace, also when it raises: `.grad`, random
/// streams, parameter and buffer values, autograd graph and modes are as
/// before (see SideEffectGuard); no DDP and no post-accumulate hook fires, a
/// `Parameter.register_hook` does.
///
/// One warm-up at a time in a process; another thread's call waits. Blocks
/// for as long as the callable compiles. Not collective.
///
/// Errors: whatever the callable raises, with the task named; ValueError for
/// no handle, RuntimeError for a closed one, TypeError if no tensor comes back.
DEEPMD_PREWARM_API void warmup_compiled(
    const c10::intrusive_ptr<CompiledTask>& task,
    const c10::List<std::optional<at::Tensor>>& inputs,
    bool backward = true);

/// The overload `.list`: the same for a list without None, which is what a
/// TorchScript literal `[x, y]` is.
DEEPMD_PREWARM_API void warmup_compiled_list(
    const c10::intrusive_ptr<CompiledTask>& task,
    const c10::List<at::Tensor>& inputs,
    bool backward = true);

}  // namespace deepmd_prewarm
