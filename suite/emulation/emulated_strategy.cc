// SPDX-License-Identifier: Apache-2.0
// Column and row layers and the cut vocabulary of an emulated rank.
#include "suite/emulation/emulated_strategy.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/observe/record_name.h"
#include "subjects/model/ops/autocast.h"
#include "subjects/model/ops/linear.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An autograd context keeps integers and strings, so the strategy travels as its address.
std::int64_t to_address(const EmulatedStrategy& strategy) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&strategy));
}
const EmulatedStrategy& strategy_of(AutogradContext* context) {
  return *reinterpret_cast<const EmulatedStrategy*>(
      static_cast<std::intptr_t>(context->saved_data["strategy"].toInt()));
}

// One view of x per module; backward sees what all of them send back at once, and so decides the
// order in which it is added.
class SharedInputFan final : public torch::autograd::Function<SharedInputFan> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, std::int64_t strategy,
                               std::int64_t group, std::int64_t views) {
    context->saved_data["strategy"] = strategy;
    context->saved_data["group"] = group;
    const auto* const emulated =
        reinterpret_cast<const EmulatedStrategy*>(static_cast<std::intptr_t>(strategy));
    const at::Tensor whole = emulated->whole_sequence(fmt::format("input {}", group), x);
    variable_list result;
    for (std::int64_t i = 0; i < views; ++i) result.push_back(whole.view_as(whole));
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto group = static_cast<std::size_t>(context->saved_data["group"].toInt());
    return {strategy_of(context).input_gradient(group, gradients), {}, {}, {}};
  }
};

class OutputSum final : public torch::autograd::Function<OutputSum> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial,
                            std::int64_t strategy, const std::string& module) {
    context->saved_data["strategy"] = strategy;
    context->saved_data["module"] = module;
    return reinterpret_cast<const EmulatedStrategy*>(static_cast<std::intptr_t>(strategy))
        ->output_sum(module, partial);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {strategy_of(context).summand_gradient(context->saved_data["module"].toStringRef(),
                                                  gradients[0]),
            {},
            {}};
  }
};

// Activation gradients are recorded as they are: dp x cp times the true ones where gradients are
// averaged.
double averaging_factor(const NumericsSpec& numerics) {
  return is_average(numerics.data.parameter_gradient)
             ? numerics.mesh.degree(Axis::kDp) * numerics.mesh.degree(Axis::kCp)
             : 1;
}

// Every entry on one rank, in their order.
void check_vocabulary(const NumericsSpec& numerics) {
  if (!numerics.vocabulary.has_value()) return;
  const SplitVocabulary& vocabulary = *numerics.vocabulary;
  std::int64_t next = 0;
  bool fits =
      vocabulary.by_rank.size() == static_cast<std::size_t>(numerics.mesh.degree(Axis::kTp));
  for (const Range& entries : vocabulary.by_rank) {
    fits = fits && entries.begin == next && entries.count >= 0;
    next += entries.count;
  }
  if (fits && next == vocabulary.size) return;
  throw UsageError(fmt::format(
      "the declared arithmetic must give each of the {} entries of the vocabulary to one of {} tp "
      "ranks, in order",
      vocabulary.size, numerics.mesh.degree(Axis::kTp)));
}

}  // namespace

Region region_of(const TensorNumerics& tensor, std::string_view module) {
  const auto found = tensor.regions.find(module);
  return found == tensor.regions.end() ? Region::kReplicated : found->second;
}

EmulatedStrategy::EmulatedStrategy(const NumericsSpec& numerics, EmulatedWorld& world, int rank,
                                   bool record_partials)
    : Strategy(numerics.mesh.degree(Axis::kDp), averaging_factor(numerics)),
      numerics_(&numerics),
      world_(&world),
      rank_(rank),
      record_partials_(record_partials),
      context_(numerics.context, world, rank),
      copied_points_(numerics.tensor.copies.points.begin(), numerics.tensor.copies.points.end()) {
  check_vocabulary(numerics);
  for (std::size_t g = 0; g < numerics.tensor.shared_inputs.size(); ++g) {
    const SharedInput& shared = numerics.tensor.shared_inputs[g];
    for (std::size_t m = 0; m < shared.modules.size(); ++m) places_[shared.modules[m]] = {g, m};
    std::vector<std::size_t> adds = shared.adds;
    std::sort(adds.begin(), adds.end());
    bool once_each = adds.size() == shared.modules.size();
    for (std::size_t i = 0; once_each && i < adds.size(); ++i) once_each = adds[i] == i;
    if (!once_each)
      throw UsageError(fmt::format(
          "the declared arithmetic must add each of the {} gradients that meet before {} once",
          shared.modules.size(), shared.modules.front()));
  }
}

at::Tensor EmulatedStrategy::linear(std::string_view module, const at::Tensor& x,
                                    const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                    Sink* sink) const {
  switch (region_of(numerics_->tensor, module)) {
    case Region::kColumn:
    case Region::kVocabHead:
      return column_linear(module, x, weight, bias);
    case Region::kRow:
      return row_linear(module, x, weight, bias, sink);
    case Region::kVocabEmbedding:
    case Region::kReplicated:
      break;
  }
  return Strategy::linear(module, x, weight, bias, sink);
}

at::Tensor EmulatedStrategy::row_linear(std::string_view module, const at::Tensor& x,
                                        const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias, Sink* sink) const {
  const at::Tensor sum = OutputSum::apply(recorded_partial(module, apply_linear(x, weight), sink),
                                          to_address(*this), std::string(module));
  if (!bias.has_value() || !bias->defined()) return sum;
  const bool rounds =
      numerics_->precision.products.has_value() && numerics_->precision.products->rounds_row_bias;
  return sum + (rounds ? bias->to(sum.scalar_type()) : *bias);
}

// Each rank looks up what it has. Ids of others are looked up in row 0, and what that gives is
// replaced by 0.
at::Tensor EmulatedStrategy::embedding(std::string_view module, const at::Tensor& ids_BS,
                                       const at::Tensor& weight, Sink* sink) const {
  if (region_of(numerics_->tensor, module) != Region::kVocabEmbedding) {
    if (!numerics_->sequence.is_cut) return Strategy::embedding(module, ids_BS, weight, sink);
    const std::int64_t part = ids_BS.size(1) / tp_degree();
    return Strategy::embedding(
        module, ids_BS.slice(1, part * coordinate(Axis::kTp), part * (coordinate(Axis::kTp) + 1)),
        weight, sink);
  }
  const Range& own = own_entries();
  const at::Tensor is_here_BS = ids_BS.ge(own.begin).logical_and(ids_BS.lt(own.begin + own.count));
  const at::Tensor found_BSH = at::embedding(weight, (ids_BS - own.begin) * is_here_BS);
  const at::Tensor summand_BSH = at::where(is_here_BS.unsqueeze(-1), found_BSH,
                                           at::zeros({}, found_BSH.options().requires_grad(false)));
  return OutputSum::apply(summand_BSH, to_address(*this), std::string(module));
}

const SplitVocabulary& EmulatedStrategy::vocabulary() const {
  if (!numerics_->vocabulary.has_value())
    throw UsageError(
        "the declared arithmetic cuts a module along the vocabulary and does not say how the "
        "vocabulary is cut");
  return *numerics_->vocabulary;
}

const Range& EmulatedStrategy::own_entries() const {
  return vocabulary().by_rank.at(static_cast<std::size_t>(coordinate(Axis::kTp)));
}

// A summand; its gradient is that of the sum.
at::Tensor EmulatedStrategy::recorded_partial(std::string_view module, at::Tensor partial_sum,
                                              Sink* sink) const {
  if (!record_partials_ || sink == nullptr) return partial_sum;
  Layout gradient = over_context(activation_layout(partial_sum, -1), partial_sum, 1);
  Layout value = gradient;
  value.placements.push_back(partial(Axis::kTp));
  return detail::tap_with_sink(*sink, to_string(RecordName{module, NameRole::kSummand}),
                               std::move(partial_sum), activation_grad_scale(), std::move(value),
                               std::move(gradient));
}

// A fused product is made by its first module; each takes its rows of every turn.
at::Tensor EmulatedStrategy::column_linear(std::string_view module, const at::Tensor& x,
                                           const at::Tensor& weight,
                                           const std::optional<at::Tensor>& bias) const {
  const auto found = places_.find(module);
  if (found == places_.end() ||
      !numerics_->tensor.shared_inputs[found->second.group].fused.has_value()) {
    return apply_linear(column_input(module, x), weight, bias);
  }
  const auto [group, position] = found->second;
  const FusedProduct& fused = *numerics_->tensor.shared_inputs[group].fused;
  if (position == 0) {
    const at::Tensor input =
        SharedInputFan::apply(x, to_address(*this), static_cast<std::int64_t>(group), 1).at(0);
    Fan fan{x, {}, {}};
    const at::Tensor turns = apply_linear(input, weight, bias).unflatten(-1, {fused.turns, -1});
    for (const at::Tensor& part : turns.split_with_sizes(fused.rows, -1))
      fan.outputs.push_back(part.flatten(-2).contiguous());
    fans_[group] = std::move(fan);
  }
  Fan& fan = fans_[group];
  if (!fan.input.defined() || !fan.input.is_same(x)) {
    throw UsageError(fmt::format(
        "the declared arithmetic fuses {} with modules that read another tensor", module));
  }
  at::Tensor output = std::move(fan.outputs[position]);
  if (position + 1 == fan.outputs.size()) fans_.erase(group);
  return output;
}

at::Tensor EmulatedStrategy::column_input(std::string_view module, const at::Tensor& x) const {
  const auto found = places_.find(module);
  if (found == places_.end())
    throw UsageError(
        fmt::format("the declared arithmetic cuts {} by columns and does not say how its input's "
                    "gradient is added",
                    module));
  const auto [group, position] = found->second;
  const auto size = numerics_->tensor.shared_inputs[group].modules.size();
  if (position == 0)
    fans_[group] = {x,
                    SharedInputFan::apply(x, to_address(*this), static_cast<std::int64_t>(group),
                                          static_cast<std::int64_t>(size)),
                    {}};
  Fan& fan = fans_[group];
  if (!fan.input.defined() || !fan.input.is_same(x)) {
    throw UsageError(
        fmt::format("the declared arithmetic says that {} reads the input of {}; it reads another",
                    module, numerics_->tensor.shared_inputs[group].modules.front()));
  }
  at::Tensor view = std::move(fan.views[position]);
  if (position + 1 == size) fans_.erase(group);
  return view;
}

at::Tensor EmulatedStrategy::input_gradient(std::size_t group,
                                            std::vector<at::Tensor> gradients) const {
  const SharedInput& shared = numerics_->tensor.shared_inputs[group];
  const auto reduced = [&](const std::string& module, const at::Tensor& gradient) {
    const bool is_head = region_of(numerics_->tensor, module) == Region::kVocabHead;
    return sum_over_tp(
        module, gradient,
        is_head ? vocabulary().head_input_gradient : numerics_->tensor.column_input_gradient);
  };
  if (shared.fused.has_value()) return reduced(shared.modules.front(), gradients.at(0));
  at::Tensor sum;
  for (const std::size_t m : shared.adds) {
    const at::Tensor gradient =
        shared.reduced_together ? gradients[m] : reduced(shared.modules[m], gradients[m]);
    sum = sum.defined() ? sum + gradient : gradient;
  }
  return shared.reduced_together ? reduced(shared.modules.front(), sum) : sum;
}

at::Tensor EmulatedStrategy::output_sum(const std::string& module,
                                        const at::Tensor& partial) const {
  const bool is_embedding = region_of(numerics_->tensor, module) == Region::kVocabEmbedding;
  return sum_over_tp(module, partial,
                     is_embedding ? vocabulary().embedding_output : numerics_->tensor.row_output);
}

at::Tensor EmulatedStrategy::summand_gradient(const std::string& module,
                                              const at::Tensor& gradient) const {
  return whole_sequence(module, gradient);
}

// Parts of all ranks, of each the samples one after the other, back to samples of whole sequences.
at::Tensor EmulatedStrategy::whole_sequence(const std::string& module,
                                            const at::Tensor& own) const {
  if (!numerics_->sequence.is_cut) return own;
  std::vector<std::int64_t> shape = own.sizes().vec();
  shape.insert(shape.begin(), tp_degree());
  const at::Tensor parts =
      world_->gather_over(Axis::kTp, rank_, module, own.contiguous()).view(shape);
  return at::cat(parts.unbind(0), 1).contiguous();
}

at::Tensor EmulatedStrategy::sum_over_tp(std::string_view what, const at::Tensor& part,
                                         const ReductionPoint& point) const {
  if (!numerics_->sequence.is_cut) return world_->reduce_over(Axis::kTp, rank_, what, part, point);
  if (part.size(1) % tp_degree() != 0) {
    throw UsageError(
        fmt::format("the declared arithmetic cuts sequences over tp {}; {} has {} tokens",
                    tp_degree(), what, part.size(1)));
  }
  const at::Tensor parts = at::stack(part.chunk(tp_degree(), 1));
  return world_->reduce_over(Axis::kTp, rank_, what, parts, point).select(0, coordinate(Axis::kTp));
}

bool EmulatedStrategy::splits_output(std::string_view module) const {
  const Region region = region_of(numerics_->tensor, module);
  return region == Region::kColumn || region == Region::kVocabHead;
}

Layout EmulatedStrategy::box_layout(const at::Tensor& local, int dim, std::int64_t size,
                                    const Range& own) const {
  const auto d = static_cast<std::size_t>(dim);
  const Shape shape = local.sizes().vec();
  Layout layout = replicated(shape);
  Box box{Shape(shape.size(), 0), Shape(shape.size(), 0), shape};
  layout.global_shape[0] *= world_->degree(Axis::kDp);
  box.global_offset[0] = coordinate(Axis::kDp) * shape[0];
  layout.global_shape[d] = size;
  box.global_offset[d] = own.begin;
  box.size[d] = own.count;
  if (own.count > 0) layout.boxes.push_back(std::move(box));
  layout.explicit_parts = true;
  return layout;
}

// Logits lie where their entries lie. A copy lies where its part lies; what comes back to it is one
// summand of the gradient.
ActivationLayouts EmulatedStrategy::activation_layouts(std::string_view point,
                                                       const at::Tensor& local, int tp_dim) const {
  if (tp_dim < 0 && numerics_->sequence.is_cut)
    return Strategy::activation_layouts(point, local, 1);
  if (tp_dim >= 0 && region_of(numerics_->tensor, point) == Region::kVocabHead) {
    const Layout layout = box_layout(local, tp_dim, vocabulary().size, own_entries());
    return {layout, layout};
  }
  if (tp_dim < 0 || !copied_points_.contains(point))
    return Strategy::activation_layouts(point, local, tp_dim);
  const std::int64_t part = local.size(tp_dim);
  const int own =
      numerics_->tensor.copies.part_of_rank.at(static_cast<std::size_t>(coordinate(Axis::kTp)));
  Layout value =
      box_layout(local, tp_dim, part * numerics_->tensor.copies.num_parts, {part * own, part});
  Layout gradient = value;
  gradient.placements.push_back(partial(Axis::kTp));
  return {std::move(value), std::move(gradient)};
}

at::Tensor EmulatedStrategy::attention(std::string_view module, const at::Tensor& q_BNSD,
                                       const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                       AttentionImpl impl, SoftmaxDtype softmax,
                                       const AttentionDropout& dropout) const {
  if (!context_.is_cut())
    return Strategy::attention(module, q_BNSD, k_BKSD, v_BKSD, impl, softmax, dropout);
  const at::Tensor q = as_product_input(q_BNSD);
  const KeysValues own{as_product_input(k_BKSD), as_product_input(v_BKSD)};
  if (context_.is_ring()) return context_.ring(q, own, module);
  const auto [k, v] = context_.gathered(own, module);
  return causal_attention(q, k, v, impl, softmax, dropout, token_positions(q_BNSD.size(2)));
}

KeysValues EmulatedStrategy::whole_context(std::string_view module, const at::Tensor& k_BKSD,
                                           const at::Tensor& v_BKSD) const {
  return context_.gathered({k_BKSD, v_BKSD}, module);
}

at::Tensor EmulatedStrategy::token_positions(std::int64_t length) const {
  return context_.is_cut() ? context_.own_positions(sequence_length(length)) : at::Tensor();
}

std::int64_t EmulatedStrategy::sequence_length(std::int64_t length) const {
  return context_.is_cut() ? length * context_.degree() : length;
}

std::int64_t EmulatedStrategy::tokens_of_stream(std::int64_t length) const {
  return numerics_->sequence.is_cut ? length * tp_degree() : length;
}

// No other pp rank has it.
Layout EmulatedStrategy::over_context(Layout layout, const at::Tensor& local,
                                      int sequence_dim) const {
  layout = context_.over_tokens(std::move(layout), local, sequence_dim);
  if (world_->degree(Axis::kPp) > 1)
    layout.placements.push_back(only_at(Axis::kPp, coordinate(Axis::kPp)));
  return layout;
}

int EmulatedStrategy::tp_degree() const noexcept {
  return world_->degree(Axis::kTp);
}

}  // namespace isoshard
