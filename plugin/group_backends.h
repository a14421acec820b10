// SPDX-License-Identifier: LGPL-3.0-or-later
// The backends of a process group: NCCL, gloo, ... Their time-outs, their
// health and, for those that connect lazily, the connection itself.
#pragma once

#include <c10/core/Device.h>
#include <deepmd_prewarm/plugin/export.h>

#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace deepmd_prewarm {

/// One backend of a group, as it is now.
struct BackendState {
  std::string device_type;   // "cuda"
  std::string name;          // "nccl"
  double timeout_s = -1.;    // of its collectives; -1: it does not tell
  std::string error;         // "" if it does not tell, else "none", "time-out",
                             // "communicator error", "remote error"
  std::string communicator;  // what NCCL says, e.g. "ncclSuccess", or "not
                             // connected"; "" where nobody can ask
};

/// Every backend of `group`; communicators are asked about on device `index`.
/// No collective, does not block, creates no context, raises nothing.
DEEPMD_PREWARM_API std::vector<BackendState> backend_states(
    c10d::ProcessGroup& group, c10::DeviceIndex index);

/// Lets the group's backend for `device` connect its communicators now, with
/// that device current. A collective: blocks until all ranks are there. False
/// if there is nothing to do: no such backend, a backend that is bound to the
/// device, connected already, or, for NCCL without libdeepmd_prewarm_cuda.so,
/// may be (it would connect a second time). Raises what the backend raises.
DEEPMD_PREWARM_API bool connect_backend(c10d::ProcessGroup& group,
                                        c10::Device device);

}  // namespace deepmd_prewarm
