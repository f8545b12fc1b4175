// SPDX-License-Identifier: Apache-2.0
/// The faults, one function each, and how they are put on a run.
#include "conformance/detection/fault.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/suggest.h"
#include "fixtures/cases/presets.h"

namespace isoshard {
namespace {

/// Group sizes differ pairwise, weights have no special values, plain SGD: nothing can hide a factor.
Case fault_case(std::string subject, int tp, int dp) {
  Case item = tiny_fault_case();
  item.subject = std::move(subject);
  item.tp = tp;
  item.dp = dp;
  return item;
}

Fault mlp_input_grad_partial() {
  Fault fault;
  fault.id = "mlp_input_grad_partial";
  fault.fault_class = 'A';
  fault.summary = "The input gradient of column-split weights stayed a partial sum on each rank; forward right, everything upstream wrong.";
  fault.source = "torchtitan #1805, #1878";
  fault.smallest_case = [] { return fault_case("autotp", 3, 2); };
  fault.collective = [](const Case&) {
    return skip_segments([](const CallInfo& info, const Segment* segment) {
      return info.purpose == Purpose::kColumnParallelBackward && segment != nullptr && segment->name.starts_with("model.layers.1.mlp.");
    });
  };
  fault.expected = {Stage::kActivationGrad, "model.layers.1.post_attention_layernorm", {0, 1, 2, 3, 4, 5}, "rank-local partial over tp"};
  return fault;
}

Fault dp_sum_missing() {
  Fault fault;
  fault.id = "dp_sum_missing";
  fault.fault_class = 'A';
  fault.summary = "The data-parallel wrapper was never applied; every replica trained on its own gradient.";
  fault.source = "ray_train_tensor_parallel verify_fsdp.py";
  fault.smallest_case = [] { return fault_case("ddp", 1, 3); };
  fault.collective = [](const Case&) {
    return skip_segments(
        [](const CallInfo& info, const Segment*) { return info.purpose == Purpose::kGradReduce && info.axis == Axis::kDp; });
  };
  fault.expected = {Stage::kParameterGrad, "", {0, 1, 2}, "rank-local over dp"};
  return fault;
}

/// Keeps this tp rank's part of the sequence and repeats it to the full length.
at::Tensor repeat_own_sequence_part(const at::Tensor& x_BSH, int tp_rank, int tp) {
  const std::int64_t part = x_BSH.size(1) / tp;
  const at::Tensor own = x_BSH.narrow(1, tp_rank * part, part);
  std::vector<at::Tensor> pieces(static_cast<std::size_t>(tp), own);
  if (const std::int64_t rest = x_BSH.size(1) - part * tp; rest > 0) pieces.push_back(own.narrow(1, 0, rest));
  return at::cat(pieces, 1);
}

Fault embed_out_split_without_sp() {
  Fault fault;
  fault.id = "embed_out_split_without_sp";
  fault.fault_class = 'E';
  fault.summary = "The embedding output was laid out as split over the sequence although sequence parallelism was off.";
  fault.source = "benchmark_tp 2faebc2";
  fault.smallest_case = [] { return fault_case("autotp", 2, 3); };
  fault.mutation = [](const Case& item, int rank) -> TapMutation {
    const int tp_rank = item.mesh().coordinate(rank, Axis::kTp);
    return [tp_rank, tp = item.tp](const Site& site, at::Tensor value) {
      if (site.kind != RecordKind::kActivation || site.name != "model.embed_tokens" || tp < 2) return value;
      return repeat_own_sequence_part(value, tp_rank, tp);
    };
  };
  fault.expected = {Stage::kForward, "model.embed_tokens", {0, 1, 2, 3, 4, 5}, "copies differ over tp"};
  return fault;
}

}  // namespace

std::span<const Fault> fault_catalogue() {
  static const std::vector<Fault> catalogue = {mlp_input_grad_partial(), dp_sum_missing(), embed_out_split_without_sp()};
  return catalogue;
}

const Fault& find_fault(std::string_view id) {
  std::vector<std::string> known;
  for (const Fault& fault : fault_catalogue()) {
    if (fault.id == id) return fault;
    known.push_back(fault.id);
  }
  throw UsageError(fmt::format("unknown fault '{}'{}; 'isoshard list faults' lists them", id, did_you_mean(id, known)));
}

RunOptions with_fault(RunOptions options, const Fault& fault, const Case& item, const FaultProbe& probe) {
  if (fault.collective) {
    const auto collective = fault.collective(item);
    options.decorate = [collective, probe](std::unique_ptr<Communicator> inner, int) {
      return decorate_with_fault(std::move(inner), collective, probe);
    };
  }
  if (fault.mutation) {
    options.mutation = [mutation = fault.mutation, item, probe](int rank) -> TapMutation {
      return [inner = mutation(item, rank), probe](const Site& site, at::Tensor value) {
        at::Tensor changed = inner(site, value);
        if (!changed.is_same(value)) probe.fired();
        return changed;
      };
    };
  }
  return options;
}

}  // namespace isoshard
