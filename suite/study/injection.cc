// SPDX-License-Identifier: Apache-2.0
// The hooks of faults, fed with compositions.
#include "suite/study/injection.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "suite/faults/fault.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// The elements of a flat tensor that the composition is about.
at::Tensor selected(const at::Tensor& flat, const Composition& c) {
  const std::int64_t n = flat.numel();
  if (c.extent == StudyExtent::kAll) return flat;
  const std::int64_t count = c.extent == StudyExtent::kElement ? 1 : (n + 3) / 4;
  const auto begin = static_cast<std::int64_t>(c.position * static_cast<double>(n - count));
  return flat.narrow(0, begin, count);
}

/// Of -1 to 1, without a pattern that the values have.
at::Tensor noise_like(const at::Tensor& flat) {
  const at::Tensor index = at::arange(flat.numel(), flat.options()) + 1;
  const at::Tensor mixed = (index * 12.9898).sin() * 43758.5453;
  return (mixed - mixed.floor()) * 2 - 1;
}

void change_in_place(at::Tensor& part, double rms, const Composition& c) {
  switch (c.change) {
    case StudyChange::kScale:
      part.mul_(1 + c.magnitude);
      return;
    case StudyChange::kShift:
      part.add_(c.magnitude * rms);
      return;
    case StudyChange::kNoise:
      part.add_(noise_like(part) * (c.magnitude * rms));
      return;
    case StudyChange::kZero:
      part.zero_();
      return;
    case StudyChange::kRoll:
      part.copy_(part.roll(1));
      return;
    case StudyChange::kRound:
      part.copy_(part.to(at::kBFloat16).to(at::kDouble));
      return;
    case StudyChange::kSkip:
      return;
  }
}

/// Writes what the composition makes of a tensor over it. Returns whether a bit changed.
bool overwrite(at::Tensor tensor, const Composition& c) {
  const at::NoGradGuard no_grad;
  const at::Tensor wrong = changed(tensor, c);
  if (at::equal(wrong, tensor)) return false;
  tensor.copy_(wrong);
  return true;
}

TapMutation tap_of(const Composition& c) {
  const RecordKind kind =
      c.point == StudyPoint::kForward ? RecordKind::kActivation : RecordKind::kActivationGrad;
  return [c, kind](const Site& site, at::Tensor value) {
    if (site.kind != kind || site.name != c.tag || value.numel() == 0) return value;
    at::Tensor wrong;
    {
      const at::NoGradGuard no_grad;
      wrong = changed(value, c);
      if (at::equal(wrong, value)) return value;
    }
    // the value is wrong, and backward goes on as it would
    return value.requires_grad() ? value - value.detach() + wrong : wrong;
  };
}

/// Changes what comes out of the calls that carry no named parameters.
class ChangedResult final : public CollectiveFault {
 public:
  ChangedResult(Composition composition, MeshShape mesh)
      : c_(std::move(composition)), mesh_(std::move(mesh)) {}

  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    return call.op == c_.called.op && call.info.purpose == c_.called.purpose &&
           call.info.axis == c_.called.axis && c_.is_on(mesh_, call.mesh->world().rank());
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    call.pass().wait();
    bool acted = false;
    const auto change = [&](const Buffer& buffer) {
      if (buffer.count > 0 && is_floating(buffer.dtype))
        acted = overwrite(tensor_of(buffer), c_) || acted;
    };
    if (call.op == CollectiveOp::kSendRecv) {
      for (const Transfer& transfer : call.transfers)
        if (!transfer.is_send) change(transfer.data);
    } else {
      change(call.output);
    }
    *call.acted = acted;
    return {};
  }

 private:
  Composition c_;
  MeshShape mesh_;
};

std::shared_ptr<const CollectiveFault> collective_of(const Composition& c, const MeshShape& mesh) {
  const auto matches = [c](const CallInfo& info, const Segment* segment) {
    return info.purpose == c.called.purpose && info.axis == c.called.axis &&
           (c.tag.empty() || (segment != nullptr && segment->name == c.tag));
  };
  if (c.change == StudyChange::kSkip) return skip_segments(matches);
  if (c.tag.empty()) return std::make_shared<ChangedResult>(c, mesh);
  SegmentChange change;
  change.matches = matches;
  change.after = [c, mesh](const InterceptedCall& call, ConstBuffer, Buffer result) {
    if (c.is_on(mesh, call.mesh->world().rank())) overwrite(tensor_of(result), c);
  };
  change.of_own_blocks = true;
  return change_segments(std::move(change));
}

/// The step of one parameter is another one: what it adds is changed.
void change_update(TrainerParts& parts, const Composition& c, const FaultProbe& probe) {
  parts.optimizer = optimizer_double(
      std::move(parts.optimizer),
      [c, probe](Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients) {
        const auto found = parameters.find(c.tag);
        const at::NoGradGuard no_grad;
        const at::Tensor before =
            found == parameters.end() ? at::Tensor() : found->second.detach().clone();
        inner.step(parameters, gradients);
        if (!before.defined() || before.numel() == 0) return;
        at::Tensor after = found->second.detach();
        const at::Tensor wrong = before + changed(after - before, c);
        if (at::equal(wrong, after)) return;
        after.copy_(wrong);
        probe.fired();
      });
}

}  // namespace

at::Tensor changed(const at::Tensor& value, const Composition& composition) {
  at::Tensor flat = value.detach().to(at::kDouble).reshape({-1}).clone();
  const double rms = flat.square().mean().sqrt().item<double>();
  at::Tensor part = selected(flat, composition);
  change_in_place(part, rms, composition);
  return flat.to(value.scalar_type()).reshape(value.sizes());
}

RunOptions with_composition(const Composition& composition, const Case& item,
                            const FaultProbe& probe) {
  const Composition& c = composition;
  const MeshShape mesh = item.mesh();
  Fault fault{.id = "composition"};
  switch (c.point) {
    case StudyPoint::kForward:
    case StudyPoint::kBackward:
      fault.hooks.tap = [c, mesh](const Case&, int rank) {
        return c.is_on(mesh, rank) ? tap_of(c) : TapMutation();
      };
      break;
    case StudyPoint::kCollective:
      fault.hooks.collective = [c, mesh](const Case&) { return collective_of(c, mesh); };
      break;
    case StudyPoint::kUpdate:
      fault.hooks.parts = [c, mesh](TrainerParts& parts, Mesh& group, const Case&,
                                    const FaultProbe& fired) {
        if (c.is_on(mesh, group.world().rank())) change_update(parts, c, fired);
      };
      break;
  }
  return with_fault({}, fault, item, probe);
}

}  // namespace isoshard
