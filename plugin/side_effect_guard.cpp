// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <deepmd_prewarm/plugin/side_effect_guard.h>

#include <mutex>
#include <unordered_set>
#include <utility>

namespace deepmd_prewarm {
namespace {

// Our own copies are nobody's business: no autograd, no autocast, no mode of
// the user (a FLOP counter, a fake mode) sees them.
class Unseen {
 public:
  Unseen()
      : excluded_(c10::autograd_dispatch_keyset |
                  c10::autocast_dispatch_keyset |
                  c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView,
                                       c10::DispatchKey::Python,
                                       c10::DispatchKey::PythonTLSSnapshot,
                                       c10::DispatchKey::Functionalize})) {}

 private:
  c10::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard excluded_;
};

// A tensor whose bytes can be read and compared here; a subclass, a wrapper, a
// sparse, nested or meta tensor cannot.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_meta() &&
         tensor.has_storage() &&
         !tensor.key_set().has_any(
             c10::python_ks |
             c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched,
                                  c10::DispatchKey::FuncTorchGradWrapper,
                                  c10::DispatchKey::Functionalize}));
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
}

// The values are as before, so a graph that saved this tensor is still right;
// only the counter would say otherwise.
void set_version(const at::Tensor& tensor, int64_t version) {
  if (version >= 0 && !tensor.is_inference()) {
    auto counter = tensor.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(
             b.unsafeGetTensorImpl()->unsafe_storage()) &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// Generators of devices that are in use; asking another one would create its
// context.
std::vector<at::Generator> generators_in_use() {
  std::vector<at::Generator> generators{
      at::globalContext().defaultGenerator(at::kCPU)};
  const auto accelerator = at::accelerator::getAccelerator();
  if (!accelerator) {
    return generators;
  }
  const auto& hooks =
      at::globalContext().getAcceleratorHooksInterface(*accelerator);
  for (c10::DeviceIndex i = 0; i < hooks.deviceCount(); ++i) {
    if (hooks.hasPrimaryContext(i)) {
      generators.push_back(
          at::globalContext().defaultGenerator({*accelerator, i}));
    }
  }
  return generators;
}

}  // namespace

SideEffectGuard::SideEffectGuard(const std::vector<at::Tensor>& state,
                                 const std::vector<at::Tensor>& inputs)
    : autograd_modes_(c10::AutogradState::get_tls_state()),
      dispatch_keys_(c10::impl::tls_local_dispatch_key_set()) {
  for (auto& generator : generators_in_use()) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    streams_.push_back({generator, generator.get_state()});
  }
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& tensor : state) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      remember_gradient(tensor);
      remember_value(tensor);
    }
  }
  for (const auto& tensor : inputs) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      remember_gradient(tensor);
    }
  }
}

void SideEffectGuard::remember_value(const at::Tensor& tensor) {
  const Unseen unseen;
  if (!is_plain(tensor)) {
    return;
  }
  at::Tensor alias(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/true));
  values_.push_back(
      {tensor, std::move(alias), tensor.clone(), version_of(tensor)});
}

void SideEffectGuard::remember_gradient(const at::Tensor& tensor) {
  if (!tensor.is_leaf() || tensor.is_inference()) {
    return;
  }
  gradients_.push_back({tensor, tensor.grad()});
  if (tensor.grad().defined()) {
    remember_value(tensor.grad());
  }
}

void SideEffectGuard::put_back_value(const Value& value) {
  const at::Tensor& tensor = value.tensor;
  if (!same_view(tensor, value.alias)) {
    tensor.set_data(value.alias);
  }
  if (!at::equal(tensor, value.copy)) {
    tensor.copy_(value.copy);
  }
  set_version(tensor, value.version);
}

void SideEffectGuard::put_back() {
  if (done_) {
    return;
  }
  done_ = true;
  c10::AutogradState::set_tls_state(autograd_modes_);
  c10::impl::_force_tls_local_dispatch_key_set(dispatch_keys_);
  for (auto& [leaf, grad] : gradients_) {
    leaf.mutable_grad() = grad;
  }
  {
    const Unseen unseen;
    for (const auto& value : values_) {
      put_back_value(value);
    }
  }
  for (auto& [generator, state] : streams_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

SideEffectGuard::~SideEffectGuard() {
  try {
    put_back();
  } catch (const std::exception& error) {
    TORCH_WARN(
        "deepmd_prewarm: not everything could be put back after a "
        "warm-up: ",
        error.what());
  }
}

}  // namespace deepmd_prewarm
