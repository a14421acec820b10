// SPDX-License-Identifier: LGPL-3.0-or-later
// The caching allocator of a device, reached through c10's generic interface:
// no CUDA header, no CUDA context made, and nothing where there is none.
#pragma once

#include <c10/core/Device.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>

namespace deepmd_prewarm {

/// Bytes that a device's caching allocator holds.
struct CacheFigures {
  int64_t reserved = 0;   // taken from the driver
  int64_t allocated = 0;  // thereof in use by tensors
  int64_t idle = 0;       // thereof in blocks that could go back to the driver
};

/// The figures of `device` (its current device if it has no index); zeros if it
/// has no caching allocator, or none in use yet. Does not block.
DEEPMD_PREWARM_API CacheFigures cache_figures(c10::Device device);

/// Gives the idle blocks of `device`, and the idle page-locked host memory of
/// its type, back to the driver; waits for the device.
/// torch (2.11, 2.15) can only empty all devices at once: idle blocks of other
/// devices that this process already uses go back too. Does nothing if the
/// allocator is not in use, if `device` holds no memory, or while the current
/// stream of a device that holds memory captures a graph.
DEEPMD_PREWARM_API void empty_device_cache(c10::Device device);

}  // namespace deepmd_prewarm
