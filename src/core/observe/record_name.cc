// SPDX-License-Identifier: Apache-2.0
// The one table of suffixes and of scalars.
#include "core/observe/record_name.h"

#include <array>

namespace isoshard {
namespace {

struct Word {
  NameRole role;
  std::string_view text;
};

constexpr std::array kSuffixes{
    Word{NameRole::kRecomputed, ".recomputed"}, Word{NameRole::kReadAgain, ".read"},
    Word{NameRole::kClipped, ".clipped"},       Word{NameRole::kMicroBatch, ".micro_batch"},
    Word{NameRole::kSummand, ".partial"},       Word{NameRole::kMaster, ".master"}};

constexpr std::array kPrefixes{Word{NameRole::kNext, "next_"},
                               Word{NameRole::kCollectives, "collectives."}};

constexpr std::array kScalars{Word{NameRole::kLearningRate, "learning_rate"},
                              Word{NameRole::kLossScale, "loss_scale"},
                              Word{NameRole::kGradNorm, "grad_norm"},
                              Word{NameRole::kFoundInf, "found_inf"},
                              Word{NameRole::kOptimizerSteps, "optimizer_steps"},
                              Word{NameRole::kRngState, "rng_state"},
                              Word{NameRole::kLoss, "loss"},
                              Word{NameRole::kLossBackward, "loss_backward"},
                              Word{NameRole::kLossPerDpRank, "loss_per_dp_rank"}};

template <std::size_t kSize>
constexpr std::string_view text_of(const std::array<Word, kSize>& words, NameRole role) noexcept {
  for (const Word& word : words) {
    if (word.role == role) return word.text;
  }
  return {};
}

RecordName without_suffix(std::string_view name, NameRole role) noexcept {
  const std::string_view suffix = text_of(kSuffixes, role);
  if (!name.ends_with(suffix)) return {name};
  return {name.substr(0, name.size() - suffix.size()), role};
}

RecordName without_prefix(std::string_view name, NameRole role) noexcept {
  const std::string_view prefix = text_of(kPrefixes, role);
  if (!name.starts_with(prefix)) return {name};
  return {name.substr(prefix.size()), role};
}

RecordName of_optimizer(std::string_view name) noexcept {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {name, NameRole::kPlain, name};
  const bool is_master = name.substr(dot) == text_of(kSuffixes, NameRole::kMaster);
  return {name.substr(0, dot), is_master ? NameRole::kMaster : NameRole::kState,
          name.substr(dot + 1)};
}

RecordName of_scalar(std::string_view name) noexcept {
  for (const Word& scalar : kScalars) {
    if (scalar.text == name) return {{}, scalar.role};
  }
  if (name.starts_with(text_of(kScalars, NameRole::kLoss))) return {name, NameRole::kOtherLoss};
  return without_prefix(name, NameRole::kCollectives);
}

}  // namespace

RecordName parse_record_name(RecordKind kind, std::string_view name) noexcept {
  switch (kind) {
    case RecordKind::kParam:
      return without_suffix(name, NameRole::kReadAgain);
    case RecordKind::kGrad: {
      const RecordName clipped = without_suffix(name, NameRole::kClipped);
      return clipped.role == NameRole::kClipped ? clipped
                                                : without_suffix(name, NameRole::kMicroBatch);
    }
    case RecordKind::kActivation: {
      const RecordName again = without_suffix(name, NameRole::kRecomputed);
      return again.role == NameRole::kRecomputed ? again : without_suffix(name, NameRole::kSummand);
    }
    case RecordKind::kActivationGrad:
      return without_suffix(name, NameRole::kSummand);
    case RecordKind::kOptimizer:
      return of_optimizer(name);
    case RecordKind::kScalar:
      return of_scalar(name);
    case RecordKind::kDataId:
      return without_prefix(name, NameRole::kNext);
    case RecordKind::kMask:
      return without_suffix(name, NameRole::kRecomputed);
  }
  return {name};
}

std::string to_string(const RecordName& name) {
  if (name.role == NameRole::kState) {
    std::string text(name.base);
    return text.append(".").append(name.state);
  }
  std::string text(text_of(kPrefixes, name.role));
  return text.append(text_of(kScalars, name.role))
      .append(name.base)
      .append(text_of(kSuffixes, name.role));
}

}  // namespace isoshard
