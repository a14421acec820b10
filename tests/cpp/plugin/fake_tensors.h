// SPDX-License-Identifier: LGPL-3.0-or-later
// Tensors of a device type whose memory is the host's, and the operators that
// moving losses needs there.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

namespace deepmd_prewarm {

inline at::Tensor host_alias(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

inline at::Tensor to_fake_device(const at::Tensor& tensor, int index) {
  auto* allocator = c10::GetAllocator(at::kCPU);
  auto data = allocator->allocate(tensor.nbytes());
  std::memcpy(data.get(), tensor.const_data_ptr(), tensor.nbytes());
  const c10::Device device(at::kPrivateUse1,
                           static_cast<c10::DeviceIndex>(index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(),
                       c10::DataPtr(data.get(), data.release_context(),
                                    data.get_deleter(), device),
                       allocator, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
  return result;
}

inline at::Tensor fake_view(const at::Tensor& self, at::IntArrayRef sizes) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
      self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return result;
}

inline at::Tensor fake_cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> aliases;
  int index = 0;
  for (const auto& tensor : tensors) {
    aliases.push_back(host_alias(tensor));
    index = tensor.device().index();
  }
  return to_fake_device(at::cat(aliases, dim), index);
}

}  // namespace deepmd_prewarm
