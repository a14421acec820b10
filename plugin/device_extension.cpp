// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/device_extension.h>
#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <fstream>

namespace deepmd_prewarm {
namespace {

using Entry = decltype(&deepmd_prewarm_device_extension);

constexpr const char* kFile = "libdeepmd_prewarm_cuda.so";

std::string beside_this_library() {
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&device_extension), &info);
  const std::string own = info.dli_fname != nullptr ? info.dli_fname : "";
  const auto slash = own.rfind('/');
  return slash == std::string::npos ? kFile : own.substr(0, slash + 1) + kFile;
}

bool exists(const std::string& path) { return std::ifstream(path).is_open(); }

// Opening a library that a full disk or a broken copy cut short ends the
// process (SIGBUS). The table of its sections is the last thing in the file.
bool is_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Elf64_Ehdr header{};
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!file || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
    return false;
  }
  file.seekg(0, std::ios::end);
  return static_cast<uint64_t>(file.tellg()) >=
         header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
}

// A driver's library can be opened without initializing the driver.
bool has_driver() {
  return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

// Ours would pull torch's CUDA part into a process that does without.
bool torch_has_cuda() {
  return dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY) != nullptr;
}

std::string last_error() {
  // glibc keeps it for each thread.
  const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? text : "unknown error";
}

LoadedExtension load() {
  const auto path = beside_this_library();
  if (!exists(path)) {
    const std::string reason = DEEPMD_PREWARM_NO_CUDA;
    return {ExtensionState::kAbsent, nullptr,
            reason.empty() ? path + " isn't there"
                           : "built without CUDA: " + reason};
  }
  if (!has_driver()) {
    return {ExtensionState::kAbsent, nullptr,
            "not needed: no NVIDIA driver on this host (libcuda.so.1)"};
  }
  if (!torch_has_cuda()) {
    return {ExtensionState::kAbsent, nullptr,
            "not needed: this process uses a torch without CUDA"};
  }
  if (!is_whole(path)) {
    return {ExtensionState::kFailed, nullptr,
            path + " is damaged; reinstall deepmd-prewarm"};
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {ExtensionState::kFailed, nullptr, last_error()};
  }
  void* symbol = dlsym(library, "deepmd_prewarm_device_extension");
  if (symbol == nullptr) {
    return {ExtensionState::kFailed, nullptr, last_error()};
  }
  const auto* extension = reinterpret_cast<Entry>(symbol)(
      DEEPMD_PREWARM_VERSION, DEEPMD_PREWARM_TORCH_VERSION);
  if (extension == nullptr) {
    return {ExtensionState::kFailed, nullptr,
            path + " was built for another version; reinstall deepmd-prewarm"};
  }
  return {ExtensionState::kLoaded, extension, path};
}

}  // namespace

const LoadedExtension& device_extension() {
  static const auto* loaded = new LoadedExtension(load());
  return *loaded;
}

}  // namespace deepmd_prewarm
