// SPDX-License-Identifier: Apache-2.0
// Settings of two manifests beside a verdict.
#include "harness/judge/records/own_word.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/bundle/run_settings.h"

namespace isoshard {
namespace {

bool says(const RunSettings& settings, const char* name, std::string_view value) {
  const auto found = settings.training.find(name);
  return found != settings.training.end() && found->second == value;
}

/// An input that may come from a file, and what is excused then.
struct Input {
  const char* name;
  std::string_view value;
  const char* words;
  const char* excused;
};

constexpr Input kBatches = {"data.source", "\"batch file\"", "batches",
                            "where the sampler and the masks stand and how samples were drawn"};
constexpr Input kWeights = {"weights.source", "\"file\"", "weights", "how weights were made"};

void add_input(const Input& input, const RunSettings& trusted, const RunSettings& judged,
               Verdict& verdict) {
  const bool trusted_says = says(trusted, input.name, input.value);
  const bool judged_says = says(judged, input.name, input.value);
  if (!trusted_says && !judged_says) return;
  const char* const who = !trusted_says ? "the judged run alone says"
                          : judged_says ? "both runs say"
                                        : "the trusted run says";
  const std::string words =
      fmt::format("{} that the {} come from a file ({}), so {} was not judged", who, input.words,
                  input.name, input.excused);
  verdict.notes.push_back(words);
  // Weights are compared bit by bit before the first step; nothing else is said of them.
  if (!trusted_says && &input == &kBatches && verdict.status == Status::kConforms)
    verdict.reason += "; " + words;
}

/// Axes of one rank say nothing.
std::vector<std::pair<Axis, int>> cut_axes(const MeshShape& mesh) {
  std::vector<std::pair<Axis, int>> axes;
  for (const AxisDegree& axis : mesh.axes()) {
    if (axis.degree > 1) axes.emplace_back(axis.axis, axis.degree);
  }
  return axes;
}

void add_calls(const RunSettings& trusted, Verdict& verdict) {
  if (trusted.collectives.empty() || verdict.mesh.world_size() == 1 ||
      verdict.status != Status::kConforms)
    return;
  const bool has_entry = std::ranges::any_of(trusted.collectives, [&](const RunCalls& calls) {
    return calls.subject == verdict.subject && cut_axes(calls.mesh) == cut_axes(verdict.mesh);
  });
  if (!has_entry)
    verdict.reason += fmt::format(
        "; what its ranks called and what its later forward passes read was not judged, as the "
        "trusted run has no table of {} on this mesh",
        verdict.subject);
}

}  // namespace

void add_own_word(const RunSettings& trusted, const RunSettings& judged, BatchFileOf batch_file,
                  Verdict& verdict) {
  if (is_from_batch_file(trusted, judged, batch_file))
    add_input(kBatches, trusted, judged, verdict);
  add_input(kWeights, trusted, judged, verdict);
  add_calls(trusted, verdict);
}

}  // namespace isoshard
