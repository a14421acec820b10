// SPDX-License-Identifier: LGPL-3.0-or-later
#include <c10/core/DeviceGuard.h>
#include <deepmd_prewarm/plugin/device_extension.h>
#include <deepmd_prewarm/plugin/group_backends.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace deepmd_prewarm {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

BackendPtr backend_of(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const std::exception&) {
    return {};
  }
}

// The options are the backend's own: a later setTimeout() shows.
double timeout_of(c10d::Backend& backend) {
  try {
    return std::chrono::duration<double>(backend.getBackendOptions()->timeout)
        .count();
  } catch (const std::exception&) {
    return -1.;
  }
}

std::string error_of(c10d::Backend& backend) {
  try {
    switch (backend.getError()) {
      case c10d::ErrorType::SUCCESS:
        return "none";
      case c10d::ErrorType::TIMEOUT:
        return "time-out";
      case c10d::ErrorType::COMM_ERROR:
        return "communicator error";
      case c10d::ErrorType::REMOTE_ERROR:
        return "remote error";
    }
    return "unknown error";
  } catch (const std::exception&) {  // it has no such answer
    return "";
  }
}

CommunicatorState communicator_of(c10d::Backend& backend,
                                  c10::DeviceIndex index) {
  const auto* extension = device_extension().extension;
  return extension == nullptr ? CommunicatorState()
                              : extension->communicator(backend, index);
}

}  // namespace

std::vector<BackendState> backend_states(c10d::ProcessGroup& group,
                                         c10::DeviceIndex index) {
  std::vector<BackendState> states;
  for (const auto& device : group.getDeviceTypes()) {
    const auto backend = backend_of(group, device.type());
    if (!backend) {
      continue;
    }
    BackendState state;
    state.device_type = c10::DeviceTypeName(device.type(), true);
    state.name = backend->getBackendName();
    state.timeout_s = timeout_of(*backend);
    state.error = error_of(*backend);
    if (device.type() == c10::DeviceType::CUDA) {
      state.communicator = communicator_of(*backend, index).text;
    }
    states.push_back(std::move(state));
  }
  return states;
}

bool connect_backend(c10d::ProcessGroup& group, c10::Device device) {
  const auto backend = backend_of(group, device.type());
  if (!backend || !device.has_index() || device.is_cpu() ||
      backend->getBoundDeviceId() == device) {
    return false;
  }
  const auto communicator = communicator_of(*backend, device.index());
  if (communicator.connected ||
      (!communicator.known && backend->getBackendName() == "nccl")) {
    return false;
  }
  const c10::DeviceGuard on_device(device);
  backend->eagerConnectSingleDevice(device);
  return true;
}

}  // namespace deepmd_prewarm
