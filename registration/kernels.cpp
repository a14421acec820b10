// SPDX-License-Identifier: LGPL-3.0-or-later
// The one table of implementations. CompositeExplicitAutograd: the same kernel
// on every backend (also for calls without a tensor), and never decomposed
// through by export or run_decompositions.
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/ops/sync_ranks.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <deepmd_prewarm/plugin/functorch_wrappers.h>
#include <deepmd_prewarm/plugin/python_gate.h>

#include <utility>

#include "registration/library.h"

namespace deepmd_prewarm {
namespace {

// FakeTensorMode calls the Python fake if there is one, else this kernel with
// Meta in the thread's dispatch keys. Running there would act at trace time,
// and without the effect registration the traced call would be deleted.
void expect_no_tracing(const char* name) {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  TORCH_CHECK(!keys.has_backend(c10::BackendComponent::MetaBit), name,
              ": expected its fake while a graph is traced, got none. Run "
              "`import deepmd_prewarm; deepmd_prewarm.load()` before "
              "torch.compile or torch.export: loading the library alone serves "
              "eager mode and TorchScript.");
}

template <typename Result, typename... Arguments>
auto kernel(
    const char* name,
    Result (*function)(Arguments...),
    c10::DispatchKey key = c10::DispatchKey::CompositeExplicitAutograd) {
  return torch::dispatch(
      key, [name, function](Arguments... arguments) -> Result {
        expect_no_tracing(name);
        const ReturnToPython gate;
        return function(std::forward<Arguments>(arguments)...);
      });
}

}  // namespace

void implement_kernels(torch::Library& m) {
  const auto impl = [&m](const char* name, auto* function) {
    m.impl(name, kernel(name, function));
  };
  // These look at any tensor there is. BackendSelect comes after all modes and
  // wrappers and before the backends, some of which have no kernel of ours
  // (nested) or another one (meta); Autograd, so that no fallback of autograd
  // takes a reference of its own.
  const auto impl_on_any = [&](const char* name, auto* function) {
    impl(name, function);
    m.impl(name, kernel(name, function, c10::DispatchKey::BackendSelect));
    for (const auto key :
         {c10::DispatchKey::Autograd, c10::DispatchKey::FuncTorchBatched}) {
      m.impl(name,
             torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<
                                      &leave_out_functorch_wrappers>()));
    }
  };
  impl_on_any("release_trace_inputs", &release_trace_inputs);
  impl_on_any("release_trace_inputs.list", &release_trace_inputs_list);
  impl_on_any("explain_release", &explain_release);
  impl("warmup_compiled", &warmup_compiled);
  impl("warmup_compiled.list", &warmup_compiled_list);
  impl("safe_empty_cache", &safe_empty_cache);
  impl("cache_bytes", &cache_bytes);
  impl("sync_ranks", &sync_ranks);
  impl("scalarize_losses", &scalarize_losses);
  impl("prewarm_library", &prewarm_library);
}

}  // namespace deepmd_prewarm
