// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <dlfcn.h>

namespace deepmd_prewarm {
namespace {

// From the process if it is visible there, else from the runtime that torch has
// loaded, if any.
template <typename Function>
Function* cuda_runtime_function(const char* name) {
  if (void* symbol = dlsym(RTLD_DEFAULT, name)) {
    return reinterpret_cast<Function*>(symbol);
  }
  for (const char* runtime :
       {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* library = dlopen(runtime, RTLD_NOLOAD | RTLD_NOW)) {
      if (void* symbol = dlsym(library, name)) {
        return reinterpret_cast<Function*>(symbol);
      }
    }
  }
  return nullptr;
}

}  // namespace

// c10 has no question for that, so the CUDA runtime that torch has loaded is
// asked; the stream's handle comes from c10. No runtime loaded: nothing can be
// capturing.
bool is_capturing(c10::Device device) {
  if (device.type() != c10::DeviceType::CUDA ||
      !c10::impl::hasDeviceGuardImpl(device.type())) {
    return false;
  }
  static auto* const ask =
      cuda_runtime_function<int(void*, int*)>("cudaStreamIsCapturing");
  static auto* const clear_error =
      cuda_runtime_function<int()>("cudaGetLastError");
  if (ask == nullptr || clear_error == nullptr) {
    return false;
  }
  // The default stream is the current device's.
  const c10::DeviceGuard on_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  int status = 0;  // cudaStreamCaptureStatusNone
  const int error = ask(guard.getStream(device).native_handle(), &status);
  if (error != 0) {
    clear_error();
  }
  // 900..908: the cudaErrorStreamCapture... family, e.g. for the legacy stream
  // while another stream captures.
  return status != 0 || (error >= 900 && error <= 908);
}

}  // namespace deepmd_prewarm
