// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/ATen.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <deepmd_prewarm/ops/scalarize_losses.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/library.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../plugin/fake_tensors.h"

namespace {

using deepmd_prewarm::fake_cat;
using deepmd_prewarm::fake_view;
using deepmd_prewarm::host_alias;
using deepmd_prewarm::to_fake_device;

// A device whose memory is the host's, with just the operators that one
// transfer needs; it counts the copies to the host.
int copies_to_host = 0;

at::Tensor fake_copy_from(const at::Tensor& self,
                          const at::Tensor& target,
                          bool) {
  copies_to_host += target.is_cpu() ? 1 : 0;
  host_alias(target).copy_(host_alias(self));
  return target;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("view", &fake_view);
  m.impl("cat", &fake_cat);
  m.impl("_copy_from", &fake_copy_from);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1,
                        c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>)

// Nodes are counted by the standard library in torch 2.11, by c10 in 2.15.
template <typename Node>
std::weak_ptr<Node> weakly(const std::shared_ptr<Node>& node) {
  return node;
}
template <typename Node>
c10::weak_intrusive_ptr<Node> weakly(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

}  // namespace

namespace deepmd_prewarm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Losses = c10::Dict<std::string, at::Tensor>;

double value_of(const at::Tensor& tensor) {
  Losses losses;
  losses.insert("loss", tensor);
  return scalarize_losses(losses, std::nullopt).at("loss");
}

std::string error_of(const at::Tensor& tensor) {
  try {
    value_of(tensor);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

std::vector<std::string> keys_of(const c10::Dict<std::string, double>& dict) {
  std::vector<std::string> keys;
  for (const auto& entry : dict) {
    keys.push_back(entry.key());
  }
  return keys;
}

TEST(ScalarizeLosses, KeepsTheOrderAndLeavesOutThePrefix) {
  Losses losses;
  for (const char* key : {"rmse_v", "l2_ener_loss", "rmse_e", "xl2_", "l2"}) {
    losses.insert(key, at::ones({}));
  }
  EXPECT_THAT(keys_of(scalarize_losses(losses, std::nullopt)),
              ElementsAre("rmse_v", "rmse_e", "xl2_", "l2"));
  const std::vector<std::string> prefixes = {"rmse", "x"};
  EXPECT_THAT(keys_of(scalarize_losses(losses, prefixes)),
              ElementsAre("l2_ener_loss", "l2"));
  EXPECT_EQ(scalarize_losses(losses, std::vector<std::string>{}).size(), 5);
}

TEST(ScalarizeLosses, ReadsEveryRealDtype) {
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kByte, at::kChar,
        at::kShort, at::kInt, at::kLong, at::kUInt16, at::kUInt32, at::kUInt64,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    EXPECT_EQ(value_of(at::full({1, 1}, 3, at::kFloat).to(dtype)), 3) << dtype;
  }
  EXPECT_EQ(value_of(at::full({}, true, at::kBool)), 1);
}

TEST(ScalarizeLosses, RoundsLargeIntegersToTheNearestDouble) {
  constexpr int64_t k53 = int64_t{1} << 53;
  for (const int64_t integer : {k53 + 1, k53 + 3, -k53 - 1, -k53 - 3,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min()}) {
    EXPECT_EQ(value_of(at::full({}, integer, at::kLong)),
              static_cast<double>(integer));
  }
  EXPECT_EQ(value_of(at::full({}, k53 + 1, at::kLong)), 9007199254740992.);
  EXPECT_EQ(value_of(at::full({}, k53 + 3, at::kLong)), 9007199254740996.);
  EXPECT_EQ(value_of(at::full({}, -1, at::kLong).view(at::kUInt64)),
            18446744073709551616.);
}

TEST(ScalarizeLosses, PassesNanAndInfinityOn) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(std::isnan(value_of(at::full({}, NAN))));
  EXPECT_EQ(value_of(at::full({}, -kInfinity)), -kInfinity);
  EXPECT_TRUE(std::isnan(value_of(at::Tensor())));
}

TEST(ScalarizeLosses, ReadsViewsNegativeBitsAndQuantizedTensors) {
  const auto numbers = at::arange(6, at::kDouble);
  EXPECT_EQ(value_of(numbers.slice(0, 4, 5)), 4);
  EXPECT_EQ(value_of(at::_neg_view(numbers.slice(0, 4, 5))), -4);
  EXPECT_EQ(
      value_of(at::quantize_per_tensor(at::ones({1}), 0.5, 0, at::kQInt8)), 1);
}

TEST(ScalarizeLosses, HoldsNoGraph) {
  const auto weight = torch::ones({1}, at::requires_grad());
  Losses losses;
  losses.insert("loss", weight * 2);
  const auto node = weakly(losses.at("loss").grad_fn());
  EXPECT_EQ(scalarize_losses(losses, std::nullopt).at("loss"), 2);
  losses.clear();
  EXPECT_TRUE(node.expired());
}

TEST(ScalarizeLosses, NamesTheKeyOfWhatItCannotRead) {
  EXPECT_THAT(error_of(at::ones({2})),
              HasSubstr("scalarize_losses: expected one element for key "
                        "'loss', got a tensor of shape [2]"));
  EXPECT_THAT(error_of(at::ones({0})), HasSubstr("key 'loss'"));
  EXPECT_THAT(error_of(at::ones({1}, at::kComplexDouble)),
              HasSubstr("expected a real dtype for key 'loss', got "
                        "ComplexDouble"));
  EXPECT_THAT(error_of(at::ones({1}).to_sparse()),
              HasSubstr("expected a dense tensor for key 'loss'"));
}

TEST(ScalarizeLosses, ChecksEveryLossBeforeItReadsOne) {
  Losses losses;
  losses.insert("good", to_fake_device(at::ones({}), 0));
  losses.insert("bad", at::ones({2}));
  copies_to_host = 0;
  EXPECT_THROW(scalarize_losses(losses, std::nullopt), c10::Error);
  EXPECT_EQ(copies_to_host, 0);
}

TEST(ScalarizeLosses, CopiesOncePerDevice) {
  Losses losses;
  for (int i = 0; i < 200; ++i) {
    const auto dtype = std::vector<at::ScalarType>{
        at::kDouble, at::kLong, at::kHalf, at::kFloat}[i % 4];
    const auto value = at::full({}, i, dtype);
    const auto key = "k" + std::to_string(i);
    losses.insert(key, i % 3 == 2 ? value : to_fake_device(value, i % 3));
  }
  copies_to_host = 0;
  const auto scalars = scalarize_losses(losses, std::nullopt);
  EXPECT_EQ(copies_to_host, 2);
  int i = 0;
  for (const auto& entry : scalars) {
    EXPECT_EQ(entry.key(), "k" + std::to_string(i));
    EXPECT_EQ(entry.value(), i++);
  }
  EXPECT_EQ(i, 200);
}

TEST(ScalarizeLosses, RoundsOnceWhenItCopies) {
  Losses losses;
  losses.insert(
      "i", to_fake_device(at::full({}, (int64_t{1} << 53) + 3, at::kLong), 0));
  losses.insert("f", to_fake_device(at::full({}, 0.1, at::kDouble), 0));
  const auto scalars = scalarize_losses(losses, std::nullopt);
  EXPECT_EQ(scalars.at("i"), 9007199254740996.);
  EXPECT_EQ(scalars.at("f"), 0.1);
}

}  // namespace
}  // namespace deepmd_prewarm
