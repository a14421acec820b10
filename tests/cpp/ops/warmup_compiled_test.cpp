// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <new>
#include <stdexcept>
#include <thread>

using deepmd_prewarm::CompiledTask;
using deepmd_prewarm::warmup_compiled;
using deepmd_prewarm::warmup_compiled_list;
using Tensors = std::vector<at::Tensor>;

namespace {

c10::List<std::optional<at::Tensor>> list_of(const Tensors& tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& tensor : tensors) {
    list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return list;
}

template <typename Error, typename Raised>
std::string message_after(Raised raised) {
  const auto task = CompiledTask::from_function(
      "water", [raised](const Tensors&) -> Tensors { throw raised; });
  try {
    warmup_compiled(task, list_of({}));
  } catch (const Error& error) {
    EXPECT_EQ(task->stats().at("failures"), 1);
    EXPECT_FALSE(task->is_warm());
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

TEST(WarmupCompiled, RunsForwardAndBackwardAndPutsEverythingBack) {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4),
                            torch::nn::Dropout(0.5));
  auto state = net->parameters();
  for (const auto& buffer : net->buffers()) {
    state.push_back(buffer);
  }
  Tensors before;
  for (const auto& tensor : state) {
    before.push_back(tensor.detach().clone());
  }
  int backwards = 0;
  state[0].register_hook([&](const at::Tensor&) { ++backwards; });
  const auto task = CompiledTask::from_function(
      "a", [&](const Tensors& in) -> Tensors { return {net->forward(in[0])}; },
      state);
  torch::manual_seed(1);
  const auto expected = torch::rand({2});
  torch::manual_seed(1);
  const Tensors samples{torch::rand({5, 3}).zero_()};
  torch::manual_seed(1);
  warmup_compiled_list(task, c10::List<at::Tensor>(samples));
  EXPECT_TRUE(torch::equal(torch::rand({2}), expected));
  EXPECT_EQ(backwards, 1);
  for (size_t i = 0; i < state.size(); ++i) {
    EXPECT_TRUE(torch::equal(state[i], before[i]));
    EXPECT_FALSE(state[i].grad().defined());
  }
  EXPECT_TRUE(task->is_warm());
  EXPECT_EQ(task->stats().at("covers_training"), 1);
  warmup_compiled(task, list_of(samples), /*backward=*/false);
  EXPECT_EQ(backwards, 1);
}

TEST(WarmupCompiled, HandsInputsOnAsTheyAreAndNoneAsUndefined) {
  const auto turned = torch::rand({3, 4}).t();
  const auto leaf = torch::ones({2}, torch::requires_grad());
  Tensors got;
  const auto task = CompiledTask::from_function("a", [&](const Tensors& in) {
    got = in;
    return Tensors{in[0]};
  });
  warmup_compiled(task, list_of({turned, at::Tensor(), leaf}));
  ASSERT_EQ(got.size(), 3);
  EXPECT_TRUE(got[0].is_same(turned));
  EXPECT_FALSE(got[1].defined());
  EXPECT_TRUE(got[2].is_same(leaf));
}

TEST(WarmupCompiled, DropsTheOutputs) {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> alive(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>{});
  const auto task = CompiledTask::from_function("a", [&](const Tensors&) {
    auto out = torch::ones({2}, torch::requires_grad()).exp();
    alive = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
        out.getIntrusivePtr());
    return Tensors{out};
  });
  warmup_compiled(task, list_of({}));
  EXPECT_TRUE(alive.expired());
}

TEST(WarmupCompiled, NamesTheTaskInStandardAndTorchErrorsAndKeepsOthers) {
  struct Mine : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const std::string named = "while warming task 'water'";
  EXPECT_TRUE(has(message_after<c10::Error>(std::runtime_error("bad")), named));
  EXPECT_TRUE(
      has(message_after<c10::Error>(std::runtime_error("bad")), ("bad")));
  EXPECT_TRUE(
      has(message_after<c10::ValueError>(std::invalid_argument("bad")), named));
  EXPECT_TRUE(
      has(message_after<c10::IndexError>(std::out_of_range("bad")), named));
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  EXPECT_TRUE(
      has(message_after<c10::TypeError>(c10::TypeError(here, "bad")), named));
  EXPECT_EQ(message_after<Mine>(Mine("mine")), "mine");
  EXPECT_EQ(message_after<std::bad_alloc>(std::bad_alloc()), "std::bad_alloc");
}

TEST(WarmupCompiled, RefusesNoHandleNoTensorAndAClosedHandle) {
  EXPECT_THROW(warmup_compiled({}, list_of({})), c10::ValueError);
  const auto task = CompiledTask::from_function(
      "a", [](const Tensors&) { return Tensors{}; });
  EXPECT_THROW(warmup_compiled(task, list_of({})), c10::TypeError);
  task->close();
  EXPECT_THROW(warmup_compiled(task, list_of({})), c10::Error);
}

TEST(WarmupCompiled, SerialisesThreadsButLetsACallableWarmAnother) {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  const auto inner =
      CompiledTask::from_function("inner", [&](const Tensors& in) {
        most = std::max<int>(most, ++inside);
        --inside;
        return in;
      });
  const auto outer =
      CompiledTask::from_function("outer", [&](const Tensors& in) {
        warmup_compiled(inner, list_of(in));
        return in;
      });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 50; ++j) {
        warmup_compiled(outer, list_of({torch::ones({1})}));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(most, 1);
  EXPECT_EQ(inner->stats().at("runs"), 200);
}

TEST(WarmupCompiled, ClosesFromAnotherThreadWhileItRuns) {
  const auto task =
      CompiledTask::from_function("a", [&](const Tensors& in) { return in; });
  std::atomic<bool> done{false};
  std::thread closer([&] {
    while (task->stats().at("runs") == 0) {
      std::this_thread::yield();
    }
    task->close();
    done = true;
  });
  try {
    while (!done) {
      warmup_compiled(task, list_of({torch::ones({1})}));
    }
  } catch (const c10::Error&) {
  }
  closer.join();
  EXPECT_EQ(task->backend(), "closed");
}

TEST(WarmupCompiled, RunsInTheModesOfTheCaller) {
  bool grad = true;
  const auto task = CompiledTask::from_function("a", [&](const Tensors& in) {
    grad = c10::GradMode::is_enabled();
    return in;
  });
  {
    const c10::NoGradGuard no_grad;
    warmup_compiled(task, list_of({torch::ones({1}, torch::requires_grad())}));
  }
  EXPECT_FALSE(grad);
  EXPECT_EQ(task->stats().at("covers_training"), 0);
}
