// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <torch/library.h>

#include <string>
#include <tuple>

namespace deepmd_prewarm {

/// The class and the schemas (library.cpp). Needs a FRAGMENT of `deepmd`.
void define_library(torch::Library& fragment);

/// The implementations (kernels.cpp). After define_library: a kernel that takes
/// a CompiledTask cannot be inferred before its class is registered.
void implement_kernels(torch::Library& fragment);

/// Version, torch it was compiled for, and file of the copy of the library that
/// registered the operators of this process (load.cpp).
std::tuple<std::string, std::string, std::string> prewarm_library();

}  // namespace deepmd_prewarm
