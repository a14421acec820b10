// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <deepmd_prewarm/plugin/export.h>

#include <optional>
#include <string>
#include <vector>

namespace deepmd_prewarm {

/// Gives the memory of trace-time inputs back to the allocator; returns bytes.
DEEPMD_PREWARM_API c10::SymInt release_trace_inputs(
    const c10::List<std::optional<at::Tensor>>& inputs);

/// The overload `.list`: the same for a list without None.
DEEPMD_PREWARM_API c10::SymInt release_trace_inputs_list(
    const c10::List<at::Tensor>& inputs);

/// Dry run: for each input "release" or the reason it would be kept.
DEEPMD_PREWARM_API std::vector<std::string> explain_release(
    const c10::List<std::optional<at::Tensor>>& inputs);

}  // namespace deepmd_prewarm
