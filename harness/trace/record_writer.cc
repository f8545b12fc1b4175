// SPDX-License-Identifier: Apache-2.0
/// Recording: number the record, compare its parts with the reference where they lie, keep what a
/// finding may need.
#include "harness/trace/record_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <tuple>

#include "core/base/error.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/stage.h"
#include "harness/trace/wanted_record.h"

namespace isoshard {

namespace {

/// The record that a repetition is made of, as the reference has it: it repeats nothing.
std::optional<RecordKey> repeated_by(const RecordKey& key) {
  const NameRole role = role_of(key);
  if (role == NameRole::kReadAgain)
    return RecordKey{key.step - 1, RecordKind::kParam, base_of(key).name, key.step == 1 ? 1 : 0};
  return role == NameRole::kRecomputed ? std::optional(base_of(key)) : std::nullopt;
}

}  // namespace

struct RecordWriter::Impl {
  explicit Impl(RecordOptions given) : options(std::move(given)) {
    if (options.keep != Keep::kNothing && options.arena == nullptr && !options.decides_only)
      throw InfrastructureError("a recorder that keeps tensors needs an arena");
    trace.rank = options.rank;
    trace.arena = options.arena;
    is_masking =
        options.reference != nullptr &&
        masks_small_gradients(options.policy, options.reference->response_runs(), options.purpose);
    // rows are held to their steps with every optimizer
    const bool holds_rows = options.reference != nullptr && options.reference->has_bytes() &&
                            options.reference->response_runs() > 0 &&
                            options.purpose == RunPurpose::kJudged;
    if (is_masking || holds_rows) masked_steps.emplace(*options.reference, options.policy);
  }

  RecordOptions options;
  RankTrace trace;
  bool is_masking = false;
  std::optional<MaskedSteps> masked_steps;  ///< if is_masking, or where rows are held to steps
  int step = 0;
  bool is_skipped = false;  ///< the step, because gradients were not finite
  std::map<std::tuple<int, RecordKind, std::string>, int> calls;
  std::map<RecordKey, double> own_max_abs;  ///< of gradients, for a perturbed run

  /// The record that comes next, before anything is known of its values.
  Record next(const Site& site, Dtype dtype, const Shape& shape) const {
    Record record;
    const std::string name = to_string(
        RecordName{site.name, site.recomputed ? NameRole::kRecomputed : NameRole::kPlain});
    const auto before = calls.find({step, site.kind, name});
    record.key = {step, site.kind, name, before == calls.end() ? 0 : before->second};
    record.order = static_cast<std::int64_t>(trace.records.size());
    record.dtype = dtype;
    record.layout = site.layout;
    record.grad_scale = site.grad_scale;
    record.local_shape = shape;
    record.parts = parts_of(record, options.mesh, options.rank);
    return record;
  }

  std::optional<HostTensor> expected(const Site& site, Dtype dtype, const Shape& shape) const {
    if (options.reference == nullptr || !options.reference->has_bytes()) return std::nullopt;
    if (options.purpose == RunPurpose::kResponse) return std::nullopt;  // it has other weights
    const Record record = next(site, dtype, shape);
    if (is_partial(record.layout)) return std::nullopt;
    const std::optional<WantedRecord> wanted =
        wanted_of(*options.reference, repeated_by(record.key).value_or(record.key), options.policy);
    if (!wanted.has_value() || wanted->record.dtype != dtype ||
        wanted->record.layout.global_shape != record.layout.global_shape)
      return std::nullopt;
    const auto scratch = std::make_shared<std::vector<std::byte>>();
    const std::byte* const local =
        local_of(record, options.reference->bytes(wanted->record), *scratch);
    const auto bytes = static_cast<std::size_t>(numel_of(shape)) * size_of(dtype);
    return HostTensor{dtype, shape, {local, bytes}, scratch};
  }

  void write(const Site& site, const HostTensor& value) {
    Record& record = trace.records.emplace_back(next(site, value.dtype, value.shape));
    ++calls[{step, site.kind, record.key.name}];
    if (role_of(record.key) == NameRole::kFoundInf) is_skipped = is_nonzero(value);
    const bool is_compared = options.reference != nullptr && !is_own_repetition(record.key);
    std::optional<WantedRecord> wanted;
    if (is_compared) wanted = wanted_of(*options.reference, record.key, options.policy);
    if (wanted.has_value() && wanted->record.layout.global_shape != record.layout.global_shape)
      wanted.reset();
    const WantedRecord* reference = wanted.has_value() ? &*wanted : nullptr;
    measure(record, reference, value.bytes.data());
    if (role_of(record.key) == NameRole::kCollectives) count_wrong_calls(record, value);
    record.kept = should_keep(record, reference);
    if (record.kept && !options.decides_only) {
      record.bytes = static_cast<std::int64_t>(value.bytes.size());
      record.offset = options.replica_bytes == nullptr
                          ? options.arena->append(value.bytes)
                          : options.replica_bytes->append(*options.arena, record.key, value.bytes);
    }
  }

  /// Whether and where calls leave their table, as one part's unequal elements.
  void count_wrong_calls(Record& record, const HostTensor& value) {
    if (!options.policy.collectives || record.parts.empty()) return;
    const std::vector<ExpectedCall> expected =
        options.policy.collectives(options.rank, record.key.step, axis_of_collectives(record.key));
    const auto mismatch = first_mismatch(expected, calls_of(value.bytes), is_skipped);
    Stats& stats = record.parts.front().stats;
    stats = {};
    stats.numel = static_cast<std::int64_t>(expected.size());
    stats.unequal_values = mismatch.has_value() ? 1 : 0;
    stats.first_unequal = mismatch.has_value() ? static_cast<std::int64_t>(mismatch->index) : -1;
  }

  void measure(Record& record, const WantedRecord* reference, const std::byte* local) {
    const bool flat = is_flat(record.layout);
    const bool is_compared = reference != nullptr && !is_partial(record.layout);
    const ElementClaims claims =
        is_compared && masked_steps.has_value() ? claims_on(record) : ElementClaims();
    const std::vector<std::uint8_t>& selected = claims.compared;
    if (!selected.empty()) record.unmasked = 0;
    std::vector<std::byte> scratch;
    double max_abs = 0;
    for (PartStats& part : record.parts) {
      const std::int64_t numel = numel_of(part, flat);
      if (numel == 0) continue;
      const std::byte* bytes = packed(record, part, local, scratch);
      part.digest = digest_of_part(bytes, record.dtype, numel);
      if (!is_compared) continue;
      compare(part, record, reference->record, bytes, claims);
      if (!selected.empty()) record.unmasked += part.stats.numel;
      max_abs = std::max(max_abs, part.stats.max_abs);
    }
    if (is_compared && record.key.kind == RecordKind::kGrad &&
        role_of(record.key) != NameRole::kClipped)
      own_max_abs[record.key] = max_abs;
  }

  ElementClaims claims_on(const Record& record) {
    if (!stepped_parameter(record.key).empty())
      return masked_steps->of_parameter(record, own_max_abs);
    const bool is_state =
        record.key.kind == RecordKind::kGrad || record.key.kind == RecordKind::kOptimizer;
    const bool is_judged = options.purpose == RunPurpose::kJudged;
    return is_state && is_judged ? masked_steps->of_state(record) : ElementClaims();
  }

  void compare(PartStats& part, const Record& record, const Record& reference,
               const std::byte* bytes, const ElementClaims& claims) {
    const std::shared_ptr<ReplicaBytes>& copies = options.replica_bytes;
    if (copies != nullptr) {
      if (const std::optional<PartStats> known = copies->find(record.key, part)) {
        part = *known;
        return;
      }
    }
    compare_part(part, record, bytes, options.reference->bytes(reference), reference.dtype,
                 reference.grad_scale, claims.compared.empty() ? nullptr : claims.compared.data(),
                 options.comparer);
    // A perturbed run begins with other weights.
    if (masked_steps.has_value() && options.purpose == RunPurpose::kJudged)
      masked_steps->check(part, record, bytes, claims);
    if (copies != nullptr) copies->add(record.key, part);
  }

  /// Into how many distinct parts the whole tensor is cut, at most.
  double parts_of_whole(const Record& record) const {
    double parts = static_cast<double>(std::max<std::size_t>(record.parts.size(), 1));
    if (record.layout.explicit_parts) return parts * options.mesh.world_size();
    for (const Placement& placement : record.layout.placements) {
      if (placement.kind == Placement::Kind::kShard) parts *= options.mesh.degree(placement.axis);
    }
    return parts;
  }

  bool should_keep(const Record& record, const WantedRecord* reference) const {
    if (options.keep == Keep::kNothing) return false;
    const RecordKind kind = record.key.kind;
    if (options.keep == Keep::kEverything) return true;
    if (is_own_repetition(record.key)) return false;  // its digest says all that is asked
    if (kind == RecordKind::kScalar || kind == RecordKind::kDataId || kind == RecordKind::kMask ||
        reference == nullptr || is_partial(record.layout)) {
      return true;
    }
    const Response* const response = options.reference->response(reference->response_of);
    const bool any_difference = is_exact(stage_of(record.key)) || response == nullptr;
    PerturbedTolerance tolerance;
    if (!any_difference) {
      const std::int64_t numel =
          record.unmasked >= 0 ? record.unmasked : numel_of(record.layout.global_shape);
      tolerance = perturbed_tolerance(*response, options.policy.k, options.policy.coarsest, numel,
                                      response->reference_norm);
    }
    const double share = 1 / parts_of_whole(record);
    for (const PartStats& part : record.parts) {
      if (part.stats.nonfinite_mismatch != 0 || part.broken != 0) return true;
      if (part.stats.unequal_values == 0) continue;
      if (any_difference) return true;
      const double whole_sq = response->reference_norm * response->reference_norm;
      const double allowed = tolerance.insensitive
                                 ? tolerance.absolute
                                 : tolerance.relative_error * response->reference_norm;
      if (!(part.stats.sum_sq_diff <= allowed * allowed * share)) return true;
      if (!tolerance.insensitive && !(std::fabs(part.stats.dot - part.stats.sum_sq_reference) <=
                                      tolerance.scale_error * whole_sq * share))
        return true;
    }
    return false;
  }
};

std::int64_t ReplicaBytes::append(Arena& arena, const RecordKey& key,
                                  std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  std::vector<Place>& places = places_[key];
  for (const Place& place : places) {
    if (place.size == bytes.size() &&
        (bytes.empty() ||
         std::memcmp(arena.data() + place.offset, bytes.data(), bytes.size()) == 0))
      return place.offset;
  }
  const std::int64_t offset = arena.append(bytes);
  places.push_back({offset, bytes.size()});
  return offset;
}

std::optional<PartStats> ReplicaBytes::find(const RecordKey& key, const PartStats& part) const {
  const std::lock_guard lock(mutex_);
  const auto found = compared_.find(key);
  if (found == compared_.end()) return std::nullopt;
  for (const PartStats& other : found->second) {
    const bool same_place = other.box.global_offset == part.box.global_offset &&
                            other.box.size == part.box.size &&
                            other.range.global_begin == part.range.global_begin &&
                            other.range.count == part.range.count;
    if (!same_place || other.digest != part.digest) continue;
    PartStats known = other;
    known.box = part.box;  // where it lies in this rank's own tensor
    known.range = part.range;
    return known;
  }
  return std::nullopt;
}

void ReplicaBytes::add(const RecordKey& key, const PartStats& part) {
  const std::lock_guard lock(mutex_);
  compared_[key].push_back(part);
}

RecordWriter::RecordWriter(RecordOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
RecordWriter::~RecordWriter() = default;

void RecordWriter::begin_step(int step) {
  impl_->step = step;
  impl_->is_skipped = false;
}

void RecordWriter::write(const Site& site, const HostTensor& value) {
  impl_->write(site, value);
}

std::optional<HostTensor> RecordWriter::expected(const Site& site, Dtype dtype,
                                                 const Shape& shape) const {
  return impl_->expected(site, dtype, shape);
}

void RecordWriter::take(const Record& record) {
  Record& own = impl_->trace.records.emplace_back(record);
  own.key.call = impl_->calls[{own.key.step, own.key.kind, own.key.name}]++;
  own.order = static_cast<std::int64_t>(impl_->trace.records.size()) - 1;
}

bool RecordWriter::would_keep(const Record& record) const {
  std::optional<WantedRecord> wanted;
  if (impl_->options.reference != nullptr)
    wanted = wanted_of(*impl_->options.reference, record.key, impl_->options.policy);
  return impl_->should_keep(record, wanted.has_value() ? &*wanted : nullptr);
}

const Record& RecordWriter::last() const {
  return impl_->trace.records.back();
}

RankTrace RecordWriter::finish() {
  return std::move(impl_->trace);
}

}  // namespace isoshard
