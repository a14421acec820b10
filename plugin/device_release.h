// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <c10/core/Allocator.h>
#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

/// Frees memory with its own device current, and so that the allocator hands it
/// on only after what is queued on that device's current stream: the caller may
/// have used it there, on another stream than it was allocated on. Does not
/// block. Uses on further streams are known to the allocator only where their
/// user called record_stream().
DEEPMD_PREWARM_API void free_on_its_device(c10::DataPtr data);

}  // namespace deepmd_prewarm
