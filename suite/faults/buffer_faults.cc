// SPDX-License-Identifier: Apache-2.0
/// Faults of communication buffers: walked with other lengths than they were packed with, refilled
/// too early, handed out too late.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "subjects/parallel/ddp/ddp_numerics.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"
#include "suite/record/make_subject.h"

namespace isoshard {
namespace {

/// What new memory holds: a known pattern, far from any weight.
at::Tensor junk(std::int64_t count) {
  return at::arange(count, at::kFloat).remainder(5).mul(0.25).add(1);
}

/// A gather of shards in blocks with one padded segment per parameter: what pads becomes junk. If
/// `walks`, the parameters are then added into one buffer at offsets that count real lengths, and
/// read from there, so that each one's padding ends up in the next.
class GatheredPadding final : public CollectiveFault {
 public:
  GatheredPadding(std::map<std::string, std::int64_t> numels, bool walks)
      : numels_(std::move(numels)), walks_(walks) {}

  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    if (call.op != CollectiveOp::kAllGather || call.info.purpose != Purpose::kParamGather ||
        call.comm->size() == 1)
      return false;
    const std::size_t count = parameters_of(call);
    for (std::size_t i = 0; i < count; ++i) {
      if (call.info.segments[i].count * call.comm->size() != numels_.at(call.info.segments[i].name))
        return true;
    }
    return false;
  }

  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    call.pass().wait();
    const auto segments = call.info.segments.first(parameters_of(call));
    const at::Tensor blocks = tensor_of(call.output).view({call.comm->size(), -1});
    const at::Tensor walked = at::zeros({blocks.numel()}, blocks.options());
    std::vector<std::int64_t> offsets;
    std::int64_t offset = 0;
    for (const Segment& segment : segments) {
      const at::Tensor whole =
          blocks.narrow(1, segment.offset, segment.count).reshape({-1}).clone();
      const std::int64_t numel = numels_.at(segment.name), padding = whole.numel() - numel;
      whole.narrow(0, numel, padding).copy_(junk(padding));
      if (!walks_)
        blocks.narrow(1, segment.offset, segment.count).copy_(whole.view({blocks.size(0), -1}));
      walked.narrow(0, offset, whole.numel()).add_(whole);
      offsets.push_back(offset);
      offset += numel;
    }
    *call.acted = !walks_;  // padding of the last parameter ends up in nothing
    for (std::size_t i = 0; walks_ && i < segments.size(); ++i) {
      const std::int64_t padded = segments[i].count * blocks.size(0),
                         numel = numels_.at(segments[i].name);
      const at::Tensor place = blocks.narrow(1, segments[i].offset, segments[i].count),
                       read = walked.narrow(0, offsets[i], padded);
      *call.acted = *call.acted ||
                    !at::equal(place.reshape({-1}).narrow(0, 0, numel), read.narrow(0, 0, numel));
      place.copy_(read.view({blocks.size(0), -1}));
    }
    return {};
  }

 private:
  /// Of one rank's block; 0 if the call does not name the same ones for every rank.
  static std::size_t parameters_of(const InterceptedCall& call) {
    const auto ranks = static_cast<std::size_t>(call.comm->size());
    const auto& segments = call.info.segments;
    const std::size_t count = segments.size() / ranks;
    return count > 0 && segments.size() % ranks == 0 && segments[count].name == segments[0].name
               ? count
               : 0;
  }

  std::map<std::string, std::int64_t> numels_;
  bool walks_;
};

std::shared_ptr<const CollectiveFault> gathered_padding(const Case& item, bool walks) {
  const TensorNumerics tensor = numerics_of(item).tensor;
  std::map<std::string, std::int64_t> numels;
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    numels[spec.name] = numel_of(held_shape(tensor, spec));
  }
  return std::make_shared<GatheredPadding>(std::move(numels), walks);
}

Case unevenly_sharded_case() {
  return fault_case("qwen2", "fsdp_tp", {.dp = 5});
}

Fault param_gather_stride() {
  Fault fault{.id = "param_gather_stride", .fault_class = 'E', .subjects = {"fsdp_tp"}};
  fault.summary =
      "A gather buffer was sized with padded lengths but walked with real ones; padding was added "
      "into the next weight.";
  fault.source = "DeepSpeed #8158";
  fault.smallest_case = unevenly_sharded_case;
  fault.hooks.collective = [](const Case& item) { return gathered_padding(item, true); };
  fault.expected = expect(Stage::kForward, "model.layers.0.input_layernorm", any_rank(5),
                          {CauseId::kPredecessorPadding,
                           {{"elements", 48},
                            {"predecessor", "model.layers.0.mlp.down_proj.weight"},
                            {"parameter", "model.layers.0.input_layernorm.weight"}}});
  return fault;
}

Fault padding_content_of_gathers() {
  Fault miss{.id = "padding_content_of_gathers", .subjects = {"fsdp_tp"}};
  miss.summary = "What pads the shards of gathered parameters holds junk instead of zeros.";
  miss.smallest_case = unevenly_sharded_case;
  miss.hooks.collective = [](const Case& item) { return gathered_padding(item, false); };
  return miss;
}

/// As another process writes it: past autograd, which would refuse to go back through it.
void overwrite(const at::Tensor& destination, const at::Tensor& source) {
  std::memcpy(destination.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
}

/// Parameters of the first layer, but for those who stepped them late: forward reads the values
/// before the step, backward the new ones.
struct LateParameters {
  std::map<std::string, at::Tensor> before, fresh;

  static bool is_late(const std::string& name) {
    return name.find(".layers.0.") != std::string::npos || name.find(".h.0.") != std::string::npos;
  }
  void remember(const DataParallel& inner) {
    for (const auto& [name, parameter] : inner.held()) {
      if (is_late(name)) before[name] = parameter.detach().clone();
    }
  }
  /// Whether that changed anything.
  bool take_back(const DataParallel& inner) {
    bool changed = false;
    for (const auto& [name, value] : before) {
      const at::Tensor& parameter = inner.held().at(name);
      changed = changed || !at::equal(parameter, value);
      fresh[name] = parameter.detach().clone();
      overwrite(parameter, value);
    }
    return changed;
  }
  void hand_out(const DataParallel& inner) {
    for (const auto& [name, value] : fresh) overwrite(inner.held().at(name), value);
    fresh.clear();
  }
};

Fault params_published_late() {
  Fault fault{.id = "params_published_late", .fault_class = 'L', .subjects = {"autotp"}};
  fault.summary = "The next forward read a bucket of weights before its new values were published.";
  fault.source = "Megatron-LM #6388";
  fault.smallest_case = [] {
    Case item = fault_case("llama", "autotp", {.dp = 3});
    item.settings.zero_stage = 1;
    item.steps = 2;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item,
                         const FaultProbe& probe) {
    // nobody waits for its own values
    if (item.settings.zero_stage == 0 || mesh.coordinate(Axis::kDp) == 0) return;
    const auto late = std::make_shared<LateParameters>();
    DataParallelRules rules;
    rules.before_forward = [late, probe](DataParallel& inner, int step) {
      if (step == 0) late->remember(inner);
      if (step != 1 || late->before.empty()) return;
      if (late->take_back(inner)) probe.fired();
      late->before.clear();
    };
    rules.after_forward = [late](DataParallel& inner, int) { late->hand_out(inner); };
    parts.data_parallel = data_parallel_double(std::move(parts.data_parallel), std::move(rules));
  };
  fault.expected =
      expect(Stage::kParametersRead, "model.layers.0.input_layernorm.weight.read", {1, 2},
             {CauseId::kStaleParametersRead,
              {{"step", 1},
               {"parameter", "model.layers.0.input_layernorm.weight"},
               {"steps", 1},
               {"ranks", std::vector{1, 2}}}},
             1);
  return fault;
}

/// The second bucket of a step is read when its result is awaited, and the third one's gradients
/// have been written over it by then.
class ReadsRefilledBucket final : public CollectiveFault {
 public:
  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.info.purpose == Purpose::kGradReduce &&
           call.info.axis == Axis::kDp && call.comm->size() > 1 && !call.info.segments.empty();
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    const std::string& name = call.info.segments.front().name;
    if (first_.empty()) first_ = name;
    bucket_ = name == first_ ? 0 : bucket_ + 1;
    *call.acted = false;  // what is read late is what it was, but for the refilled bucket
    if (bucket_ == 1) {
      late_ = call;
      return Work([call] { call.pass().wait(); });
    }
    if (bucket_ == 2 && late_.has_value()) {
      const std::size_t bytes =
          std::min(late_->output.count, call.output.count) * size_of(call.output.dtype);
      *call.acted = std::memcmp(late_->output.data, call.output.data, bytes) != 0;
      std::memcpy(late_->output.data, call.output.data, bytes);
      late_.reset();
    }
    return call.pass();
  }

 private:
  // Every rank is a process with a copy of its own.
  mutable std::string first_;
  mutable int bucket_ = -1;
  mutable std::optional<InterceptedCall> late_;
};

Fault bucket_refilled_before_reduce_ends() {
  Fault fault{.id = "bucket_refilled_before_reduce_ends", .fault_class = 'L', .subjects = {"ddp"}};
  fault.summary = "New gradients were written into a bucket whose reduction was still running.";
  fault.source = "DeepSpeed #7965, #5606";
  fault.smallest_case = [] {
    Case item = fault_case("llama", "ddp", {.dp = 3});
    item.settings.bucket_bytes = std::int64_t{64} << 10;  // 4 buckets
    return item;
  };
  fault.hooks.collective = [](const Case&) { return std::make_shared<ReadsRefilledBucket>(); };
  fault.expected =
      expect(Stage::kParameterGrad, "", any_rank(3), {CauseId::kWrongValuesOfOtherTensor});
  return fault;
}

}  // namespace

void add_buffer_faults(Faults& faults) {
  for (Fault (*make)() :
       {bucket_refilled_before_reduce_ends, param_gather_stride, params_published_late})
    faults.push_back(make());
}

void add_buffer_benign_variations(Faults& faults) {
  faults.push_back(padding_content_of_gathers());
}

}  // namespace isoshard
