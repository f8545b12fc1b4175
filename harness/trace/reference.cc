// SPDX-License-Identifier: Apache-2.0
/// The trusted run: an index over its records, and the responses of its perturbed runs.
#include "harness/trace/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/base/error.h"
#include "harness/trace/numbers.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

/// Whether element i of the local tensor is element i of the global one.
bool holds_whole(const Record& record) {
  const Layout& layout = record.layout;
  if (record.local_shape != layout.global_shape || is_partial(layout)) return false;
  if (!layout.explicit_parts) return true;
  const Shape zeros(layout.global_shape.size(), 0);
  const FlatRange whole{0, 0, numel_of(layout.global_shape)};
  return (layout.boxes.size() == 1 && layout.boxes[0] == Box{zeros, zeros, layout.global_shape}) ||
         (layout.flat.size() == 1 && layout.flat[0] == whole);
}

}  // namespace

struct Reference::Impl {
  Trace trace;
  std::map<RecordKey, const Record*> index;
  std::map<int, const Record*> begins_of_backward;  // by step
  std::map<RecordKey, Response> responses;
  int runs = 0;
  Redrawn redrawn;
};

Reference::Reference(Trace trace) : impl_(std::make_shared<Impl>()) {
  impl_->trace = std::move(trace);
  const Trace& t = impl_->trace;
  if (t.mesh.world_size() != 1 || t.ranks.size() != 1) {
    throw MeshError(fmt::format(
        "a reference is one process, not a mesh of {} with {} traces; assemble it first",
        t.mesh.world_size(), t.ranks.size()));
  }
  if (t.ranks[0].records.empty()) throw VacuousError("the reference recorded nothing");
  for (const Record& record : t.ranks[0].records) {
    if (!record.kept)
      throw VacuousError(fmt::format("the reference did not keep {}", describe(record.key)));
    if (!holds_whole(record)) {
      throw MeshError(fmt::format("the reference holds only a part of {} ({})",
                                  describe(record.key), describe(record.layout)));
    }
    (void)t.ranks[0].tensor(record);  // checks that its bytes are there
    if (!impl_->index.emplace(record.key, &record).second)
      throw MeshError(fmt::format("the reference recorded {} twice", describe(record.key)));
    // A loss has one element, so its own gradient says nothing of the logits.
    if (record.key.kind != RecordKind::kActivationGrad || numel_of(record.layout.global_shape) < 2)
      continue;
    const Record*& first = impl_->begins_of_backward[record.key.step];
    if (first == nullptr || record.order < first->order) first = &record;
  }
}

const Record* Reference::begin_of_backward(int step) const noexcept {
  if (impl_ == nullptr) return nullptr;
  const auto found = impl_->begins_of_backward.find(step);
  return found == impl_->begins_of_backward.end() ? nullptr : found->second;
}

const Trace& Reference::trace() const noexcept {
  static const Trace empty;
  return impl_ == nullptr ? empty : impl_->trace;
}

const Record* Reference::find(const RecordKey& key) const {
  if (impl_ == nullptr) return nullptr;
  const auto found = role_of(key) == NameRole::kRecomputed ? impl_->index.find(base_of(key))
                                                           : impl_->index.find(key);
  return found == impl_->index.end() ? nullptr : found->second;
}

HostTensor Reference::tensor(const RecordKey& key) const {
  const Record* record = find(key);
  if (record == nullptr) throw VacuousError(fmt::format("the reference has no {}", describe(key)));
  return impl_->trace.ranks[0].tensor(*record);
}

const std::byte* Reference::bytes(const Record& record) const {
  if (!has_bytes())
    throw VacuousError(
        fmt::format("the reference has let the bytes of {} go", describe(record.key)));
  return impl_->trace.ranks[0].arena->data() + record.offset;
}

void Reference::discard_bytes() {
  if (impl_ != nullptr) impl_->trace.ranks[0].arena = nullptr;
}

bool Reference::has_bytes() const noexcept {
  return impl_ != nullptr && impl_->trace.ranks[0].arena != nullptr;
}

namespace {

/// Gradients of parameters and activations that are not finite on some rank.
std::set<RecordKey> nonfinite_gradients(const Trace& run) {
  std::set<RecordKey> found;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (record.key.kind != RecordKind::kGrad && record.key.kind != RecordKind::kActivationGrad)
        continue;
      const Stats stats = stats_of(record);
      if (stats.nan_actual + stats.inf_actual > 0) found.insert(record.key);
    }
  }
  return found;
}

std::set<int> steps_with_gradients_in(const std::set<RecordKey>& nonfinite) {
  std::set<int> steps;
  for (const RecordKey& key : nonfinite) {
    if (key.kind == RecordKind::kGrad) steps.insert(key.step);
  }
  return steps;
}

/// The flag of a rank, by its bytes, or by what it says of them where they were not kept.
std::optional<double> flag_of(const RankTrace& rank, const Record& flag) {
  if (flag.kept) {
    const std::vector<double> numbers = numbers_of(rank.tensor(flag));
    return numbers.size() == 1 ? std::optional(numbers[0]) : std::nullopt;
  }
  const Stats stats = stats_of(flag);
  return stats.numel == 1 ? std::optional(std::sqrt(stats.sum_sq_actual)) : std::nullopt;
}

/// Whether all ranks of a run have the same flag, another one than `expected`, and gradients that
/// fit it: those of the steps in `nonfinite` are not finite.
bool differs_alike(const Record& flag, const std::vector<double>& expected, const Trace& run,
                   const std::set<int>& nonfinite) {
  std::set<double> seen;
  for (const RankTrace& rank : run.ranks) {
    const Record* const own = rank.find(flag.key);
    const std::optional<double> number = own == nullptr ? std::nullopt : flag_of(rank, *own);
    if (!number.has_value() || expected == std::vector<double>{*number}) return false;
    seen.insert(*number);
  }
  return seen.size() == 1 && (*seen.begin() != 0) == nonfinite.contains(flag.key.step);
}

}  // namespace

bool follows_parting(const RecordKey& key, int step) noexcept {
  return key.step > step || (key.step == step && stage_of(key) >= Stage::kGradNorm);
}

std::optional<int> Reference::parting_step(const Trace& run) const {
  if (impl_ == nullptr) return std::nullopt;
  std::set<int> steps;
  std::optional<std::set<int>> nonfinite;  // looked for once, and only where there are flags
  for (const Record& record : impl_->trace.ranks[0].records) {
    if (role_of(record.key) != NameRole::kFoundInf) continue;
    if (!nonfinite.has_value()) nonfinite = steps_with_gradients_in(nonfinite_gradients(run));
    if (differs_alike(record, numbers_of(tensor(record.key)), run, *nonfinite))
      steps.insert(record.key.step);
  }
  if (steps.empty()) return std::nullopt;
  return *steps.begin();
}

bool Reference::may_part(const Trace& run, int step) const {
  const RecordKey flag = scalar_key(step, NameRole::kFoundInf);
  const Response* const moved = response(flag);
  if (moved != nullptr && moved->absolute_norm > 0) return true;
  if (find(flag) == nullptr || numbers_of(tensor(flag)) != std::vector<double>{0}) return false;
  constexpr double kLargest = 65504, kPieces = 4;
  const double loss_scale = RunView(*this).first_element(step, NameRole::kLossScale).value_or(1);
  const std::set<RecordKey> overflowed = nonfinite_gradients(run);
  for (const Record& record : impl_->trace.ranks[0].records) {
    const RecordKey& key = record.key;
    if (key.step != step || record.dtype != Dtype::kFloat16 || !overflowed.contains(key)) continue;
    double factor = 0;
    for (const RankTrace& rank : run.ranks) {
      if (const Record* const own = rank.find(key); own != nullptr)
        factor = std::max(factor, std::fabs(own->grad_scale / record.grad_scale));
    }
    // What is stepped with was divided by the scale after it was looked at.
    if (key.kind == RecordKind::kGrad && role_of(key) != NameRole::kMicroBatch)
      factor *= loss_scale;
    const std::vector<double> numbers = numbers_of(tensor(key));
    if (std::any_of(numbers.begin(), numbers.end(), [&](double number) {
          return !(std::fabs(number) * factor < kLargest / kPieces);
        }))
      return true;
  }
  return false;
}

void Reference::add_response(const Trace& perturbed) {
  add_variant(perturbed);
  ++impl_->runs;
}

void Reference::add_variant(const Trace& perturbed) {
  if (impl_ == nullptr) throw VacuousError("responses of an empty reference");
  const std::optional<int> parting = parting_step(perturbed);
  for (const RankTrace& rank : perturbed.ranks) {
    for (const Record& record : rank.records) {
      if (!impl_->index.contains(record.key)) continue;
      const bool is_flag = record.key.step == parting && role_of(record.key) == NameRole::kFoundInf;
      if (parting.has_value() && !is_flag && follows_parting(record.key, *parting)) continue;
      const Stats stats = stats_of(record);
      Response& response = impl_->responses[record.key];
      // An infinite relative error (the reference is 0 and the perturbed run is not) is no licence
      // to differ: the absolute norm says how far such a tensor moves.
      const double relative = stats.relative_error();
      if (std::isfinite(relative))
        response.relative_error = std::max(response.relative_error, relative);
      if (std::isfinite(stats.scale()))
        response.scale_error = std::max(response.scale_error, std::fabs(stats.scale() - 1));
      response.absolute_norm = std::max(response.absolute_norm, std::sqrt(stats.sum_sq_diff));
      response.max_abs = std::max(response.max_abs, stats.max_abs);
      response.reference_norm =
          std::max(response.reference_norm, std::sqrt(stats.sum_sq_reference));
      response.reference_max_abs = std::max(response.reference_max_abs, stats.max_abs_reference);
      ++response.runs;
    }
  }
}

const Response* Reference::response(const RecordKey& key) const {
  if (impl_ == nullptr) return nullptr;
  const auto found = impl_->responses.find(key);
  return found == impl_->responses.end() ? nullptr : &found->second;
}

int Reference::response_runs() const noexcept {
  return impl_ == nullptr ? 0 : impl_->runs;
}

const std::map<RecordKey, Response>& Reference::responses() const noexcept {
  static const std::map<RecordKey, Response> none;
  return impl_ == nullptr ? none : impl_->responses;
}

void Reference::set_responses(std::map<RecordKey, Response> responses, int runs) {
  if (impl_ == nullptr) throw VacuousError("responses of an empty reference");
  impl_->responses = std::move(responses);
  impl_->runs = runs;
}

void Reference::add_redrawn(const Trace& run) {
  if (impl_ == nullptr) throw VacuousError("redrawn runs of an empty reference");
  const int number = impl_->redrawn.runs++;
  const std::optional<int> parting = parting_step(run);
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (!impl_->index.contains(record.key) || !is_floating(record.dtype) || record.unmasked >= 0)
        continue;
      if (parting.has_value() && follows_parting(record.key, *parting)) continue;
      const Stats s = stats_of(record);
      if (s.numel == 0 || s.nan_reference + s.inf_reference + s.nan_actual + s.inf_actual > 0)
        continue;
      impl_->redrawn.sums[record.key].push_back(
          {number, s.sum_sq_diff, s.dot - s.sum_sq_reference, s.sum_diff});
    }
  }
}

const Redrawn& Reference::redrawn() const noexcept {
  static const Redrawn none;
  return impl_ == nullptr ? none : impl_->redrawn;
}

void Reference::set_redrawn(Redrawn redrawn) {
  if (impl_ == nullptr) throw VacuousError("redrawn runs of an empty reference");
  impl_->redrawn = std::move(redrawn);
}

}  // namespace isoshard
