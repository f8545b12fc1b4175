// SPDX-License-Identifier: Apache-2.0
/// The dtypes in which ranks hold one tensor.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// The ranks that hold a tensor, by dtype, where they do not have one dtype.
struct MixedDtypes {
  Dtype usual = Dtype::kFloat32;  ///< the reference's if a rank has it, else that of most ranks
  std::vector<int> usual_ranks;   ///< that hold it in this dtype
  std::map<Dtype, std::vector<int>> others;

  /// Ranks that hold it in another dtype than the usual one, in ascending order.
  [[nodiscard]] std::vector<int> odd_ranks() const;
  /// "fp32 on rank 1, bf16 on ranks 0, 2".
  [[nodiscard]] std::string words() const;
};

/// Nothing if all ranks have one dtype. Only ranks that hold elements of the tensor count: nothing
/// is rounded in an empty shard, and frameworks give it any dtype.
[[nodiscard]] std::optional<MixedDtypes> mixed_dtypes(const std::vector<Held>& held,
                                                      Dtype reference);

/// The first rank that holds elements of the tensor in another dtype than the reference's; null if
/// there is none.
[[nodiscard]] const Held* with_other_dtype(const std::vector<Held>& held, Dtype reference);

}  // namespace isoshard::detail
