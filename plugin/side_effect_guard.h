// SPDX-License-Identifier: LGPL-3.0-or-later
// What a run of foreign code may change and a training must not notice:
// random streams, gradients, parameter and buffer values, thread modes.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <vector>

namespace deepmd_prewarm {

/// Remembers at construction, puts back at put_back() or, if that was never
/// reached, at destruction (a failure there is a warning, not an exception).
///
/// - the default generators of the CPU and of every accelerator device whose
///   context exists (none is created);
/// - of each tensor in `state`: storage, shape, value, version counter, and of
///   each leaf `.grad` (the object, and its value);
/// - of each leaf in `inputs`: `.grad`;
/// - grad mode, inference mode and dispatch keys (autocast) of this thread.
///
/// Costs one copy of `state` and of its gradients while it lives.
class DEEPMD_PREWARM_API SideEffectGuard {
 public:
  SideEffectGuard(const std::vector<at::Tensor>& state,
                  const std::vector<at::Tensor>& inputs);
  ~SideEffectGuard();
  SideEffectGuard(const SideEffectGuard&) = delete;
  SideEffectGuard& operator=(const SideEffectGuard&) = delete;

  /// Puts everything back, once; a second call does nothing.
  void put_back();

 private:
  struct Value {
    at::Tensor tensor;
    at::Tensor alias;  // same storage and shape as `tensor` had
    at::Tensor copy;
    int64_t version;  // -1: none is kept (inference tensor)
  };
  struct Gradient {
    at::Tensor leaf;
    at::Tensor grad;  // undefined: it was None
  };
  struct Stream {
    at::Generator generator;
    at::Tensor state;
  };

  void remember_value(const at::Tensor& tensor);
  void remember_gradient(const at::Tensor& tensor);
  static void put_back_value(const Value& value);

  std::vector<Value> values_;
  std::vector<Gradient> gradients_;
  std::vector<Stream> streams_;
  c10::AutogradState autograd_modes_;
  c10::impl::LocalDispatchKeySet dispatch_keys_;
  bool done_ = false;
};

}  // namespace deepmd_prewarm
