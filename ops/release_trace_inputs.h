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

/// Gives the memory of trace-time inputs back to the allocator and returns the
/// bytes freed. `inputs`: tensors of any shape, dtype and device, and None.
///
/// The caller gives up the tensors in the list; everything else is protected,
/// storage by storage: what another tensor shares, autograd saved, a gradient
/// accumulator hangs on, or the process doesn't own stays exactly as it was
/// (explain_release says which and why). Each later access to the data of a
/// freed tensor raises a RuntimeError that names this operator; shape, dtype
/// and device stay readable. Idempotent. Thread-safe; does not block.
///
/// From C++, one variable per tensor beside the list counts as the caller's own
/// and cannot be told apart from a module that holds the same tensor object.
DEEPMD_PREWARM_API c10::SymInt release_trace_inputs(
    const c10::List<std::optional<at::Tensor>>& inputs);

/// The overload `.list`: the same for a list without None.
DEEPMD_PREWARM_API c10::SymInt release_trace_inputs_list(
    const c10::List<at::Tensor>& inputs);

/// Dry run of release_trace_inputs: for each input "release", or the reason for
/// which it would be kept. Changes nothing.
DEEPMD_PREWARM_API std::vector<std::string> explain_release(
    const c10::List<std::optional<at::Tensor>>& inputs);

}  // namespace deepmd_prewarm
