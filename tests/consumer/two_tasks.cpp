// SPDX-License-Identifier: LGPL-3.0-or-later
// A C++ training of two tasks with one shared layer: warms both before step 1,
// gives their samples back, then trains them in turn and logs plain numbers.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <deepmd_prewarm/plugin/compiled_task.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace {

at::Tensor numbers(int64_t rows, int64_t columns) {
  return at::linspace(-1, 1, rows * columns, at::kDouble)
      .reshape({rows, columns});
}

struct Task {
  std::string name;
  at::Tensor shared;  // (3, 4), the same tensor in each task
  at::Tensor head;    // (4, 1), its own
  int64_t calls = 0;

  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) {
    ++calls;
    return (at::tanh(x.matmul(shared)).matmul(head) - y).square().mean();
  }
};

std::vector<at::Tensor> sample(double target) {
  return {numbers(5, 3), at::full({5, 1}, target, at::kDouble)};
}

}  // namespace

int main() {
  const auto shared = numbers(3, 4).requires_grad_();
  std::map<std::string, double> targets{{"metal", -1.}, {"water", 2.}};
  std::map<std::string, Task> tasks;
  for (const auto& [name, target] : targets) {
    tasks[name] = {name, shared, numbers(4, 1).requires_grad_()};
  }

  // Before step 1: every task once, forward and backward, without a trace.
  for (auto& [name, task] : tasks) {
    const auto handle = deepmd_prewarm::CompiledTask::from_function(
        name,
        [&task = task](const std::vector<at::Tensor>& inputs) {
          return std::vector<at::Tensor>{task.loss(inputs.at(0), inputs.at(1))};
        },
        {task.shared, task.head});
    c10::List<std::optional<at::Tensor>> inputs;
    for (auto& tensor : sample(targets[name])) {
      inputs.push_back(std::move(tensor));
    }
    deepmd_prewarm::warmup_compiled(handle, inputs);
    const auto freed = deepmd_prewarm::release_trace_inputs(inputs);
    deepmd_prewarm::safe_empty_cache(c10::kCPU);
    std::printf("warm %s %s warm=%d training=%g calls=%ld grad=%d freed=%ld\n",
                name.c_str(), handle->backend().c_str(), handle->is_warm(),
                handle->stats().at("covers_training"),
                static_cast<long>(task.calls), task.head.grad().defined(),
                static_cast<long>(freed.expect_int()));
  }

  for (int step = 0; step < 6; ++step) {
    c10::Dict<std::string, at::Tensor> losses;
    for (auto& [name, task] : tasks) {
      const auto batch = sample(targets[name]);
      const auto loss = task.loss(batch[0], batch[1]);
      loss.backward();
      const c10::NoGradGuard no_grad;
      for (auto* weight : {&task.shared, &task.head}) {
        weight->sub_(weight->grad() * 0.1);
        weight->mutable_grad().reset();
      }
      losses.insert(name, loss);
      losses.insert("l2_" + name, loss.sqrt());
    }
    for (const auto& entry :
         deepmd_prewarm::scalarize_losses(losses, std::nullopt)) {
      std::printf("loss %d %s %.17g\n", step, entry.key().c_str(),
                  entry.value());
    }
  }
  return 0;
}
