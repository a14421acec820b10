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

/// Gives the idle blocks of `device` back to the driver; waits for the device.
/// Does nothing if its allocator is not in use, if the device holds no memory,
/// while its current stream captures a graph, or if another device of the same
/// type has idle blocks too: the allocator can only empty all of them at once.
DEEPMD_PREWARM_API void empty_device_cache(c10::Device device);

}  // namespace deepmd_prewarm
