// SPDX-License-Identifier: Apache-2.0
/// Values of another time: an earlier step's, or another micro-batch's.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/trace/clipped.h"

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

std::string by_steps(int back) {
  return fmt::format("stale by {} step{}", back, back == 1 ? "" : "s");
}

std::string stale_number(const Evidence& e) {
  const View* bad = e.first_bad_view();
  if (bad == nullptr || e.wanted.key.name == "learning_rate") return "";
  for (int back = 1; back <= std::min(e.wanted.key.step, kStepsBehind); ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (is_number_of(e, *bad, key)) return by_steps(back) + e.on_bad_ranks();
  }
  return "";
}

/// Each wrong call of an activation and the call whose value it has, if all wrong ones have one.
std::string of_micro_batch(const Evidence& e, const std::vector<const View*>& bad) {
  const int own = e.wanted.key.call, all = e.num_micro_batches();
  std::vector<int> others;
  for (int call = own - 1; call >= 0; --call) others.push_back(call);
  for (int call = own + 1; call < all; ++call) others.push_back(call);
  for (const int call : others) {
    RecordKey key = e.wanted.key;
    key.call = call;
    if (!holds_value_of(e, bad, key)) continue;
    return fmt::format("micro-batch {} has the values of micro-batch {}{}{}", own, call,
                       call < own ? ", which came before: stale" : "", e.on_bad_ranks());
  }
  return "";
}

}  // namespace

std::string cause_stale(const Evidence& e) {
  if (e.wanted.layout.global_shape.empty() || e.whole.numel() == 1)
    return e.wanted.key.kind == RecordKind::kScalar ? stale_number(e) : "";
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || final_gradient_of(e.wanted.key).has_value()) return "";
  const bool is_of_pass = e.wanted.key.kind == RecordKind::kActivation ||
                          e.wanted.key.kind == RecordKind::kActivationGrad;
  if (is_of_pass) {
    if (std::string text = of_micro_batch(e, bad); !text.empty()) return text;
  }
  for (int back = 1; back <= std::min(e.wanted.key.step, kStepsBehind); ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (holds_value_of(e, bad, key)) return by_steps(back) + e.on_bad_ranks();
  }
  // the last micro-batch of the step before
  RecordKey key = e.wanted.key;
  --key.step;
  for (key.call = e.num_micro_batches() - 1; is_of_pass && key.step >= 0 && key.call > 0;
       --key.call) {
    if (key.call != e.wanted.key.call && holds_value_of(e, bad, key))
      return fmt::format("stale: the values of micro-batch {} of the step before{}", key.call,
                         e.on_bad_ranks());
  }
  return "";
}

}  // namespace isoshard::detail
