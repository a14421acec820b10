// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/warmup_compiled.h>

namespace deepmd_prewarm {
void warmup_compiled(const c10::intrusive_ptr<CompiledTask>&,
                     const c10::List<std::optional<at::Tensor>>&,
                     bool) {}
}  // namespace deepmd_prewarm
