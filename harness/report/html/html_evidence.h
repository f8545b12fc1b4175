// SPDX-License-Identifier: Apache-2.0
/// What stands beside the verdict of a case: its `evidence` and `schedule`; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// As parts::rank_in_words, for HTML.
[[nodiscard]] std::string rank_in_words(const nlohmann::json& item, int rank);

/// Rows: the first divergent tensor and its neighbors; columns: ranks; cells: each rank's error.
[[nodiscard]] std::string by_rank_of(const nlohmann::json& item);
/// The numbers of the reference and of ranks side by side, those that differ marked.
[[nodiscard]] std::string numbers_of(const nlohmann::json& item);
/// A picture of each class of tensors: which rank holds which part.
[[nodiscard]] std::string placements_of(const nlohmann::json& item);
/// The calls of each rank along each axis, in order; ranks that call the same stand together.
[[nodiscard]] std::string calls_of(const nlohmann::json& item);
/// The schedule of a pipeline, a lane for each rank.
[[nodiscard]] std::string schedule_of(const nlohmann::json& item);

}  // namespace isoshard::html
