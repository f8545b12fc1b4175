// SPDX-License-Identifier: Apache-2.0
// The file of --findings, and what it changes of a verdict.
#include "harness/compare/given_findings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <span>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/io/json.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"
#include "harness/report/json/values_json.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr int kSchema = 1;

/// A number, a word or a list of numbers.
NamedValue value_of(const std::string& name, const json& given, const std::filesystem::path& file) {
  const std::optional<IdValue> value = read_value(given);
  const bool is_number = !given.is_array() && !given.is_string() && value.has_value();
  const bool is_list = given.is_array() && value.has_value() &&
                       !std::holds_alternative<std::vector<std::string>>(*value);
  if (is_number || is_list) return {name, *value};
  if (given.is_array())
    detail::refuse_form(file, fmt::format("\"{}\" must list numbers", printable(name)));
  return {name, detail::text_field(json{{"value", given}}, "value", file)};
}

/// Ids that another program may give. Only the judge gives the others.
constexpr FindingId kGivenFindings[] = {FindingId::kGiven,
                                        FindingId::kSamplesNotShared,
                                        FindingId::kEqualInputs,
                                        FindingId::kOtherNumberOfCalls,
                                        FindingId::kSamplesTwice,
                                        FindingId::kSamplesMissing,
                                        FindingId::kBufferDiffers,
                                        FindingId::kSamplesShortened,
                                        FindingId::kSamplesAdded,
                                        FindingId::kOptimizerStepsDiffer,
                                        FindingId::kGradientMissingOnRank,
                                        FindingId::kReplicasDiffer};
constexpr CauseId kGivenCauses[] = {CauseId::kGivenCause,
                                    CauseId::kNoDataSampler,
                                    CauseId::kOtherMicroBatches,
                                    CauseId::kOwnSamplesOnEachRank,
                                    CauseId::kBatchStatistics,
                                    CauseId::kMeanOfOwnLabels,
                                    CauseId::kFunctionWrong,
                                    CauseId::kSamplesLeftOut,
                                    CauseId::kStepSkipped,
                                    CauseId::kSamplesCut,
                                    CauseId::kSamplesRepeatedToFill,
                                    CauseId::kStepsOfRanksDiffer,
                                    CauseId::kGradientsCleared,
                                    CauseId::kReplicasTrainApart,
                                    CauseId::kLossScaledOnRanks,
                                    CauseId::kLossDividedByOtherLabels,
                                    CauseId::kLossWeightsOfMicroBatches,
                                    CauseId::kLossWeightsOfClasses,
                                    CauseId::kLossOfOtherTokens,
                                    CauseId::kLossOfOtherLabels,
                                    CauseId::kLossSmoothing,
                                    CauseId::kLossPenalizesLogits,
                                    CauseId::kLossRounded,
                                    CauseId::kLossTermBesideOutput,
                                    CauseId::kLossWrongOnRanks};

template <TabledId Id>
struct GivenId {
  Id id;
  NamedValues values;
};

/// {"id": ..., "numbers": {...}, "words": {...}} with one of these ids.
///
/// Errors   FileError if it is another one, or its text has a value that is not given.
template <TabledId Id>
GivenId<Id> id_of(const json& given, std::span<const Id> known, const std::filesystem::path& file) {
  const auto name = detail::text_field(given, "id", file);
  const std::optional<Id> id = find_id<Id>(name);
  if (!id.has_value() || std::ranges::find(known, *id) == known.end())
    detail::refuse_form(
        file,
        fmt::format(
            "the \"id\" of a given {} must be one of {}, got '{}'", kind_of(Id()),
            fmt::join(known | std::views::transform([](Id one) { return name_of(one); }), ", "),
            printable(name)));
  GivenId<Id> made{*id, {}};
  for (const char* const part : {"numbers", "words"}) {
    const json of_part = given.contains(part) ? given.at(part) : json::object();
    if (!of_part.is_object())
      detail::refuse_form(file,
                          fmt::format("\"{}\" of a {} must be an object", part, kind_of(Id())));
    for (const auto& [value_name, value] : of_part.items())
      made.values.push_back(value_of(value_name, value, file));
  }
  for (const Placeholder& place : placeholders_in(row_of(*id).text)) {
    if (!place.is_optional && find_value(made.values, place.name) == nullptr)
      detail::refuse_form(file, fmt::format("a {} \"{}\" must have the value \"{}\"", kind_of(Id()),
                                            name_of(*id), place.name));
  }
  return made;
}

/// Of an id with values, or of words: then the id is that of words of other programs. None if there
/// are no words.
Cause cause_of(const json& entry, const char* field, const std::filesystem::path& file) {
  if (entry.contains(field) && entry.at(field).is_object()) {
    auto [id, values] = id_of<CauseId>(entry.at(field), kGivenCauses, file);
    return make_cause(id, std::move(values));
  }
  std::string words = detail::text_field(entry, field, file);
  if (words.empty()) return {};
  return make_cause(CauseId::kGivenCause, {NamedValue::words("problem", words)});
}

Finding finding_of(const json& entry, const std::filesystem::path& file) {
  const RecordKey key = detail::key_of(entry, {}, file);
  Finding finding;
  if (entry.contains("finding")) {
    auto [id, values] = id_of<FindingId>(entry.at("finding"), kGivenFindings, file);
    finding = make_finding(key, id, std::move(values));
  } else {
    finding = make_finding(key, FindingId::kGiven,
                           {NamedValue::words("problem", detail::text_field(entry, "what", file))});
  }
  finding.cause = cause_of(entry, "cause", file);
  finding.diagnosis = finding.cause.text;
  for (const std::int64_t rank : detail::field<Shape>(entry, "ranks", file)) {
    if (rank < 0 || rank > std::numeric_limits<int>::max())
      detail::refuse_form(file, fmt::format("a rank must be a small number, got {}", rank));
    finding.ranks.push_back(static_cast<int>(rank));
  }
  return finding;
}

/// "data ids input_ids (step 0): ... on rank 1; likely cause"
std::string words_of(const Finding& finding) {
  return fmt::format(
      "{}{}{}", finding.what,
      finding.ranks.size() == 1 ? fmt::format(" on rank {}", finding.ranks.front()) : "",
      finding.diagnosis.empty() ? "" : "; " + finding.diagnosis);
}

std::tuple<int, Stage> place_of(const Finding& f) {
  return {f.key.step, f.stage};
}

void add_finding(const Finding& finding, Verdict& verdict) {
  const auto at = std::ranges::find_if(
      verdict.findings, [&](const Finding& other) { return place_of(other) >= place_of(finding); });
  const bool is_first = at == verdict.findings.begin();
  verdict.findings.insert(at, finding);
  if (verdict.status == Status::kConforms || verdict.status == Status::kVacuous) {
    set_diverges(verdict);
    verdict.reason = "first " + words_of(finding);
  } else if (is_first) {
    verdict.reason =
        fmt::format("first {}; among recorded tensors, {}", words_of(finding), verdict.reason);
  } else {
    verdict.reason += "; also " + words_of(finding);
  }
}

/// The place of a tensor in the order of execution; behind all where it was not compared.
auto place_of(const RecordKey& key, const Verdict& verdict) {
  const auto found = std::ranges::find(verdict.tensors, key, &TensorComparison::key);
  return std::tuple(key.step, stage_of(key), found - verdict.tensors.begin());
}

/// The ranks that a cause is about; none where it names none.
std::vector<int> ranks_of(const Cause& cause) {
  const IdValue* const value = find_value(cause.values, "ranks");
  const auto* const ranks =
      value == nullptr ? nullptr : std::get_if<std::vector<std::int64_t>>(value);
  return ranks == nullptr ? std::vector<int>() : std::vector<int>(ranks->begin(), ranks->end());
}

void add_cause(const GivenCause& given, Verdict& verdict) {
  Finding& first = verdict.findings.front();
  const Cause& cause = given.cause;
  if (cause.empty()) return;
  if (place_of(first.key, verdict) < place_of(given.key, verdict)) {
    verdict.notes.push_back("a possible cause of later findings: " + cause.text);
    return;
  }
  first.diagnosis =
      first.diagnosis.empty() ? cause.text : fmt::format("{}; {}", cause.text, first.diagnosis);
  if (first.cause.empty()) {
    first.cause = cause;
    // A number that all ranks share, such as the loss, may be wrong because of some of them.
    if (const auto ranks = ranks_of(cause); first.key == given.key && !ranks.empty())
      first.ranks = ranks;
  }
  verdict.reason += "; likely cause: " + cause.text;
}

}  // namespace

GivenFindings read_given_findings(const std::filesystem::path& file) {
  const json content = read_json_file(file);
  if (const int schema = detail::field<int>(content, "schema", file); schema != kSchema)
    throw FileError(
        fmt::format("{}: the schema must be {}, got {}", file.string(), kSchema, schema));
  GivenFindings given;
  for (const json& entry : detail::field<json>(content, "findings", file)) {
    const bool always = !entry.value("only_if_diverging", false);
    (always ? given.findings : given.if_diverging).push_back(finding_of(entry, file));
  }
  for (const json& entry : detail::field<json>(content, "causes", file))
    given.causes.push_back({detail::key_of(entry, {}, file),
                            cause_of(entry, entry.contains("cause") ? "cause" : "text", file)});
  for (const json& note : content.value("notes", json::array()))
    given.notes.push_back(detail::text_field(json{{"note", note}}, "note", file));
  const json sites = content.value("call_sites", json::object());
  for (const auto& [tensor, site] : sites.items())
    given.call_sites.emplace(tensor, detail::text_field(json{{"site", site}}, "site", file));
  return given;
}

void add_given_findings(const GivenFindings& given, Verdict& verdict) {
  verdict.notes.insert(verdict.notes.end(), given.notes.begin(), given.notes.end());
  // from the back, so that those of one step and stage keep their order
  for (const Finding& finding : given.findings | std::views::reverse) add_finding(finding, verdict);
  for (const Finding& finding : given.if_diverging | std::views::reverse) {
    if (!verdict.findings.empty() && place_of(finding) <= place_of(verdict.findings.front()))
      add_finding(finding, verdict);
  }
  for (Finding& finding : verdict.findings) {
    const auto site = given.call_sites.find(fmt::format("{}/{}/{}/{}", finding.key.step,
                                                        name_of(finding.key.kind), finding.key.name,
                                                        finding.key.call));
    if (site != given.call_sites.end()) finding.call_site = site->second;
  }
  if (verdict.status != Status::kDiverges || verdict.findings.empty()) return;
  for (const GivenCause& cause : given.causes) add_cause(cause, verdict);
}

}  // namespace isoshard
