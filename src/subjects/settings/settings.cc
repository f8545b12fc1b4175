// SPDX-License-Identifier: Apache-2.0
// Names of the training settings.
#include "subjects/settings/settings.h"

#include <fmt/format.h>

#include <regex>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {

std::string_view name_of(LossMean mean) noexcept {
  switch (mean) {
    case LossMean::kGlobal:
      return "global";
    case LossMean::kLocal:
      return "local";
    case LossMean::kSum:
      return "sum";
    case LossMean::kMicroBatch:
      return "micro-batch";
  }
  return "unknown";
}

std::string_view name_of(GradAverage average) noexcept {
  switch (average) {
    case GradAverage::kInCollective:
      return "in-collective";
    case GradAverage::kMultiplyFirst:
      return "multiply-first";
    case GradAverage::kDivideFirst:
      return "divide-first";
    case GradAverage::kMultiplyLast:
      return "multiply-last";
    case GradAverage::kDivideLast:
      return "divide-last";
    case GradAverage::kDivideAround:
      return "divide-around";
  }
  return "unknown";
}

std::string_view name_of(ClipNorm norm) noexcept {
  return norm == ClipNorm::kTorch ? "torch" : "exact";
}

std::string_view name_of(ContextOrder order) noexcept {
  return order == ContextOrder::kHeadTail ? "head-tail" : "contiguous";
}

std::string_view name_of(ContextAttention attention) noexcept {
  return attention == ContextAttention::kRing ? "ring" : "all-gather";
}

namespace {

template <class Value, std::size_t kCount>
Value parsed(std::string_view what, std::string_view name, const Value (&values)[kCount]) {
  std::vector<std::string> known;
  for (const Value value : values) {
    if (name_of(value) == name) return value;
    known.emplace_back(name_of(value));
  }
  throw UsageError(fmt::format("unknown {} '{}'{}; it must be one of {}", what, name,
                               did_you_mean(name, known), join_names(known)));
}

}  // namespace

IsFrozen frozen_by(const std::string& pattern) {
  if (pattern.empty()) return [](std::string_view) { return false; };
  try {
    return [expression = std::regex(pattern)](std::string_view parameter) {
      return std::regex_match(parameter.begin(), parameter.end(), expression);
    };
  } catch (const std::regex_error& error) {
    throw UsageError(
        fmt::format("--freeze must be a regular expression for whole names of parameters, such as "
                    "'model\\.layers\\.0\\..*', got '{}': {}",
                    pattern, error.what()));
  }
}

LossMean parse_loss_mean(std::string_view name) {
  return parsed("loss mean", name,
                {LossMean::kGlobal, LossMean::kLocal, LossMean::kSum, LossMean::kMicroBatch});
}

GradAverage parse_grad_average(std::string_view name) {
  return parsed("average of gradients", name,
                {GradAverage::kInCollective, GradAverage::kMultiplyFirst, GradAverage::kDivideFirst,
                 GradAverage::kMultiplyLast, GradAverage::kDivideLast, GradAverage::kDivideAround});
}

ClipNorm parse_clip_norm(std::string_view name) {
  return parsed("clip norm", name, {ClipNorm::kExact, ClipNorm::kTorch});
}

ContextOrder parse_context_order(std::string_view name) {
  return parsed("context order", name, {ContextOrder::kHeadTail, ContextOrder::kContiguous});
}

ContextAttention parse_context_attention(std::string_view name) {
  return parsed("context attention", name, {ContextAttention::kAllGather, ContextAttention::kRing});
}

}  // namespace isoshard
