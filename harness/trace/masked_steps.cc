// SPDX-License-Identifier: Apache-2.0
// Claims from the reference's gradients, moments and token ids; limits from Adam's rule.
#include "harness/trace/masked_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "harness/stats/stats.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
/// So many gradients are not all 0 by chance.
constexpr std::int64_t kTellingRow = 8;
constexpr std::string_view kIds = "input_ids";

bool is_skipped_step(const Reference& reference, int step) {
  return RunView(reference).first_element(step, NameRole::kFoundInf).value_or(0) != 0;
}

bool records_rates(const Reference& reference) {
  return std::ranges::any_of(reference.trace().ranks[0].records, [](const Record& record) {
    return role_of(record.key) == NameRole::kLearningRate;
  });
}

/// The parameter whose state a record holds: "w" of the state of w; of a gradient its own name.
std::string parameter_of(const RecordKey& key) {
  // What is 0 at the end of a step was 0 between its micro-batches. The converse is not so.
  const RecordName name = parsed(key);
  const bool is_of_base = name.role == NameRole::kMicroBatch || key.kind == RecordKind::kOptimizer;
  return is_of_base ? std::string(name.base) : key.name;
}

/// What the reference began with: the parameter as read, or, where it was resumed, the first
/// record of the same name.
const Record* before_of(const Reference& reference, const RecordKey& key) {
  const RecordKey read{0, RecordKind::kParam, std::string(stepped_parameter(key)), 0};
  if (const Record* record = reference.find(read)) return record;
  const Record* first = nullptr;
  for (int step = 0; step <= key.step && first == nullptr; ++step)
    first = reference.find({step, key.kind, key.name, 0});
  return first;
}

bool is_row_zero(const std::byte* bytes, Dtype dtype, std::int64_t first, std::int64_t count) {
  for (std::int64_t i = first; i < first + count; ++i) {
    if (value_at(bytes, dtype, i) != 0) return false;
  }
  return true;
}

}  // namespace

RecordKey record_before(RecordKey key) {
  if (key.call > 0) {
    --key.call;
  } else {
    --key.step;
    key.call = key.step == 0 && key.kind == RecordKind::kParam ? 1 : 0;
  }
  return key;
}

RecordKey before_step(const RecordKey& key) {
  if (key.kind == RecordKind::kParam) return record_before(key);
  if (key.step > 0) return {key.step - 1, key.kind, key.name, 0};
  return {0, RecordKind::kParam, std::string(stepped_parameter(key)), 0};
}

double largest_adam_ratio(double beta1, double beta2, int updates) noexcept {
  if (!(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1)) return kUnbounded;
  double largest = 1, sum = 0, power = 1;
  for (int t = 1; t <= updates; ++t) {
    sum += power;  // of q^j for j < t
    power *= beta2 > 0 ? beta1 * beta1 / beta2 : (beta1 > 0 ? kUnbounded : 0);
    const double ratio = (1 - beta1) / (1 - std::pow(beta1, t)) *
                         std::sqrt((1 - std::pow(beta2, t)) / (1 - beta2) * sum);
    largest = std::max(largest, ratio);
  }
  return largest;
}

StepLimit step_limit(const Reference& reference, const JudgePolicy& policy, const RecordKey& key,
                     Dtype dtype) {
  if (!policy.step_rule.has_value()) return {kUnbounded, 0};
  const StepRule& rule = *policy.step_rule;
  const bool has_rates = records_rates(reference);
  const std::string name(stepped_parameter(key));
  StepLimit limit;
  int updates = 0;
  for (int step = 0; step <= key.step; ++step) {
    const std::optional<double> recorded =
        RunView(reference).first_element(step, NameRole::kLearningRate);
    // a run that was resumed did not make the steps before
    if (has_rates && !recorded.has_value()) {
      ++updates;
      continue;
    }
    if (is_skipped_step(reference, step)) continue;
    const double rate = recorded.value_or(rule.learning_rate);
    ++updates;
    const Record* squares = RunView(reference).value(step, RecordKind::kOptimizer,
                                                     {name, NameRole::kState, "exp_avg_sq"});
    const Dtype state = squares == nullptr ? policy.coarsest : squares->dtype;
    // Eight roundings on the way of a step, two more of each moment in every update.
    const double rounded = 1 + 8 * (updates + 1) * unit_roundoff(state);
    // a square may lose half of the least positive number
    const double lost = std::sqrt(updates * least_positive(state) / 2 /
                                  std::max(1 - std::pow(rule.beta2, updates), 0x1p-50));
    const double underflow = lost == 0 ? 1 : 1 + lost / rule.eps;
    const double moved =
        rate * largest_adam_ratio(rule.beta1, rule.beta2, updates) * rounded * underflow;
    // Decay and step round the weight once each; the third is that of what was read.
    const double of_weight = rate * rule.weight_decay + 3 * unit_roundoff(dtype);
    limit.fixed += moved + of_weight * (limit.fixed + moved);
    limit.relative += of_weight * (1 + limit.relative);
  }
  return limit;
}

ElementClaims MaskedSteps::of_parameter(const Record& record,
                                        const std::map<RecordKey, double>& own_max_abs) {
  ElementClaims claims;
  const std::string parameter(stepped_parameter(record.key));
  claims.moved = surely_moved(record);
  if (!policy_->mask) {
    // decay may round in two ways where it is no factor
    claims.untouched = untouched_rows(parameter, record);
    if (are_moved(claims.untouched, record)) claims.untouched.clear();
    return claims;
  }
  const std::int64_t numel = numel_of(record.layout.global_shape);
  for (int s = 0; s <= record.key.step; ++s) {
    const RecordKey key{s, RecordKind::kGrad, parameter, 0};
    const Record* gradient = reference_->find(key);
    if (gradient == nullptr || gradient->layout.global_shape != record.layout.global_shape)
      continue;
    const Response* response = reference_->response(key);
    const auto own = own_max_abs.find(key);
    const double moves = response != nullptr        ? response->max_abs
                         : own != own_max_abs.end() ? own->second
                                                    : 0;
    const double threshold = responses_allowed(policy_->k, policy_->coarsest) *
                             gradient_margin(policy_->coarsest) * moves;
    if (claims.compared.empty()) claims.compared.assign(static_cast<std::size_t>(numel), 1);
    const std::byte* bytes = reference_->bytes(*gradient);
    for (std::int64_t i = 0; i < numel; ++i) {
      const bool above = std::fabs(value_at(bytes, gradient->dtype, i)) > threshold;
      if (!above) claims.compared[static_cast<std::size_t>(i)] = 0;
    }
  }
  if (claims.compared.empty()) return claims;
  // Where the reference ends in no number, or further away than the rule allows (its script clamps
  // weights after the step), the comparison must see it.
  const Record* const begin = reference_->find({0, RecordKind::kParam, parameter, 0});
  if (const Record* after = reference_->find(record.key)) {
    const bool has_limit = begin != nullptr &&
                           begin->layout.global_shape == record.layout.global_shape &&
                           after->layout.global_shape == record.layout.global_shape;
    const StepLimit limit = step_limit(*reference_, *policy_, record.key, after->dtype);
    const std::byte* bytes = reference_->bytes(*after);
    const std::byte* from = has_limit ? reference_->bytes(*begin) : nullptr;
    for (std::int64_t i = 0; i < numel; ++i) {
      std::uint8_t& compared = claims.compared[static_cast<std::size_t>(i)];
      const double value = value_at(bytes, after->dtype, i);
      if (compared != 0) continue;
      if (!std::isfinite(value)) compared = 1;
      if (!has_limit) continue;
      const double before = value_at(from, begin->dtype, i);
      if (std::fabs(value - before) > limit.fixed + limit.relative * std::fabs(before))
        compared = 1;
    }
  }
  claims.untouched = untouched_rows(parameter, record);
  return claims;
}

/// Whether the reference's steps moved rows in whose gradients there is nothing: by decay.
bool MaskedSteps::are_moved(const std::vector<std::uint8_t>& rows, const Record& record) const {
  const Record* const before = before_of(*reference_, record.key);
  const Record* const after = reference_->find(record.key);
  const Shape& shape = record.layout.global_shape;
  if (rows.empty() || before == nullptr || after == nullptr ||
      before->layout.global_shape != shape || after->layout.global_shape != shape)
    return true;
  const std::byte *const from = reference_->bytes(*before), *const to = reference_->bytes(*after);
  const std::int64_t row_size = numel_of(shape) / shape[0];
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const std::int64_t first = static_cast<std::int64_t>(row) * row_size;
    for (std::int64_t i = first; rows[row] != 0 && i < first + row_size; ++i) {
      if (value_at(from, before->dtype, i) != value_at(to, after->dtype, i)) return true;
    }
  }
  return false;
}

/// Of tables in 16 bits. A gradient that turned round may leave a moment near 0, whose sign is that
/// of roundings.
std::vector<std::uint8_t> MaskedSteps::surely_moved(const Record& record) const {
  const RecordKey& key = record.key;
  const Shape& shape = record.layout.global_shape;
  const Record* const before = reference_->find(before_step(key));
  const Record* const after = reference_->find(key);
  if (size_of(policy_->coarsest) != 2 || shape.size() != 2 || before == nullptr ||
      after == nullptr || before->layout.global_shape != shape ||
      after->layout.global_shape != shape)
    return {};
  const auto numel = static_cast<std::size_t>(numel_of(shape));
  enum : std::uint8_t { kNo, kUp, kDown };
  std::vector<std::uint8_t> moved(numel);
  const std::byte* const end_bytes = reference_->bytes(*after);
  const std::byte* const begin_bytes = reference_->bytes(*before);
  for (std::size_t i = 0; i < numel; ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const double end = value_at(end_bytes, after->dtype, at);
    const double begin = value_at(begin_bytes, before->dtype, at);
    moved[i] = end > begin ? kUp : end < begin ? kDown : kNo;
  }
  for (int step = 0; step <= key.step; ++step) {
    if (is_skipped_step(*reference_, step)) continue;
    const RecordKey gradient_key{step, RecordKind::kGrad, std::string(stepped_parameter(key)), 0};
    const Record* const gradient = reference_->find(gradient_key);
    const Response* const response = reference_->response(gradient_key);
    if (gradient == nullptr || response == nullptr || gradient->layout.global_shape != shape)
      return {};
    const double threshold = responses_allowed(policy_->k, policy_->coarsest) *
                             gradient_margin(policy_->coarsest) * response->max_abs;
    const std::byte* const bytes = reference_->bytes(*gradient);
    for (std::size_t i = 0; i < numel; ++i) {
      if (moved[i] == kNo) continue;
      const double g = value_at(bytes, gradient->dtype, static_cast<std::int64_t>(i));
      const bool is_sure =
          std::fabs(g) > threshold && std::isfinite(g) && (g > 0) == (moved[i] == kDown);
      if (!is_sure) moved[i] = kNo;
    }
  }
  return moved;
}

ElementClaims MaskedSteps::of_state(const Record& record) {
  return {
      .compared = {}, .untouched = untouched_rows(parameter_of(record.key), record), .moved = {}};
}

/// Marks what the tokens of the steps up to this one read.
void MaskedSteps::add_reads(int step) {
  for (; reads_up_to_ < step; ++reads_up_to_) {
    for (int call = 0;; ++call) {
      const Record* ids =
          reference_->find({reads_up_to_ + 1, RecordKind::kDataId, std::string(kIds), call});
      if (ids == nullptr || is_floating(ids->dtype)) break;  // floats are inputs without tokens
      const Shape& shape = ids->layout.global_shape;
      if (!shape.empty()) positions_ = std::max(positions_, shape.back());
      const std::byte* bytes = reference_->bytes(*ids);
      for (std::int64_t i = 0; i < numel_of(shape); ++i) {
        const double id = value_at(bytes, ids->dtype, i);
        if (!(id >= 0 && id < 0x1p31)) continue;
        const auto row = static_cast<std::size_t>(id);
        if (row >= is_read_.size()) is_read_.resize(row + 1, 0);
        is_read_[row] = 1;
      }
    }
  }
}

bool MaskedSteps::has_moments(const std::string& parameter, int step, std::size_t row,
                              std::int64_t row_size) const {
  for (const std::string_view state : {"exp_avg", "exp_avg_sq", "momentum_buffer"}) {
    const Record* moment =
        RunView(*reference_)
            .value(step, RecordKind::kOptimizer, {parameter, NameRole::kState, state});
    if (moment == nullptr) continue;
    const std::int64_t first = static_cast<std::int64_t>(row) * row_size;
    if (first + row_size > numel_of(moment->layout.global_shape) ||
        !is_row_zero(reference_->bytes(*moment), moment->dtype, first, row_size))
      return true;
  }
  return false;
}

std::vector<std::uint8_t> MaskedSteps::untouched_rows(const std::string& parameter,
                                                      const Record& record) {
  const Shape& shape = record.layout.global_shape;
  if (shape.size() < 2 || numel_of(shape) == 0) return {};
  const auto num_rows = static_cast<std::size_t>(shape[0]);
  const std::int64_t row_size = numel_of(shape) / shape[0];
  Rows& rows = rows_[parameter];
  if (rows.zeros.size() != num_rows || rows.step > record.key.step) rows = {};
  bool has_gradient = !rows.zeros.empty();
  for (int step = rows.step + 1; step <= record.key.step; ++step) {
    const Record* gradient = reference_->find({step, RecordKind::kGrad, parameter, 0});
    if (gradient == nullptr || gradient->layout.global_shape != shape) continue;
    if (!has_gradient) rows.zeros.assign(num_rows, 1);
    has_gradient = true;
    const std::byte* bytes = reference_->bytes(*gradient);
    for (std::size_t row = 0; row < num_rows; ++row) {
      const std::int64_t first = static_cast<std::int64_t>(row) * row_size;
      if (rows.zeros[row] != 0 && !is_row_zero(bytes, gradient->dtype, first, row_size))
        rows.zeros[row] = 0;
    }
  }
  rows.step = record.key.step;
  const auto touched = std::ranges::count(rows.zeros, std::uint8_t{0});
  if (!has_gradient || touched == 0 || touched == shape[0]) return {};

  // A row may be 0 by its rows' own values, too: a unit that relu switches off for every token
  // here, and not in another run. Of a table, tokens or positions alone say what is read.
  add_reads(record.key.step);
  const auto is_read = [&](std::size_t row) { return row < is_read_.size() && is_read_[row] != 0; };
  bool by_token = !is_read_.empty(), by_position = positions_ > 0;
  for (std::size_t row = 0; row < num_rows; ++row) {
    if (rows.zeros[row] != 0) continue;
    by_token = by_token && is_read(row);
    by_position = by_position && static_cast<std::int64_t>(row) < positions_;
  }
  const bool is_wide = size_of(policy_->coarsest) > 2;
  const bool knows_reads = !is_read_.empty();
  const bool shows_by_zeros = policy_->coarsest != Dtype::kFloat16 && row_size >= kTellingRow;
  std::vector<std::uint8_t> untouched(num_rows, 0);
  for (std::size_t row = 0; row < num_rows; ++row) {
    if (rows.zeros[row] == 0) continue;
    const bool unread = (by_token && !is_read(row)) ||
                        (by_position && static_cast<std::int64_t>(row) >= positions_);
    const bool is_zero = knows_reads ? shows_by_zeros && (by_token || by_position) : is_wide;
    if ((unread || is_zero) && !has_moments(parameter, record.key.step, row, row_size))
      untouched[row] = 1;
  }
  return untouched;
}

void MaskedSteps::check(PartStats& part, const Record& record, const std::byte* packed_part,
                        const ElementClaims& claims) const {
  part.untouched = part.broken = 0;
  part.first_broken = -1;
  const Record* wanted = reference_->find(record.key);
  if (wanted == nullptr) return;
  if (!claims.moved.empty()) check_rows(part, record, packed_part, claims);
  if (claims.compared.empty() && claims.untouched.empty()) return;
  const Record* before = claims.compared.empty() ? nullptr : before_of(*reference_, record.key);
  if (before != nullptr && before->layout.global_shape != record.layout.global_shape)
    before = nullptr;
  const Dtype coarser =
      before != nullptr && unit_roundoff(before->dtype) > unit_roundoff(record.dtype)
          ? before->dtype
          : record.dtype;
  const StepLimit limit = before == nullptr
                              ? StepLimit{kUnbounded, 0}
                              : step_limit(*reference_, *policy_, record.key, coarser);
  const std::byte *reference = reference_->bytes(*wanted),
                  *began = before == nullptr ? nullptr : reference_->bytes(*before);
  const double scale = record.grad_scale / wanted->grad_scale;
  const Shape& shape = record.layout.global_shape;
  const std::int64_t row_size =
      shape.empty() || shape[0] == 0 ? 1 : std::max<std::int64_t>(numel_of(shape) / shape[0], 1);
  const auto break_at = [&](std::int64_t i) {
    if (part.broken++ == 0 || i < part.first_broken) part.first_broken = i;
  };
  for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t i = position + k;
      const bool compared =
          !claims.compared.empty() && claims.compared[static_cast<std::size_t>(i)] != 0;
      const bool untouched = !claims.untouched.empty() &&
                             claims.untouched[static_cast<std::size_t>(i / row_size)] != 0;
      if (compared || (claims.compared.empty() && !untouched)) continue;
      const double value = value_at(packed_part, record.dtype, done + k) / scale;
      if (untouched) {
        if (policy_->mask) ++part.untouched;
        if (!(value == value_at(reference, wanted->dtype, i))) break_at(i);
        continue;
      }
      const double old = began == nullptr ? 0 : value_at(began, before->dtype, i);
      const bool fits = std::isfinite(value) &&
                        (limit.fixed == kUnbounded ||
                         std::fabs(value - old) <= limit.fixed + limit.relative * std::fabs(old));
      if (!fits) break_at(i);
    }
  });
}

void MaskedSteps::check_rows(PartStats& part, const Record& record, const std::byte* packed_part,
                             const ElementClaims& claims) const {
  constexpr std::int64_t kFewest = 8;
  constexpr double kShare = 0.9;
  // What is legal in the steps before adds up. They all went this way, as the elements are sure.
  constexpr double kMostBefore = 3;
  struct Row {
    double dot = 0, squares = 0;  ///< of difference x step, and of the step
    double fourth = 0;            ///< powers of the step
    double before = 0;            ///< of all steps before x step, in magnitude
    std::int64_t sure = 0, first = -1;
  };
  std::map<std::int64_t, Row> rows;
  const Record& wanted = *reference_->find(record.key);
  const std::byte* const reference = reference_->bytes(wanted);
  const double scale = record.grad_scale / wanted.grad_scale;
  const std::int64_t row_size = record.layout.global_shape[1];
  const Record* const begin = before_of(*reference_, record.key);
  const Record* const last = reference_->find(before_step(record.key));
  if (begin == nullptr || last == nullptr ||
      begin->layout.global_shape != record.layout.global_shape)
    return;
  const std::byte* const first_bytes = reference_->bytes(*begin);
  const std::byte* const last_bytes = reference_->bytes(*last);
  std::int64_t number = -1;
  Row* own = nullptr;  // of that number
  for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t i = position + k;
      if (claims.moved[static_cast<std::size_t>(i)] == 0) continue;
      if (const std::int64_t at = i / row_size; at != number) {
        number = at;
        own = &rows[number];
      }
      Row& row = *own;
      const double value = value_at(packed_part, record.dtype, done + k) / scale;
      const double right = value_at(reference, wanted.dtype, i);
      const double before = value_at(last_bytes, last->dtype, i);
      const double move = right - before;
      row.dot += (value - right) * move;
      row.squares += move * move;
      row.fourth += move * move * move * move;
      row.before += std::fabs((before - value_at(first_bytes, begin->dtype, i)) * move);
      if (row.sure++ == 0) row.first = i;
    }
  });
  for (const auto& [index, row] : rows) {
    // In 16 bits an element moves by its own ulp, and a large one may outweigh all others: as many
    // as so many of one size count.
    const bool are_enough =
        row.sure >= kFewest && row.squares * row.squares >= kFewest * row.fourth;
    if (!are_enough || std::fabs(row.dot) < kShare * row.squares ||
        row.before > kMostBefore * row.squares)
      continue;
    part.broken += row.sure;
    if (part.first_broken < 0 || row.first < part.first_broken) part.first_broken = row.first;
  }
}

}  // namespace isoshard
