// SPDX-License-Identifier: LGPL-3.0-or-later
// CUDA as a fake guard, a fake allocator and a fake runtime: no driver here.
#include <ATen/ATen.h>
#include <deepmd_prewarm/ops/release_trace_inputs.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/ops/warmup_compiled.h>
#include <deepmd_prewarm/plugin/device_release.h>
#include <deepmd_prewarm/plugin/graph_capture.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fake_capture.h"
#include "fake_device.h"

namespace deepmd_prewarm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kCUDA = c10::DeviceType::CUDA;

FakeDevice& device() {
  static auto* fake = new FakeDevice(kCUDA);
  return *fake;
}

c10::Device cuda(int index) {
  return {kCUDA, static_cast<c10::DeviceIndex>(index)};
}

void free_and_note(void* memory) {
  device().note("freed with device " + std::to_string(device().current));
  std::free(memory);
}

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::calloc(1, bytes);
    return {memory, memory, &free_and_note, device().getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_and_note; }
  void copy_data(void*, const void*, size_t) const override {}
};

}  // namespace

int current_fake_device() { return device().current; }

namespace {

at::Tensor tensor_on(int index, int64_t numel = 4) {
  static auto* allocator = new FakeAllocator;
  const auto bytes = static_cast<size_t>(numel) * sizeof(float);
  const auto before = std::exchange(device().current, index);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       allocator->allocate(bytes), allocator,
                       /*resizable=*/true);
  device().current = before;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

class DeviceRelease : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)] =
        &device();
  }
  void SetUp() override {
    device().reset();
    capturing_on = -1;
  }
};

c10::SymInt release(at::Tensor tensor) {
  c10::List<at::Tensor> list;
  list.push_back(std::move(tensor));
  return release_trace_inputs_list(list);
}

TEST_F(DeviceRelease, FreesOnTheTensorsOwnDeviceAndComesBack) {
  EXPECT_EQ(release(tensor_on(1)), 16);
  EXPECT_THAT(device().log,
              ElementsAre("used on device 1 stream 0", "freed with device 1"));
  EXPECT_EQ(device().current, 0);
}

TEST_F(DeviceRelease, TellsTheAllocatorTheStreamInUseBeforeItFrees) {
  device().streams = {3, 7, 0};
  device().current = 1;
  release(tensor_on(0));
  release(tensor_on(1));
  EXPECT_THAT(device().log,
              ElementsAre("used on device 0 stream 3", "freed with device 0",
                          "used on device 1 stream 7", "freed with device 1"));
  EXPECT_EQ(device().current, 1);
}

TEST_F(DeviceRelease, MakesNoContextOnADeviceWithoutOne) {
  c10::List<at::Tensor> list;
  list.push_back(tensor_on(0));
  list.push_back(tensor_on(1));
  list.push_back(at::rand({4}));
  EXPECT_EQ(release_trace_inputs_list(list), 48);
  EXPECT_THAT(device().log,
              ::testing::Not(::testing::Contains("context made")));
}

TEST_F(DeviceRelease, LeavesTheDeviceAloneForHostMemory) {
  EXPECT_EQ(release(at::rand({4})), 16);
  EXPECT_THAT(device().log, IsEmpty());
}

TEST_F(DeviceRelease, RefusesWhileItsDeviceCapturesAGraph) {
  const auto captured = tensor_on(1);
  const auto other = tensor_on(0);
  capturing_on = 1;
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(captured);
  list.push_back(other);
  EXPECT_THAT(explain_release(list),
              ElementsAre(HasSubstr("captures a CUDA graph"), "release"));
  EXPECT_EQ(release_trace_inputs(list), 16);  // the one on device 0
  EXPECT_THAT(device().log,
              ElementsAre("used on device 0 stream 0", "freed with device 0"));
  EXPECT_NE(captured.const_data_ptr(), nullptr);
  capturing_on = -1;
  EXPECT_EQ(release_trace_inputs(list), 16);
}

TEST_F(DeviceRelease, ReadsNoLossesWhileTheirDeviceCapturesAGraph) {
  const auto loss = tensor_on(1, 1);
  capturing_on = 1;
  try {
    read_losses({{"loss", loss}});
    FAIL() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("expected no CUDA graph capture on cuda:1"));
  }
}

TEST_F(DeviceRelease, WarmsNothingUpWhileADeviceCapturesAGraph) {
  int runs = 0;
  const auto task = CompiledTask::from_function(
      "water", [&runs](const std::vector<at::Tensor>& inputs) {
        ++runs;
        return inputs;
      });
  c10::List<at::Tensor> inputs;
  inputs.push_back(tensor_on(1));
  capturing_on = 1;
  try {
    warmup_compiled_list(task, inputs, /*backward=*/false);
    FAIL() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("on cuda:1 while task 'water' warms up"));
  }
  EXPECT_EQ(runs, 0);
}

TEST_F(DeviceRelease, AsksForACaptureOnTheDeviceItself) {
  capturing_on = 1;
  EXPECT_TRUE(is_capturing(cuda(1)));
  EXPECT_FALSE(is_capturing(cuda(0)));
  EXPECT_FALSE(is_capturing(c10::DeviceType::CPU));
  EXPECT_EQ(device().current, 0);
}

}  // namespace
}  // namespace deepmd_prewarm
