// SPDX-License-Identifier: LGPL-3.0-or-later
// What happens when the library is loaded. An exception that leaves a static
// initializer aborts the process, so everything is caught here and kept for
// the loader to ask: deepmd_prewarm_load_error() is empty when all is well.
//
// A process may load several copies (a hard copy, the build tree next to the
// installed file). The first one registers; a later one of the same version
// stands aside, of another version it reports both.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>
#include <deepmd_prewarm/plugin/export.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <exception>
#include <memory>
#include <string>

#include "registration/library.h"

#define DEEPMD_PREWARM_TEXT_(x) #x
#define DEEPMD_PREWARM_TEXT(x) DEEPMD_PREWARM_TEXT_(x)

/// Versions of this file, for a loader that reads it without loading it.
extern "C" DEEPMD_PREWARM_API const char deepmd_prewarm_stamp[];
const char deepmd_prewarm_stamp[] =
    "deepmd_prewarm version=" DEEPMD_PREWARM_VERSION
    " torch=" DEEPMD_PREWARM_TORCH_VERSION
    " cxx11_abi=" DEEPMD_PREWARM_TEXT(_GLIBCXX_USE_CXX11_ABI);

namespace deepmd_prewarm {
namespace {

std::string this_file() {
  Dl_info info{};
  dladdr(deepmd_prewarm_stamp, &info);
  return info.dli_fname ? info.dli_fname : "";
}

std::string described(const std::string& version,
                      const std::string& torch,
                      const std::string& path) {
  return c10::str(version, " for torch ", torch, " (", path, ")");
}

// Empty, or why this copy cannot stand aside for the one that is registered.
std::string compare_with(const c10::OperatorHandle& registered) {
  using Describe = std::tuple<std::string, std::string, std::string>();
  const auto [version, torch, path] = registered.typed<Describe>().call();
  if (version == DEEPMD_PREWARM_VERSION &&
      torch == DEEPMD_PREWARM_TORCH_VERSION) {
    return "";
  }
  return c10::str("deepmd-prewarm: expected one version in a process, got ",
                  described(version, torch, path),
                  ", which stays in use, and then ",
                  described(DEEPMD_PREWARM_VERSION,
                            DEEPMD_PREWARM_TORCH_VERSION, this_file()),
                  ". Load both from the same installation.");
}

std::string register_everything() {
  try {
    const auto registered = c10::Dispatcher::singleton().findSchema(
        {"deepmd::prewarm_library", ""});
    if (registered) {
      return compare_with(*registered);
    }
    // Undone by the destructor if a step throws: all operators or none.
    auto fragment = std::make_unique<torch::Library>(
        torch::Library::FRAGMENT, "deepmd", std::nullopt, __FILE__, __LINE__);
    define_library(*fragment);
    implement_kernels(*fragment);
    // Never destroyed then: other static destructors may call operators.
    static_cast<void>(fragment.release());
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

const std::string& load_error() {
  static const std::string* error = [] {
    auto* text = new std::string(register_everything());
    if (!text->empty()) {
      // A bare dlopen has nobody to ask for the error.
      TORCH_WARN(*text);
    }
    return text;
  }();
  return *error;
}

[[maybe_unused]] const bool registered_at_load = load_error().empty();

}  // namespace

std::tuple<std::string, std::string, std::string> prewarm_library() {
  return {DEEPMD_PREWARM_VERSION, DEEPMD_PREWARM_TORCH_VERSION, this_file()};
}

}  // namespace deepmd_prewarm

extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_load_error() {
  return deepmd_prewarm::load_error().c_str();
}

extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_version() {
  return DEEPMD_PREWARM_VERSION;
}

/// The torch this library was compiled for, e.g. "2.11.0".
extern "C" DEEPMD_PREWARM_API const char* deepmd_prewarm_torch_version() {
  return DEEPMD_PREWARM_TORCH_VERSION;
}
