// SPDX-License-Identifier: Apache-2.0
// Causes of findings, and counts over the verdict's tensors.
#include "harness/judge/first_cause.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/causes/diagnosis.h"
#include "harness/ids/phrase.h"
#include "harness/trace/stage.h"
#include "harness/trace/wanted_record.h"

namespace isoshard::detail {
namespace {

/// For how many tensors the cause is the same, and of how many.
struct Shared {
  int same = 0, of = 0;
};

Shared count_same(const Verdict& verdict, const Causes& causes, const RecordKey& key,
                  const Cause& cause) {
  Shared shared;
  for (const TensorComparison& tensor : verdict.tensors) {
    if (tensor.key.step != key.step || tensor.key.kind != key.kind || tensor.key.call != key.call ||
        role_of(tensor.key) == NameRole::kMicroBatch ||
        (role_of(tensor.key) == NameRole::kClipped) != (role_of(key) == NameRole::kClipped))
      continue;
    ++shared.of;
    const auto found = causes.find(tensor.key);
    if (found != causes.end() && found->second == cause) ++shared.same;
  }
  return shared;
}

/// "q_proj.weight", "k_proj.weight": of which parameters the step has the cause, if they are of few
/// kinds; empty if they are of more.
std::vector<std::string> kinds_with(const Verdict& verdict, const Causes& causes,
                                    const RecordKey& key, const Cause& cause) {
  constexpr std::size_t kMost = 3;
  std::vector<std::string> kinds;
  for (const TensorComparison& tensor : verdict.tensors) {
    const RecordKey& other = tensor.key;
    const auto found = causes.find(other);
    if (other.step != key.step || other.kind != key.kind || other.call != key.call ||
        found == causes.end() || found->second != cause)
      continue;
    const std::size_t last = other.name.rfind('.');
    const std::size_t before = last == std::string::npos || last == 0
                                   ? std::string::npos
                                   : other.name.rfind('.', last - 1);
    const std::string kind =
        before == std::string::npos ? other.name : other.name.substr(before + 1);
    if (std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
  }
  return kinds.size() > kMost ? std::vector<std::string>() : kinds;
}

std::string_view point_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

/// Of the records of this step and call whose names end alike: one for each layer.
Shared count_same_point(const Verdict& verdict, const Causes& causes, const RecordKey& key,
                        const Cause& cause) {
  Shared shared;
  for (const TensorComparison& tensor : verdict.tensors) {
    const RecordKey& other = tensor.key;
    if (other.step != key.step || other.kind != key.kind || other.call != key.call ||
        point_of(other.name) != point_of(key.name))
      continue;
    ++shared.of;
    const auto found = causes.find(other);
    if (found != causes.end() && found->second == cause) ++shared.same;
  }
  return shared;
}

/// Of the masks that were drawn again in this step and call.
Shared count_recomputed(const Verdict& verdict, const Causes& causes, const RecordKey& key,
                        const Cause& cause) {
  Shared shared;
  for (const TensorComparison& tensor : verdict.tensors) {
    if (tensor.key.step != key.step || tensor.key.call != key.call ||
        role_of(tensor.key) != NameRole::kRecomputed)
      continue;
    ++shared.of;
    const auto found = causes.find(tensor.key);
    if (found != causes.end() && found->second == cause) ++shared.same;
  }
  return shared;
}

bool has_wrong_gradients(const Verdict& verdict, int step) {
  return std::any_of(
      verdict.tensors.begin(), verdict.tensors.end(), [&](const TensorComparison& tensor) {
        return tensor.key.step == step &&
               (tensor.stage == Stage::kActivationGrad || tensor.stage == Stage::kParameterGrad) &&
               !tensor.within;
      });
}

/// "exact", "right"; empty where something of the step's forward pass is wrong, or nothing is
/// known of it.
std::string_view state_of_forward(const Verdict& verdict, int step) {
  bool any = false, exact = true;
  for (const TensorComparison& tensor : verdict.tensors) {
    if (tensor.key.step != step || tensor.stage != Stage::kForward) continue;
    any = true;
    if (!tensor.within) return "";
    exact = exact && tensor.stats.unequal_values == 0;
  }
  return !any ? "" : exact ? "exact" : "right";
}

/// What is known of the step's forward pass, and of its gradients where they are asked for: values
/// of the cause, and words behind it.
void tell_other_passes(const Verdict& verdict, bool with_gradients, Finding& first) {
  const int step = first.key.step;
  if (const std::string_view forward = state_of_forward(verdict, step); !forward.empty()) {
    first.cause.values.emplace_back("forward", forward);
    first.forward_words =
        phrase(forward == "exact" ? PhraseId::kForwardExact : PhraseId::kForwardRight);
  }
  if (with_gradients && has_wrong_gradients(verdict, step)) {
    first.cause.values.emplace_back("gradients", "wrong");
    first.forward_words += phrase(PhraseId::kGradientsWrong);
  }
}

void tell_shared(const Shared& shared, std::vector<std::string> kinds, Finding& first) {
  first.cause.values.emplace_back("same", shared.same);
  first.cause.values.emplace_back("same_of", shared.of);
  if (!kinds.empty()) first.cause.values.emplace_back("same_kinds", std::move(kinds));
}

/// The cause of a finding, as one of the tensor `of`, which its values name where it is another
/// one.
void explain(Finding& finding, const RecordKey& of, Cause cause) {
  finding.diagnosis =
      phrase(PhraseId::kCauseOf, {{"tensor", subject_of(of)}, {"cause", cause.text}});
  finding.cause = std::move(cause);
  if (of != finding.key) finding.cause.values.emplace_back("of", describe(of));
}

/// Whether a cause says how wrong values look, and nothing of what makes them so.
bool only_describes(CauseId cause) {
  constexpr std::array kDescriptions = {
      CauseId::kNumberOff,       CauseId::kNumbersOff,      CauseId::kCopiesDifferOverAxes,
      CauseId::kEitherCopyWrong, CauseId::kOneElementWrong, CauseId::kPartWrong};
  return std::ranges::find(kDescriptions, cause) != kDescriptions.end();
}

/// Whether a wrong tensor of a stage makes later ones of it wrong: their patterns say nothing.
bool is_computed_in_turn(Stage stage) {
  return stage == Stage::kForward || stage == Stage::kActivationGrad;
}

/// Whether a finding may say why `first` was made: it has its stage. A norm that is missing is
/// explained by the gradients that were clipped by it, too.
bool may_explain(const Finding& other, const Finding& first) {
  const bool is_missing_norm = first.diagnosis.empty() && first.stage == Stage::kGradNorm;
  return other.stage == first.stage || (is_missing_norm && other.stage == Stage::kClippedGrad);
}

/// Whether all findings of the step and stage that have a cause have the same one as `one`.
bool is_cause_of_all(const std::vector<Finding>& findings, const Finding& one) {
  return std::ranges::all_of(findings, [&](const Finding& other) {
    return other.key.step != one.key.step || other.stage != one.stage ||
           other.diagnosis.empty() || other.cause.id == one.cause.id;
  });
}

/// Where no pattern fits the first finding, or it is one number that is off, another finding of its
/// step may say why: one of its stage, or of what was made of it.
void borrow_cause(std::vector<Finding>& findings) {
  Finding& first = findings.front();
  const bool is_number =
      first.cause.id == CauseId::kNumberOff || first.cause.id == CauseId::kNumbersOff;
  if ((!first.diagnosis.empty() && !is_number) || is_computed_in_turn(first.stage)) return;
  for (const Finding& other : findings) {
    if (other.key.step != first.key.step || !may_explain(other, first)) return;
    if (other.diagnosis.empty() || other.key == first.key || only_describes(other.cause.id))
      continue;
    if (other.stage != first.stage && !is_cause_of_all(findings, other)) return;
    first.cause = other.cause;
    first.cause.values.emplace_back("of", describe(other.key));
    first.diagnosis = phrase(PhraseId::kOfAnotherTensor, {{"diagnosis", other.diagnosis}});
    return;
  }
}

class Diagnosis {
 public:
  Diagnosis(std::vector<OrderedFinding>& findings, const JudgedRun& run)
      : findings_(findings), run_(run) {}

  /// Small tensors before large ones, which are searched for what small ones have shown.
  Causes run() {
    std::vector<OrderedFinding*> small, large;
    std::size_t later = 0;
    for (OrderedFinding& ordered : findings_) {
      const Finding& first = findings_.front().finding;
      const bool with_first =
          ordered.finding.key.step == first.key.step && ordered.finding.stage == first.stage;
      if (ordered.result == nullptr) name_unwanted(ordered.finding);
      // the final gradient says more than one between micro-batches
      if (ordered.result == nullptr || role_of(ordered.finding.key) == NameRole::kMicroBatch)
        continue;
      const bool is_large = is_large_tensor(ordered.finding.key);
      if (!with_first && (is_large || later++ >= kMaxDiagnosedLater)) continue;
      (is_large ? large : small).push_back(&ordered);
    }
    for (OrderedFinding* ordered : small) diagnose_one(*ordered);
    for (OrderedFinding* ordered : large) diagnose_one(*ordered);
    diagnose_between_micro_batches();
    return std::move(causes_);
  }

 private:
  static constexpr std::size_t kMaxDiagnosedLater = 400;

  bool is_large_tensor(const RecordKey& key) const {
    const Record* record = run_.reference.find(key);
    return record != nullptr && numel_of(record->layout.global_shape) > kLargeTensor;
  }

  /// Of what was not compared, as the reference has no such record.
  void name_unwanted(Finding& finding) const {
    if (run_.reference.find(finding.key) != nullptr) return;
    if (Cause cause = cause_of_unwanted(run_.reference, finding.key); !cause.empty())
      explain(finding, finding.key, std::move(cause));
  }

  void diagnose_one(OrderedFinding& ordered) {
    const RecordKey& key = ordered.finding.key;
    Cause cause = role_of(key) == NameRole::kRecomputed
                      ? make_cause(CauseId::kRecomputedMaskDiffers)
                      : cause_of(ordered);
    if (cause.empty()) return;
    causes_[key] = cause;
    explain(ordered.finding, key, std::move(cause));
  }

  Cause cause_of(const OrderedFinding& ordered) {
    const RecordKey& key = ordered.finding.key;
    return diagnose(run_.reference, wanted_of(run_.reference, key, run_.options)->record,
                    run_.actual, run_.held.at(key), *ordered.result, run_.options, fitting_);
  }

  void diagnose_between_micro_batches() {
    if (findings_.empty()) return;
    Finding& first = findings_.front().finding;
    const RecordKey final = final_of(first.key);
    const auto tensor_of = [&](const RecordKey& key) {
      return std::ranges::find(run_.tensors, key, &TensorComparison::key);
    };
    if (final == first.key || tensor_of(first.key) == run_.tensors.end()) return;
    const auto cause = causes_.find(final);
    if (cause != causes_.end()) {
      explain(first, final, cause->second);
      return;
    }
    if (findings_.front().result != nullptr) {
      if (Cause own = cause_of(findings_.front()); !own.empty())
        explain(first, final, std::move(own));
    }
    const auto tensor = tensor_of(final);
    if (tensor == run_.tensors.end() || !tensor->within) return;
    Cause between = make_cause(CauseId::kRightAtEndOfStep, {{"micro_batch", first.key.call}});
    if (first.cause.empty())
      explain(first, final, std::move(between));
    else
      first.diagnosis += phrase(PhraseId::kFurther, {{"words", between.text}});
  }

  std::vector<OrderedFinding>& findings_;
  const JudgedRun& run_;
  FittingPatterns fitting_;
  Causes causes_;
};

}  // namespace

Causes diagnose_findings(std::vector<OrderedFinding>& findings, const JudgedRun& run) {
  return Diagnosis(findings, run).run();
}

void summarise_first(Verdict& verdict, const Causes& causes) {
  if (verdict.findings.empty()) return;
  borrow_cause(verdict.findings);
  if (verdict.findings.front().diagnosis.empty()) return;
  Finding& first = verdict.findings.front();
  const RecordKey diagnosed = final_of(first.key);
  const auto found = causes.find(diagnosed);
  const Cause cause = found == causes.end() ? Cause() : found->second;
  const auto add_shared = [&](const Shared& shared, const std::vector<std::string>& kinds) {
    tell_shared(shared, kinds, first);
    first.diagnosis += words_of_shared(first.cause.values);
  };
  if (first.stage == Stage::kParameterGrad || first.stage == Stage::kParameterAfterStep ||
      first.stage == Stage::kReplicaDrift || first.stage == Stage::kClippedGrad) {
    const Shared shared = count_same(verdict, causes, diagnosed, cause);
    if (shared.same == shared.of && shared.of > 1) {
      tell_shared(shared, {}, first);
      const PhraseId all = first.stage == Stage::kParameterGrad ? PhraseId::kOfAllGradients
                           : first.stage == Stage::kClippedGrad ? PhraseId::kOfAllClippedGradients
                                                                : PhraseId::kOfAllParameters;
      first.diagnosis = phrase(all, {{"cause", cause.text}});
    } else if (shared.same > 1) {
      add_shared(shared, kinds_with(verdict, causes, diagnosed, cause));
    }
  }
  if (first.stage == Stage::kMasks && role_of(first.key) != NameRole::kRecomputed) {
    first.cause.values.emplace_back("point", point_of(first.key.name));
    tell_shared(count_same_point(verdict, causes, first.key, cause), {}, first);
    first.diagnosis += phrase(PhraseId::kOfPoints, first.cause.values);
  }
  if (role_of(first.key) == NameRole::kRecomputed) {
    // where values are recorded again, and no mask is, there is nothing to count
    const Shared shared = count_recomputed(verdict, causes, first.key, cause);
    if (shared.of > 0) add_shared(shared, {});
    tell_other_passes(verdict, /*with_gradients=*/true, first);
  } else if (first.stage > Stage::kForward) {
    tell_other_passes(verdict, /*with_gradients=*/false, first);
  }
  first.diagnosis += first.forward_words;
}

std::string words_of_shared(const NamedValues& values) {
  if (find_value(values, "same") == nullptr) return "";
  NamedValues all = values;
  if (find_value(values, "same_kinds") != nullptr)
    all.push_back(NamedValue::words("kinds", phrase(PhraseId::kSameKinds, values)));
  return phrase(PhraseId::kTheSameFor, all);
}

void stop_at_wrong_data(Verdict& verdict) {
  std::set<std::string> lacking(verdict.missing.begin(), verdict.missing.end());
  lacking.insert(verdict.extra.begin(), verdict.extra.end());
  const auto first = std::ranges::find_if(verdict.findings, [&](const Finding& finding) {
    return finding.stage == Stage::kDataIds && !lacking.contains(describe(finding.key));
  });
  if (first == verdict.findings.end()) return;
  const int step = first->key.step;
  const auto follows = [&](const auto& part) {
    return std::tuple(part.key.step, part.stage) > std::tuple(step, Stage::kDataIds);
  };
  std::erase_if(verdict.findings, follows);
  std::set<std::string> found;
  for (const Finding& finding : verdict.findings) found.insert(describe(finding.key));
  const auto is_gone = [&](const std::string& name) { return !found.contains(name); };
  std::erase_if(verdict.missing, is_gone);
  std::erase_if(verdict.extra, is_gone);
  const std::size_t following = std::erase_if(verdict.tensors, follows);
  verdict.compared = std::ranges::count_if(
      verdict.tensors, [](const TensorComparison& tensor) { return tensor.stats.numel > 0; });
  if (following > 0)
    verdict.notes.push_back(fmt::format(
        "the data of step {} differ, so {} tensors that follow from them are not judged", step,
        following));
}

}  // namespace isoshard::detail
