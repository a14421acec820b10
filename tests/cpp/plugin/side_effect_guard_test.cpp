// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/autocast_mode.h>
#include <deepmd_prewarm/plugin/side_effect_guard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

using deepmd_prewarm::SideEffectGuard;

TEST(SideEffectGuard, PutsTheCpuStreamBack) {
  torch::manual_seed(3);
  {
    SideEffectGuard guard({}, {});
    torch::rand({8});
    guard.put_back();
  }
  const auto first = torch::rand({4});
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(torch::rand({4}), first));
}

TEST(SideEffectGuard, PutsValuesAndVersionsBackWhenTheRunThrows) {
  auto buffer = torch::arange(6.).reshape({2, 3}).t();
  const auto version = buffer._version();
  const auto* address = buffer.data_ptr();
  try {
    const SideEffectGuard guard({buffer}, {});
    buffer.add_(1);
    throw std::runtime_error("half-way");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(torch::equal(buffer, torch::arange(6.).reshape({2, 3}).t()));
  EXPECT_EQ(buffer._version(), version);
  EXPECT_EQ(buffer.data_ptr(), address);
}

TEST(SideEffectGuard, PutsGradientsBack) {
  auto with = torch::ones({2}, torch::requires_grad());
  auto without = torch::ones({2}, torch::requires_grad());
  with.mutable_grad() = torch::full({2}, 5.);
  const auto grad = with.grad();
  SideEffectGuard guard({with}, {without});
  (with * without).sum().backward();
  EXPECT_TRUE(without.grad().defined());
  guard.put_back();
  EXPECT_TRUE(with.grad().is_same(grad));
  EXPECT_TRUE(torch::equal(grad, torch::full({2}, 5.)));
  EXPECT_FALSE(without.grad().defined());
}

TEST(SideEffectGuard, PutsBackNanAndEmptyAndSharedTensors) {
  auto buffer = torch::full({2}, NAN);
  auto empty = torch::empty({0});
  auto view = buffer.slice(0, 0, 1);
  SideEffectGuard guard({buffer, empty, view, buffer, at::Tensor()}, {});
  view.zero_();
  guard.put_back();
  EXPECT_TRUE(buffer.isnan().all().item<bool>());
}

TEST(SideEffectGuard, LeavesSparseAndMetaTensorsToTheirOwner) {
  const auto sparse = torch::ones({2, 2}).to_sparse();
  const auto meta = torch::empty({2}, torch::kMeta);
  SideEffectGuard guard({sparse, meta}, {sparse});
  guard.put_back();
  EXPECT_EQ(sparse._nnz(), 4);
}

TEST(SideEffectGuard, PutsModesBack) {
  SideEffectGuard guard({}, {});
  c10::GradMode::set_enabled(false);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  guard.put_back();
  EXPECT_TRUE(c10::GradMode::is_enabled());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(SideEffectGuard, HoldsInferenceTensorsInInferenceMode) {
  const c10::InferenceMode inference;
  auto buffer = torch::ones({2});
  SideEffectGuard guard({buffer}, {buffer});
  buffer.zero_();
  guard.put_back();
  EXPECT_TRUE(torch::equal(buffer, torch::ones({2})));
}
