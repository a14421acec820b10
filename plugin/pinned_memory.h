// SPDX-License-Identifier: LGPL-3.0-or-later
// Page-locked host memory: the cache that a device type keeps of it, and
// copies from the device through it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>

namespace deepmd_prewarm {

/// Bytes that the host allocator of a device type holds.
struct PinnedFigures {
  int64_t reserved = 0;  // page-locked
  int64_t used = 0;      // thereof by tensors
};

/// Zeros where there is no such allocator. Does not block, creates no context.
DEEPMD_PREWARM_API PinnedFigures pinned_figures(c10::DeviceType type);

/// Unlocks the idle blocks. To be called with a device current that is in use
/// and captures nothing; does nothing if there is nothing idle.
DEEPMD_PREWARM_API void empty_pinned_cache(c10::DeviceType type);

/// `tensor` on the CPU, readable on return. On a device with streams: one
/// transfer through page-locked memory, in the order of the device's current
/// stream, and an event that is waited for; other streams are not.
DEEPMD_PREWARM_API at::Tensor copy_to_host(const at::Tensor& tensor);

}  // namespace deepmd_prewarm
