// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <deepmd_prewarm/plugin/storage_audit.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <string>
#include <vector>

namespace deepmd_prewarm {
namespace {

std::vector<Verdict> judge_list(const c10::List<at::Tensor>& list) {
  StorageAudit audit;
  for (size_t i = 0; i < list.size(); ++i) {
    audit.add(list.get(i));
  }
  audit.decide();
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < audit.size(); ++i) {
    verdicts.push_back(audit.verdict(i));
  }
  return verdicts;
}

// The caller's variables stay: one handle beside the list for each tensor.
template <typename... Tensors>
std::vector<Verdict> judge(const Tensors&... tensors) {
  c10::List<at::Tensor> list;
  (list.push_back(tensors), ...);
  return judge_list(list);
}

using Verdicts = std::vector<Verdict>;

TEST(StorageAudit, ReleasesWhatOnlyTheListAndOneVariableHold) {
  const auto coord = torch::rand({4, 3});
  EXPECT_EQ(judge(coord), Verdicts{Verdict::kRelease});
}

TEST(StorageAudit, CountsARepeatedTensorOnce) {
  const auto coord = torch::rand({4, 3});
  EXPECT_EQ(judge(coord, coord),
            (Verdicts{Verdict::kRelease, Verdict::kRelease}));
}

// More than the few entries that are found by a scan.
TEST(StorageAudit, TellsThousandsOfTensorsAndStoragesApart) {
  std::vector<at::Tensor> tensors;
  c10::List<at::Tensor> list;
  for (int i = 0; i < 1000; ++i) {
    tensors.push_back(torch::rand({8}));
    tensors.push_back(tensors.back().slice(0, 0, 4));
  }
  const auto shared = tensors[1998].slice(0, 1, 2);  // outside the list
  for (const auto& tensor : tensors) {
    list.push_back(tensor);
    list.push_back(tensor);
  }
  const auto verdicts = judge_list(list);
  ASSERT_EQ(verdicts.size(), 4000);
  EXPECT_EQ(std::count(verdicts.begin(), verdicts.end(), Verdict::kRelease),
            3996);
  EXPECT_EQ(verdicts.back(), Verdict::kStorageShared);
}

TEST(StorageAudit, NamesTensorsThatHaveNothingToGiveBack) {
  EXPECT_EQ(judge(at::Tensor()), Verdicts{Verdict::kNone});
  EXPECT_EQ(judge(at::empty({0})), Verdicts{Verdict::kEmpty});
  EXPECT_EQ(judge(at::empty({3}, at::kMeta)), Verdicts{Verdict::kMeta});
  EXPECT_EQ(judge(at::eye(3).to_sparse()), Verdicts{Verdict::kSparse});
  EXPECT_EQ(judge(at::eye(3).to_sparse_csr()), Verdicts{Verdict::kSparse});
  EXPECT_EQ(judge(at::rand({3}).to_mkldnn()), Verdicts{Verdict::kOpaque});
}

TEST(StorageAudit, KeepsBorrowedMemory) {
  std::vector<float> numbers(8);
  EXPECT_EQ(judge(at::from_blob(numbers.data(), {8})),
            Verdicts{Verdict::kBorrowed});
}

TEST(StorageAudit, KeepsCopyOnWriteMemory) {
  const auto tensor = at::rand({8});
  const auto lazy = at::_lazy_clone(tensor);
  EXPECT_EQ(judge(tensor), Verdicts{Verdict::kCopyOnWrite});
  EXPECT_EQ(judge(lazy), Verdicts{Verdict::kCopyOnWrite});
}

TEST(StorageAudit, KeepsAStorageThatAnotherTensorShares) {
  const auto tensor = torch::rand({8});
  const auto view = tensor.slice(0, 2, 4);
  const auto detached = tensor.detach();
  EXPECT_EQ(judge(tensor, view),
            (Verdicts{Verdict::kStorageShared, Verdict::kStorageShared}));
  EXPECT_EQ(judge(tensor, view, detached), (Verdicts(3, Verdict::kRelease)));
}

TEST(StorageAudit, ReleasesAViewWhoseBaseNobodyElseKnows) {
  const auto view = torch::rand({8}).slice(0, 2, 4);
  EXPECT_EQ(judge(view), Verdicts{Verdict::kRelease});
}

TEST(StorageAudit, KeepsAViewWhoseBaseHasAnotherHolder) {
  const auto base = torch::rand({8});
  const auto view = base.slice(0, 2, 4);
  EXPECT_EQ(judge(view), Verdicts{Verdict::kStorageShared});
}

TEST(StorageAudit, KeepsWhatAutogradSavedAndItsCompanions) {
  const auto coord = torch::rand({8});
  const auto view = coord.slice(0, 2, 4);
  const auto weight = torch::rand({8}, at::requires_grad());
  const auto energy = (coord * weight).sum();
  EXPECT_EQ(judge(coord, view),
            (Verdicts{Verdict::kHeld, Verdict::kCompanion}));
}

TEST(StorageAudit, KeepsALeafWithALiveAccumulator) {
  const auto coord = torch::rand({8}, at::requires_grad());
  {
    const auto energy = coord.sum();  // saves no tensor
    EXPECT_EQ(judge(coord), Verdicts{Verdict::kAccumulator});
  }
  EXPECT_EQ(judge(coord), Verdicts{Verdict::kRelease});
}

// A list that owns its tensors says nothing about who else holds the others.
TEST(StorageAudit, TrustsNoHandleBesideAListThatOwnsItsTensors) {
  c10::List<at::Tensor> list;
  list.push_back(torch::rand({8}));
  list.push_back(torch::rand({8}));
  EXPECT_EQ(judge_list(list), (Verdicts(2, Verdict::kRelease)));
  const auto weight = torch::rand({8}, at::requires_grad());
  const auto energy = (list.get(0) * weight).sum();
  EXPECT_EQ(judge_list(list),
            (Verdicts{Verdict::kUncertain, Verdict::kRelease}));
}

TEST(StorageAudit, ChangesNothingByItself) {
  const auto coord = torch::ones({8});
  judge(coord);
  EXPECT_EQ(coord.use_count(), 1);
  EXPECT_EQ(coord.storage().use_count(), 1);
  EXPECT_EQ(coord.sum().item<float>(), 8);
}

TEST(StorageAudit, DescribesEveryVerdictInItsOwnWords) {
  std::vector<std::string> words;
  for (auto value = static_cast<int>(Verdict::kRelease);
       value <= static_cast<int>(Verdict::kCompanion); ++value) {
    words.emplace_back(describe(static_cast<Verdict>(value)));
  }
  EXPECT_EQ(words.front(), "release");
  EXPECT_EQ(std::count(words.begin(), words.end(), "unknown"), 0);
  std::sort(words.begin(), words.end());
  EXPECT_EQ(std::adjacent_find(words.begin(), words.end()), words.end());
}

}  // namespace
}  // namespace deepmd_prewarm
