// SPDX-License-Identifier: Apache-2.0
// Surgery on a graph: hooks that keep what comes into the cut, and edges that end there.
#include "subjects/train/split_backward.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/base/error.h"
#include "subjects/model/ops/linear.h"

namespace isoshard {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Called after the hooks of tensors, so it keeps what the node really gets.
class KeepIncoming final : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepIncoming(std::shared_ptr<variable_list> incoming) : incoming_(std::move(incoming)) {}
  variable_list operator()(const variable_list& gradients) override {
    *incoming_ = gradients;
    return gradients;
  }

 private:
  std::shared_ptr<variable_list> incoming_;
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  std::unordered_map<const Node*, std::vector<Node*>> givers;  ///< whose result comes into a node
};

Graph graph_from(const std::shared_ptr<Node>& root) {
  Graph graph;
  std::unordered_set<const Node*> seen{root.get()};
  graph.nodes.push_back(root);
  for (std::size_t next = 0; next < graph.nodes.size(); ++next) {
    Node* const node = graph.nodes[next].get();
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      graph.givers[edge.function.get()].push_back(node);
      if (seen.insert(edge.function.get()).second) graph.nodes.push_back(edge.function);
    }
  }
  return graph;
}

std::unordered_set<const Node*> leading_to(const Node* input, const Graph& graph) {
  std::unordered_set<const Node*> leading{input};
  std::vector<const Node*> open{input};
  while (!open.empty()) {
    const auto givers = graph.givers.find(open.back());
    open.pop_back();
    if (givers == graph.givers.end()) continue;
    for (const Node* const giver : givers->second)
      if (leading.insert(giver).second) open.push_back(giver);
  }
  return leading;
}

// The leaves that a node leads to past all nodes that lead to the input.
torch::autograd::edge_list leaves_beside(const Node& node,
                                         const std::unordered_set<const Node*>& to_input) {
  torch::autograd::edge_list leaves;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open{&node};
  while (!open.empty()) {
    const Node* const from = open.back();
    open.pop_back();
    for (const Edge& edge : from->next_edges()) {
      if (!edge.is_valid() || to_input.contains(edge.function.get())) continue;
      if (!seen.insert(edge.function.get()).second) continue;
      open.push_back(edge.function.get());
      if (edge.function->num_outputs() == 0) leaves.push_back(edge);
    }
  }
  return leaves;
}

// The engine would come to the leaf from the first reader through the second one, too.
void require_one_reader(bool is_first) {
  if (is_first) return;
  throw NotBuiltError(
      "separate gradients of inputs and of weights are not built for a stage that reads a "
      "parameter in two places; take a pipeline schedule without zero bubble");
}

// Functions of C++ make all their gradients, whoever asks for which, but for those that ask.
void require_partial_results(const Node& node) {
  const std::string name = node.name();
  if (name.find("CppNode") == std::string::npos || detail::is_widened_linear(node)) return;
  throw NotBuiltError(
      fmt::format("separate gradients of inputs and of weights are not built for {}, which makes "
                  "both; take a pipeline schedule without zero bubble",
                  name));
}

}  // namespace

struct SplitBackward::Cut {
  std::shared_ptr<Node> node;
  torch::autograd::edge_list leaves;        ///< whose gradients it makes
  std::shared_ptr<variable_list> incoming;  ///< gradients, as the node got them
};

SplitBackward::SplitBackward() = default;
SplitBackward::SplitBackward(SplitBackward&&) noexcept = default;
SplitBackward& SplitBackward::operator=(SplitBackward&&) noexcept = default;
SplitBackward::~SplitBackward() = default;

at::Tensor SplitBackward::input_gradient(at::Tensor result, const at::Tensor& gradient,
                                         const at::Tensor& input) {
  const Edge input_edge = torch::autograd::impl::gradient_edge(input);
  const Graph graph = graph_from(result.grad_fn());
  const std::unordered_set<const Node*> to_input = leading_to(input_edge.function.get(), graph);
  std::unordered_set<const Node*> all_leaves;
  for (const std::shared_ptr<Node>& node : graph.nodes) {
    if (node == input_edge.function || !to_input.contains(node.get())) continue;
    torch::autograd::edge_list leaves = leaves_beside(*node, to_input);
    if (leaves.empty()) continue;
    require_partial_results(*node);
    for (const Edge& leaf : leaves)
      require_one_reader(all_leaves.insert(leaf.function.get()).second);
    cuts_.push_back({node, std::move(leaves), std::make_shared<variable_list>()});
    node->add_pre_hook(std::make_unique<KeepIncoming>(cuts_.back().incoming));
  }
  const at::Tensor of_input = torch::autograd::grad({std::move(result)}, {input}, {gradient},
                                                    /*retain_graph=*/true)
                                  .front();
  for (const Cut& cut : cuts_) {
    cut.node->pre_hooks().pop_back();
    cut.node->tensor_pre_hooks().clear();  // they have been called
  }
  return of_input;
}

// From each node of the cut to its own leaves.
void SplitBackward::weight_gradients() {
  for (Cut& cut : cuts_) {
    torch::autograd::edge_list roots;
    variable_list gradients;
    for (std::size_t i = 0; i < cut.incoming->size(); ++i) {
      if (!(*cut.incoming)[i].defined()) continue;
      roots.emplace_back(cut.node, static_cast<std::uint32_t>(i));
      gradients.push_back((*cut.incoming)[i]);
    }
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, cut.leaves);
    cut = {};
  }
  cuts_.clear();
}

}  // namespace isoshard
