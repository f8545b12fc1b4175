// SPDX-License-Identifier: Apache-2.0
/// Looks at the modules that tables list while ranks run: norms, first elements, and how far they
/// are from another run's outputs.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/report/tables.h"
#include "harness/run/sink_chain.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// What was seen of one module on dp rank 0, over its whole tp group, in the first forward and
/// backward.
struct ModuleNumbers {
  std::string name;
  std::int64_t numel = 0;  ///< of the output on dp rank 0
  double output_norm = 0;
  /// Of the output's gradient, its declared scale divided out; below 0: none was seen.
  double gradient_norm = -1;
  /// The same of what rank 0 alone holds.
  double local_output_norm = 0, local_gradient_norm = -1;
  std::vector<double> first;  ///< first elements of the output
  /// Of all bits and places of the output, and of its gradient.
  std::uint64_t output_digest = 0, gradient_digest = 0;
  Stats from_baseline;  ///< against the baseline's output; numel 0: not compared
};

/// Shared memory that ranks of dp coordinate 0 write into. Outputs of a baseline are kept there, of
/// any module at most its first tokens in 320 MiB; of other runs nothing but numbers is kept.
///
/// Requires   made before the ranks fork, and read after they have ended.
class ModuleTap {
 public:
  /// `records`, a trusted run of the case, says which modules there are and how large. `baseline`
  /// may be null; with `keeps` this run is one for others.
  ModuleTap(const Case& item, const Reference& records, std::shared_ptr<const ModuleTap> baseline,
            bool keeps);
  ~ModuleTap();
  ModuleTap(const ModuleTap&) = delete;
  ModuleTap& operator=(const ModuleTap&) = delete;

  /// Empty for ranks that it does not look at.
  /// Ranks   local; the tap must outlive the rank.
  [[nodiscard]] TapObserver on_rank(int rank) const;
  /// In execution order.
  [[nodiscard]] std::vector<ModuleNumbers> numbers() const;
  /// Norms of what rank 0 holds of each parameter's gradient, its declared scale divided out.
  struct LocalGradients {
    std::map<std::string, double> norms;
    std::set<std::string> sharded;  ///< of which it holds less than the whole
  };
  [[nodiscard]] LocalGradients local_gradients() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// The same of a single process that holds the global batch: its rows of dp rank 0.
[[nodiscard]] std::vector<ModuleNumbers> module_numbers(const Case& item,
                                                        const Reference& reference);

}  // namespace isoshard
