// SPDX-License-Identifier: LGPL-3.0-or-later
// What only CUDA's and NCCL's own headers can tell. It lives in a library of
// its own, libdeepmd_prewarm_cuda.so, which is looked for beside this one and
// loaded when first asked for, on a host with an NVIDIA driver only. Everything
// else the plugin does on a device goes through c10's generic interfaces.
#pragma once

#include <deepmd_prewarm/plugin/export.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Backend;
}  // namespace c10d

namespace deepmd_prewarm {

/// The state of a backend's communicator on one device.
struct CommunicatorState {
  bool known = false;      // false: not a backend this library knows
  bool connected = false;  // a communicator exists for the device
  std::string text;        // NCCL's own word, e.g. "ncclSuccess"
};

/// Implemented in libdeepmd_prewarm_cuda.so.
class DeviceExtension {
 public:
  virtual ~DeviceExtension() = default;

  /// ("CUDA runtime", "13.0"), ... Creates no context.
  virtual std::vector<std::pair<std::string, std::string>> versions() const = 0;

  /// Indices of devices on which this process has a primary context. Creates
  /// none.
  virtual std::vector<int> contexts() const = 0;

  /// What ncclCommGetAsyncError says about the communicator that `backend` has
  /// on device `index`. Does not block, creates nothing.
  virtual CommunicatorState communicator(c10d::Backend& backend,
                                         int index) const = 0;

  /// Runs a kernel on device `index`; creates a context there. Empty, or why it
  /// did not work.
  virtual std::string probe(int index) const = 0;
};

/// Why the extension is there or not.
enum class ExtensionState : uint8_t {
  kLoaded,
  kAbsent,  // not built, no driver, a torch without CUDA: nothing is wrong
  kFailed,  // it should have loaded
};

struct LoadedExtension {
  ExtensionState state = ExtensionState::kAbsent;
  const DeviceExtension* extension = nullptr;  // unless kLoaded
  std::string text;  // its file, or the reason in a sentence
};

/// Loads the extension at the first call; later ones cost nothing. Creates no
/// context, initializes no driver, raises nothing.
DEEPMD_PREWARM_API const LoadedExtension& device_extension();

}  // namespace deepmd_prewarm

/// Entry of libdeepmd_prewarm_cuda.so: nullptr if it was built for another
/// version of this library or of torch.
extern "C" DEEPMD_PREWARM_API const deepmd_prewarm::DeviceExtension*
deepmd_prewarm_device_extension(const char* version, const char* torch);
