// SPDX-License-Identifier: LGPL-3.0-or-later
// What a call from C++ costs. bench_operators.py runs this program and compares
// with the goals.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>

#include <ctime>
#include <optional>
#include <string>
#include <vector>

namespace deepmd_prewarm {
namespace {

using Inputs = c10::List<std::optional<at::Tensor>>;
using Losses = c10::Dict<std::string, at::Tensor>;
using Prefixes = std::optional<std::vector<std::string>>;

template <typename Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

// One frame of 32 atoms with 64 neighbours each: ext_coord, ext_atype, nlist,
// mapping, fparam, aparam.
std::vector<at::Tensor> trace_inputs_of_a_frame() {
  return {at::ones({1, 96, 3}, at::kDouble), at::ones({1, 96}, at::kLong),
          at::ones({1, 32, 64}, at::kLong),  at::ones({1, 96}, at::kLong),
          at::ones({1, 2}, at::kDouble),     at::ones({1, 32, 2}, at::kDouble)};
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

// Only the release is timed, in batches: asking for the time costs as much.
void release_six_tensors(benchmark::State& state) {
  constexpr size_t kBatch = 16;
  const auto release =
      operator_of<c10::SymInt(const Inputs&)>("deepmd::release_trace_inputs");
  while (state.KeepRunningBatch(kBatch)) {
    std::vector<std::vector<at::Tensor>> frames(kBatch);
    std::vector<Inputs> lists(kBatch);
    for (size_t i = 0; i < kBatch; ++i) {
      frames[i] = trace_inputs_of_a_frame();
      for (const auto& tensor : frames[i]) {
        lists[i].push_back(tensor);
      }
    }
    int64_t bytes = 0;
    const auto start = cpu_seconds();
    for (const auto& list : lists) {
      bytes += release.call(list).expect_int();
    }
    state.SetIterationTime(cpu_seconds() - start);
    if (bytes == 0) {
      state.SkipWithError("nothing was released");
    }
  }
}
BENCHMARK(release_six_tensors)->UseManualTime();

void safe_empty_cache_cpu(benchmark::State& state) {
  const auto empty = operator_of<void(c10::Device)>("deepmd::safe_empty_cache");
  for (auto _ : state) {
    empty.call(at::kCPU);
  }
}
BENCHMARK(safe_empty_cache_cpu);

std::vector<at::Tensor> losses_of(benchmark::State& state) {
  std::vector<at::Tensor> losses;
  for (int64_t i = 0; i < state.range(0); ++i) {
    losses.push_back(at::full({}, i, at::kDouble));
  }
  return losses;
}

void scalarize_losses_cpu(benchmark::State& state) {
  const auto scalarize = operator_of<c10::Dict<std::string, double>(
      const Losses&, const Prefixes&)>("deepmd::scalarize_losses");
  Losses losses;
  for (const auto& loss : losses_of(state)) {
    losses.insert("rmse_" + std::to_string(losses.size()), loss);
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(scalarize.call(losses, std::nullopt));
  }
}
BENCHMARK(scalarize_losses_cpu)->Arg(8)->Arg(20);

void item_for_each_loss(benchmark::State& state) {
  const auto losses = losses_of(state);
  for (auto _ : state) {
    for (const auto& loss : losses) {
      benchmark::DoNotOptimize(loss.item<double>());
    }
  }
}
BENCHMARK(item_for_each_loss)->Arg(8)->Arg(20);

}  // namespace
}  // namespace deepmd_prewarm

BENCHMARK_MAIN();
