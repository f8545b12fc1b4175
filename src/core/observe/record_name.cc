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

constexpr std::array kSuffixes{Word{NameRole::kRecomputed, ".recomputed"},
                               Word{NameRole::kReadAgain, ".read"},
                               Word{NameRole::kClipped, ".clipped"},
                               Word{NameRole::kMicroBatch, ".micro_batch"},
                               Word{NameRole::kSummand, ".partial"},
                               Word{NameRole::kMaster, ".master"},
                               Word{NameRole::kHyperparameters, ".hyperparameters"}};

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

// The role is known to the compiler: names are parsed for each record again.
template <NameRole kRole>
RecordName without_suffix(std::string_view name) noexcept {
  constexpr std::string_view kSuffix = text_of(kSuffixes, kRole);
  if (!name.ends_with(kSuffix)) return {name};
  return {name.substr(0, name.size() - kSuffix.size()), kRole};
}

template <NameRole kRole>
RecordName without_prefix(std::string_view name) noexcept {
  constexpr std::string_view kPrefix = text_of(kPrefixes, kRole);
  if (!name.starts_with(kPrefix)) return {name};
  return {name.substr(kPrefix.size()), kRole};
}

RecordName of_optimizer(std::string_view name) noexcept {
  constexpr std::string_view kMasterSuffix = text_of(kSuffixes, NameRole::kMaster);
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {name, NameRole::kPlain, name};
  constexpr std::string_view kNumbersSuffix = text_of(kSuffixes, NameRole::kHyperparameters);
  const std::string_view suffix = name.substr(dot);
  const NameRole role = suffix == kMasterSuffix    ? NameRole::kMaster
                        : suffix == kNumbersSuffix ? NameRole::kHyperparameters
                                                   : NameRole::kState;
  return {name.substr(0, dot), role, name.substr(dot + 1)};
}

RecordName of_scalar(std::string_view name) noexcept {
  for (const Word& scalar : kScalars) {
    if (scalar.text == name) return {{}, scalar.role};
  }
  if (name.starts_with(text_of(kScalars, NameRole::kLoss))) return {name, NameRole::kOtherLoss};
  return without_prefix<NameRole::kCollectives>(name);
}

}  // namespace

RecordName parse_record_name(RecordKind kind, std::string_view name) noexcept {
  switch (kind) {
    case RecordKind::kParam:
      return without_suffix<NameRole::kReadAgain>(name);
    case RecordKind::kGrad: {
      const RecordName clipped = without_suffix<NameRole::kClipped>(name);
      return clipped.role == NameRole::kClipped ? clipped
                                                : without_suffix<NameRole::kMicroBatch>(name);
    }
    case RecordKind::kActivation: {
      const RecordName again = without_suffix<NameRole::kRecomputed>(name);
      return again.role == NameRole::kRecomputed ? again : without_suffix<NameRole::kSummand>(name);
    }
    case RecordKind::kActivationGrad:
      return without_suffix<NameRole::kSummand>(name);
    case RecordKind::kOptimizer:
      return of_optimizer(name);
    case RecordKind::kScalar:
      return of_scalar(name);
    case RecordKind::kDataId:
      return without_prefix<NameRole::kNext>(name);
    case RecordKind::kMask:
      return without_suffix<NameRole::kRecomputed>(name);
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
