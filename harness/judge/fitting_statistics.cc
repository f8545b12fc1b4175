// SPDX-License-Identifier: Apache-2.0
// The reference is compared with itself once more, cut and masked as the rank's tensor was: that
// gives every number of the statistics which does not depend on the run.
#include "harness/judge/fitting_statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "harness/trace/parts.h"
#include "harness/trace/record_writer.h"
#include "harness/trace/sampled.h"
#include "harness/trace/wanted_record.h"

namespace isoshard {
namespace {

/// Sums in fp64 of the same numbers in another order.
constexpr double kSummed = 1e-9;
constexpr double kCancelled = 1e-6;

bool is_near(double a, double b, double relative) {
  return std::fabs(a - b) <= relative * std::max(std::fabs(a), std::fabs(b));
}

/// What is wrong with the numbers alone; empty if nothing is.
std::string contradiction_of(const PartStats& part, std::int64_t numel, std::int64_t whole) {
  const Stats& s = part.stats;
  for (const std::int64_t count :
       {s.numel, s.unequal_bits, s.unequal_values, s.nan_reference, s.nan_actual, s.inf_reference,
        s.inf_actual, s.nonfinite_mismatch, part.untouched, part.broken}) {
    if (count < 0 || count > numel) return fmt::format("a count must be 0 to {}", numel);
  }
  for (const std::int64_t place : {s.first_unequal, s.worst, part.first_broken}) {
    if (place < -1 || place >= whole) return fmt::format("a place must be below {}", whole);
  }
  for (const double number : {s.max_abs, s.max_ulp, s.sum_sq_reference, s.sum_sq_actual,
                              s.sum_sq_diff, s.sum_abs_diff, s.max_abs_reference}) {
    if (!(number >= 0)) return "a norm must not be negative";
  }
  for (const double number : {s.max_abs, s.sum_sq_reference, s.sum_sq_actual, s.sum_sq_diff, s.dot,
                              s.sum_abs_diff, s.max_abs_reference, s.sum_diff}) {
    if (!std::isfinite(number)) return "sums must be finite";
  }
  const double expected = s.sum_sq_actual - 2 * s.dot + s.sum_sq_reference;
  if (std::fabs(expected - s.sum_sq_diff) >
      kCancelled * (s.sum_sq_actual + s.sum_sq_reference + std::fabs(s.dot)))
    return fmt::format(
        "the squared error must follow from norms and product, got {:.6g} for {:.6g}",
        s.sum_sq_diff, expected);
  const double most = 1 + kCancelled;
  if (s.max_abs * s.max_abs > s.sum_sq_diff * most ||
      s.sum_sq_diff > s.max_abs * s.max_abs * static_cast<double>(s.numel) * most ||
      std::fabs(s.sum_diff) > s.sum_abs_diff * most ||
      s.sum_abs_diff > s.max_abs * static_cast<double>(s.numel) * most)
    return "the largest error, the sum of errors and that of their squares must fit each other";
  const bool has_error = s.max_abs != 0 || s.nonfinite_mismatch != 0;
  if (s.unequal_values == 0 && (has_error || s.unequal_bits > numel))
    return "a tensor without a different value has an error";
  if (s.unequal_bits == 0 && s.unequal_values != 0) return "values differ, but no bits";
  if (numel == 0 &&
      (s.sum_sq_reference != 0 || s.sum_sq_actual != 0 || s.dot != 0 || s.max_abs_reference != 0))
    return "a part has no element, but a norm";
  if (s.nonfinite_mismatch == 0 &&
      (s.nan_reference != s.nan_actual || s.inf_reference != s.inf_actual))
    return "one side has more NaNs or infinities, but none is on one side only";
  return "";
}

/// Where an element of the local tensor lies in the whole; -1: in no part.
struct Found {
  std::size_t part = 0;
  std::int64_t global = -1;
};

Found place_of(const Record& record, std::int64_t position) {
  for (std::size_t p = 0; p < record.parts.size(); ++p) {
    const PartStats& part = record.parts[p];
    if (is_flat(record.layout)) {
      const std::int64_t inside = position - part.range.local_begin;
      if (inside >= 0 && inside < part.range.count) return {p, part.range.global_begin + inside};
      continue;
    }
    std::int64_t rest = position, global = 0, stride = 1;
    bool is_inside = true;
    for (std::size_t d = record.local_shape.size(); d-- > 0 && is_inside;) {
      const std::int64_t at = rest % record.local_shape[d] - part.box.local_offset[d];
      rest /= record.local_shape[d];
      is_inside = at >= 0 && at < part.box.size[d];
      global += (part.box.global_offset[d] + at) * stride;
      stride *= record.layout.global_shape[d];
    }
    if (is_inside) return {p, global};
  }
  return {};
}

class Checker {
 public:
  Checker(const SavedRun& judged, const Reference& reference, const JudgePolicy& policy)
      : judged_(judged), reference_(reference), policy_(policy) {}

  ComparedInRanks run() {
    for (const RankTrace& rank : judged_.bundle.trace.ranks) {
      RecordOptions options;
      options.mesh = judged_.bundle.trace.mesh;
      options.rank = rank.rank;
      options.reference = &reference_;
      options.keep = Keep::kWhatDiffers;
      options.decides_only = true;
      options.policy = policy_;
      RecordWriter writer(options);
      for (const Record& record : rank.records) {
        if (record.compared) check(rank.rank, record, writer);
      }
    }
    compared_.tensors = static_cast<std::int64_t>(keys_.size());
    return compared_;
  }

 private:
  [[noreturn]] void refuse(int rank, const Record& record, std::string_view what) const {
    judged_.refuse(RuleId::kStatisticsNotCredible,
                   {{"tensor", describe(record.key)}, {"rank", rank}, {"problem", what}});
  }

  void check(int rank, const Record& record, RecordWriter& writer) {
    const RecordKind kind = record.key.kind;
    if (kind == RecordKind::kScalar || kind == RecordKind::kDataId || kind == RecordKind::kMask ||
        is_partial(record.layout) || judged_.bundle.inferred.contains(record.key))
      refuse(rank, record, "its kind or layout needs the tensor itself");
    const auto wanted = wanted_of(reference_, record.key, policy_);
    if (!wanted.has_value() || wanted->record.layout.global_shape != record.layout.global_shape)
      refuse(rank, record, "the reference has no such tensor");
    const bool flat = is_flat(record.layout);
    std::int64_t covered = 0;
    const std::int64_t whole = numel_of(record.layout.global_shape);
    for (const PartStats& part : record.parts) {
      const std::int64_t numel = numel_of(part, flat);
      covered += numel;
      if (std::string problem = contradiction_of(part, numel, whole); !problem.empty())
        refuse(rank, record, problem);
    }
    if (covered != numel_of(record.local_shape))
      refuse(rank, record, "a tensor with padding must be kept");
    if (covered == 0) return;
    const auto sample = judged_.bundle.samples.find({rank, record.key});
    if (sample == judged_.bundle.samples.end()) refuse(rank, record, "it has no samples");
    check_against_reference(rank, record, *wanted, sample->second, writer);
    check_samples(rank, record, wanted->record, sample->second);
    keys_.insert(record.key);
    compared_.elements += covered;
    compared_.sampled += static_cast<std::int64_t>(sample->second.size() / size_of(record.dtype));
  }

  bool may_overwrite(const Record& record, const Record& wanted) const {
    return record.dtype == wanted.dtype && record.grad_scale == wanted.grad_scale;
  }

  /// The reference's elements where the rank has its own; those that were sampled are the rank's
  /// where that changes nothing but them.
  std::vector<std::byte> local_of(int rank, const Record& record, const Record& wanted,
                                  const std::vector<std::byte>& sample) const {
    const auto element = static_cast<std::int64_t>(size_of(wanted.dtype));
    std::vector<std::byte> local(static_cast<std::size_t>(numel_of(record.local_shape) * element));
    const std::byte* const from = reference_.bytes(wanted);
    Record inverse = record;  // local and global change places
    inverse.dtype = wanted.dtype;
    for (const PartStats& part : record.parts) {
      std::vector<std::byte> bytes(
          static_cast<std::size_t>(numel_of(part, is_flat(record.layout)) * element));
      for_each_run(part, record, [&](std::int64_t global, std::int64_t at, std::int64_t count) {
        std::copy_n(from + global * element, count * element, bytes.begin() + at * element);
      });
      PartStats swapped = part;
      swapped.box.global_offset = part.box.local_offset;
      swapped.range.global_begin = part.range.local_begin;
      inverse.layout.global_shape = record.local_shape;
      place_part(swapped, inverse, bytes.data(), local.data());
    }
    if (may_overwrite(record, wanted)) {
      const std::vector<std::int64_t> positions =
          sampled_positions(judged_.bundle.run, rank, record.key, numel_of(record.local_shape));
      for (std::size_t i = 0; i < positions.size(); ++i)
        std::copy_n(sample.begin() + static_cast<std::ptrdiff_t>(i) * element, element,
                    local.begin() + positions[i] * element);
    }
    return local;
  }

  void check_against_reference(int rank, const Record& record, const WantedRecord& wanted,
                               const std::vector<std::byte>& sample, RecordWriter& writer) {
    const std::vector<std::byte> local = local_of(rank, record, wanted.record, sample);
    writer.begin_step(record.key.step);
    Layout layout = record.layout;
    writer.write({record.key.kind, record.key.name, std::move(layout), wanted.record.grad_scale},
                 {wanted.record.dtype, record.local_shape, local});
    const Record& own = writer.last();
    if ((own.unmasked >= 0) != (record.unmasked >= 0) ||
        (own.unmasked >= 0 && own.unmasked != record.unmasked))
      refuse(rank, record, "a mask leaves out other elements");
    for (std::size_t i = 0; i < record.parts.size(); ++i)
      check_part(rank, record, wanted.record, record.parts[i], own.parts[i]);
    // Not held against the run: the judge says what it does not show.
    if (writer.would_keep(record)) ++compared_.let_go;
  }

  void check_part(int rank, const Record& record, const Record& wanted, const PartStats& said,
                  const PartStats& own) const {
    const Stats &s = said.stats, &o = own.stats;
    if (s.numel != o.numel || said.untouched != own.untouched)
      refuse(rank, record, fmt::format("{} elements must be compared, got {}", o.numel, s.numel));
    if (s.nan_reference != o.nan_reference || s.inf_reference != o.inf_reference)
      refuse(rank, record, "the reference has other NaNs or infinities");
    // An element that is not finite on one side adds nothing to norms; such a run fails anyway.
    if (s.nonfinite_mismatch == 0 && (!is_near(s.sum_sq_reference, o.sum_sq_reference, kSummed) ||
                                      s.max_abs_reference != o.max_abs_reference))
      refuse(rank, record,
             fmt::format("the reference has the squared norm {:.17g}, got {:.17g}",
                         o.sum_sq_reference, s.sum_sq_reference));
    const bool may_equal = may_overwrite(record, wanted);
    if (may_equal && (said.broken < own.broken || exceeds(o, s)))
      refuse(rank, record, "its samples differ by more than it says");
    if (may_equal && s.unequal_bits == 0 && record.unmasked < 0 && said.digest != own.digest)
      refuse(rank, record,
             "equal tensors have equal digests, got another one than the reference's");
  }

  /// Whether some elements differ by more than all are said to.
  static bool exceeds(const Stats& some, const Stats& all) {
    const double most = 1 + kSummed;
    return some.unequal_values > all.unequal_values ||
           some.nonfinite_mismatch > all.nonfinite_mismatch || some.max_abs > all.max_abs * most ||
           some.sum_sq_diff > all.sum_sq_diff * most;
  }

  /// Element by element, also where dtypes or factors differ. A mask leaves out some of them.
  void check_samples(int rank, const Record& record, const Record& wanted,
                     const std::vector<std::byte>& sample) const {
    if (record.unmasked >= 0) return;
    const std::vector<std::int64_t> positions =
        sampled_positions(judged_.bundle.run, rank, record.key, numel_of(record.local_shape));
    std::vector<Stats> found(record.parts.size());
    const std::byte* const reference = reference_.bytes(wanted);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const Found at = place_of(record, positions[i]);
      if (at.global < 0) continue;
      accumulate(found[at.part],
                 reference + at.global * static_cast<std::int64_t>(size_of(wanted.dtype)),
                 wanted.dtype, sample.data() + i * size_of(record.dtype), record.dtype, 1,
                 at.global, record.grad_scale / wanted.grad_scale);
    }
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (exceeds(found[i], record.parts[i].stats))
        refuse(rank, record, "its samples differ by more than it says");
    }
  }

  const SavedRun& judged_;
  const Reference& reference_;
  const JudgePolicy& policy_;
  ComparedInRanks compared_;
  std::set<RecordKey> keys_;
};

}  // namespace

bool has_statistics(const Trace& trace) noexcept {
  return std::ranges::any_of(trace.ranks, [](const RankTrace& rank) {
    return std::ranges::any_of(rank.records, &Record::compared);
  });
}

void require_compared_with(const SavedRun& trusted, const SavedRun& run) {
  if (!has_statistics(run.bundle.trace)) return;
  if (!run.bundle.compared_with.has_value()) run.refuse(RuleId::kComparedWithNothing);
  if (run.bundle.compared_with->digest != trusted.bundle.digest)
    run.refuse(RuleId::kComparedWithOther,
               {{"trusted", trusted.manifest.parent_path().string()},
                {"wanted", trusted.bundle.digest.substr(0, 12)},
                {"got", run.bundle.compared_with->digest.substr(0, 12)}});
}

ComparedInRanks require_fitting_statistics(const SavedRun& trusted, const SavedRun& judged,
                                           const Reference& reference, const JudgePolicy& policy) {
  if (!has_statistics(judged.bundle.trace)) return {};
  require_compared_with(trusted, judged);
  if (judged.bundle.compared_with->responses != trusted.bundle.responses_hash)
    judged.refuse(RuleId::kComparedWithOtherResponses);
  return Checker(judged, reference, policy).run();
}

std::string words_of(const ComparedInRanks& compared) {
  if (compared.tensors == 0) return "";
  return fmt::format("{} of them compared in the judged ranks, which kept {} of {} elements",
                     compared.tensors, compared.sampled, compared.elements);
}

std::string note_of(const ComparedInRanks& compared) {
  if (compared.tensors == 0) return "";
  std::string text = fmt::format(
      "{} tensors were compared in the judged ranks: their statistics fit the reference and the "
      "{:.2g} % of their elements that were kept; statistics that are wrong elsewhere would not be "
      "found",
      compared.tensors,
      100 * static_cast<double>(compared.sampled) / static_cast<double>(compared.elements));
  if (compared.let_go > 0)
    text += fmt::format(
        "; {} records moved by more than the reference does were not kept, so that "
        "their elements cannot be shown",
        compared.let_go);
  return text;
}

}  // namespace isoshard
