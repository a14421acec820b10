// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <deepmd_prewarm/plugin/device_release.h>

namespace deepmd_prewarm {

void free_on_its_device(c10::DataPtr data) {
  const auto device = data.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    data.clear();
    return;
  }
  const c10::DeviceGuard on_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  // Nothing happens if this is the stream that it was allocated on.
  guard.recordDataPtrOnStream(data, guard.getStream(device));
  data.clear();
}

}  // namespace deepmd_prewarm
