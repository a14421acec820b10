// SPDX-License-Identifier: LGPL-3.0-or-later
// An AOTInductor package: machine code made ahead of time, for inference.
#include <c10/core/GradMode.h>
#include <deepmd_prewarm/plugin/task_backend.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <utility>

namespace deepmd_prewarm {
namespace {

using torch::inductor::AOTIModelPackageLoader;

constexpr char kMakeAgain[] =
    ". Make it again under this torch with "
    "torch._inductor.aoti_compile_and_package.";

void check_file(const std::string& path) {
  std::error_code status;
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path, status),
                    "CompiledTask.from_package: expected a .pt2 file, got no "
                    "file at '",
                    path, "'. Pass what aoti_compile_and_package returned.");
  char magic[4] = {};
  std::ifstream(path, std::ios::binary).read(magic, sizeof(magic));
  TORCH_CHECK_VALUE(std::string(magic, 4) == "PK\3\4",
                    "CompiledTask.from_package: expected an AOTInductor "
                    "package (a zip archive), got another kind of file at '",
                    path, "'", kMakeAgain);
}

class PackageBackend final : public TaskBackend {
 public:
  explicit PackageBackend(const std::string& path) {
    check_file(path);
    try {
      loader_ = std::make_shared<AOTIModelPackageLoader>(path);
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      TORCH_CHECK_VALUE(
          false, "CompiledTask.from_package: expected a package that torch ",
          TORCH_VERSION, " can load, got '", path,
          "': ", known ? known->what_without_backtrace() : error.what(),
          kMakeAgain);
    }
  }

  std::string kind() const override { return "package"; }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    const auto loader = held();
    TORCH_CHECK(loader, "warmup_compiled: the handle was closed meanwhile");
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK_VALUE(
          inputs[i].defined() && inputs[i].layout() == at::kStrided,
          "warmup_compiled: expected a dense tensor as input ", i,
          " of the package, got ",
          inputs[i].defined() ? "another layout" : "None");
    }
    const c10::NoGradGuard inference;
    return loader->run(inputs);
  }

  bool is_open() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return loader_ != nullptr;
  }

  void close() noexcept override {
    std::shared_ptr<AOTIModelPackageLoader> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(loader_);
  }

 private:
  std::shared_ptr<AOTIModelPackageLoader> held() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return loader_;
  }

  mutable std::mutex mutex_;  // guards loader_
  std::shared_ptr<AOTIModelPackageLoader> loader_;
};

}  // namespace

std::shared_ptr<TaskBackend> package_backend(const std::string& path) {
  return std::make_shared<PackageBackend>(path);
}

}  // namespace deepmd_prewarm
