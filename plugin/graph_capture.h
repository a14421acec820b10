// SPDX-License-Identifier: LGPL-3.0-or-later
// A CUDA graph records what a stream is asked for instead of doing it: freeing,
// waiting and reading back break the recording.
#pragma once

#include <c10/core/Device.h>
#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// Whether the current stream of `device` is recording a graph. False for every
/// type but CUDA. `device` must be in use: it is made current to ask.
DEEPMD_PREWARM_API bool is_capturing(c10::Device device);

}  // namespace deepmd_prewarm
