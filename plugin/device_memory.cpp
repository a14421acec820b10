// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <deepmd_prewarm/plugin/device_memory.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <deepmd_prewarm/plugin/pinned_memory.h>

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

// emptyCache() frees on every device that holds memory, so a capture on any of
// them would break.
bool any_capturing(c10::DeviceAllocator& allocator,
                   const c10::impl::VirtualGuardImpl& guard) {
  for (c10::DeviceIndex i = 0; i < guard.deviceCount(); ++i) {
    if (figures_of(allocator, i).reserved == 0) {
      continue;
    }
    if (is_capturing({guard.type(), i})) {
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
    empty_pinned_cache(device.type());
  }
}

}  // namespace deepmd_prewarm
