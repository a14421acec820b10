// SPDX-License-Identifier: LGPL-3.0-or-later
// The CUDA device of these tests is a fake allocator and a fake guard: they
// count what is asked of them, and there is no driver.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <deepmd_prewarm/ops/safe_empty_cache.h>
#include <deepmd_prewarm/plugin/device_memory.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "../plugin/fake_capture.h"

namespace deepmd_prewarm {
namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;

c10::Device cuda(int index) {
  return {kCUDA, static_cast<c10::DeviceIndex>(index)};
}

struct Figures {
  int64_t reserved = 0;
  int64_t allocated = 0;
  int64_t split = 0;
};

struct FakeAllocator final : c10::DeviceAllocator {
  bool in_use = false;
  std::map<int, Figures> devices;
  int emptied = 0;
  std::vector<int> current_when_emptied;

  c10::DataPtr allocate(size_t) override { return {}; }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return in_use; }
  void emptyCache(c10::MempoolId_t) override;
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    constexpr size_t kAll = 0;
    const auto figures = devices[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.reserved_bytes[kAll].current = figures.reserved;
    stats.allocated_bytes[kAll].current = figures.allocated;
    stats.active_bytes[kAll].current = figures.allocated;
    stats.inactive_split_bytes[kAll].current = figures.split;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  mutable int current = 0;
  mutable std::vector<int> made_current;
  int count = 2;

  c10::DeviceType type() const override { return kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(current); }
  void setDevice(c10::Device device) const override {
    current = device.index();
    made_current.push_back(current);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  void* getStreamNativeHandle(c10::Stream) const override { return nullptr; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(count);
  }
};

struct FakeHostAllocator final : at::HostAllocator {
  int64_t idle = 0;
  std::vector<int> current_when_emptied;

  c10::DataPtr allocate(size_t) override { return {}; }
  void copy_data(void*, const void*, size_t) const override {}
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override;
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = idle;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

FakeHostAllocator& host() {
  static auto* fake = new FakeHostAllocator;
  return *fake;
}

FakeAllocator& allocator() {
  static auto* fake = new FakeAllocator;
  return *fake;
}

FakeGuard& guard() {
  static auto* fake = new FakeGuard;
  return *fake;
}

void FakeAllocator::emptyCache(c10::MempoolId_t) {
  ++emptied;
  current_when_emptied.push_back(guard().current);
}

void FakeHostAllocator::empty_cache() {
  current_when_emptied.push_back(guard().current);
}

}  // namespace

int current_fake_device() { return guard().current; }

namespace {

class SafeEmptyCache : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    c10::SetAllocator(kCUDA, &allocator(), 255);
    at::setHostAllocator(kCUDA, &host(), 255);
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)] =
        &guard();
  }
  void SetUp() override {
    allocator().in_use = true;
    allocator().devices = {{0, {1000, 300, 100}}};
    allocator().emptied = 0;
    allocator().current_when_emptied.clear();
    host().idle = 0;
    host().current_when_emptied.clear();
    capturing_on = -1;
    guard().count = 2;
    guard().current = 0;
    guard().made_current.clear();
  }
};

TEST_F(SafeEmptyCache, EmptiesTheCudaDeviceThatIsNamed) {
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().emptied, 1);
}

TEST_F(SafeEmptyCache, TakesTheCurrentDeviceIfNoneIsNamed) {
  guard().current = 1;
  allocator().devices = {{1, {1000, 300, 0}}};
  safe_empty_cache(kCUDA);
  EXPECT_EQ(allocator().current_when_emptied, std::vector<int>{1});
}

TEST_F(SafeEmptyCache, DoesNothingForEveryOtherType) {
  for (const auto type :
       {c10::DeviceType::CPU, c10::DeviceType::Meta, c10::DeviceType::XPU,
        c10::DeviceType::MPS, c10::DeviceType::PrivateUse1}) {
    safe_empty_cache(type);
  }
  EXPECT_EQ(allocator().emptied, 0);
}

TEST_F(SafeEmptyCache, DoesNothingBeforeCudaIsInUse) {
  allocator().in_use = false;
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().emptied, 0);
  EXPECT_TRUE(guard().made_current.empty());
}

TEST_F(SafeEmptyCache, MakesNoContextOnADeviceThatHoldsNothing) {
  safe_empty_cache(cuda(1));
  EXPECT_EQ(allocator().emptied, 0);
  EXPECT_TRUE(guard().made_current.empty());
}

TEST_F(SafeEmptyCache, DoesNothingForAnIndexThatIsNotThere) {
  allocator().devices[7] = {1000, 0, 0};
  safe_empty_cache(cuda(7));
  EXPECT_EQ(allocator().emptied, 0);
}

TEST_F(SafeEmptyCache, FreesOnTheDeviceAndComesBackToTheCurrentOne) {
  allocator().devices = {{1, {1000, 300, 0}}};
  safe_empty_cache(cuda(1));
  EXPECT_EQ(allocator().current_when_emptied, std::vector<int>{1});
  EXPECT_EQ(guard().current, 0);
}

// torch has one call for all devices; who names one expects its memory back.
TEST_F(SafeEmptyCache, GivesMemoryBackAlsoIfAnotherDeviceHasFreeBlocks) {
  allocator().devices[1] = {500, 100, 0};
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().current_when_emptied, std::vector<int>{0});
  safe_empty_cache(cuda(1));
  EXPECT_EQ(allocator().current_when_emptied, (std::vector<int>{0, 1}));
  EXPECT_EQ(guard().current, 0);
}

TEST_F(SafeEmptyCache, MakesNoDeviceCurrentThatHoldsNothing) {
  guard().current = 1;  // chosen, but no context yet
  guard().count = 3;
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().current_when_emptied, std::vector<int>{0});
  // Back to 1 by the guard that restores; torch's own makes no context then.
  for (const auto made : guard().made_current) {
    EXPECT_NE(made, 2);
  }
}

TEST_F(SafeEmptyCache, DoesNothingWhileAGraphIsCaptured) {
  capturing_on = 0;
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().emptied, 0);
  capturing_on = 1;  // holds no memory: nothing of it can be freed
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().emptied, 1);
  allocator().devices[1] = {500, 500, 0};
  safe_empty_cache(cuda(0));
  EXPECT_EQ(allocator().emptied, 1);
  EXPECT_EQ(guard().current, 0);
}

// Unlocking needs a context: that of a device in use, not the current one's.
TEST_F(SafeEmptyCache, UnlocksIdleHostMemoryOnTheDeviceToo) {
  allocator().devices = {{1, {1000, 300, 0}}};
  safe_empty_cache(cuda(1));
  EXPECT_TRUE(host().current_when_emptied.empty());
  host().idle = 64;
  capturing_on = 1;
  safe_empty_cache(cuda(1));
  EXPECT_TRUE(host().current_when_emptied.empty());
  capturing_on = -1;
  safe_empty_cache(cuda(1));
  EXPECT_EQ(host().current_when_emptied, std::vector<int>{1});
}

TEST_F(SafeEmptyCache, ReportsTheAllocatorsFigures) {
  EXPECT_EQ(cache_bytes(cuda(0)), std::make_tuple(1000, 300));
  EXPECT_EQ(cache_figures(cuda(0)).idle, 600);
  EXPECT_EQ(cache_bytes(cuda(7)), std::make_tuple(0, 0));
  EXPECT_EQ(cache_bytes(c10::DeviceType::CPU), std::make_tuple(0, 0));
  EXPECT_EQ(cache_bytes(c10::DeviceType::Meta), std::make_tuple(0, 0));
  allocator().in_use = false;
  EXPECT_EQ(cache_bytes(cuda(0)), std::make_tuple(0, 0));
  EXPECT_TRUE(guard().made_current.empty());
}

}  // namespace
}  // namespace deepmd_prewarm
