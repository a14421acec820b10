// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/Functions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <deepmd_prewarm/plugin/pinned_memory.h>

namespace deepmd_prewarm {
namespace {

at::HostAllocator* host_allocator(c10::DeviceType type) {
  try {
    return at::getHostAllocator(type);
  } catch (const c10::Error&) {  // none was registered
    return nullptr;
  }
}

bool has_streams(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA || type == c10::DeviceType::XPU ||
         type == c10::DeviceType::PrivateUse1;
}

// Undefined where the device type has no page-locked memory, or no more of it.
at::Tensor pinned_like(const at::Tensor& tensor) {
  try {
    return at::empty(tensor.sizes(), at::TensorOptions()
                                         .dtype(tensor.dtype())
                                         .device(at::kCPU)
                                         .pinned_memory(true));
  } catch (const c10::Error&) {
    return {};
  }
}

}  // namespace

PinnedFigures pinned_figures(c10::DeviceType type) {
  auto* allocator = host_allocator(type);
  if (allocator == nullptr) {
    return {};
  }
  const auto stats = allocator->get_stats();
  return {stats.allocated_bytes.current, stats.active_bytes.current};
}

void empty_pinned_cache(c10::DeviceType type) {
  const auto figures = pinned_figures(type);
  if (figures.reserved > figures.used) {
    host_allocator(type)->empty_cache();
  }
}

at::Tensor copy_to_host(const at::Tensor& tensor) {
  const auto device = tensor.device();
  const auto host =
      has_streams(device.type()) ? pinned_like(tensor) : at::Tensor();
  if (!host.defined()) {
    return tensor.to(at::kCPU);
  }
  const c10::DeviceGuard on_device(device);
  host.copy_(tensor, /*non_blocking=*/true);
  c10::Event arrived(device.type());
  arrived.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  arrived.synchronize();
  return host;
}

}  // namespace deepmd_prewarm
