// SPDX-License-Identifier: Apache-2.0
/// Values of another time: an earlier step's, or another micro-batch's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"

namespace isoshard::detail {
namespace {

constexpr int kStepsBehind = 4;

/// Whether every wrong rank holds the reference's value of `key`.
bool holds_value_of(const Evidence& e, const std::vector<const View*>& bad, const RecordKey& key) {
  const Record* other = e.reference.find(key);
  if (other == nullptr || other->layout.global_shape != e.wanted.layout.global_shape) return false;
  const Values whole = e.reference_value(key) / other->grad_scale;
  bool is_told = false;
  for (const View* view : bad) {
    const Values old = whole.cut(view->box.global_offset, view->box.size);
    if (!e.explains_each(old, *view)) return false;
    is_told = is_told || is_telling(old);
  }
  return is_told;
}

/// A single number fits by chance unless it is equal to far more digits than it is wrong in.
bool is_number_of(const Evidence& e, const View& bad, const RecordKey& key) {
  constexpr double kClearly = 1000;
  if (e.reference.find(key) == nullptr) return false;
  const double near = std::min(std::max(e.tolerance(), 1e-6), 1e-4);
  const double old = e.reference_value(key).item(), seen = bad.actual.item();
  if (old == 0) return false;
  return std::fabs(seen - old) <= near * std::fabs(old) &&
         std::fabs(seen - bad.expected.item()) >= kClearly * near * std::fabs(old);
}

Cause stale_by(const Evidence& e, int steps) {
  return make_cause(CauseId::kStaleBySteps, {{"steps", steps}, e.on_bad_ranks()});
}

Cause stale_number(const Evidence& e) {
  const View* bad = e.first_bad_view();
  const NameRole role = role_of(e.wanted.key);
  if (bad == nullptr || role == NameRole::kLearningRate || role == NameRole::kLossScale) return {};
  for (int back = 1; back <= std::min(e.wanted.key.step, kStepsBehind); ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (is_number_of(e, *bad, key)) return stale_by(e, back);
  }
  return {};
}

/// Each wrong call of an activation and the call whose value it has, if all wrong ones have one.
Cause of_micro_batch(const Evidence& e, const std::vector<const View*>& bad) {
  const int own = e.wanted.key.call, all = e.num_micro_batches();
  std::vector<int> others;
  for (int call = own - 1; call >= 0; --call) others.push_back(call);
  for (int call = own + 1; call < all; ++call) others.push_back(call);
  for (const int call : others) {
    RecordKey key = e.wanted.key;
    key.call = call;
    if (!holds_value_of(e, bad, key)) continue;
    NamedValues values = {{"micro_batch", own}, {"other", call}, e.on_bad_ranks()};
    if (call < own) values.push_back(NamedValue::words("before", phrase(PhraseId::kCameBefore)));
    return make_cause(CauseId::kValuesOfMicroBatch, std::move(values));
  }
  return {};
}

/// How often `old` is added to what a rank should hold; nothing if that explains too little.
std::optional<double> times_added(const Evidence& e, const Values& old, const View& view) {
  const double squares = dot(old, old);
  if (squares == 0 || !is_telling(old)) return std::nullopt;
  const double times = dot(view.actual - view.expected, old) / squares;
  return times > 0 && e.explains_each(view.expected + times * old, view) ? std::optional(times)
                                                                         : std::nullopt;
}

/// Where the mask of a sample stands in the reference.
struct MaskPlace {
  int step = 0, call = 0;
  std::int64_t sample = 0;
};

/// The masks of one site in all steps and micro-batches.
using MasksOfSite = std::vector<std::pair<RecordKey, Values>>;

MasksOfSite masks_of_site(const Evidence& e) {
  MasksOfSite masks;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind == RecordKind::kMask && record.key.name == e.wanted.key.name &&
        record.layout.global_shape == e.wanted.layout.global_shape)
      masks.emplace_back(record.key, e.reference_value(record.key));
  }
  return masks;
}

/// Of one sample, which a rank holds a part of: the only place in the reference that has this mask.
std::optional<MaskPlace> place_of_mask(const MasksOfSite& masks, const Values& mask, Shape offset,
                                       Shape size) {
  std::optional<MaskPlace> found;
  size[0] = 1;
  for (const auto& [key, values] : masks) {
    for (std::int64_t sample = 0; sample < values.size(0); ++sample) {
      offset[0] = sample;
      if (!equal(values.cut(offset, size), mask)) continue;
      if (found.has_value()) return std::nullopt;
      found = MaskPlace{key.step, key.call, sample};
    }
  }
  return found;
}

Cause masks_of_others(const Evidence& e, const std::map<std::int64_t, MaskPlace>& by_sample) {
  const MaskPlace& first = by_sample.begin()->second;
  std::set<std::int64_t> samples, others;
  bool is_one_pass = true, is_same_sample = true;
  for (const auto& [sample, place] : by_sample) {
    samples.insert(sample);
    others.insert(place.sample);
    is_one_pass = is_one_pass && place.step == first.step && place.call == first.call;
    is_same_sample = is_same_sample && place.sample == sample;
  }
  NamedValues values = {{"samples", samples},
                        {"micro_batch", e.wanted.key.call},
                        NamedValue::words("first_samples", some_of(samples)),
                        e.on_bad_ranks()};
  if (!is_one_pass) return make_cause(CauseId::kMasksOfMicroBatches, std::move(values));
  values.emplace_back("other", first.call);
  values.emplace_back("step", first.step);
  if (first.step != e.wanted.key.step)
    values.push_back(
        NamedValue::words("of_step", phrase(PhraseId::kOfStep, {{"step", first.step}})));
  if (is_same_sample) return make_cause(CauseId::kMasksOfMicroBatch, std::move(values));
  values.emplace_back("other_samples", others);
  values.push_back(NamedValue::words("first_others", some_of(others)));
  return make_cause(CauseId::kMasksOfSamples, std::move(values));
}

}  // namespace

Cause cause_not_cleared(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || stage_of(e.wanted.key) != Stage::kParameterGrad ||
      is_gradient_besides(e.wanted.key))
    return {};
  for (int back = 1; back <= std::min(e.wanted.key.step, kStepsBehind); ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    const Record* earlier = e.reference.find(key);
    if (earlier == nullptr || earlier->layout.global_shape != e.wanted.layout.global_shape)
      continue;
    const Values old = e.reference_value(key) / earlier->grad_scale;
    std::optional<double> common;
    const bool fits = std::ranges::all_of(bad, [&](const View* view) {
      const auto times = times_added(e, old.cut(view->box.global_offset, view->box.size), *view);
      if (!common.has_value()) common = times;
      return times.has_value() && is_near(*times, *common, 0.01);
    });
    if (!fits) continue;
    NamedValues values = {{"times", *common}, {"step", key.step}, e.on_bad_ranks()};
    if (!is_near(*common, 1, 1e-3))
      values.push_back(
          NamedValue::words("times_words", phrase(PhraseId::kTimesAdded, {{"times", *common}})));
    return make_cause(CauseId::kNotCleared, std::move(values));
  }
  return {};
}

Cause cause_other_masks(const Evidence& e) {
  constexpr std::int64_t kLeastElements = 64;  // fewer are alike by chance
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.whole.dim() < 2) return {};
  const MasksOfSite masks = masks_of_site(e);
  std::map<std::int64_t, MaskPlace> by_sample;
  for (const View* view : bad) {
    if (view->actual.numel() < kLeastElements * view->actual.size(0)) return {};
    for (std::int64_t i = 0; i < view->actual.size(0); ++i) {
      const Values mask = view->actual.narrow(0, i, 1);
      if (equal(mask, view->expected.narrow(0, i, 1))) continue;
      if (mask.min() == mask.max()) return {};
      const auto place = place_of_mask(masks, mask, view->box.global_offset, view->box.size);
      if (!place.has_value()) return {};
      by_sample[view->box.global_offset[0] + i] = *place;
    }
  }
  return by_sample.empty() ? Cause() : masks_of_others(e, by_sample);
}

Cause cause_stale(const Evidence& e) {
  if (e.wanted.layout.global_shape.empty() || e.whole.numel() == 1)
    return e.wanted.key.kind == RecordKind::kScalar ? stale_number(e) : Cause();
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || role_of(e.wanted.key) == NameRole::kMicroBatch) return {};
  const bool is_of_pass = e.wanted.key.kind == RecordKind::kActivation ||
                          e.wanted.key.kind == RecordKind::kActivationGrad;
  if (is_of_pass) {
    if (Cause cause = of_micro_batch(e, bad); !cause.empty()) return cause;
  }
  for (int back = 1; back <= std::min(e.wanted.key.step, kStepsBehind); ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (holds_value_of(e, bad, key)) return stale_by(e, back);
  }
  // the last micro-batch of the step before
  RecordKey key = e.wanted.key;
  --key.step;
  for (key.call = e.num_micro_batches() - 1; is_of_pass && key.step >= 0 && key.call > 0;
       --key.call) {
    if (key.call != e.wanted.key.call && holds_value_of(e, bad, key))
      return make_cause(CauseId::kMicroBatchOfStepBefore,
                        {{"micro_batch", key.call}, e.on_bad_ranks()});
  }
  return {};
}

}  // namespace isoshard::detail
