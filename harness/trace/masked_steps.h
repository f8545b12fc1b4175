// SPDX-License-Identifier: Apache-2.0
/// Parameters after the steps of an optimizer: which elements are compared with the reference, and
/// what is demanded of all others and of rows. docs/internals/tolerances.md ("Adam", "Rows")
/// derives it.
///
/// Words. An element is *compared* where the reference's gradient was above its response in every
/// step so far. A row is *untouched* where no token read it: its gradients and moments are exactly
/// 0, whatever the roundings. Every other element is *bounded*: its step has the sign of noise, but
/// no more than the size that the optimizer's rule gives it. Optimizers whose step is no sign
/// compare every element.
///
/// In 16 bits one row among many may be left out of a step and stay within the tolerance of its
/// tensor. An element is *sure* where the reference's gradient was above its response and of one
/// sign in every step so far: no rounding turns or stops its step. A row whose sure elements
/// together do not make their last step, or make it twice, is broken.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/trace/judge_policy.h"
#include "harness/trace/record.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// The largest |m_hat| / (sqrt(v_hat) + eps) that Adam's rule can give in exact arithmetic after
/// at most `updates` updates: 1 for the first. Infinite where the betas bound nothing.
[[nodiscard]] double largest_adam_ratio(double beta1, double beta2, int updates) noexcept;

/// |after - before| <= fixed + relative x |before| in each element.
struct StepLimit {
  double fixed = 0, relative = 0;
};

/// How far the steps up to that of `key` may have moved an element of a parameter from what the
/// reference began with. Learning rates and skipped steps are those that the reference recorded.
/// `dtype` is what the values are kept in. Infinite without a rule.
[[nodiscard]] StepLimit step_limit(const Reference& reference, const JudgePolicy& policy,
                                   const RecordKey& key, Dtype dtype);

/// The record of a parameter, or of its master, before the one that is given: after the step
/// before, or as read.
[[nodiscard]] RecordKey record_before(RecordKey key);

/// The record that stepped values had before their step: the parameter's own, or its master's. A
/// master is recorded after steps alone, so before the first one it has the parameter's values.
[[nodiscard]] RecordKey before_step(const RecordKey& key);

/// What is demanded of the elements of one record.
struct ElementClaims {
  /// One byte per element of the whole tensor: whether it is compared. Empty: all of them are.
  std::vector<std::uint8_t> compared;
  /// One byte per row (index of dim 0): whether it is untouched. Empty: none of them is.
  std::vector<std::uint8_t> untouched;
  /// One byte per element: whether the reference's last step moved it for sure. Empty: rows are not
  /// held to their steps.
  std::vector<std::uint8_t> moved;
};

/// The claims on the records of one run, made from what the reference holds. One object a run:
/// records come in the order of steps.
class MaskedSteps {
 public:
  /// Both must outlive the object.
  MaskedSteps(const Reference& reference, const JudgePolicy& policy)
      : reference_(&reference), policy_(&policy) {}

  /// Of a parameter after a step or its master. `own_max_abs`: of gradients, for a perturbed run,
  /// where there is no response. Nothing is left out if no gradient of the parameter is known, or
  /// if the policy has no mask.
  [[nodiscard]] ElementClaims of_parameter(const Record& record,
                                           const std::map<RecordKey, double>& own_max_abs);
  /// Of a gradient or a state of the optimizer: untouched rows are demanded, too.
  [[nodiscard]] ElementClaims of_state(const Record& record);

  /// Counts, in a packed part, the elements that break what is demanded of them: untouched ones
  /// must be the reference's (signed zeros are equal), bounded ones finite and within the limit,
  /// and sure ones of a row must make their last step together.
  void check(PartStats& part, const Record& record, const std::byte* packed_part,
             const ElementClaims& claims) const;

 private:
  [[nodiscard]] std::vector<std::uint8_t> surely_moved(const Record& record) const;
  void check_rows(PartStats& part, const Record& record, const std::byte* packed_part,
                  const ElementClaims& claims) const;
  [[nodiscard]] bool are_moved(const std::vector<std::uint8_t>& rows, const Record& record) const;

  struct Rows {
    int step = -1;                    ///< up to which the gradients have been looked at
    std::vector<std::uint8_t> zeros;  ///< by row: every gradient so far was 0
  };
  [[nodiscard]] std::vector<std::uint8_t> untouched_rows(const std::string& parameter,
                                                         const Record& record);
  void add_reads(int step);
  [[nodiscard]] bool has_moments(const std::string& parameter, int step, std::size_t row,
                                 std::int64_t row_size) const;

  const Reference* reference_;
  const JudgePolicy* policy_;
  std::map<std::string, Rows, std::less<>> rows_;
  int reads_up_to_ = -1;  ///< step
  std::vector<std::uint8_t> is_read_;
  std::int64_t positions_ = 0;
};

}  // namespace isoshard
