// SPDX-License-Identifier: LGPL-3.0-or-later
// What happens when the library is loaded. An exception that leaves a static
// initializer aborts the process, so everything is caught here and kept for
// the loader to ask: deepmd_prewarm_load_error() is empty when all is well.
#include <deepmd_prewarm/plugin/export.h>
#include <torch/library.h>

#include <exception>
#include <string>

#include "registration/library.h"

namespace {

std::string register_everything() {
  try {
    // Never destroyed: other static destructors may still call operators.
    auto* fragment = new torch::Library(torch::Library::FRAGMENT, "deepmd",
                                        std::nullopt, __FILE__, __LINE__);
    deepmd_prewarm::define_library(*fragment);
    deepmd_prewarm::implement_kernels(*fragment);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

const std::string& load_error() {
  static const std::string* error = new std::string(register_everything());
  return *error;
}

[[maybe_unused]] const bool registered_at_load = load_error().empty();

}  // namespace

extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_load_error() {
  return load_error().c_str();
}

extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_version() {
  return DEEPMD_PREWARM_VERSION;
}

/// The torch this library was compiled for, e.g. "2.11.0".
extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_torch_version() {
  return DEEPMD_PREWARM_TORCH_VERSION;
}
