// SPDX-License-Identifier: LGPL-3.0-or-later
#include <deepmd_prewarm/plugin/discarded_backward.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

using deepmd_prewarm::cut_graph;
using deepmd_prewarm::discarded_backward;
using deepmd_prewarm::GraphMark;

TEST(DiscardedBackward, RunsToTheLeavesAndLeavesGradUndefined) {
  const auto leaf = torch::ones({3}, torch::requires_grad());
  int fired = 0;
  leaf.register_hook([&](const at::Tensor& grad) {
    EXPECT_TRUE(torch::equal(grad, torch::full({3}, 2.)));
    ++fired;
  });
  const GraphMark mark;
  EXPECT_TRUE(discarded_backward({leaf * 2}, {}, mark));
  EXPECT_EQ(fired, 1);
  EXPECT_FALSE(leaf.grad().defined());
}

TEST(DiscardedBackward, DoesNothingWithoutAnOutputThatRequiresGrad) {
  const GraphMark mark;
  EXPECT_FALSE(discarded_backward({torch::ones({3})}, {}, mark));
  EXPECT_FALSE(discarded_backward({}, {}, mark));
}

TEST(DiscardedBackward, SumsComplexAndSharedOutputs) {
  const auto leaf = torch::ones({2}, torch::requires_grad());
  const GraphMark mark;
  const auto out = leaf * leaf;
  const auto wave = torch::complex(leaf, leaf);
  EXPECT_TRUE(discarded_backward({out, out, wave, leaf}, {}, mark));
}

TEST(DiscardedBackward, ReachesAnInputThatIsNoLeaf) {
  const auto leaf = torch::ones({3}, torch::requires_grad());
  const auto samples = cut_graph({leaf * 2});
  int fired = 0;
  samples[0].register_hook([&](const at::Tensor&) { ++fired; });
  const GraphMark mark;
  EXPECT_TRUE(discarded_backward({samples[0].exp()}, samples, mark));
  EXPECT_EQ(fired, 1);
}

TEST(DiscardedBackward, KeepsAnOlderGraphOfThisThreadUsable) {
  const auto leaf = torch::ones({3}, torch::requires_grad());
  const auto older = leaf.exp();
  const GraphMark mark;
  EXPECT_TRUE(discarded_backward({older * older}, {}, mark));
  older.sum().backward();
  EXPECT_TRUE(leaf.grad().defined());
}

TEST(CutGraph, KeepsStorageStridesTypeAndGradButNotTheCallersGraph) {
  const auto leaf = torch::rand({3, 4}, torch::requires_grad());
  const auto input = (leaf * 2).t();
  const auto plain = torch::ones({2}, torch::kShort);
  const auto cut = cut_graph({input, plain, leaf, at::Tensor()});
  EXPECT_TRUE(cut[0].is_alias_of(input));
  EXPECT_EQ(cut[0].strides(), input.strides());
  EXPECT_TRUE(cut[0].requires_grad());
  EXPECT_FALSE(cut[0].is_leaf());
  EXPECT_TRUE(cut[0].grad_fn()->next_edges().empty());
  EXPECT_TRUE(cut[1].is_same(plain));
  EXPECT_TRUE(cut[2].is_same(leaf));
  EXPECT_FALSE(cut[3].defined());
}
