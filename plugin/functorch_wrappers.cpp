// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <deepmd_prewarm/plugin/functorch_wrappers.h>
#include <deepmd_prewarm/plugin/storage_audit.h>

#include <utility>
#include <vector>

namespace deepmd_prewarm {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DispatchKeySet kWrapperKeys({DispatchKey::FuncTorchBatched,
                                       DispatchKey::FuncTorchGradWrapper,
                                       DispatchKey::BatchedNestedTensor,
                                       DispatchKey::Batched});

// The keys that still have a say after the one that this kernel serves.
DispatchKeySet keys_below(DispatchKeySet keys) {
  const auto below = keys.has(DispatchKey::FuncTorchBatched)
                         ? DispatchKeySet(DispatchKeySet::FULL_AFTER,
                                          DispatchKey::FuncTorchBatched)
                         : c10::after_autograd_keyset;
  return keys & below;
}

std::vector<size_t> find_wrappers(c10::ArrayRef<c10::IValue> elements) {
  std::vector<size_t> found;
  for (size_t i = 0; i < elements.size(); ++i) {
    if (elements[i].isTensor() &&
        is_functorch_wrapper(elements[i].toTensor())) {
      found.push_back(i);
    }
  }
  return found;
}

// The schema decides which kind of list: Tensor[] holds no None.
c10::IValue without(const c10::IValue& list,
                    const std::vector<size_t>& wrappers) {
  if (list.isTensorList()) {
    auto tensors = list.toTensorList().copy();
    for (auto i = wrappers.rbegin(); i != wrappers.rend(); ++i) {
      tensors.erase(tensors.begin() + static_cast<int64_t>(*i));
    }
    return tensors;
  }
  auto tensors = list.toOptionalTensorList().copy();
  for (const auto i : wrappers) {
    tensors.set(i, std::nullopt);
  }
  return tensors;
}

}  // namespace

bool is_functorch_wrapper(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has_any(kWrapperKeys);
}

void leave_out_functorch_wrappers(const c10::OperatorHandle& op,
                                  DispatchKeySet keys,
                                  torch::jit::Stack* stack) {
  auto& inputs = torch::jit::peek(*stack, 0, 1);
  const auto wrappers = find_wrappers(inputs.toListRef());
  if (!wrappers.empty()) {
    inputs = without(inputs, wrappers);
  }
  op.redispatchBoxed(keys_below(keys), stack);
  auto& result = torch::jit::peek(*stack, 0, 1);
  if (!wrappers.empty() && result.isList() &&
      result.toList().elementType()->kind() == c10::TypeKind::StringType) {
    auto reasons = c10::impl::toTypedList<std::string>(result.toList());
    for (const auto i : wrappers) {
      reasons.set(i, describe(Verdict::kFunctorch));
    }
    result = std::move(reasons);
  }
}

}  // namespace deepmd_prewarm
