// SPDX-License-Identifier: LGPL-3.0-or-later
// The one kernel: does this driver run what this toolkit compiles? For `doctor
// --device`, never in a training. No torch header, so that nvcc is quick.
#include <cuda_runtime.h>

#include <string>

namespace deepmd_prewarm {
namespace {

constexpr int kThreads = 256;

__global__ void add_own_index(int* values) {
  values[threadIdx.x] += static_cast<int>(threadIdx.x);
}

// Frees also if a step fails.
struct DeviceInts {
  int* data = nullptr;
  DeviceInts() = default;
  DeviceInts(const DeviceInts&) = delete;
  DeviceInts& operator=(const DeviceInts&) = delete;
  ~DeviceInts() { cudaFree(data); }
};

cudaError_t run(bool& right) {
  DeviceInts values;
  cudaError_t error = cudaMalloc(&values.data, kThreads * sizeof(int));
  if (error == cudaSuccess) {
    error = cudaMemset(values.data, 0, kThreads * sizeof(int));
  }
  if (error == cudaSuccess) {
    add_own_index<<<1, kThreads>>>(values.data);
    error = cudaGetLastError();
  }
  int host[kThreads] = {};
  if (error == cudaSuccess) {
    error = cudaMemcpy(host, values.data, sizeof(host), cudaMemcpyDeviceToHost);
  }
  right = true;
  for (int i = 0; i < kThreads; ++i) {
    right = right && host[i] == i;
  }
  return error;
}

}  // namespace

std::string probe_device(int index) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) {
    error = cudaSetDevice(index);
  }
  bool right = false;
  if (error == cudaSuccess) {
    error = run(right);
    cudaSetDevice(before);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // ours: nobody else should find it
    return std::string(cudaGetErrorName(error)) + ": " +
           cudaGetErrorString(error);
  }
  return right ? "" : "the kernel's result is wrong";
}

}  // namespace deepmd_prewarm
