// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <c10/core/Device.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <tuple>

namespace deepmd_prewarm {

/// Gives the caching allocator's free blocks back to the driver if
/// `device.type() == cuda`, and does nothing else in every other case: other
/// device types, no driver, CUDA not in use yet, a graph capture under way, an
/// index that isn't there. Never creates a context, on no device. torch's
/// allocator has one call for all devices: free blocks of another device that
/// this process already uses go back with it, as in torch.cuda.empty_cache();
/// nothing else of another device changes. Blocks until the devices are idle.
/// Raises nothing of its own.
DEEPMD_PREWARM_API void safe_empty_cache(c10::Device device);

/// (reserved, allocated) bytes of the device's caching allocator; (0, 0) where
/// there is none. Does not block, creates nothing.
DEEPMD_PREWARM_API std::tuple<int64_t, int64_t> cache_bytes(c10::Device device);

}  // namespace deepmd_prewarm
