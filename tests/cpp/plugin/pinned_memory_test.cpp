// SPDX-License-Identifier: LGPL-3.0-or-later
// A device whose memory is the host's and whose streams are lazy: what they are
// asked for happens when an event after it is waited for, and not before.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <deepmd_prewarm/plugin/pinned_memory.h>
#include <deepmd_prewarm/plugin/side_effect_guard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <set>

#include "fake_device.h"
#include "fake_tensors.h"

namespace deepmd_prewarm {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

constexpr auto kType = c10::DeviceType::PrivateUse1;

FakeDevice& device() {
  static auto* fake = new FakeDevice(kType);
  return *fake;
}

struct FakeHostAllocator final : at::HostAllocator {
  std::set<const void*> blocks;
  int64_t idle = 0;
  int emptied = 0;

  static void release(void* memory);
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::calloc(1, bytes);
    blocks.insert(memory);
    return {memory, memory, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    ++emptied;
    idle = 0;
  }
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.active_bytes.current = 100;
    stats.allocated_bytes.current = 100 + idle;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

FakeHostAllocator& host() {
  static auto* fake = new FakeHostAllocator;
  return *fake;
}

void FakeHostAllocator::release(void* memory) {
  host().blocks.erase(memory);
  std::free(memory);
}

struct FakeHooks final : at::PrivateUse1HooksInterface {
  std::vector<at::Generator> generators{
      at::make_generator<at::CPUGeneratorImpl>(1),
      at::make_generator<at::CPUGeneratorImpl>(2),
      at::make_generator<at::CPUGeneratorImpl>(3)};
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return index != FakeDevice::kWithoutContext;
  }
  c10::DeviceIndex deviceCount() const override { return FakeDevice::kCount; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host(); }
  bool isPinnedPtr(const void* data) const override {
    return host().blocks.count(data) != 0;
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex index) const override {
    if (!hasPrimaryContext(index)) {
      device().note("context made");
    }
    return generators[static_cast<size_t>(index)];
  }
};

FakeHooks& hooks() {
  static auto* fake = new FakeHooks;
  return *fake;
}

at::Tensor fake_copy_from(const at::Tensor& self,
                          const at::Tensor& target,
                          bool non_blocking) {
  const auto copy = [self, target] {
    std::memcpy(target.data_ptr(), self.data_ptr(), self.nbytes());
  };
  device().note(std::string("copied ") +
                (host().blocks.count(target.data_ptr()) != 0 ? "to pinned"
                                                             : "to pageable") +
                " with device " + std::to_string(device().current));
  if (non_blocking) {
    device().pending.emplace_back(copy);
  } else {
    copy();
  }
  return target;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("view", &fake_view);
  m.impl("cat", &fake_cat);
  m.impl("_copy_from", &fake_copy_from);
}

class PinnedMemory : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    c10::register_privateuse1_backend("fakedevice");
    at::RegisterPrivateUse1HooksInterface(&hooks());
    at::setHostAllocator(kType, &host());
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kType)] =
        &device();
  }
  void SetUp() override {
    device().reset();
    host().idle = 0;
    host().emptied = 0;
  }
};

TEST_F(PinnedMemory, TheHostReadsAfterAnEventOnTheStreamInUse) {
  device().streams = {0, 5, 0};
  const auto copy = copy_to_host(to_fake_device(at::full({2}, 7.F), 1));
  EXPECT_EQ(copy[1].item<float>(), 7.F);
  EXPECT_THAT(device().log,
              ElementsAre("copied to pinned with device 1",
                          "event on device 1 stream 5", "event waited for"));
  EXPECT_EQ(device().current, 0);
}

TEST_F(PinnedMemory, LossesTravelOnceForEachDevice) {
  std::vector<NamedLoss> losses;
  for (int i = 0; i < 20; ++i) {
    losses.push_back({"loss", to_fake_device(at::full({}, i + 0.5), i % 2)});
  }
  const auto values = read_losses(losses);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], i + 0.5);
  }
  EXPECT_THAT(device().log,
              ElementsAre("copied to pinned with device 0",
                          "event on device 0 stream 0", "event waited for",
                          "copied to pinned with device 1",
                          "event on device 1 stream 0", "event waited for"));
}

TEST_F(PinnedMemory, EmptiesTheCacheOnlyIfSomethingIsIdle) {
  empty_pinned_cache(kType);
  EXPECT_EQ(host().emptied, 0);
  host().idle = 50;
  EXPECT_EQ(pinned_figures(kType).reserved, 150);
  EXPECT_EQ(pinned_figures(kType).used, 100);
  empty_pinned_cache(kType);
  EXPECT_EQ(host().emptied, 1);
  EXPECT_EQ(pinned_figures(kType).reserved, 100);
}

TEST_F(PinnedMemory, ATypeWithoutAHostAllocatorHasNone) {
  EXPECT_EQ(pinned_figures(c10::DeviceType::HPU).reserved, 0);
  empty_pinned_cache(c10::DeviceType::HPU);
}

// The guard of a warm-up, on devices of which one is not in use.
TEST_F(PinnedMemory, RandomStreamsOfDevicesInUseArePutBack) {
  const auto draw = [](int index) {
    auto generator = hooks().generators[static_cast<size_t>(index)];
    return at::rand({4}, generator);
  };
  const auto before = hooks().generators[1].get_state();
  at::Tensor first;
  {
    SideEffectGuard guard({}, {});
    first = draw(1);
    draw(0);
    guard.put_back();
  }
  EXPECT_TRUE(at::equal(hooks().generators[1].get_state(), before));
  EXPECT_TRUE(at::equal(draw(1), first));
  EXPECT_THAT(device().log, Not(Contains("context made")));
}

}  // namespace
}  // namespace deepmd_prewarm
