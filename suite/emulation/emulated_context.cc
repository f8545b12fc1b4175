// SPDX-License-Identifier: Apache-2.0
// Tokens, keys and values over cp.
#include "suite/emulation/emulated_context.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "subjects/model/ops/block_attention.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An autograd context keeps integers and strings.
std::int64_t to_address(const EmulatedContext& context) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&context));
}
const EmulatedContext& from_address(std::int64_t address) {
  return *reinterpret_cast<const EmulatedContext*>(static_cast<std::intptr_t>(address));
}

// Tokens are dim 3 of keys and values together, [2,B,K,S,D].
class Gathered final : public torch::autograd::Function<Gathered> {
 public:
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& k, const at::Tensor& v,
                            std::int64_t address, const std::string& module) {
    saved->saved_data["context"] = address;
    saved->saved_data["module"] = module;
    const EmulatedContext& context = from_address(address);
    const at::Tensor parts = context.of_all(at::stack({k, v}), "keys of " + module);
    const std::int64_t length = k.size(2) * context.degree();
    std::vector<std::int64_t> shape = parts[0].sizes().vec();
    shape[3] = length;
    at::Tensor whole = at::empty(shape, parts.options());
    for (int rank = 0; rank < context.degree(); ++rank)
      whole.index_copy_(3, context.positions_of(rank, length).to(whole.device()), parts[rank]);
    return whole;
  }
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const EmulatedContext& context = from_address(saved->saved_data["context"].toInt());
    const std::int64_t length = gradients[0].size(3);
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < context.degree(); ++rank)
      parts.push_back(gradients[0].index_select(
          3, context.positions_of(rank, length).to(gradients[0].device())));
    const at::Tensor own =
        context.reduced(at::stack(parts), "keys of " + saved->saved_data["module"].toStringRef())
            .select(0, context.cp_rank());
    return {own[0], own[1], {}, {}};
  }
};

BlockPlaces places_of(const EmulatedContext& context, int queries, int keys, std::int64_t own) {
  const std::int64_t length = own * context.degree();
  return {context.positions_of(queries, length), context.positions_of(keys, length)};
}

class Ring final : public torch::autograd::Function<Ring> {
 public:
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, std::int64_t address, const std::string& module) {
    const EmulatedContext& context = from_address(address);
    const at::Tensor all = context.of_all(at::stack({k, v}), "keys of " + module);
    const bool is_wide = q.scalar_type() == at::kDouble;
    const std::optional<Dtype>& merge = context.numerics().ring->merge_dtype;
    const at::ScalarType wide = is_wide ? at::kDouble : at::kFloat;
    at::Tensor out, lse;
    for (int turn = 0; turn < context.degree(); ++turn) {
      const int owner = (context.cp_rank() - turn + context.degree()) % context.degree();
      const BlockPlaces places = places_of(context, context.cp_rank(), owner, k.size(2));
      if (!sees_any(places)) continue;
      const BlockAttention block = block_attention(q, all[owner][0], all[owner][1], places);
      if (out.defined()) {
        merge_block(out, lse, block);
      } else {
        out = block.out_BNQD.to(merge.has_value() ? float_type_of(*merge) : wide);
        lse = block.lse_BNQ1;
      }
    }
    out = out.to(q.scalar_type());
    saved->save_for_backward({q, all, out, lse});
    saved->saved_data["context"] = address;
    saved->saved_data["module"] = module;
    return out;
  }
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const variable_list kept = saved->get_saved_variables();
    const at::Tensor &q = kept[0], &all = kept[1], &out = kept[2], &lse = kept[3];
    const EmulatedContext& context = from_address(saved->saved_data["context"].toInt());
    const int degree = context.degree(), own = context.cp_rank();
    const std::int64_t length = q.size(2);
    const at::ScalarType wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor of_q = at::zeros(q.sizes(), q.options().dtype(wide));
    // what this rank adds to each owner's keys and values
    const at::Tensor added = at::zeros(all.sizes(), all.options().dtype(wide));
    for (int turn = 0; turn < degree; ++turn) {
      const int owner = (own - turn + degree) % degree;
      const BlockPlaces places = places_of(context, own, owner, length);
      if (!sees_any(places)) continue;
      const BlockGradients block =
          block_gradients(q, all[owner][0], all[owner][1], places, out, lse, gradients[0]);
      of_q = of_q + block.q_BNQD;
      added[owner][0].copy_(block.k_BKTD);
      added[owner][1].copy_(block.v_BKTD);
    }
    const at::Tensor of_all =
        context.of_all(added, "gradients of keys of " + saved->saved_data["module"].toStringRef());
    at::Tensor sum = of_all[own][own];
    for (int behind = 1; behind < degree; ++behind) {
      const int rank = (own + behind) % degree;
      if (sees_any(places_of(context, rank, own, length))) sum = sum + of_all[rank][own];
    }
    const at::ScalarType dtype = q.scalar_type();
    return {of_q.to(dtype), sum[0].to(dtype), sum[1].to(dtype), {}, {}};
  }
};

}  // namespace

EmulatedContext::EmulatedContext(const ContextNumerics& numerics, EmulatedWorld& world, int rank)
    : numerics_(&numerics),
      world_(&world),
      rank_(rank),
      cp_rank_(world.coordinate(rank, Axis::kCp)) {
  if (!is_cut()) return;
  std::vector<int> given;
  for (const std::vector<int>& chunks : numerics.chunks_of_rank)
    given.insert(given.end(), chunks.begin(), chunks.end());
  std::sort(given.begin(), given.end());
  bool fits = numerics.chunks_of_rank.size() == static_cast<std::size_t>(degree()) &&
              given.size() == static_cast<std::size_t>(numerics.num_chunks);
  for (std::size_t i = 0; fits && i < given.size(); ++i) fits = given[i] == static_cast<int>(i);
  if (fits) return;
  throw UsageError(fmt::format(
      "the declared arithmetic must give each of the {} chunks of a sequence to one of {} cp ranks",
      numerics.num_chunks, degree()));
}

at::Tensor EmulatedContext::positions_of(int cp_rank, std::int64_t length) const {
  if (!is_cut()) return at::arange(length, at::kLong);
  if (length % numerics_->num_chunks != 0) {
    throw ShapeError(fmt::format("the declared arithmetic cuts a sequence into {} chunks, got {}",
                                 numerics_->num_chunks, length));
  }
  const std::int64_t size = length / numerics_->num_chunks;
  std::vector<at::Tensor> parts;
  for (const int chunk : numerics_->chunks_of_rank.at(static_cast<std::size_t>(cp_rank)))
    parts.push_back(at::arange(chunk * size, (chunk + 1) * size, at::kLong));
  return at::cat(parts);
}

at::Tensor EmulatedContext::own_tokens(const at::Tensor& whole_BS) const {
  return is_cut() ? whole_BS.index_select(1, own_positions(whole_BS.size(1))) : whole_BS;
}

// Places that follow each other make one box.
Layout EmulatedContext::over_tokens(Layout layout, const at::Tensor& /*local*/, int dim) const {
  if (!is_cut()) return layout;
  const auto d = static_cast<std::size_t>(dim);
  const std::int64_t length = layout.global_shape[d] * degree();
  const at::Tensor positions = own_positions(length);
  const auto* const places = positions.const_data_ptr<std::int64_t>();
  const std::vector<Box> whole = boxes_of(layout, world_->mesh(), rank_);
  layout.boxes.clear();
  for (const Box& box : whole) {
    for (std::int64_t first = 0, next = 0; first < positions.numel(); first = next) {
      next = first + 1;
      while (next < positions.numel() && places[next] == places[next - 1] + 1) ++next;
      // of a box that has some of the tokens only
      const std::int64_t begin = std::max(first, box.global_offset[d]),
                         end = std::min(next, box.global_offset[d] + box.size[d]);
      if (begin >= end) continue;
      Box part = box;
      part.local_offset[d] = box.local_offset[d] + begin - box.global_offset[d];
      part.global_offset[d] = places[begin];
      part.size[d] = end - begin;
      layout.boxes.push_back(std::move(part));
    }
  }
  layout.global_shape[d] = length;
  std::erase_if(layout.placements, [](const Placement& placement) {
    return placement.kind == Placement::Kind::kShard;
  });
  layout.explicit_parts = true;
  return layout;
}

at::Tensor EmulatedContext::of_all(const at::Tensor& own, std::string_view what) const {
  std::vector<std::int64_t> shape = own.sizes().vec();
  shape.insert(shape.begin(), degree());
  return world_->gather_over(Axis::kCp, rank_, what, own.contiguous()).view(shape);
}

at::Tensor EmulatedContext::reduced(const at::Tensor& parts, std::string_view what) const {
  return world_->reduce_over(Axis::kCp, rank_, what, parts, numerics_->keys_gradient);
}

KeysValues EmulatedContext::gathered(const KeysValues& own, std::string_view module) const {
  if (!is_cut()) return own;
  const at::Tensor both = Gathered::apply(own.k, own.v, to_address(*this), std::string(module));
  return {both[0], both[1]};
}

at::Tensor EmulatedContext::ring(const at::Tensor& q_BNSD, const KeysValues& own,
                                 std::string_view module) const {
  return Ring::apply(q_BNSD, own.k, own.v, to_address(*this), std::string(module))
      .transpose(1, 2)
      .contiguous()
      .flatten(2);
}

}  // namespace isoshard
