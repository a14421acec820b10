// SPDX-License-Identifier: LGPL-3.0-or-later
// The whole dispatcher surface of deepmd-prewarm: one class, eight schemas, no
// logic. Always a FRAGMENT: deepmd-kit's libdeepmd_op_pt.so owns the namespace.
#include "registration/library.h"

#include <deepmd_prewarm/plugin/compiled_task.h>

namespace {

using deepmd_prewarm::CompiledTask;

// CONSERVATIVE keeps a call whose result is unused alive in TorchScript.
c10::FunctionSchema conservative(const char* schema) {
  return torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE);
}

}  // namespace

void deepmd_prewarm::define_library(torch::Library& m) {
  // Names what to import when a call reaches Dynamo or export without fakes.
  m.set_python_module("deepmd_prewarm._fakes");

  m.class_<CompiledTask>("CompiledTask").def("name", &CompiledTask::name);

  m.def(conservative("release_trace_inputs(Tensor?[] inputs) -> SymInt"));
  m.def(conservative("release_trace_inputs.list(Tensor[] inputs) -> SymInt"));
  m.def(conservative("explain_release(Tensor?[] inputs) -> str[]"));
  m.def(conservative(
      "warmup_compiled(__torch__.torch.classes.deepmd.CompiledTask task, "
      "Tensor?[] inputs, *, bool backward=True) -> ()"));
  m.def(conservative("safe_empty_cache(Device device) -> ()"));
  m.def(conservative(
      "cache_bytes(Device device) -> (int reserved, int allocated)"));
  m.def(
      conservative("sync_ranks(str group_name, str phase, str error=\"\", "
                   "float timeout_s=0.) -> ()"));
  m.def(
      conservative("scalarize_losses(Dict(str, Tensor) losses, "
                   "str[]? skip_prefixes=None) -> Dict(str, float)"));
}
