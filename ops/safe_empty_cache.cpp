// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/plugin/device_memory.h>

namespace deepmd_prewarm {

void safe_empty_cache(c10::Device device) {
  // The one guard of the plugin: every cache call goes through here.
  if (device.type() == c10::DeviceType::CUDA) {
    empty_device_cache(device);
  }
}

std::tuple<int64_t, int64_t> cache_bytes(c10::Device device) {
  const auto figures = cache_figures(device);
  return {figures.reserved, figures.allocated};
}

}  // namespace deepmd_prewarm
