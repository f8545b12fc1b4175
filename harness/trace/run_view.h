// SPDX-License-Identifier: Apache-2.0
/// The numbers of a run by what they are: of the reference, or of one rank.
#pragma once
#include <cstddef>
#include <optional>

#include "harness/stats/stats.h"
#include "harness/trace/numbers.h"
#include "harness/trace/reference.h"
#include "harness/trace/trace.h"

namespace isoshard {

/// Refers to the run. What a rank did not keep is as if it were not recorded.
class RunView {
 public:
  explicit RunView(const Reference& reference) noexcept : reference_(&reference) {}
  explicit RunView(const RankTrace& rank) noexcept : rank_(&rank) {}

  /// nullptr: not recorded.
  [[nodiscard]] const Record* find(const RecordKey& key) const {
    if (reference_ != nullptr) return reference_->find(key);
    const Record* const record = rank_->find(key);
    return record != nullptr && record->kept ? record : nullptr;
  }
  /// The record with these parts of a name; `name.state` selects the optimizer's state.
  [[nodiscard]] const Record* value(int step, RecordKind kind, const RecordName& name,
                                    int call = 0) const {
    return find({step, kind, to_string(name), call});
  }
  [[nodiscard]] const Record* scalar(int step, NameRole role) const {
    return find(scalar_key(step, role));
  }

  /// Nothing where the step has no record of it.   Errors   VacuousError unless it has one element.
  [[nodiscard]] std::optional<double> grad_norm(int step) const {
    return number(step, NameRole::kGradNorm);
  }
  [[nodiscard]] std::optional<double> learning_rate(int step) const {
    return number(step, NameRole::kLearningRate);
  }
  [[nodiscard]] std::optional<double> loss_scale(int step) const {
    return number(step, NameRole::kLossScale);
  }
  /// Whether any element of the flag is not 0.
  [[nodiscard]] std::optional<bool> found_inf(int step) const {
    const Record* const flag = scalar(step, NameRole::kFoundInf);
    return flag == nullptr ? std::nullopt : std::optional(is_nonzero(tensor(*flag)));
  }
  /// Whether the run says that it skipped the step, as its gradients were not finite.
  [[nodiscard]] bool is_skipped(int step) const { return found_inf(step).value_or(false); }

  /// The first element of a scalar, which may have more; nothing if it has none.
  [[nodiscard]] std::optional<double> first_element(int step, NameRole role) const {
    const Record* const record = scalar(step, role);
    if (record == nullptr || numel_of(record->layout.global_shape) < 1) return std::nullopt;
    const std::byte* const bytes =
        reference_ != nullptr ? reference_->bytes(*record) : rank_->tensor(*record).bytes.data();
    return value_at(bytes, record->dtype, 0);
  }

 private:
  [[nodiscard]] HostTensor tensor(const Record& record) const {
    return reference_ != nullptr ? reference_->tensor(record.key) : rank_->tensor(record);
  }
  [[nodiscard]] std::optional<double> number(int step, NameRole role) const {
    const Record* const record = scalar(step, role);
    return record == nullptr ? std::nullopt : std::optional(number_of(tensor(*record)));
  }

  const Reference* reference_ = nullptr;
  const RankTrace* rank_ = nullptr;
};

}  // namespace isoshard
