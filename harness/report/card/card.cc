// SPDX-License-Identifier: Apache-2.0
// What is wrong with one part of a report, in words.
#include "harness/report/card/card.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/mesh/mesh_words.h"
#include "harness/report/card/report_parts.h"

namespace isoshard {
namespace {

using nlohmann::json;
using namespace parts;
using Kind = CardWords::Kind;

/// Ranks of the first divergent tensor: those that are wrong, and those that are right.
std::pair<std::vector<int>, std::vector<int>> ranks_of(const json& item, const json& finding) {
  std::set<int> wrong, right;
  for (const json& held : list_of(part_in(item, "evidence"), "around")) {
    if (!is_same_tensor(held, finding)) continue;
    for (const json& part : list_of(held, "parts")) {
      const int rank = static_cast<int>(number_of(part, "rank"));
      if (number_of(part, "compared") > 0)
        (number_of(part, "unequal") > 0 ? wrong : right).insert(rank);
    }
  }
  for (const int rank : wrong) right.erase(rank);
  return {{wrong.begin(), wrong.end()}, {right.begin(), right.end()}};
}

CardRow where_of(const json& item, const json& finding) {
  const std::string name = word_in(item, "case");
  std::string words = fmt::format(": step {:.0f}, {}, {}", number_of(finding, "step"),
                                  word_in(finding, "stage"), row_of(finding));
  if (const std::string site = word_in(finding, "call_site"); !site.empty())
    words += "; called at " + site;
  const auto [wrong, right] = ranks_of(item, finding);
  const json& ranks = list_of(finding, "ranks");
  if (!ranks.empty() && ranks[0].is_number_integer())
    words += fmt::format("; first on {}", rank_in_words(item, ranks[0].get<int>()));
  if (wrong.size() > 1) words += "; wrong on " + words_of_ranks(wrong);
  if (!right.empty()) words += "; right on " + words_of_ranks(right);
  if (const std::string copied = word_in(item, "copy_of"); !copied.empty())
    words += fmt::format(". {} is this project's copy of {}", word_in(item, "subject"), copied);
  return {"Where", {{Kind::kPart, name.empty() ? "this run" : name}, {Kind::kPlain, words + "."}}};
}

std::string_view advice_of(const std::string& stage) {
  static const std::map<std::string, std::string_view> kAdvice = {
      {"step settings", "Compare what both runs were told of this step, such as the learning rate"},
      {"data ids", "Look at the sampler: both runs must take the same samples in each step"},
      {"masks", "Look at how random numbers are drawn: seeds and offsets of each rank"},
      {"weights as read",
       "Look at how weights reach this rank: loading, sharding, and what came back from the last "
       "step"},
      {"forward", "Look at the forward code between the two, and at the collective that ends it"},
      {"activation gradient", "Look at the backward code between the two and its collectives"},
      {"parameter gradient",
       "Look at how this gradient is made and summed: the backward of its module, and the "
       "reduction over ranks"},
      {"grad norm", "Look at how the norm is summed over ranks: each shard once"},
      {"clipped gradient", "Look at clipping: the norm and the factor that ranks clip with"},
      {"optimizer state", "Look at the optimizer's step: its state, and who owns which part of it"},
      {"parameter after step",
       "Look at the optimizer's step, and at what gathers parameters after it"},
      {"replica drift", "Look at what must keep copies equal: some rank applied another update"},
      {"collectives", "Compare the calls of the ranks: another call was made than declared"}};
  const auto found = kAdvice.find(stage);
  return found == kAdvice.end() ? "Look at what makes it" : found->second;
}

/// Words of a cause, and what they mean to somebody who does not know them.
constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kMeanings = {
    {{"dtype differs between ranks",
      "Some ranks round what others do not: a cast or autocast depends on the rank"},
     {"the journal shows its reduction",
      "Each rank has its own addend of a sum that was made, too: look at what is added to it "
      "behind "
      "the reduction, or was not there yet when it was called"},
     {"rank-local",
      "Each rank has its own addend of a sum that was never made: a reduction over "
      "these ranks is missing"},
     {"scale", "It is a multiple of the right value: a factor is missing, or is there twice"},
     {"permuted",
      "The right numbers are in the wrong places: shards were put together in "
      "another order"},
     {"stale", "It is the value of an earlier step: something was read before it was written"},
     {"copies differ", "Ranks that must hold the same hold different values"}}};

/// The tensors before the first divergence say where the mistake is not.
CardRow look_at(const json& item, const json& finding) {
  CardRow row{"What to look at", {}};
  const json& tensors = list_of(item, "tensors");
  const auto found = std::ranges::find_if(
      tensors, [&](const json& tensor) { return is_same_tensor(tensor, finding); });
  if (found != tensors.end() && found != tensors.begin()) {
    const auto before = found - tensors.begin();
    const bool is_right = std::none_of(tensors.begin(), found, [](const json& tensor) {
      return part_in(tensor, "within") == false;
    });
    if (is_right) {
      row.words = {
          {Kind::kPlain,
           before == 1
               ? "The one tensor recorded before it is right, "
               : fmt::format("All {} tensors recorded before it are right, the last of them ",
                             before)},
          {Kind::kTensor, word_in(*(found - 1), "name")},
          {Kind::kPlain, fmt::format(" ({}). ", word_in(*(found - 1), "stage"))}};
    }
  }
  std::string advice = fmt::format("{}.", advice_of(word_in(finding, "stage")));
  constexpr std::string_view kBetween = " between the two";
  if (const std::size_t at = advice.find(kBetween); row.words.empty() && at != advice.npos)
    advice.erase(at, kBetween.size());  // nothing before it is named
  const std::string cause = word_in(finding, "diagnosis");
  const auto meaning = std::ranges::find_if(
      kMeanings, [&](const auto& known) { return cause.find(known.first) != cause.npos; });
  if (meaning != kMeanings.end()) advice += fmt::format(" {}.", meaning->second);
  row.words.push_back({Kind::kPlain, std::move(advice)});
  return row;
}

std::string last_line(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  return text.substr(text.find_last_of('\n') + 1);  // npos + 1 is 0
}

std::string first_of(const json& item, std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (std::string words = word_in(item, name); !words.empty()) return words;
  return "";
}

/// Without findings: the reason is all that is known.
Card card_of_reason(const json& item, bool is_benchmark) {
  std::string reason = first_of(item, {"unmet", "reason", "text"});
  // what is printed of a benchmark ends with what came out
  if (is_benchmark) reason = last_line(std::move(reason));
  if (const std::string rule = word_in(part_in(item, "rule"), "id"); !rule.empty())
    reason += fmt::format(" [{}]", rule);
  return {{is_benchmark ? "What came out" : "What broke", {{Kind::kPlain, std::move(reason)}}},
          {"Where", {{Kind::kPart, first_of(item, {"case", "name", "experiment"})}}}};
}

}  // namespace

bool is_as_it_should_be(const json& item) {
  if (const json& holds = part_in(item, "holds"); !holds.is_null()) return holds == true;
  if (const json& detection = part_in(item, "detection"); detection.is_object())
    return part_in(detection, "as_expected") == true;
  const json& status = part_in(item, "status");
  if (status.is_null()) return true;  // a reference
  static const std::set<std::string> kGood = {"conforms", "match",   "accepted", "reviewed",
                                              "pending",  "removed", "measured"};
  return status.is_string() && kGood.contains(status.get<std::string>()) &&
         !part_in(item, "unmet").is_string();
}

Card card_of(const json& item, std::string_view list) {
  if (const std::string missed = word_in(part_in(item, "detection"), "problem"); !missed.empty()) {
    return {{"What broke",
             {{Kind::kStrong, word_in(item, "fault") + " was not found as it must be"},
              {Kind::kPlain, ": " + missed}}},
            {"Where", {{Kind::kPart, word_in(item, "case")}}}};
  }
  const json& findings = list_of(item, "findings");
  if (findings.empty()) return card_of_reason(item, list == "benchmarks");
  const json& first = findings[0];
  const std::string cause = word_in(first, "diagnosis");
  return {{"What broke", {{Kind::kStrong, word_in(first, "what")}}},
          {"Likely cause", {{Kind::kPlain, cause.empty() ? "no known pattern fits" : cause}}},
          where_of(item, first),
          look_at(item, first)};
}

std::string words_of(const CardRow& row) {
  std::string text;
  for (const CardWords& words : row.words) text += words.text;
  return text;
}

std::string shell_word(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return std::string(word);
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  const bool has_controls = std::ranges::any_of(word, is_control);  // bash's and ksh's $'...'
  std::string result = has_controls ? "$'" : "'";
  for (const char c : word) {
    if (is_control(c)) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else if (has_controls && (c == '\'' || c == '\\')) {
      result += fmt::format("\\{}", c);
    } else {
      result += c == '\'' ? "'\\''" : std::string(1, c);
    }
  }
  return result + "'";
}

}  // namespace isoshard
