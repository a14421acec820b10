// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/export.h>

#include <optional>

namespace deepmd_prewarm {

DEEPMD_PREWARM_API void warmup_compiled(
    const c10::intrusive_ptr<CompiledTask>& task,
    const c10::List<std::optional<at::Tensor>>& inputs,
    bool backward);

}  // namespace deepmd_prewarm
