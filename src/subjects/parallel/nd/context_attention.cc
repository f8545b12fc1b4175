// SPDX-License-Identifier: Apache-2.0
// Keys and values on their way over cp.
#include "subjects/parallel/nd/context_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>
#include <string>
#include <utility>

#include "core/comm/tensor.h"
#include "subjects/model/ops/block_attention.h"
#include "subjects/model/ops/ops.h"
#include "subjects/parallel/nd/exchange.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An autograd context keeps integers and strings, so objects travel as their addresses.
template <class T>
std::int64_t to_address(T& object) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&object));
}
template <class T>
T& from_address(std::int64_t address) {
  return *reinterpret_cast<T*>(static_cast<std::intptr_t>(address));
}

// Parts travel as [cp, 2, B, K, S / cp, D].
class GatheredContext final : public torch::autograd::Function<GatheredContext> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& k, const at::Tensor& v,
                            std::int64_t split, std::int64_t cp, const std::string& module) {
    context->saved_data["split"] = split;
    context->saved_data["cp"] = cp;
    context->saved_data["module"] = module;
    Communicator& group = from_address<Communicator>(cp);
    const at::Tensor own = at::stack({k, v}).unsqueeze(0).contiguous();
    const Segment segment{module, ParamClass::kOther, 0, own.numel()};
    const at::Tensor all =
        all_gather(group, own, {Purpose::kRingKv, Axis::kCp, std::span(&segment, 1)});
    const at::Tensor joined = at::cat(all.unbind(0), 3);  // [2,B,K,S,D], one rank after the other
    return joined.index_select(3, from_address<const ContextSplit>(split)
                                      .places_of_gathered(joined.size(3))
                                      .to(joined.device()));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Communicator& group = from_address<Communicator>(context->saved_data["cp"].toInt());
    const auto& split = from_address<const ContextSplit>(context->saved_data["split"].toInt());
    const std::string module = context->saved_data["module"].toStringRef();
    const at::Tensor& whole = gradients[0];
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < group.size(); ++rank) parts.push_back(split.part_of(rank, whole, 3));
    const at::Tensor all = at::stack(parts).contiguous();
    const Segment segment{module, ParamClass::kOther, 0, all.numel()};
    const at::Tensor own = reduce_scatter(group, all, Reduction::kSum,
                                          {Purpose::kRingDkv, Axis::kCp, std::span(&segment, 1)})
                               .select(0, 0);
    return {own.select(0, 0), own.select(0, 1), {}, {}, {}};
  }
};

// To the next rank, from the one before.
at::Tensor passed_on(const at::Tensor& tensor, Communicator& cp, Purpose purpose,
                     const std::string& module) {
  const int size = cp.size(), rank = cp.rank();
  return exchanged(tensor, (rank + 1) % size, (rank + size - 1) % size, cp, purpose, Axis::kCp,
                   module);
}

// The places of the tokens whose keys this rank has in turn `turn`, and of its own.
BlockPlaces places_in(const ContextSplit& split, const Communicator& cp, int turn,
                      std::int64_t own_length) {
  const int owner = (cp.rank() + cp.size() - turn) % cp.size();
  const std::int64_t length = own_length * cp.size();
  return {split.positions(length), split.positions_of(owner, length)};
}

class RingAttention final : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, std::int64_t split_address,
                            std::int64_t cp_address, std::int64_t merge_dtype,
                            const std::string& module) {
    const auto& split = from_address<const ContextSplit>(split_address);
    Communicator& cp = from_address<Communicator>(cp_address);
    at::Tensor both = at::stack({k, v}), out, lse;
    for (int turn = 0; turn < cp.size(); ++turn) {
      if (turn > 0) both = passed_on(both, cp, Purpose::kRingKv, module);
      const BlockPlaces places = places_in(split, cp, turn, k.size(2));
      if (!sees_any(places)) continue;
      const BlockAttention block = block_attention(q, both[0], both[1], places);
      if (turn == 0) {
        out = block.out_BNQD.to(static_cast<at::ScalarType>(merge_dtype));
        lse = block.lse_BNQ1;
      } else {
        merge_block(out, lse, block);
      }
    }
    out = out.to(q.scalar_type());
    context->save_for_backward({q, k, v, out, lse});
    context->saved_data["split"] = split_address;
    context->saved_data["cp"] = cp_address;
    context->saved_data["module"] = module;
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    const auto& split = from_address<const ContextSplit>(context->saved_data["split"].toInt());
    Communicator& cp = from_address<Communicator>(context->saved_data["cp"].toInt());
    const std::string module = context->saved_data["module"].toStringRef();
    const at::ScalarType wide = wide_type(q.scalar_type());
    at::Tensor both = at::stack({k, v});
    at::Tensor of_q = at::zeros(q.sizes(), q.options().dtype(wide)), of_both;
    for (int turn = 0; turn < cp.size(); ++turn) {
      if (turn > 0) {
        both = passed_on(both, cp, Purpose::kRingKv, module);
        of_both = passed_on(of_both, cp, Purpose::kRingDkv, module);
      }
      const BlockPlaces places = places_in(split, cp, turn, k.size(2));
      if (!sees_any(places)) continue;
      const BlockGradients block =
          block_gradients(q, both[0], both[1], places, out, lse, gradients[0]);
      of_q = of_q + block.q_BNQD;
      const at::Tensor own = at::stack({block.k_BKTD, block.v_BKTD});
      of_both = of_both.defined() ? of_both + own : own;
    }
    if (cp.size() > 1) of_both = passed_on(of_both, cp, Purpose::kRingDkv, module);
    const at::ScalarType dtype = q.scalar_type();
    return {of_q.to(dtype), of_both[0].to(dtype), of_both[1].to(dtype), {}, {}, {}, {}};
  }
};

}  // namespace

KeysValues gathered_context(const KeysValues& own, const ContextSplit& split, Communicator& cp,
                            std::string_view module) {
  const at::Tensor both =
      GatheredContext::apply(own.k, own.v, to_address(split), to_address(cp), std::string(module));
  return {both[0], both[1]};
}

at::Tensor ring_attention(const at::Tensor& q_BNSD, const KeysValues& own,
                          const ContextSplit& split, Communicator& cp,
                          std::optional<Dtype> merge_dtype, std::string_view module) {
  const at::ScalarType merge =
      merge_dtype.has_value() ? scalar_type_of(*merge_dtype) : wide_type(q_BNSD.scalar_type());
  const at::Tensor out =
      RingAttention::apply(q_BNSD, own.k, own.v, to_address(split), to_address(cp),
                           static_cast<std::int64_t>(merge), std::string(module));
  return out.transpose(1, 2).contiguous().flatten(2);
}

}  // namespace isoshard
