// SPDX-License-Identifier: Apache-2.0
/// Cases and judging options that the suites of emulated references share.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "conformance/subjects/registry.h"
#include "conformance/subjects/step_test.h"
#include "fixtures/reference/emulated_reference.h"

namespace isoshard {

/// No tolerance for anything.
inline JudgeOptions exact_options(const Case& item) {
  JudgeOptions options = judge_options(item);
  options.level = Level::kExact;
  return options;
}

/// The tiny model with 4 heads, which tp 4 divides.
inline Case four_head_case(int dp, int tp, Dtype dtype = Dtype::kFloat32) {
  Case item = step_case("autotp", dp, tp, dtype);
  item.model_name = "tiny4h";
  item.config.num_heads = item.config.num_kv_heads = 4;
  item.config.head_dim = item.config.hidden_size / 4;
  return item;
}

/// Where two runs of one mesh first differ in a bit, rank by rank and record by record, in words; empty if nowhere.
/// Nothing is put together first: copies, summands of partial sums and signed zeros count.
inline std::string first_difference(const Trace& emulated, const Trace& actual) {
  if (emulated.ranks.size() != actual.ranks.size()) {
    return std::to_string(emulated.ranks.size()) + " and " + std::to_string(actual.ranks.size()) + " ranks";
  }
  for (std::size_t r = 0; r < actual.ranks.size(); ++r) {
    const std::vector<Record>&ours = emulated.ranks[r].records, &theirs = actual.ranks[r].records;
    const std::string on_rank = " on rank " + std::to_string(r);
    for (std::size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
      if (i >= ours.size() || i >= theirs.size())
        return describe((i < ours.size() ? ours : theirs)[i].key) + " is in one run only" + on_rank;
      if (ours[i].key != theirs[i].key) return describe(ours[i].key) + " stands where " + describe(theirs[i].key) + " stands" + on_rank;
      const std::vector<PartStats>&a = ours[i].parts, &b = theirs[i].parts;
      bool equal = ours[i].dtype == theirs[i].dtype && ours[i].layout.global_shape == theirs[i].layout.global_shape &&
                   ours[i].grad_scale == theirs[i].grad_scale && a.size() == b.size();
      for (std::size_t k = 0; equal && k < a.size(); ++k) equal = a[k].box == b[k].box && a[k].digest == b[k].digest;
      if (!equal) return describe(ours[i].key) + " differs" + on_rank;
    }
  }
  return "";
}

/// The same case on four and more heads of 8, with fewer kv heads than tp ranks where `kv_heads` < tp.
inline Case copied_heads_case(int dp, int tp, std::int64_t heads, std::int64_t kv_heads, Dtype dtype = Dtype::kFloat32) {
  return with_heads(step_case("autotp", dp, tp, dtype), heads, kv_heads);
}

}  // namespace isoshard
