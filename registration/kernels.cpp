// SPDX-License-Identifier: LGPL-3.0-or-later
// The one table of implementations. CompositeExplicitAutograd: the same kernel
// on every backend (also for calls without a tensor), and never decomposed
// through by export or run_decompositions.
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>

#include "registration/library.h"

namespace deepmd_prewarm {

void implement_kernels(torch::Library& m) {
  const auto impl = [&m](const char* name, auto&& kernel) {
    m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                 std::forward<decltype(kernel)>(kernel)));
  };
  impl("release_trace_inputs", TORCH_FN(release_trace_inputs));
  impl("release_trace_inputs.list", TORCH_FN(release_trace_inputs_list));
  impl("explain_release", TORCH_FN(explain_release));
  impl("warmup_compiled", TORCH_FN(warmup_compiled));
  impl("safe_empty_cache", TORCH_FN(safe_empty_cache));
  impl("cache_bytes", TORCH_FN(cache_bytes));
  impl("sync_ranks", TORCH_FN(sync_ranks));
  impl("scalarize_losses", TORCH_FN(scalarize_losses));
}

}  // namespace deepmd_prewarm
