// SPDX-License-Identifier: LGPL-3.0-or-later
// functorch (grad, jvp, vmap) hands a transformed function wrappers. Autograd
// inside the transform saves the wrapper, so the counts of the tensor that it
// stands for do not show who will read it: that tensor must stay out of reach.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// True for a tensor that stands for another one inside a transform.
DEEPMD_PREWARM_API bool is_functorch_wrapper(const at::Tensor& tensor);

/// Boxed kernel for the Autograd and FuncTorchBatched keys of an operator whose
/// one argument is a list of tensors: hands the call on without the wrappers in
/// the list (None instead, or gone from a list that cannot hold None). In a
/// result of one string per entry, their entries say what they are.
DEEPMD_PREWARM_API void leave_out_functorch_wrappers(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack);

}  // namespace deepmd_prewarm
