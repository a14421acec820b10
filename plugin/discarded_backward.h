// SPDX-License-Identifier: LGPL-3.0-or-later
// A backward whose gradients nobody gets: it runs (and so compiles) every
// backward kernel, and fires no hook that an optimizer or DDP set on a leaf.
#pragma once

#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <vector>

namespace deepmd_prewarm {

/// Where this thread's autograd graph ended when it was made: nodes that are
/// older belong to the caller.
class DEEPMD_PREWARM_API GraphMark {
 public:
  GraphMark();
  uint64_t sequence_nr;
  uint64_t thread_id;
};

/// `inputs` with every non-leaf that requires grad replaced by a tensor of the
/// same storage, strides and dtype whose graph ends here: the backward must
/// not run through, and use up, the caller's graph behind it.
DEEPMD_PREWARM_API std::vector<at::Tensor> cut_graph(
    const std::vector<at::Tensor>& inputs);

/// Backward from the sum of the floating outputs to every leaf below them and
/// to `inputs`; drops the gradients. Returns false if no output requires grad.
/// A graph that is older than `mark` is kept usable.
DEEPMD_PREWARM_API bool discarded_backward(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    const GraphMark& mark);

}  // namespace deepmd_prewarm
