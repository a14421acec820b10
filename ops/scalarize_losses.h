// SPDX-License-Identifier: LGPL-3.0-or-later
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>

#include <optional>
#include <string>
#include <vector>

namespace deepmd_prewarm {

DEEPMD_PREWARM_API c10::Dict<std::string, double> scalarize_losses(
    const c10::Dict<std::string, at::Tensor>& losses,
    const std::optional<std::vector<std::string>>& skip_prefixes);

}  // namespace deepmd_prewarm
