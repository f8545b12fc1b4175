// SPDX-License-Identifier: Apache-2.0
/// Collects the tables of several cases of one model and dtype while they are verified.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness/report/tables.h"
#include "suite/record/run_case.h"
#include "suite/verify/case_judgement.h"
#include "suite/verify/module_tap.h"

namespace isoshard {

/// Equal for cases that stand in one table: everything but subject, degrees and what only a subject
/// has.
[[nodiscard]] std::string table_group(const Case& item);

/// Groups after each other, in each the first subject `ddp` (others are compared with it) before
/// the others, and cases that share a reference still neighbors; only of a group with two
/// references that fit together the largest world comes last.
void order_for_tables(std::vector<Case>& cases);

/// The first case of a group is its baseline. Memory: of the baseline's outputs dp rank 0's
/// samples, of any module at most 320 MiB.
///
/// Requires   cases in the order of order_for_tables; per case add_plain (if a plain reference is
///            made), then observed and its run (once or more), then add.
class SideBySide {
 public:
  /// A plain reference was made for the case.
  void add_plain(const Case& item, const Reference& reference);
  /// Options to run the case with. `records` as for ModuleTap.
  [[nodiscard]] RunOptions observed(const Case& item, const Reference& records, RunOptions options);
  /// The case was judged.
  void add(const Case& item, const CaseJudgement& judgement);
  /// In the order of the cases; groups of which nothing was judged are left out.
  [[nodiscard]] std::vector<ComparisonTables> tables() const;

 private:
  struct Group {
    ComparisonTables tables;
    TableColumn reference;
    std::vector<std::string> modules;
    std::map<std::string, std::vector<double>> reference_first, baseline_first;
    int baseline_dp = 0;
    std::vector<std::pair<int, int>> degrees;  ///< tp and dp, by column
  };
  Group& group_of(const Case& item);

  std::vector<std::pair<std::string, Group>> groups_;
  std::shared_ptr<const ModuleTap> baseline_, current_;
  std::string baseline_group_;  ///< table_group of baseline_
};

}  // namespace isoshard
