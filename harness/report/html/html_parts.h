// SPDX-License-Identifier: Apache-2.0
/// The parts of a case's section; internal to html.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// The first thing that is wrong; "" where nothing is.
[[nodiscard]] std::string findings_of(const nlohmann::json& item);
/// The others.
[[nodiscard]] std::string more_findings_of(const nlohmann::json& item);
/// The tensors recorded next to the first finding's, before and after; "" without one.
[[nodiscard]] std::string neighbors_of(const nlohmann::json& item);
/// Rows: layers; columns: stages of a step; cells: how much of what is allowed is used at most.
[[nodiscard]] std::string map_of(const nlohmann::json& item);
/// The relative error of each activation in the order of the forward pass, and what is allowed.
[[nodiscard]] std::string growth_of(const nlohmann::json& item);
/// At most `room` tensors, those that use most first.
[[nodiscard]] std::string tensors_of(const nlohmann::json& item, std::size_t room);

}  // namespace isoshard::html
