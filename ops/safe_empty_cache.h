// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <c10/core/Device.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <tuple>

namespace deepmd_prewarm {

DEEPMD_PREWARM_API void safe_empty_cache(c10::Device device);

/// (reserved, allocated) bytes of the device's caching allocator.
DEEPMD_PREWARM_API std::tuple<int64_t, int64_t> cache_bytes(c10::Device device);

}  // namespace deepmd_prewarm
