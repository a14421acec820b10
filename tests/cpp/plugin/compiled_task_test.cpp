// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/compiled_task.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

using deepmd_prewarm::CompiledTask;
using Tensors = std::vector<at::Tensor>;

namespace {

torch::jit::Module doubling_module() {
  torch::jit::Module module("Doubling");
  module.register_parameter("weight", torch::full({1}, 2.), false);
  module.define("def forward(self, x):\n  return x * self.weight\n");
  return module;
}

template <typename Error, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

testing::AssertionResult has(const std::string& text, const std::string& part) {
  return text.find(part) == std::string::npos
             ? testing::AssertionFailure() << '"' << text << "\" lacks " << part
             : testing::AssertionSuccess();
}

}  // namespace

TEST(CompiledTask, CountsRunsAndTellsWhetherTheLastWasWarm) {
  const auto task =
      CompiledTask::from_function("a", [](const Tensors& in) { return in; });
  EXPECT_EQ(task->name(), "a");
  EXPECT_EQ(task->backend(), "function");
  EXPECT_FALSE(task->is_warm());
  task->record({1.5, 0.5, true, ""});
  EXPECT_TRUE(task->is_warm());
  task->record({1, 0, true, "recompile limit"});
  EXPECT_FALSE(task->is_warm());
  task->record_failure();
  const auto stats = task->stats();
  EXPECT_EQ(stats.at("runs"), 2);
  EXPECT_EQ(stats.at("failures"), 1);
  EXPECT_EQ(stats.at("eager_runs"), 1);
  EXPECT_EQ(stats.at("forward_s"), 2.5);
  EXPECT_EQ(stats.at("backward_s"), 0.5);
  EXPECT_EQ(stats.at("covers_training"), 1);
}

TEST(CompiledTask, LetsTheCallableGoOnClose) {
  auto captured = std::make_shared<int>(1);
  const auto task = CompiledTask::from_function(
      "a", [captured](const Tensors& in) { return in; });
  EXPECT_EQ(captured.use_count(), 2);
  task->close();
  task->close();
  EXPECT_EQ(captured.use_count(), 1);
  EXPECT_EQ(task->backend(), "closed");
  EXPECT_TRUE(has(message_of<c10::Error>([&] { task->open_backend(); }),
                  ("got task 'a' after close()")));
}

TEST(CompiledTask, RefusesAnEmptyNameAndAnEmptyFunction) {
  EXPECT_THROW(
      CompiledTask::from_function("", [](const Tensors& in) { return in; }),
      c10::ValueError);
  EXPECT_THROW(CompiledTask::from_function("a", nullptr), c10::ValueError);
}

TEST(CompiledTask, HoldsTheStateOfAFunctionWeakly) {
  auto weight = torch::ones({2});
  const auto task = CompiledTask::from_function(
      "a", [](const Tensors& in) { return in; }, {weight, at::Tensor()});
  EXPECT_EQ(task->open_backend()->state().size(), 1);
  EXPECT_EQ(weight.use_count(), 1);
  weight.reset();
  EXPECT_TRUE(task->open_backend()->state().empty());
}

TEST(CompiledTask, HoldsATorchScriptModuleWeaklyAndSaysWhenItIsGone) {
  auto module = std::make_unique<torch::jit::Module>(doubling_module());
  const auto task = CompiledTask::from_script("a", *module);
  const auto backend = task->open_backend();
  EXPECT_EQ(backend->kind(), "torchscript");
  EXPECT_TRUE(torch::equal(backend->run({torch::ones({1})}).at(0),
                           torch::full({1}, 2.)));
  EXPECT_EQ(backend->state().size(), 1);
  module.reset();
  EXPECT_TRUE(backend->state().empty());
  EXPECT_TRUE(has(message_of<c10::Error>([&] { backend->run({}); }),
                  ("the module (Doubling) to be alive")));
}

TEST(CompiledTask, RefusesAMethodThatIsNotThere) {
  const auto module = doubling_module();
  EXPECT_TRUE(has(message_of<c10::ValueError>(
                      [&] { CompiledTask::from_script("a", module, "step"); }),
                  ("a method of Doubling, got 'step'")));
}

TEST(CompiledTask, RefusesAPackageThatIsMissingOrNone) {
  EXPECT_TRUE(has(message_of<c10::ValueError>(
                      [] { CompiledTask::from_package("a", "/nowhere.pt2"); }),
                  ("got no file at '/nowhere.pt2'")));
  EXPECT_TRUE(has(message_of<c10::ValueError>(
                      [] { CompiledTask::from_package("a", "/etc/hostname"); }),
                  ("got another kind of file")));
}
