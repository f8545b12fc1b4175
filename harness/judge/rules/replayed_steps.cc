// SPDX-License-Identifier: Apache-2.0
#include "harness/judge/rules/replayed_steps.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "harness/causes/view/adam_rule.h"
#include "harness/causes/view/evidence.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

/// A step does about six operations on each element, and roundings of the moments count twice in
/// their quotient.
constexpr double kRoundings = 8;
/// A rule that the reference follows only nearly must not fail in a run that does the same.
constexpr double kShareOfReference = 0.5;
constexpr std::int64_t kMostElements = 1 << 22;  ///< of a tensor: each takes 40 bytes

/// What a step is made of, and what came of it; all of one box.
struct ReplayedStep {
  Box box;
  Values before, m, v, after;
  double of_value = 0, of_moments = 0;  ///< unit roundoffs of what is stepped, and of the moments
};

double roundoff_of(Dtype dtype) {
  return unit_roundoff(is_floating(dtype) ? dtype : Dtype::kFloat32);
}

/// The first element that the rule does not give, and how many there are.
struct WrongElements {
  std::int64_t count = 0, first = 0;
  double expected = 0;
};

/// `share`   of the bound that may be used
WrongElements wrong_elements(const ReplayedStep& step, const AdamRule& rule, double share) {
  WrongElements wrong;
  const double of_m = rule.correction1(), of_v = rule.correction2(), kept = rule.kept();
  // A power of a beta that is rounded to fp32 moves 1 less that power by as much.
  constexpr double kFloat = 0x1p-24;
  const double of_step = kRoundings * (step.of_moments + kFloat) + kFloat * (1 / of_m + 0.5 / of_v);
  const auto before = step.before.flat(), m = step.m.flat(), v = step.v.flat(),
             after = step.after.flat();
  for (std::size_t i = 0; i < after.size(); ++i) {
    const double moved = rule.rate / of_m * m[i] / (std::sqrt(v[i] / of_v) + rule.eps),
                 made = before[i] * kept - moved;
    const double noise =
        kRoundings * step.of_value * std::max(std::fabs(before[i]), std::fabs(made)) +
        of_step * std::fabs(moved);
    if (std::fabs(after[i] - made) <= share * noise) continue;
    if (wrong.count++ == 0) {
      wrong.first = static_cast<std::int64_t>(i);
      wrong.expected = made;
    }
  }
  return wrong;
}

class Replay {
 public:
  explicit Replay(const JudgedRun& run) : run_(run) {}

  std::vector<OrderedFinding> all() {
    for (const auto& [key, held] : run_.held) {
      if (!stepped_parameter(key).empty()) replay(key, held);
    }
    return std::move(findings_);
  }

 private:
  const Record* of_reference(const RecordKey& key, const Shape& shape) const {
    const Record* const record = run_.reference.find(key);
    return record != nullptr && record->layout.global_shape == shape ? record : nullptr;
  }

  static RecordKey state_key(const RecordKey& key, const char* state) {
    return {key.step, RecordKind::kOptimizer,
            to_string({stepped_parameter(key), NameRole::kState, state}), 0};
  }

  void replay(const RecordKey& key, const std::vector<Held>& held) {
    const Record* const wanted = run_.reference.find(key);
    if (wanted == nullptr || !run_.reference.has_bytes()) return;
    const bool is_kept = std::ranges::any_of(held, [](const Held& h) { return h.record->kept; });
    const Shape& shape = wanted->layout.global_shape;
    if (!is_kept || numel_of(shape) > kMostElements) return;
    const Record *const before = of_reference(before_step(key), shape),
                        *const m = of_reference(state_key(key, "exp_avg"), shape),
                        *const v = of_reference(state_key(key, "exp_avg_sq"), shape);
    if (before == nullptr || m == nullptr || v == nullptr || numel_of(shape) == 0) return;
    ReplayedStep whole;
    whole.box = {Shape(shape.size()), Shape(shape.size()), shape};
    const auto value = [&](const Record& record) {
      return Values(run_.reference.tensor(record.key)).reshape(shape).contiguous();
    };
    whole.before = value(*before);
    whole.m = value(*m);
    whole.v = value(*v);
    whole.after = value(*wanted);
    whole.of_value = std::max(roundoff_of(wanted->dtype), roundoff_of(before->dtype));
    whole.of_moments = std::max(roundoff_of(m->dtype), roundoff_of(v->dtype));
    for (const AdamRule& rule : adam_rules_of(run_.reference, run_.options, key)) {
      if (wrong_elements(whole, rule, kShareOfReference).count > 0) continue;
      judge(key, *wanted, held, whole, rule);
      return;
    }
  }

  void judge(const RecordKey& key, const Record& wanted, const std::vector<Held>& held,
             const ReplayedStep& whole, const AdamRule& rule) {
    Finding finding;
    for (const Held& h : held) {
      for (const auto& [box, after] : kept_boxes(*h.rank, *h.record, wanted.layout.global_shape)) {
        ReplayedStep own = whole;
        own.box = box;
        own.after = after.contiguous();
        own.of_value = std::max(own.of_value, roundoff_of(h.record->dtype));
        const bool is_known =
            take(*h.rank, before_step(key), box, own.before, own.of_value) &&
            take(*h.rank, state_key(key, "exp_avg"), box, own.m, own.of_moments) &&
            take(*h.rank, state_key(key, "exp_avg_sq"), box, own.v, own.of_moments);
        if (!is_known) continue;
        const WrongElements wrong = wrong_elements(own, rule, 1);
        if (wrong.count == 0) continue;
        if (finding.ranks.empty()) {
          finding =
              make_finding(key, FindingId::kStepNotOfRule, {},
                           {{"wrong", wrong.count},
                            {"elements", own.after.numel()},
                            {"rank", h.rank->rank},
                            {"index", index_of(box, wrong.first)},
                            {"actual", own.after.flat()[static_cast<std::size_t>(wrong.first)]},
                            {"expected", wrong.expected}});
        }
        if (finding.ranks.empty() || finding.ranks.back() != h.rank->rank)
          finding.ranks.push_back(h.rank->rank);
      }
    }
    if (finding.ranks.empty()) return;
    finding.confirmed = true;
    findings_.push_back({wanted.order, std::move(finding)});
  }

  /// What a rank has of a record in a box: its own bytes, or, if it kept none as they are the
  /// reference's, those. False if its boxes are other ones.
  bool take(const RankTrace& rank, const RecordKey& key, const Box& box, Values& whole_to_own,
            double& of_dtype) const {
    const Record* const record = rank.find(key);
    if (record == nullptr) return false;
    of_dtype = std::max(of_dtype, roundoff_of(record->dtype));
    if (!record->kept) {
      // a mask leaves elements out, and digests alone compare nothing
      const Stats stats = stats_of(*record);
      if (stats.unequal_values != 0 || stats.numel == 0 || record->unmasked >= 0) return false;
      whole_to_own = whole_to_own.cut(box.global_offset, box.size).contiguous();
      return true;
    }
    for (const auto& [own_box, values] :
         kept_boxes(rank, *record, run_.reference.find(key)->layout.global_shape)) {
      if (own_box.global_offset != box.global_offset || own_box.size != box.size) continue;
      whole_to_own = values.contiguous();
      return true;
    }
    return false;
  }

  const JudgedRun& run_;
  std::vector<OrderedFinding> findings_;
};

}  // namespace

std::vector<OrderedFinding> replay_steps(const JudgedRun& run) {
  return Replay(run).all();
}

}  // namespace isoshard::detail
