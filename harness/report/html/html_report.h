// SPDX-License-Identifier: Apache-2.0
/// A report as one page for people: no network, readable without scripts, in the light and in the
/// dark, on paper and by screen readers.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard {

/// The page of a report.json (docs/reference/report.md), so that it can be made from a stored one.
/// Of each case: the verdict; the first divergence with the tensors that were recorded before and
/// after it; a map of layers and stages that shows where the allowed error is used up; the error
/// over the forward pass; what was compared, in a table that leaves out what the page has no room
/// for.
///
/// Determinism   a function of its argument: no time, no host.
/// Errors   FileError if the JSON is not a report of the schema that this program writes.
[[nodiscard]] std::string html_of(const nlohmann::json& report);

}  // namespace isoshard
