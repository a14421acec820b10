// SPDX-License-Identifier: LGPL-3.0-or-later
#include "fake_capture.h"

#include <deepmd_prewarm/plugin/export.h>

namespace deepmd_prewarm {

int capturing_on = -1;

}  // namespace deepmd_prewarm

// Found before the CUDA runtime that torch has loaded: the program exports
// them.
extern "C" {
DEEPMD_PREWARM_API int cudaStreamIsCapturing(void*, int* status) {
  using deepmd_prewarm::capturing_on;
  *status = deepmd_prewarm::current_fake_device() == capturing_on ? 1 : 0;
  return 0;
}
DEEPMD_PREWARM_API int cudaGetLastError() { return 0; }
}
