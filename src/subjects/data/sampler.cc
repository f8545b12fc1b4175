// SPDX-License-Identifier: Apache-2.0
// Contiguous and epoch-wise splits of samples over dp.
#include "subjects/data/sampler.h"

#include <fmt/format.h>

#include <numeric>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/suggest.h"

namespace isoshard {
namespace {

constexpr TailPolicy kPolicies[] = {TailPolicy::kDrop, TailPolicy::kPad, TailPolicy::kError};

void check_sizes(int dp_degree, std::int64_t batch_size) {
  if (dp_degree >= 1 && batch_size >= 1) return;
  throw UsageError(fmt::format("the dp degree and the batch size must be at least 1, got {} and {}",
                               dp_degree, batch_size));
}

void check_request(std::int64_t global_batch, int dp_coordinate, int dp_degree) {
  if (global_batch >= 0 && dp_coordinate >= 0 && dp_coordinate < dp_degree) return;
  throw UsageError(fmt::format(
      "the global batch must be at least 0 and the dp coordinate from 0 to {}, got {} and {}",
      dp_degree - 1, global_batch, dp_coordinate));
}

}  // namespace

std::string_view name_of(TailPolicy policy) noexcept {
  switch (policy) {
    case TailPolicy::kDrop:
      return "drop";
    case TailPolicy::kPad:
      return "pad";
    case TailPolicy::kError:
      return "error";
  }
  return "unknown";
}

TailPolicy parse_tail_policy(std::string_view name) {
  std::vector<std::string> known;
  for (const TailPolicy policy : kPolicies) {
    if (name_of(policy) == name) return policy;
    known.emplace_back(name_of(policy));
  }
  throw UsageError(fmt::format("unknown tail policy '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

ContiguousSampler::ContiguousSampler(int dp_degree, std::int64_t batch_size)
    : dp_degree_(dp_degree), batch_size_(batch_size) {
  check_sizes(dp_degree, batch_size);
}

std::vector<std::int64_t> ContiguousSampler::samples(std::int64_t global_batch,
                                                     int dp_coordinate) const {
  check_request(global_batch, dp_coordinate, dp_degree_);
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(batch_size_));
  std::iota(numbers.begin(), numbers.end(),
            (global_batch * dp_degree_ + dp_coordinate) * batch_size_);
  return numbers;
}

EpochSampler::EpochSampler(const EpochSamplerSettings& settings)
    : settings_(settings), unit_(settings.dp_degree * settings.batch_size) {
  check_sizes(settings.dp_degree, settings.batch_size);
  const std::int64_t count = settings.num_samples;
  if (count < 1)
    throw UsageError(fmt::format("a data set must have at least 1 sample, got {}", count));
  const auto [epoch, position] = settings.start;
  if (epoch < 0 || position < 0 || position > count) {
    throw UsageError(
        fmt::format("the epoch must be at least 0 and the position from 0 to {}, got {} and {}",
                    count, epoch, position));
  }
  const std::string global_batch = fmt::format("a global batch of {} (dp {} x batch size {})",
                                               unit_, settings.dp_degree, settings.batch_size);
  if (settings.tail == TailPolicy::kDrop && count < unit_) {
    throw UsageError(
        fmt::format("{} samples do not fill {}, so tail policy drop leaves nothing; use tail "
                    "policy pad or fewer ranks",
                    count, global_batch));
  }
  for (const std::int64_t rest : {count, count - position}) {
    if (settings.tail != TailPolicy::kError || rest % unit_ == 0) continue;
    throw UsageError(fmt::format(
        "{} samples are not a multiple of {}: {} are left over; use tail policy drop or pad", rest,
        global_batch, rest % unit_));
  }
}

std::int64_t EpochSampler::batches_in(std::int64_t num_samples) const {
  return settings_.tail == TailPolicy::kPad ? (num_samples + unit_ - 1) / unit_
                                            : num_samples / unit_;
}

SamplerPosition EpochSampler::begin_of(std::int64_t global_batch) const {
  const auto [epoch, position] = settings_.start;
  const std::int64_t in_first = batches_in(settings_.num_samples - position);
  if (global_batch < in_first) return {epoch, position + global_batch * unit_};
  const std::int64_t per_epoch = batches_in(settings_.num_samples), later = global_batch - in_first;
  return {epoch + 1 + later / per_epoch, later % per_epoch * unit_};
}

SamplerPosition EpochSampler::position_after(std::int64_t global_batches) const {
  return begin_of(global_batches);
}

std::vector<std::int64_t> EpochSampler::samples(std::int64_t global_batch,
                                                int dp_coordinate) const {
  check_request(global_batch, dp_coordinate, settings_.dp_degree);
  const auto [epoch, position] = begin_of(global_batch);
  if (epoch != cached_epoch_) {
    cached_order_ = order_of(epoch);
    cached_epoch_ = epoch;
  }
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < settings_.batch_size; ++i) {
    // Beyond the last sample the order begins again: that is the padding.
    const std::int64_t place =
        (position + dp_coordinate * settings_.batch_size + i) % settings_.num_samples;
    numbers.push_back(cached_order_[static_cast<std::size_t>(place)]);
  }
  return numbers;
}

std::vector<std::int64_t> EpochSampler::order_of(std::int64_t epoch) const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(settings_.num_samples));
  std::iota(order.begin(), order.end(), 0);
  if (!settings_.shuffle) return order;
  // Fisher and Yates, from the end. The remainder of 64 random bits is uniform to within size /
  // 2^64.
  const RandomStream stream(settings_.seed, fmt::format("data.shuffle.{}", epoch));
  for (std::size_t last = order.size() - 1; last > 0; --last)
    std::swap(order[last], order[stream.bits(last) % (last + 1)]);
  return order;
}

}  // namespace isoshard
