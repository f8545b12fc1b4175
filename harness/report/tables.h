// SPDX-License-Identifier: Apache-2.0
/// Several runs of one model side by side: losses, norms per module, and how far runs are from the
/// reference and from each other.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "harness/verdict/verdict.h"

namespace isoshard {

/// "First elements" of a module are so many, as published dumps have them.
inline constexpr std::int64_t kListedElements = 100;

/// How the elements of one tensor differ from those of another.
struct Difference {
  std::int64_t numel = 0;  ///< compared; 0: nothing was
  double max_abs = 0;      ///< largest absolute difference
  double norm = 0;         ///< Frobenius norm of the other tensor
  double error_norm = 0;   ///< Frobenius norm of the difference

  [[nodiscard]] double relative() const noexcept;  ///< error_norm / norm; 0 if both are 0
  /// max_abs / norm. Over the first elements it is what seeds/000 publishes as relative difference
  /// (docs/internals/published.md).
  [[nodiscard]] double max_abs_by_norm() const noexcept;
};
[[nodiscard]] Difference difference_of(const Stats& stats);
/// Of the leading elements that both have.
[[nodiscard]] Difference difference_of(const std::vector<double>& other,
                                       const std::vector<double>& values);

struct ModuleDifference {
  Difference whole, first;  ///< over what was compared of the output; over its first elements
  /// Elements that the output has: more than whole.numel where only its first tokens were kept.
  std::int64_t whole_of = 0;
};

/// Norms of parameter gradients, parameter by parameter.
struct GradientComparison {
  std::int64_t parameters = 0;
  double max_abs = 0, mean_abs = 0;  ///< of the differences of norms
  /// Of difference / norm of the other; parameters whose norm is 0 in both count 0.
  double max_relative = 0;
  std::string max_abs_name, max_relative_name;
  double mean_relative = 0;
};
/// Over the parameters that both have.
[[nodiscard]] GradientComparison compare_gradient_norms(const std::map<std::string, double>& other,
                                                        const std::map<std::string, double>& norms);

/// Norms of what rank 0 alone holds, as tools see that look at one rank's tensors.
struct LocalNorms {
  std::map<std::string, double> outputs, output_gradients, parameter_gradients;
  /// Those of `parameter_gradients` of which rank 0 holds less than the whole.
  std::set<std::string> sharded;
};

/// How much of a run is that of an earlier one of equal degrees, bit by bit, on dp rank 0.
struct SameBits {
  std::string as;                               ///< title of the other run
  int outputs = 0, output_gradients = 0;        ///< equal ones
  int outputs_of = 0, output_gradients_of = 0;  ///< that both have
  std::vector<std::string> different;           ///< modules, each once
};

/// One run. Norms are those of dp rank 0's samples, shards put together.
struct TableColumn {
  std::string title;           ///< "autotp tp2 dp2"; "reference"
  std::string case_slug;       ///< empty for the reference
  std::vector<double> losses;  ///< by dp rank
  std::map<std::string, double> output_norms;
  /// Of module outputs' gradients, of dp rank 0's own loss.
  std::map<std::string, double> gradient_norms;
  std::map<std::string, double> parameter_gradient_norms;  ///< of the global batch
  std::map<std::string, ModuleDifference> from_reference;  ///< `whole`: over the global batch
  std::map<std::string, ModuleDifference> from_baseline;   ///< over dp rank 0's samples
  std::optional<GradientComparison> gradients_from_reference;
  /// Only if both have the same global batch.
  std::optional<GradientComparison> gradients_from_baseline;
  LocalNorms local;
  /// The norms of rank 0's parts of parameter gradients against the baseline's whole ones, of
  /// sharded parameters and of the others: how far off a tool is that takes one for the other. Only
  /// if both have the same global batch.
  std::optional<GradientComparison> local_from_baseline_sharded, local_from_baseline_whole;
  /// Of all bits that dp rank 0's tp group has of a module's output, and of its gradient.
  std::map<std::string, std::uint64_t> output_digests, gradient_digests;
  std::optional<SameBits> same_bits;
};

/// Compares digests of two runs.
[[nodiscard]] SameBits same_bits(const TableColumn& other, const TableColumn& column);

struct ComparisonTables {
  std::string title;  ///< of what all runs share: "qwen2_bf16"
  /// Title of the column that others are compared with; empty: of none.
  std::string baseline;
  std::vector<std::string> modules;  ///< in execution order
  std::vector<TableColumn> columns;
  bool shows_local = false;  ///< the text has LocalNorms, too

  [[nodiscard]] const TableColumn* find(std::string_view name) const noexcept;
};

/// Whether tables list a module: not norms inside layers, nor points inside attention, but what
/// enters and leaves a split.
[[nodiscard]] bool is_listed_module(std::string_view name);

}  // namespace isoshard
