// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>
#include <torch/custom_class.h>

#include <string>

namespace deepmd_prewarm {

class DEEPMD_PREWARM_API CompiledTask : public torch::CustomClassHolder {
 public:
  explicit CompiledTask(std::string name) : name_(std::move(name)) {}
  std::string name() const { return name_; }

 private:
  std::string name_;
};

}  // namespace deepmd_prewarm
