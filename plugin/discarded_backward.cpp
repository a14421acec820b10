// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <deepmd_prewarm/plugin/discarded_backward.h>
#include <deepmd_prewarm/plugin/torch_private.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>

namespace deepmd_prewarm {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The end of a graph that was cut off; never executed, only reached.
struct CutOff : public Node {
  variable_list apply(variable_list&& grads) override {
    return variable_list(grads.size());
  }
};

struct Below {
  variable_list leaves;
  bool enters_older_graph = false;
};

Below search_below(const variable_list& roots, const GraphMark& mark) {
  Below below;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  // Keep gradient accumulators alive, which a leaf holds weakly.
  std::vector<torch::autograd::Edge> edges;
  edges.reserve(roots.size());
  const auto visit = [&](Node* node) {
    if (node && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
    visit(edges.back().function.get());
  }
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    if (auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
      below.leaves.push_back(leaf->variable);
      continue;
    }
    below.enters_older_graph |= node->thread_id() == mark.thread_id &&
                                node->sequence_nr() < mark.sequence_nr;
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return below;
}

}  // namespace

GraphMark::GraphMark()
    : sequence_nr(at::sequence_number::peek()),
      thread_id(at::RecordFunction::currentThreadId()) {}

std::vector<at::Tensor> cut_graph(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> cut;
  cut.reserve(inputs.size());
  for (const auto& input : inputs) {
    if (!input.defined() || !input.requires_grad() || input.is_leaf()) {
      cut.push_back(input);
      continue;
    }
    auto end = make_node<CutOff>();
    auto tensor = input.detach();
    end->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {std::move(end), 0});
    cut.push_back(std::move(tensor));
  }
  return cut;
}

bool discarded_backward(const std::vector<at::Tensor>& outputs,
                        const std::vector<at::Tensor>& inputs,
                        const GraphMark& mark) {
  variable_list roots;
  variable_list ones;
  for (const auto& output : outputs) {
    if (output.requires_grad() &&
        (output.is_floating_point() || output.is_complex())) {
      roots.push_back(output);
      ones.push_back(at::ones_like(output.detach()));
    }
  }
  if (roots.empty()) {
    return false;
  }
  auto [targets, enters_older_graph] = search_below(roots, mark);
  for (const auto& input : inputs) {
    if (input.defined() && input.requires_grad() && !input.is_leaf()) {
      targets.push_back(input);
    }
  }
  if (!targets.empty()) {
    torch::autograd::grad(roots, targets, ones,
                          /*retain_graph=*/enters_older_graph,
                          /*create_graph=*/false, /*allow_unused=*/true);
  }
  return true;
}

}  // namespace deepmd_prewarm
