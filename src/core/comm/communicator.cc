// SPDX-License-Identifier: Apache-2.0
/// Work's life and the names of reductions.
#include "core/comm/communicator.h"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {

std::string name_of(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

std::string_view name_of(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::kSum:
      return "sum";
    case Reduction::kAvg:
      return "avg";
    case Reduction::kMin:
      return "min";
    case Reduction::kMax:
      return "max";
  }
  return "unknown";
}

std::string_view name_of(ReductionOrder order) noexcept {
  switch (order) {
    case ReductionOrder::kOrdered:
      return "ordered";
    case ReductionOrder::kRing:
      return "ring";
    case ReductionOrder::kTree:
      return "tree";
    case ReductionOrder::kNative:
      return "native";
  }
  return "unknown";
}

ReductionOrder parse_reduction_order(std::string_view name) {
  std::vector<std::string> known;
  for (const ReductionOrder order : std::array{ReductionOrder::kOrdered, ReductionOrder::kRing,
                                               ReductionOrder::kTree, ReductionOrder::kNative}) {
    if (name == name_of(order)) return order;
    known.emplace_back(name_of(order));
  }
  throw UsageError(fmt::format("unknown reduction order '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

Work Communicator::all_to_all(ConstBuffer input, Buffer output, const CallInfo& info) {
  if (input.count % size() != 0) {
    throw ShapeError(fmt::format(
        "all_to_all: the number of elements must be a multiple of the group size {}, got {}",
        size(), input.count));
  }
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), input.count / size());
  return all_to_all(input, counts, output, counts, info);
}

namespace {

// A destructor cannot throw. The failure is not lost: the world is aborted, so the next call of
// this rank throws it.
void finish_quietly(std::function<void()>& complete) noexcept {
  if (!complete) return;
  try {
    std::exchange(complete, nullptr)();
  } catch (...) {
  }
}

}  // namespace

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    finish_quietly(complete_);
    complete_ = std::exchange(other.complete_, nullptr);
  }
  return *this;
}

Work::~Work() {
  finish_quietly(complete_);
}

void Work::wait() {
  if (!complete_) return;
  try {
    std::exchange(complete_, nullptr)();
  } catch (...) {
    complete_ = [failure = std::current_exception()] { std::rethrow_exception(failure); };
    throw;
  }
}

}  // namespace isoshard
