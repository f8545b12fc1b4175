// SPDX-License-Identifier: Apache-2.0
// The injector: one decorator, tap, double or setting for each point.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/observe/layer_name.h"
#include "harness/fault/collective_fault.h"
#include "suite/faults/injection.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// Whether a name has this pattern, in which '*' stands for any letters.
bool fits(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  if (star == pattern.npos) return name == pattern;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  for (std::size_t i = 0; i <= name.size(); ++i)
    if (fits(name.substr(i), pattern.substr(star + 1))) return true;
  return false;
}

/// An injection with what it needs to know of the case.
class Resolved : public Injection {
 public:
  Resolved(const Injection& injection, const Case& item)
      : Injection(with_numbers_of(item, injection)),
        mesh_(item.mesh()),
        last_layer_(item.config.num_layers - 1),
        first_row_biases_(layers == FaultLayers::kFirstOfEach ? first_row_biases(item)
                                                              : std::set<std::string>()) {}

  [[nodiscard]] bool is_on(int rank) const { return Injection::is_on(mesh_, rank); }
  [[nodiscard]] bool is_about(const std::string& module_or_parameter) const {
    return (name.empty() || fits(module_or_parameter, name)) && is_in_layers(module_or_parameter);
  }
  [[nodiscard]] bool is_about(const CallInfo& info, const Segment* segment) const {
    if (info.purpose != called.purpose || info.axis != called.axis) return false;
    const bool takes_all = name.empty() && classes.empty() && layers == FaultLayers::kAny;
    if (takes_all || segment == nullptr) return takes_all;
    return (classes.empty() || std::ranges::find(classes, segment->param_class) != classes.end()) &&
           is_about(segment->name);
  }

 private:
  [[nodiscard]] bool is_in_layers(const std::string& place) const {
    switch (layers) {
      case FaultLayers::kAny:
        return true;
      case FaultLayers::kLast:
        return layer_of(place).ends_with(fmt::format(".{}", last_layer_));
      case FaultLayers::kInside:
        return !layer_of(place).empty();
      case FaultLayers::kOutside:
        return layer_of(place).empty();
      case FaultLayers::kFirstOfEach:
        return first_row_biases_.contains(place);
    }
    return false;
  }

  MeshShape mesh_;
  std::int64_t last_layer_;
  std::set<std::string> first_row_biases_;
};
using SharedInjection = std::shared_ptr<const Resolved>;

/// A run of the elements of a flat tensor.
at::Tensor run_of(const at::Tensor& flat, FaultExtent extent, double position) {
  const std::int64_t n = flat.numel();
  const auto placed = [&](std::int64_t count) {
    return flat.narrow(0, static_cast<std::int64_t>(position * static_cast<double>(n - count)),
                       count);
  };
  switch (extent) {
    case FaultExtent::kPart:
      return placed((n + 3) / 4);
    case FaultExtent::kElement:
      return placed(1);
    case FaultExtent::kHalf:
      return placed((n + 1) / 2);
    case FaultExtent::kSecondThird:
      return flat.narrow(0, n / 3, n / 3);
    case FaultExtent::kAll:
    case FaultExtent::kZeros:
      break;
  }
  return flat;
}

/// Numbers from -1 to 1, without a pattern that the values have.
at::Tensor noise_like(const at::Tensor& flat) {
  const at::Tensor index = at::arange(flat.numel(), flat.options()) + 1;
  const at::Tensor mixed = (index * 12.9898).sin() * 43758.5453;
  return (mixed - mixed.floor()) * 2 - 1;
}

/// Keeps `bits` bits of mantissa after the leading one; 0: rounds to bf16.
at::Tensor rounded(const at::Tensor& x, double bits) {
  if (bits == 0) return x.to(at::kBFloat16).to(at::kDouble);
  const auto [mantissa, exponent] = at::frexp(x);
  const double steps = std::exp2(bits + 1);
  return at::ldexp((mantissa * steps).round() / steps, exponent);
}

bool has(FaultPoint point, FaultChange change) {
  switch (change) {
    case FaultChange::kScale:
      return point <= FaultPoint::kLoss;
    case FaultChange::kSkip:
      return point == FaultPoint::kCollective;
    case FaultChange::kSplit:
      return point == FaultPoint::kLoss;
    case FaultChange::kRestart:
      return point == FaultPoint::kPositions;
    case FaultChange::kSet:
      return point == FaultPoint::kSetting;
    default:
      return point <= FaultPoint::kUpdate;
  }
}

/// A dtype that a run does not have is not set.
void set_dtype(std::optional<Dtype>& dtype, const std::string& value) {
  const std::optional<Dtype> parsed =
      value == "none" ? std::nullopt : std::optional(parse_dtype(value));
  if (dtype.has_value()) dtype = parsed;
}

template <typename Int>
void set_number(Int& number, const std::string& value) {
  const char* end = value.data() + value.size();
  if (const auto [stop, error] = std::from_chars(value.data(), end, number);
      error != std::errc() || stop != end)
    throw UsageError(fmt::format("the value of a setting must be a whole number, got '{}'", value));
}

using Setter = void (*)(TrainerParts& parts, const std::string& value);
/// Errors   UsageError for a setting that no part of a trainer has.
Setter setter_of(const std::string& setting) {
  static const std::map<std::string, Setter> setters = {
      {"autocast", [](TrainerParts& p, const std::string& v) { set_dtype(p.autocast, v); }},
      {"bucket_bytes",
       [](TrainerParts& p, const std::string& v) { set_number(p.bucket_bytes, v); }},
      {"master_dtype", [](TrainerParts& p, const std::string& v) { set_dtype(p.master_dtype, v); }},
      {"recompute_every",
       [](TrainerParts& p, const std::string& v) { set_number(p.recompute_every, v); }}};
  if (const auto found = setters.find(setting); found != setters.end()) return found->second;
  throw UsageError(fmt::format("a setting must be reduction_order or one of {}, got '{}'",
                               fmt::join(std::views::keys(setters), ", "), setting));
}

void require_possible(const Injection& injection) {
  if (!has(injection.point, injection.change))
    throw UsageError(fmt::format("a change at {} must be one that this point has, got {}",
                                 name_of(injection.point), name_of(injection.change)));
  if (injection.point == FaultPoint::kSetting && injection.name == "reduction_order") {
    (void)parse_reduction_order(injection.value);
    if (injection.ranks.has_value())
      throw UsageError("reduction_order must be set on all ranks, got one group of ranks");
  } else if (injection.point == FaultPoint::kSetting) {
    TrainerParts scratch;
    setter_of(injection.name)(scratch, injection.value);
  }
  if (injection.change == FaultChange::kSkip && injection.side == FaultSide::kGiven)
    throw UsageError("what is skipped must be a result, got what is given");
  if (injection.side == FaultSide::kGiven &&
      injection.called.op.value_or(CollectiveOp::kSendRecv) != CollectiveOp::kSendRecv)
    throw UsageError(fmt::format(
        "what is given can be changed in send_recv and, without an op, in reductions, got {}",
        name_of(*injection.called.op)));
  if (injection.change == FaultChange::kSkip && injection.extent == FaultExtent::kAll &&
      injection.ranks.has_value())
    throw UsageError("a reduction must be skipped on all ranks: others would wait for ever");
}

at::Tensor changed_part(const at::Tensor& part, double size, const Injection& injection) {
  switch (injection.change) {
    case FaultChange::kScale:
      return part * (1 + injection.magnitude);
    case FaultChange::kShift:
      return part + injection.magnitude * size;
    case FaultChange::kNoise:
      return part + noise_like(part) * (injection.magnitude * size);
    case FaultChange::kZero:
      return at::zeros_like(part);
    case FaultChange::kRoll:
      return part.roll(1);
    case FaultChange::kRound:
      return rounded(part, injection.magnitude);
    default:
      return part;
  }
}

/// Zeros of another sign are other bits. NaN equals NaN.
bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a, b, 0, 0, /*equal_nan=*/true) && at::equal(a.signbit(), b.signbit());
}

/// Writes what the injection makes of a tensor over it. Returns whether a bit changed.
bool overwrite(at::Tensor tensor, const Injection& injection) {
  const at::NoGradGuard no_grad;
  const at::Tensor wrong = changed(tensor, injection);
  if (has_same_bits(wrong, tensor)) return false;
  tensor.copy_(wrong);
  return true;
}

TapMutation tap_of(const SharedInjection& injection) {
  const RecordKind kind = injection->point == FaultPoint::kForward ? RecordKind::kActivation
                                                                   : RecordKind::kActivationGrad;
  return [injection, kind](const Site& site, at::Tensor value) {
    if (site.kind != kind || value.numel() == 0 || !injection->is_about(site.name)) return value;
    at::Tensor wrong;
    {
      const at::NoGradGuard no_grad;
      wrong = changed(value, *injection);
      if (has_same_bits(wrong, value)) return value;
    }
    if (!value.requires_grad()) return wrong;
    // the value is wrong, and backward goes on as it would
    at::Tensor result = value.clone();
    result.detach().copy_(wrong);
    return result;
  };
}

/// Changes the whole result of each call of one op; of a grouped one also what is sent.
class ChangedCall final : public CollectiveFault {
 public:
  explicit ChangedCall(SharedInjection injection) : injection_(std::move(injection)) {}

  [[nodiscard]] bool applies(const InterceptedCall& call) const override {
    if (call.op != injection_->called.op || !injection_->is_on(call.mesh->world().rank()))
      return false;
    return call.op == CollectiveOp::kSendRecv
               ? std::ranges::any_of(call.transfers,
                                     [&](const Transfer& t) { return is_chosen(t); })
               : is_for(call.info);
  }
  [[nodiscard]] Work apply(const InterceptedCall& call) const override {
    if (injection_->side == FaultSide::kGiven) return send_changed(call);
    call.pass().wait();
    *call.acted = false;
    const auto change = [&](const Buffer& buffer) {
      if (buffer.count > 0 && is_floating(buffer.dtype))
        *call.acted = overwrite(tensor_of(buffer), *injection_) || *call.acted;
    };
    if (call.op != CollectiveOp::kSendRecv) change(call.output);
    for (const Transfer& transfer : call.transfers)
      if (is_chosen(transfer)) change(transfer.data);
    return {};
  }

 private:
  [[nodiscard]] bool is_for(const CallInfo& info) const {
    return injection_->is_about(info, info.segments.empty() ? nullptr : info.segments.data());
  }
  [[nodiscard]] bool is_chosen(const Transfer& transfer) const {
    return transfer.is_send == (injection_->side == FaultSide::kGiven) && is_for(transfer.info);
  }

  /// Sends a changed copy: what is sent may be read again.
  [[nodiscard]] Work send_changed(const InterceptedCall& call) const {
    std::vector<Transfer> transfers(call.transfers.begin(), call.transfers.end());
    std::vector<at::Tensor> sent;
    *call.acted = false;
    for (Transfer& transfer : transfers) {
      if (!is_chosen(transfer)) continue;
      sent.push_back(tensor_of(transfer.data).clone());
      *call.acted = overwrite(sent.back(), *injection_) || *call.acted;
      transfer.data.data = static_cast<std::byte*>(sent.back().mutable_data_ptr());
    }
    call.comm->send_recv(transfers).wait();
    return {};
  }

  SharedInjection injection_;
};

std::shared_ptr<const CollectiveFault> collective_of(const SharedInjection& injection) {
  const auto matches = [injection](const CallInfo& info, const Segment* segment) {
    return injection->is_about(info, segment);
  };
  const bool is_skip = injection->change == FaultChange::kSkip;
  if (is_skip && injection->extent == FaultExtent::kAll) return skip_segments(matches);
  const bool is_by_parts =
      is_skip || !injection->called.op.has_value() ||
      (!injection->name.empty() && injection->called.op != CollectiveOp::kSendRecv);
  if (!is_by_parts) return std::make_shared<ChangedCall>(injection);
  const auto is_here = [injection](const InterceptedCall& call) {
    return call.op == injection->called.op.value_or(call.op) &&
           injection->is_on(call.mesh->world().rank());
  };
  SegmentChange change{.matches = matches};
  if (injection->side == FaultSide::kGiven) {
    change.before = [=](const InterceptedCall& call, Buffer given) {
      if (is_here(call)) overwrite(tensor_of(given), *injection);
    };
    return change_segments(std::move(change));
  }
  change.of_own_blocks = true;
  change.after = [=](const InterceptedCall& call, ConstBuffer given, Buffer result) {
    if (!is_here(call)) return;
    if (!is_skip) {
      overwrite(tensor_of(result), *injection);
      return;
    }
    const Buffer own{const_cast<std::byte*>(given.data), given.count, given.dtype};
    run_of(tensor_of(result), injection->extent, injection->position)
        .copy_(run_of(tensor_of(own), injection->extent, injection->position));
  };
  return change_segments(std::move(change));
}

/// The step of the chosen parameters is another one: what it adds is changed.
void change_update(TrainerParts& parts, const SharedInjection& injection, const FaultProbe& probe) {
  parts.optimizer = optimizer_double(
      std::move(parts.optimizer), [injection, probe](Optimizer& inner, NamedTensors& parameters,
                                                     const NamedTensors& gradients) {
        const at::NoGradGuard no_grad;
        NamedTensors before;
        for (const auto& [name, parameter] : parameters)
          if (injection->is_about(name)) before[name] = parameter.detach().clone();
        inner.step(parameters, gradients);
        for (const auto& [name, old] : before) {
          at::Tensor after = parameters.at(name).detach();
          if (old.numel() == 0) continue;
          const at::Tensor step = after - old, wrong_step = changed(step, *injection);
          // an element whose step is right keeps its bits
          const at::Tensor wrong = at::where(wrong_step == step, after, old + wrong_step);
          if (has_same_bits(wrong, after)) continue;
          after.copy_(wrong);
          probe.fired();
        }
      });
}

/// The losses of `count` runs of the sequence, added up.
CrossEntropy sum_over_runs(const Strategy& inner, const LossInputs& in, std::int64_t count) {
  const auto logits = in.logits.tensor_split(count, 1),
             targets = in.targets_BS.tensor_split(count, 1);
  CrossEntropy sum;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const CrossEntropy next = inner.loss(logits[i].contiguous(), targets[i].contiguous(),
                                         in.weight_B, in.label_smoothing);
    sum = i == 0 ? next
                 : CrossEntropy{sum.loss + next.loss, sum.sample_sum_B + next.sample_sum_B,
                                sum.sample_count_B + next.sample_count_B};
  }
  return sum;
}

void change_loss(TrainerParts& parts, const SharedInjection& injection, const FaultProbe& probe) {
  parts.strategy = strategy_double(
      parts.strategy, {.loss = [injection, probe](const Strategy& inner, const LossInputs& in) {
        const double m = injection->magnitude;
        if (m != 0) probe.fired();
        if (injection->change == FaultChange::kSplit)
          return sum_over_runs(inner, in, static_cast<std::int64_t>(m));
        CrossEntropy result = in.loss_by(inner);
        result.loss = result.loss * (1 + m);
        return result;
      }});
}

void restart_positions(TrainerParts& parts, const FaultProbe& probe) {
  parts.strategy = strategy_double(
      parts.strategy, {.token_positions = [probe](const Strategy& inner, std::int64_t length) {
        const at::Tensor right = inner.token_positions(length);
        if (!right.defined()) return right;  // all tokens are here
        return counted(probe, right, at::arange(length, at::kLong));
      }});
}

void change_setting(TrainerParts& parts, const Injection& injection, const FaultProbe& probe) {
  const auto values = [&] {
    return std::tuple(parts.bucket_bytes, parts.recompute_every, parts.master_dtype,
                      parts.autocast);
  };
  const auto before = values();
  setter_of(injection.name)(parts, injection.value);
  if (values() != before) probe.fired();
}

void change_parts(TrainerParts& parts, const SharedInjection& injection, const FaultProbe& probe) {
  switch (injection->point) {
    case FaultPoint::kUpdate:
      return change_update(parts, injection, probe);
    case FaultPoint::kLoss:
      return change_loss(parts, injection, probe);
    case FaultPoint::kPositions:
      return restart_positions(parts, probe);
    default:
      return change_setting(parts, *injection, probe);
  }
}

}  // namespace

at::Tensor changed(const at::Tensor& value, const Injection& injection) {
  at::Tensor flat = value.detach().to(at::kDouble).reshape({-1}).clone();
  const double size = flat.square().mean().sqrt().item<double>();
  if (injection.extent == FaultExtent::kZeros) {
    const at::Tensor zeros = flat.eq(0);
    flat.masked_scatter_(zeros, changed_part(flat.masked_select(zeros), size, injection));
  } else {
    at::Tensor run = run_of(flat, injection.extent, injection.position);
    run.copy_(changed_part(run, size, injection));
  }
  return flat.to(value.scalar_type()).reshape(value.sizes());
}

RunOptions inject(RunOptions options, const Injection& injection, const Case& item,
                  const FaultProbe& probe) {
  require_possible(injection);
  if (item.micro_batches < injection.least_micro_batches) return options;
  const auto resolved = std::make_shared<const Resolved>(injection, item);
  switch (injection.point) {
    case FaultPoint::kForward:
    case FaultPoint::kBackward:
      options.mutation = [resolved, probe, first = options.mutation](int rank) -> TapMutation {
        TapMutation before = first ? first(rank) : TapMutation();
        if (!resolved->is_on(rank)) return before;
        TapMutation own = counted(tap_of(resolved), probe);
        if (!before) return own;
        return [before, own](const Site& site, at::Tensor value) {
          return own(site, before(site, std::move(value)));
        };
      };
      return options;
    case FaultPoint::kCollective:
      options.decorate = [fault = collective_of(resolved), probe, mesh = item.mesh(),
                          inner = options.decorate](std::unique_ptr<Communicator> comm, int rank) {
        if (inner) comm = inner(std::move(comm), rank);
        return decorate_with_fault(std::move(comm), fault, probe, mesh);
      };
      return options;
    default:
      break;
  }
  if (injection.point == FaultPoint::kSetting && injection.name == "reduction_order") {
    options.order = parse_reduction_order(injection.value);
    if (options.order != ReductionOrder::kOrdered) probe.fired();
    return options;
  }
  options.edits.parts = [resolved, probe, first = options.edits.parts](TrainerParts& parts,
                                                                       Mesh& mesh) {
    if (first) first(parts, mesh);
    if (resolved->is_on(mesh.world().rank())) change_parts(parts, resolved, probe);
  };
  return options;
}

}  // namespace isoshard
