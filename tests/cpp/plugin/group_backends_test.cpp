// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/group_backends.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fake_device.h"

namespace deepmd_prewarm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kCUDA = c10::DeviceType::CUDA;
using std::chrono::milliseconds;

FakeDevice& device() {
  static auto* fake = new FakeDevice(kCUDA);
  return *fake;
}

c10::Device cuda(int index) {
  return {kCUDA, static_cast<c10::DeviceIndex>(index)};
}

struct FakeBackend : c10d::Backend {
  explicit FakeBackend(std::string named)
      : c10d::Backend(0, 1),
        name(std::move(named)),
        options(c10::make_intrusive<Options>(name, milliseconds(15500))) {}

  const std::string getBackendName() const override { return name; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(milliseconds timeout) override { options->timeout = timeout; }
  void eagerConnectSingleDevice(at::Device to) override {
    device().note("connect device " + std::to_string(to.index()) +
                  " with device " + std::to_string(device().current));
    TORCH_CHECK(!refuses, "no peer answers");
  }
  c10d::ErrorType getError() override {
    TORCH_CHECK(tells, "no getError here");
    return error;
  }

  std::string name;
  c10::intrusive_ptr<Options> options;
  c10d::ErrorType error = c10d::ErrorType::SUCCESS;
  bool tells = true;
  bool refuses = false;
};

class GroupBackends : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)] =
        &device();
  }
  void SetUp() override { device().reset(); }

  void use(const std::string& name) {
    backend_ = c10::make_intrusive<FakeBackend>(name);
    group_->setBackend(kCUDA, c10d::ProcessGroup::BackendType::CUSTOM,
                       backend_);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_ =
      c10::make_intrusive<c10d::ProcessGroup>(
          c10::make_intrusive<c10d::HashStore>(), 0, 1);
  c10::intrusive_ptr<FakeBackend> backend_;
};

TEST_F(GroupBackends, ConnectTheRanksOwnDeviceWithItCurrent) {
  use("fake");
  EXPECT_TRUE(connect_backend(*group_, cuda(1)));
  EXPECT_THAT(device().log, ElementsAre("connect device 1 with device 1"));
  EXPECT_EQ(device().current, 0);
}

TEST_F(GroupBackends, AreNotConnectedTwice) {
  group_->setBoundDeviceId(cuda(1));
  use("fake");
  EXPECT_FALSE(connect_backend(*group_, cuda(1)));
  EXPECT_THAT(device().log, IsEmpty());
}

// A second ncclCommInitRank would be made, and dropped.
TEST_F(GroupBackends, OfNcclAreLeftAloneWhereNobodyCanTellIfTheyAreConnected) {
  use("nccl");
  EXPECT_FALSE(connect_backend(*group_, cuda(0)));
  EXPECT_THAT(device().log, IsEmpty());
}

TEST_F(GroupBackends, OfAnotherDeviceTypeAreNotConnected) {
  use("fake");
  EXPECT_FALSE(connect_backend(*group_, c10::DeviceType::CPU));
  EXPECT_FALSE(connect_backend(*group_, {c10::DeviceType::XPU, 0}));
  EXPECT_THAT(device().log, IsEmpty());
}

TEST_F(GroupBackends, PassOnWhyTheyCannotConnect) {
  use("fake");
  backend_->refuses = true;
  EXPECT_THROW(connect_backend(*group_, cuda(1)), c10::Error);
  EXPECT_EQ(device().current, 0);
}

TEST_F(GroupBackends, TellTheirTimeOutAsItIsNow) {
  use("fake");
  const auto before = backend_states(*group_, 0);
  ASSERT_EQ(before.size(), 1);
  EXPECT_EQ(before[0].device_type, "cuda");
  EXPECT_EQ(before[0].name, "fake");
  EXPECT_EQ(before[0].timeout_s, 15.5);
  backend_->setTimeout(milliseconds(20000));
  EXPECT_EQ(backend_states(*group_, 0)[0].timeout_s, 20.);
}

TEST_F(GroupBackends, TellTheirErrorOrNothing) {
  use("fake");
  const std::vector<std::pair<c10d::ErrorType, std::string>> words = {
      {c10d::ErrorType::SUCCESS, "none"},
      {c10d::ErrorType::TIMEOUT, "time-out"},
      {c10d::ErrorType::COMM_ERROR, "communicator error"},
      {c10d::ErrorType::REMOTE_ERROR, "remote error"}};
  for (const auto& [error, text] : words) {
    backend_->error = error;
    EXPECT_EQ(backend_states(*group_, 0)[0].error, text);
  }
  backend_->tells = false;
  EXPECT_EQ(backend_states(*group_, 0)[0].error, "");
  EXPECT_THAT(device().log, IsEmpty());  // asked without touching a device
}

}  // namespace
}  // namespace deepmd_prewarm
