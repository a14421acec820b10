// SPDX-License-Identifier: LGPL-3.0-or-later
// libdeepmd_prewarm_cuda.so: host code against CUDA's headers. Nothing here
// runs when the library is loaded, and only probe() creates a context.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>

#include "plugin/cuda_parts.h"

namespace deepmd_prewarm {
namespace {

// 13000 is 13.0.
std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." +
         std::to_string(number % 1000 / 10);
}

// The driver's library, if it is loaded; linking it would demand a driver.
template <typename Function>
Function* driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  return driver == nullptr ? nullptr
                           : reinterpret_cast<Function*>(dlsym(driver, name));
}

class CudaExtension final : public DeviceExtension {
 public:
  std::vector<std::pair<std::string, std::string>> versions() const override {
    std::vector<std::pair<std::string, std::string>> said;
    int number = 0;
    if (auto* ask = driver_function<CUresult(int*)>("cuDriverGetVersion")) {
      if (ask(&number) == CUDA_SUCCESS) {
        said.emplace_back("driver for CUDA", cuda_version(number));
      }
    }
    if (cudaRuntimeGetVersion(&number) == cudaSuccess) {
      said.emplace_back("CUDA runtime", cuda_version(number));
    }
    said.emplace_back("built for CUDA", cuda_version(CUDART_VERSION));
    add_nccl_versions(said);
    return said;
  }

  // Before anybody initialized the driver it refuses to answer: then there are
  // none. Asking the runtime instead would initialize it.
  std::vector<int> contexts() const override {
    std::vector<int> found;
    auto* count = driver_function<CUresult(int*)>("cuDeviceGetCount");
    auto* get = driver_function<CUresult(CUdevice*, int)>("cuDeviceGet");
    auto* state = driver_function<CUresult(CUdevice, unsigned int*, int*)>(
        "cuDevicePrimaryCtxGetState");
    int devices = 0;
    if (count == nullptr || get == nullptr || state == nullptr ||
        count(&devices) != CUDA_SUCCESS) {
      return found;
    }
    for (int index = 0; index < devices; ++index) {
      CUdevice device = 0;
      unsigned int flags = 0;
      int active = 0;
      if (get(&device, index) == CUDA_SUCCESS &&
          state(device, &flags, &active) == CUDA_SUCCESS && active != 0) {
        found.push_back(index);
      }
    }
    return found;
  }

  CommunicatorState communicator(c10d::Backend& backend,
                                 int index) const override {
    return nccl_communicator(backend, index);
  }

  std::string probe(int index) const override {
#ifdef DEEPMD_PREWARM_PROBE
    return probe_device(index);
#else
    static_cast<void>(index);
    return "built without nvcc: there is no kernel to run";
#endif
  }
};

}  // namespace

#ifndef DEEPMD_PREWARM_NCCL
void add_nccl_versions(std::vector<std::pair<std::string, std::string>>&) {}
CommunicatorState nccl_communicator(c10d::Backend&, int) { return {}; }
#endif

}  // namespace deepmd_prewarm

const deepmd_prewarm::DeviceExtension* deepmd_prewarm_device_extension(
    const char* version, const char* torch) {
  static const auto* extension = new deepmd_prewarm::CudaExtension;
  return std::strcmp(version, DEEPMD_PREWARM_VERSION) == 0 &&
                 std::strcmp(torch, DEEPMD_PREWARM_TORCH_VERSION) == 0
             ? extension
             : nullptr;
}
