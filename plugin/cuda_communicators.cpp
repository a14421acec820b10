// SPDX-License-Identifier: LGPL-3.0-or-later
// libdeepmd_prewarm_cuda.so: what needs nccl.h.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "plugin/cuda_parts.h"

namespace deepmd_prewarm {
namespace {

// 22809 is 2.28.9.
std::string nccl_version(int number) {
  return std::to_string(number / 10000) + "." +
         std::to_string(number % 10000 / 100) + "." +
         std::to_string(number % 100);
}

// The enumerator's name, as NCCL's own logs print it.
const char* name_of(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "ncclSuccess";
    case ncclUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case ncclSystemError:
      return "ncclSystemError";
    case ncclInternalError:
      return "ncclInternalError";
    case ncclInvalidArgument:
      return "ncclInvalidArgument";
    case ncclInvalidUsage:
      return "ncclInvalidUsage";
    case ncclRemoteError:
      return "ncclRemoteError";
    case ncclInProgress:
      return "ncclInProgress";
    default:
      return "unknown ncclResult_t";
  }
}

}  // namespace

void add_nccl_versions(std::vector<std::pair<std::string, std::string>>& said) {
  int number = 0;
  if (ncclGetVersion(&number) == ncclSuccess) {
    said.emplace_back("NCCL", nccl_version(number));
  }
  said.emplace_back("built for NCCL", nccl_version(NCCL_VERSION_CODE));
}

CommunicatorState nccl_communicator(c10d::Backend& backend, int index) {
  auto* nccl = dynamic_cast<c10d::ProcessGroupNCCL*>(&backend);
  if (nccl == nullptr) {
    return {};
  }
  CommunicatorState state;
  state.known = true;
  // It asks for the current device's; one without a context has none.
  if (index < 0 ||
      !c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(index))) {
    state.text = "not connected";
    return state;
  }
  const c10::cuda::CUDAGuard on_device(static_cast<c10::DeviceIndex>(index));
  try {
    auto* communicator = reinterpret_cast<ncclComm_t>(nccl->getCommPtr());
    if (communicator == nullptr) {
      state.text = "not connected";
      return state;
    }
    state.connected = true;
    ncclResult_t result = ncclSuccess;
    const auto asked = ncclCommGetAsyncError(communicator, &result);
    state.text = name_of(asked == ncclSuccess ? result : asked);
  } catch (const std::exception& error) {  // it was aborted
    state.text = error.what();
  }
  return state;
}

}  // namespace deepmd_prewarm
