// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <deepmd_prewarm/plugin/device_memory.h>
#include <dlfcn.h>

namespace deepmd_prewarm {

namespace {

// The device's caching allocator if it is in use, else nullptr.
c10::DeviceAllocator* allocator_in_use(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU || !c10::impl::hasDeviceGuardImpl(type)) {
    return nullptr;
  }
  c10::Allocator* registered = nullptr;
  try {
    registered = c10::GetAllocator(type);
  } catch (const c10::Error&) {  // a torch that was built without this device
    return nullptr;
  }
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(registered);
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

CacheFigures figures_of(c10::DeviceAllocator& allocator,
                        c10::DeviceIndex index) {
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator.getDeviceStats(index);
  CacheFigures figures;
  figures.reserved = stats.reserved_bytes[kAll].current;
  figures.allocated = stats.allocated_bytes[kAll].current;
  figures.idle = figures.reserved - stats.active_bytes[kAll].current -
                 stats.inactive_split_bytes[kAll].current;
  return figures;
}

// The index that is meant, or -1 if the device isn't there.
c10::DeviceIndex index_of(c10::Device device,
                          const c10::impl::VirtualGuardImpl& guard) {
  const auto index =
      device.has_index() ? device.index() : guard.getDevice().index();
  return index < guard.deviceCount() ? index
                                     : static_cast<c10::DeviceIndex>(-1);
}

// From the process if it is visible there, else from the runtime that torch has
// loaded, if any.
template <typename Function>
Function* cuda_runtime_function(const char* name) {
  if (void* symbol = dlsym(RTLD_DEFAULT, name)) {
    return reinterpret_cast<Function*>(symbol);
  }
  for (const char* runtime :
       {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* library = dlopen(runtime, RTLD_NOLOAD | RTLD_NOW)) {
      if (void* symbol = dlsym(library, name)) {
        return reinterpret_cast<Function*>(symbol);
      }
    }
  }
  return nullptr;
}

// Freeing memory breaks a CUDA graph capture. c10 has no question for that, so
// the CUDA runtime that torch has loaded is asked; the stream's handle comes
// from c10. No runtime loaded: nothing can be capturing.
bool is_capturing(c10::Device device,
                  const c10::impl::VirtualGuardImpl& guard) {
  static auto* const ask =
      cuda_runtime_function<int(void*, int*)>("cudaStreamIsCapturing");
  static auto* const clear_error =
      cuda_runtime_function<int()>("cudaGetLastError");
  if (ask == nullptr || clear_error == nullptr ||
      device.type() != c10::DeviceType::CUDA) {
    return false;
  }
  int status = 0;  // cudaStreamCaptureStatusNone
  const int error = ask(guard.getStream(device).native_handle(), &status);
  if (error != 0) {
    clear_error();
  }
  // 900..908: the cudaErrorStreamCapture... family, e.g. for the legacy stream
  // while another stream captures.
  return status != 0 || (error >= 900 && error <= 908);
}

// emptyCache() frees on every device that holds memory, so a capture on any of
// them would break. The default stream is the current device's: ask each there.
bool any_capturing(c10::DeviceAllocator& allocator,
                   const c10::impl::VirtualGuardImpl& guard) {
  for (c10::DeviceIndex i = 0; i < guard.deviceCount(); ++i) {
    if (figures_of(allocator, i).reserved == 0) {
      continue;
    }
    const c10::Device device(guard.type(), i);
    const c10::DeviceGuard on_device(device);
    if (is_capturing(device, guard)) {
      return true;
    }
  }
  return false;
}

}  // namespace

CacheFigures cache_figures(c10::Device device) {
  auto* allocator = allocator_in_use(device.type());
  if (allocator == nullptr) {
    return {};
  }
  const auto index =
      index_of(device, c10::impl::VirtualGuardImpl(device.type()));
  return index < 0 ? CacheFigures{} : figures_of(*allocator, index);
}

void empty_device_cache(c10::Device device) {
  auto* allocator = allocator_in_use(device.type());
  if (allocator == nullptr) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto index = index_of(device, guard);
  // A device that holds no memory may have no context yet, and making it the
  // current one would create it.
  if (index < 0 || figures_of(*allocator, index).reserved == 0) {
    return;
  }
  if (!any_capturing(*allocator, guard)) {
    // Freeing works in the current device's context, and would create one.
    const c10::DeviceGuard on_target(c10::Device(device.type(), index));
    allocator->emptyCache();
  }
}

}  // namespace deepmd_prewarm
