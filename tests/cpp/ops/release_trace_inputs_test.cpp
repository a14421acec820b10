// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace deepmd_prewarm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Inputs = c10::List<std::optional<at::Tensor>>;

template <typename... Entries>
Inputs list_of(const Entries&... entries) {
  Inputs list;
  (list.push_back(entries), ...);
  return list;
}

template <typename... Entries>
int64_t release(const Entries&... entries) {
  return release_trace_inputs(list_of(entries...)).expect_int();
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(ReleaseTraceInputs, GivesBackTheBytesOfEachStorageOnce) {
  const auto coord = torch::rand({4, 3}, at::kDouble);
  const auto atype = torch::zeros({4}, at::kLong);
  const std::optional<at::Tensor> mapping;
  EXPECT_EQ(release(coord, atype, mapping, coord), 4 * 3 * 8 + 4 * 8);
  EXPECT_EQ(release(coord, atype, mapping, coord), 0);
  EXPECT_EQ(release(), 0);
}

TEST(ReleaseTraceInputs, FreesThroughTheAllocatorOfTheStorage) {
  static std::atomic<int> freed;
  struct Counting final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
      void* data = std::malloc(bytes);
      return {data, data, &free_counted, at::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }
    static void free_counted(void* data) {
      freed += data != nullptr ? 1 : 0;
      std::free(data);
    }
  } allocator;
  freed = 0;
  c10::Storage storage(c10::Storage::use_byte_size_t(), 32, &allocator, true);
  auto tensor = at::empty({0}).set_(std::move(storage), 0, {8}, {1});
  EXPECT_EQ(release(tensor), 32);
  EXPECT_EQ(freed, 1);
  tensor.reset();
  EXPECT_EQ(freed, 1);
}

TEST(ReleaseTraceInputs, MakesEveryLaterAccessRaiseByName) {
  const auto coord = torch::rand({4, 3});
  release(coord);
  EXPECT_THAT(error_of([&] { coord.sum(); }),
              HasSubstr("release_trace_inputs: expected"));
  EXPECT_THAT(error_of([&] { coord[0].sum(); }),
              HasSubstr("release_trace_inputs"));
  EXPECT_THAT(error_of([&] { coord.data_ptr(); }),
              HasSubstr("release_trace_inputs"));
  EXPECT_THAT(error_of([&] { coord.zero_(); }),
              HasSubstr("release_trace_inputs"));
  EXPECT_EQ(coord.sizes(), (at::IntArrayRef{4, 3}));
  EXPECT_EQ(coord.scalar_type(), at::kFloat);
  EXPECT_EQ(coord.device(), at::Device(at::kCPU));
}

TEST(ReleaseTraceInputs, LeavesARefusedTensorAsItWas) {
  const auto coord = torch::ones({8});
  const auto view = coord.slice(0, 0, 2);
  const auto version = coord._version();
  EXPECT_EQ(release(coord), 0);
  EXPECT_EQ(coord.sum().item<float>(), 8);
  EXPECT_EQ(coord._version(), version);
  EXPECT_EQ(coord.use_count(), 2);  // the variable, and the view's base
}

TEST(ReleaseTraceInputs, ReleasesTheFreeOnesAmongRefusedOnes) {
  std::vector<float> numbers(8, 1);
  const auto borrowed = at::from_blob(numbers.data(), {8});
  const auto first = torch::rand({2});
  const auto last = torch::rand({3});
  EXPECT_EQ(release(first, borrowed, std::optional<at::Tensor>(), last), 20);
  EXPECT_EQ(borrowed.sum().item<float>(), 8);
}

TEST(ReleaseTraceInputs, KeepsGradientsOfAPendingBackwardRight) {
  const auto coord = torch::full({4}, 3.);
  const auto weight = torch::ones({4}, at::requires_grad());
  const auto squared = weight * weight;   // saves weight, twice
  auto energy = (squared * coord).sum();  // saves coord; squared isn't needed
  EXPECT_EQ(release(coord, weight), 0);
  EXPECT_EQ(release(squared), 16);
  energy.backward();
  EXPECT_TRUE(at::equal(weight.grad(), torch::full({4}, 6.)));
  energy.reset();
  EXPECT_GT(release(coord), 0);
}

TEST(ReleaseTraceInputs, KeepsSecondOrderGraphsRight) {
  const auto coord = torch::full({4}, 2., at::requires_grad());
  const auto energy = (coord * coord * coord).sum();
  const auto force = torch::autograd::grad({energy}, {coord}, {}, true, true);
  EXPECT_EQ(release(coord), 0);
  const auto second = torch::autograd::grad({force[0].sum()}, {coord});
  EXPECT_TRUE(at::equal(second[0], torch::full({4}, 12.)));
}

TEST(ReleaseTraceInputs, TakesAListWithoutNone) {
  const auto coord = torch::rand({4});
  c10::List<at::Tensor> list;
  list.push_back(coord);
  EXPECT_EQ(release_trace_inputs_list(list).expect_int(), 16);
}

TEST(ReleaseTraceInputs, DoesTheSameThroughTheDispatcher) {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("deepmd::release_trace_inputs", "")
                      .typed<c10::SymInt(const Inputs&)>();
  const auto coord = torch::rand({4});
  const auto weight = torch::rand({4}, at::requires_grad());
  const auto saved = torch::rand({4});
  const auto energy = (saved * weight).sum();
  EXPECT_EQ(op.call(list_of(coord, saved)).expect_int(), 16);
}

TEST(ExplainRelease, SaysForEachEntryWhatReleaseWillDo) {
  const auto coord = torch::rand({4});
  const auto view = coord.slice(0, 0, 2);
  const auto atype = torch::zeros({4}, at::kLong);
  const auto inputs = list_of(coord, std::optional<at::Tensor>(), atype);
  const auto reasons = explain_release(inputs);
  EXPECT_THAT(reasons, ElementsAre(HasSubstr("shared with a tensor outside"),
                                   HasSubstr("None"), "release"));
  EXPECT_EQ(release_trace_inputs(inputs).expect_int(), 32);
  EXPECT_EQ(explain_release(inputs)[2], "already released");
}

// Every list holds the tensors, so that a list which is judged while another
// is alive has to refuse: freed once or not at all, and never both.
TEST(ReleaseTraceInputs, FreesAtMostOnceFromManyThreads) {
  for (int round = 0; round < 60; ++round) {
    const auto coord = torch::ones({64});
    std::atomic<int> ready{0};
    std::atomic<int64_t> bytes{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        ++ready;
        while (ready < 4) {
          std::this_thread::yield();
        }
        bytes += release(coord);
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    ASSERT_TRUE(bytes == 0 || bytes == 256) << bytes;
    if (bytes == 0) {
      ASSERT_EQ(coord.sum().item<float>(), 64);
    }
    ASSERT_EQ(bytes + release(coord), 256);
  }
}

// As while another thread's call with this tensor is under way.
TEST(ReleaseTraceInputs, KeepsATensorThatAnotherListHolds) {
  const auto coord = torch::rand({4});
  auto other = list_of(coord);
  const auto inputs = list_of(coord);
  EXPECT_EQ(release_trace_inputs(inputs).expect_int(), 0);
  other.clear();
  EXPECT_EQ(release_trace_inputs(inputs).expect_int(), 16);
}

// The view either came first and can be read for good, or it came second and
// raises by name. Nobody reads memory that is gone.
TEST(ReleaseTraceInputs, LetsAnotherThreadTakeAViewMeanwhile) {
  constexpr int64_t kSize = 1 << 16;  // large enough to be unmapped when freed
  for (int round = 0; round < 60; ++round) {
    const auto coord = torch::ones({kSize});
    const auto inputs = list_of(coord);
    std::atomic<bool> go{false};
    std::string problem;
    std::thread reader([&] {
      while (!go) {
        std::this_thread::yield();
      }
      const auto view = coord.slice(0, 1, kSize);
      try {
        if (view.sum().item<double>() != kSize - 1) {
          problem = "read something else";
        }
      } catch (const c10::Error& error) {
        problem = error.what_without_backtrace();
      }
    });
    go = true;
    release_trace_inputs(inputs);
    reader.join();
    ASSERT_TRUE(problem.empty() ||
                problem.rfind("release_trace_inputs", 0) == 0)
        << problem;
  }
}

}  // namespace
}  // namespace deepmd_prewarm
