// SPDX-License-Identifier: Apache-2.0
/// Names of purposes, as the fault catalogue spells them.
#include "core/comm/call_info.h"

#include <array>
#include <cstddef>

namespace isoshard {

std::string_view name_of(Purpose purpose) noexcept {
  static constexpr std::array<std::string_view, 21> kNames = {"unspecified",
                                                              "row_parallel.forward",
                                                              "column_parallel.backward",
                                                              "sequence.gather",
                                                              "sequence.scatter",
                                                              "vocab_parallel.embed",
                                                              "vocab_parallel.max",
                                                              "vocab_parallel.logsumexp",
                                                              "vocab_parallel.target",
                                                              "vocab_parallel.smoothing",
                                                              "vocab_parallel.backward",
                                                              "grad_reduce",
                                                              "param_gather",
                                                              "clip_norm",
                                                              "loss_reduce",
                                                              "token_count",
                                                              "pipe.forward",
                                                              "pipe.backward",
                                                              "ring.kv",
                                                              "ring.dkv",
                                                              "setup"};
  static_assert(kNames.size() == static_cast<std::size_t>(Purpose::kSetup) + 1);
  const auto index = static_cast<std::size_t>(purpose);
  return index < kNames.size() ? kNames[index] : "unknown";
}

}  // namespace isoshard
