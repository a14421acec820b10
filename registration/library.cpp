// SPDX-License-Identifier: LGPL-3.0-or-later
// The whole dispatcher surface of deepmd-prewarm: one class, nine schemas, no
// logic. Always a FRAGMENT: deepmd-kit's libdeepmd_op_pt.so owns the namespace.
#include "registration/library.h"

#include <deepmd_prewarm/plugin/compiled_task.h>
#include <deepmd_prewarm/plugin/task_pickling.h>

namespace {

using deepmd_prewarm::CompiledTask;

// CONSERVATIVE keeps a call whose result is unused alive in TorchScript.
c10::FunctionSchema conservative(const char* schema) {
  return torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE);
}

// These operators act on the process, not on values. nondeterministic_seeded
// is torch's word for "the same arguments may do something else next time":
// without it, tracers run an operator on constants for real to fold its result.
const std::vector<at::Tag> kActs{at::Tag::nondeterministic_seeded,
                                 at::Tag::pt2_compliant_tag};

}  // namespace

void deepmd_prewarm::define_library(torch::Library& m) {
  // Names what to import when a call reaches Dynamo or export without fakes.
  m.set_python_module("deepmd_prewarm._fakes");

  m.class_<CompiledTask>("CompiledTask")
      .def("name", &CompiledTask::name)
      .def("backend", &CompiledTask::backend)
      .def("is_warm", &CompiledTask::is_warm)
      .def("stats", &CompiledTask::stats)
      .def("close", &CompiledTask::close)
      .def("__obj_flatten__", &deepmd_prewarm::flatten_task)
      .def_pickle(
          [](const c10::intrusive_ptr<CompiledTask>& task) {
            return deepmd_prewarm::task_to_token(task);
          },
          [](const deepmd_prewarm::TaskToken& token) {
            return deepmd_prewarm::task_from_token(token);
          });

  const auto def = [&m](const char* schema) {
    m.def(conservative(schema), kActs);
  };
  def("release_trace_inputs(Tensor?[] inputs) -> SymInt");
  def("release_trace_inputs.list(Tensor[] inputs) -> SymInt");
  def("explain_release(Tensor?[] inputs) -> str[]");
  def("warmup_compiled(__torch__.torch.classes.deepmd.CompiledTask task, "
      "Tensor?[] inputs, *, bool backward=True) -> ()");
  def("warmup_compiled.list(__torch__.torch.classes.deepmd.CompiledTask task, "
      "Tensor[] inputs, *, bool backward=True) -> ()");
  def("safe_empty_cache(Device device) -> ()");
  def("cache_bytes(Device device) -> (int reserved, int allocated)");
  def("sync_ranks(str group_name, str phase, str error=\"\", "
      "float timeout_s=0.) -> ()");
  def("scalarize_losses(Dict(str, Tensor) losses, "
      "str[]? skip_prefixes=None) -> Dict(str, float)");
  // Which copy of this library serves the process.
  def("prewarm_library() -> (str version, str torch, str path)");
}
