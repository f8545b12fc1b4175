// SPDX-License-Identifier: Apache-2.0
// Names, words and the numbers of a case.
#include "suite/faults/injection.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

namespace isoshard {
namespace {

std::string_view plural_of(ParamClass param_class) {
  constexpr std::array<std::string_view, 10> kNames = {
      "activations",           "matrices",   "biases",
      "row-parallel biases",   "norms",      "norms of heads",
      "copied kv projections", "embeddings", "position embeddings",
      "tied weights"};
  return kNames.at(static_cast<std::size_t>(param_class));
}

std::string_view in_words(FaultLayers layers) {
  constexpr std::array<std::string_view, 5> kWords = {
      "", " in the last layer", " in layers", " outside of layers", " that come first in a layer"};
  return kWords.at(static_cast<std::size_t>(layers));
}

std::string_view in_words(FaultExtent extent) {
  constexpr std::array<std::string_view, 6> kWords = {
      "", "a quarter of ", "one element of ", "half of ", "the zeros of ", "the second third of "};
  return kWords.at(static_cast<std::size_t>(extent));
}

std::string in_words(const FaultRanks& ranks) {
  return ranks.are_others
             ? fmt::format(" on all {} ranks but {}", name_of(ranks.axis), ranks.coordinate)
             : fmt::format(" on {} rank {}", name_of(ranks.axis), ranks.coordinate);
}

/// " by tp": what follows the place.
std::string number_in_words(const Injection& injection) {
  switch (injection.change) {
    case FaultChange::kScale:
      return injection.factor == FaultFactor::kMagnitude
                 ? fmt::format(" by {:g}", 1 + injection.magnitude)
                 : fmt::format(" by {}", name_of(injection.factor));
    case FaultChange::kShift:
      return fmt::format(" by {:g} of their size", injection.magnitude);
    case FaultChange::kNoise:
      return fmt::format(" of {:g} of their size", injection.magnitude);
    case FaultChange::kRound:
      return injection.magnitude == 0
                 ? " to bf16"
                 : fmt::format(" to {:g} bits after the leading one", injection.magnitude);
    default:
      return "";
  }
}

std::string call_in_words(const Injection& injection) {
  const std::string call =
      fmt::format("{} over {}", name_of(injection.called.purpose), name_of(injection.called.axis));
  if (injection.change == FaultChange::kSkip) return call;
  return injection.side == FaultSide::kGiven ? "what is given to " + call
                                             : "what comes out of " + call;
}

std::string place_in_words(const Injection& injection) {
  switch (injection.point) {
    case FaultPoint::kForward:
      return injection.name.empty() ? "every activation" : "the activation";
    case FaultPoint::kBackward:
      return injection.name.empty() ? "the gradient of every activation"
                                    : "the gradient of the activation";
    case FaultPoint::kCollective:
      return call_in_words(injection);
    case FaultPoint::kUpdate:
      return "the step of the optimizer";
    case FaultPoint::kLoss:
      return "the loss that goes backward";
    case FaultPoint::kPositions:
    case FaultPoint::kSetting:
      break;
  }
  return "";
}

std::string_view verb_of(FaultChange change) {
  constexpr std::array<std::string_view, 10> kVerbs = {
      "multiplies", "shifts", "adds noise to", "zeroes", "rolls", "rounds", "skips", "", "", ""};
  return kVerbs.at(static_cast<std::size_t>(change));
}

}  // namespace

std::string_view name_of(FaultPoint point) noexcept {
  constexpr std::array<std::string_view, 7> kNames = {
      "forward", "backward", "collective", "update", "loss", "positions", "setting"};
  return kNames.at(static_cast<std::size_t>(point));
}

std::string_view name_of(FaultChange change) noexcept {
  constexpr std::array<std::string_view, 10> kNames = {"scale", "shift", "noise", "zero",    "roll",
                                                       "round", "skip",  "split", "restart", "set"};
  return kNames.at(static_cast<std::size_t>(change));
}

std::string_view name_of(FaultExtent extent) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"all",  "part",  "element",
                                                      "half", "zeros", "second third"};
  return kNames.at(static_cast<std::size_t>(extent));
}

std::string_view name_of(FaultFactor factor) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {
      "1 + magnitude", "tp", "1/tp", "cp", "micro-batches", "1/micro-batches"};
  return kNames.at(static_cast<std::size_t>(factor));
}

bool Injection::is_on(const MeshShape& mesh, int rank) const {
  return !ranks.has_value() ||
         (mesh.coordinate(rank, ranks->axis) == ranks->coordinate) != ranks->are_others;
}

std::string in_words(const Injection& injection) {
  std::string text;
  switch (injection.change) {
    case FaultChange::kSplit:
      text = fmt::format("computes the loss in {:g} runs of the sequence", injection.magnitude);
      break;
    case FaultChange::kRestart:
      text = "counts the positions of tokens from 0";
      break;
    case FaultChange::kSet:
      text = fmt::format("sets {} to {}", injection.name, injection.value);
      break;
    default:
      text = fmt::format("{} ", verb_of(injection.change));
      text += in_words(injection.extent);
      text += place_in_words(injection);
      std::vector<std::string_view> carried;
      for (const ParamClass one : injection.classes) carried.push_back(plural_of(one));
      if (!carried.empty()) text += fmt::format(" of {}", fmt::join(carried, " and "));
      if (!injection.name.empty()) text += fmt::format(" of {}", injection.name);
      text += in_words(injection.layers);
      text += number_in_words(injection);
  }
  if (injection.ranks.has_value()) text += in_words(*injection.ranks);
  if (injection.least_micro_batches > 1)
    text += fmt::format(", with at least {} micro-batches", injection.least_micro_batches);
  return text;
}

Injection with_numbers_of(const Case& item, Injection injection) {
  const auto factor = [&]() -> double {
    switch (injection.factor) {
      case FaultFactor::kMagnitude:
        return 1 + injection.magnitude;
      case FaultFactor::kTp:
        return item.degrees.tp;
      case FaultFactor::kOneOverTp:
        return 1.0 / item.degrees.tp;
      case FaultFactor::kCp:
        return item.degrees.cp;
      case FaultFactor::kMicroBatches:
        return item.micro_batches;
      case FaultFactor::kOneOverMicroBatches:
        return 1.0 / item.micro_batches;
    }
    return 1;
  };
  if (injection.factor != FaultFactor::kMagnitude) injection.magnitude = factor() - 1;
  injection.factor = FaultFactor::kMagnitude;
  return injection;
}

}  // namespace isoshard
