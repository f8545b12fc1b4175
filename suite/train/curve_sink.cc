// SPDX-License-Identifier: Apache-2.0
// Scalars are written down, copies digested, the rest passes.
#include "suite/train/curve_sink.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "core/observe/record_name.h"

namespace isoshard {
namespace {

using nlohmann::json;

RecordOptions copies_options(const CurveSinkOptions& options) {
  RecordOptions recording;
  recording.mesh = options.mesh;
  recording.rank = options.rank;
  return recording;
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU, at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

}  // namespace

// CBOR, unlike JSON text, holds every double, NaN and infinities too.
std::vector<std::byte> RankCurve::serialize() const {
  json steps_json = json::array();
  for (const CurveStep& s : steps)
    steps_json.push_back({s.step, s.loss, s.rank_losses, s.grad_norm, s.learning_rate});
  json all = {{"steps", std::move(steps_json)}};
  const std::vector<std::byte> trace = copies.serialize();
  const auto* const data = reinterpret_cast<const std::uint8_t*>(trace.data());
  all["copies"] = json::binary({data, data + trace.size()});
  if (first_non_finite.has_value()) {
    const NonFiniteTensor& t = *first_non_finite;
    all["non_finite"] = {t.order, t.name, t.nan, t.infinite, t.numel};
  }
  const std::vector<std::uint8_t> bytes = json::to_cbor(all);
  const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

RankCurve RankCurve::deserialize(std::span<const std::byte> bytes) {
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  const json all = json::from_cbor(begin, begin + bytes.size(), true, false);
  if (!all.is_object()) throw InfrastructureError("a rank's curve was cut off");
  RankCurve curve;
  for (const json& s : all.at("steps")) {
    curve.steps.push_back({s.at(0).get<int>(), s.at(1).get<double>(),
                           s.at(2).get<std::vector<double>>(), s.at(3).get<double>(),
                           s.at(4).get<double>()});
  }
  const json::binary_t& trace = all.at("copies").get_binary();
  curve.copies =
      RankTrace::deserialize({reinterpret_cast<const std::byte*>(trace.data()), trace.size()});
  if (all.contains("non_finite")) {
    const json& t = all.at("non_finite");
    curve.first_non_finite = NonFiniteTensor{
        t.at(0).get<std::int64_t>(), t.at(1).get<std::string>(), t.at(2).get<std::int64_t>(),
        t.at(3).get<std::int64_t>(), t.at(4).get<std::int64_t>()};
  }
  return curve;
}

CurveSink::CurveSink(CurveSinkOptions options)
    : options_(std::move(options)), copies_(copies_options(options_)) {}

void CurveSink::begin_step(int step) {
  step_ = step;
  is_skipped_ = false;
  copies_.begin_step(step);
}

CurveStep& CurveSink::current() {
  if (curve_.steps.empty() || curve_.steps.back().step != step_)
    curve_.steps.push_back({.step = step_, .rank_losses = {}});
  return curve_.steps.back();
}

at::Tensor CurveSink::on_activation(const Site& site, at::Tensor value) {
  search(site, value);
  return value;
}

at::Tensor CurveSink::on_activation_grad(const Site& site, at::Tensor gradient) {
  search(site, gradient);
  return gradient;
}

void CurveSink::on_record(const Site& site, const at::Tensor& value) {
  search(site, value);
  if (site.kind == RecordKind::kScalar) {
    const NameRole role = parse_record_name(site.kind, site.name).role;
    if (role == NameRole::kLoss) current().loss = values_of(value).at(0);
    if (role == NameRole::kLossPerDpRank) current().rank_losses = values_of(value);
    if (role == NameRole::kLearningRate) current().learning_rate = values_of(value).at(0);
    if (role == NameRole::kFoundInf) is_skipped_ = values_of(value).at(0) != 0;
    // A step that is skipped because its gradients overflowed uses none of them.
    if (role == NameRole::kGradNorm) current().grad_norm = is_skipped_ ? 0 : values_of(value).at(0);
    return;
  }
  // The parameters as read, before step 0, have no step before them.
  const bool is_copied = site.kind == RecordKind::kParam || site.kind == RecordKind::kOptimizer;
  if (is_copied && !curve_.steps.empty() && is_checked(step_)) copies_.on_record(site, value);
}

bool CurveSink::is_checked(int step) const noexcept {
  return (step + 1) % options_.check_interval == 0 || step + 1 == options_.num_steps;
}

void CurveSink::search(const Site& site, const at::Tensor& value) {
  if (options_.watch_from < 0 || step_ < options_.watch_from || curve_.first_non_finite.has_value())
    return;
  const at::NoGradGuard no_grad;
  const std::int64_t order = num_searched_++;
  if (!value.is_floating_point()) return;
  const std::int64_t nan = value.detach().isnan().sum().item<std::int64_t>();
  const std::int64_t infinite = value.detach().isinf().sum().item<std::int64_t>();
  if (nan + infinite == 0) return;
  curve_.first_non_finite = NonFiniteTensor{
      order, describe(RecordKey{step_, site.kind, site.name, 0}), nan, infinite, value.numel()};
}

RankCurve CurveSink::finish() {
  curve_.copies = copies_.finish();
  return std::move(curve_);
}

}  // namespace isoshard
