// SPDX-License-Identifier: LGPL-3.0-or-later
// What the files of libdeepmd_prewarm_cuda.so have from each other.
#pragma once

#include <deepmd_prewarm/plugin/device_extension.h>

#include <string>
#include <utility>
#include <vector>

namespace deepmd_prewarm {

// cuda_communicators.cpp; without nccl.h they know nothing.
void add_nccl_versions(std::vector<std::pair<std::string, std::string>>& said);
CommunicatorState nccl_communicator(c10d::Backend& backend, int index);

// cuda_probe.cu.
std::string probe_device(int index);

}  // namespace deepmd_prewarm
