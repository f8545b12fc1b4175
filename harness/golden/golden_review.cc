// SPDX-License-Identifier: Apache-2.0
// Old and new, side by side.
#include "harness/golden/golden_review.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <vector>

#include "core/base/hex_float.h"
#include "harness/golden/compare_golden.h"
#include "harness/golden/golden_rules.h"

namespace isoshard {
namespace {

std::string origin_of(const Golden& golden) {
  std::string words;
  for (const auto& [key, value] : golden.fingerprint) words += fmt::format("{} {}, ", key, value);
  return fmt::format("{}arithmetic {}, commit {}{}", words, golden.arithmetic,
                     golden.build.commit.substr(0, 12),
                     golden.build.state == "clean" ? "" : " (" + golden.build.state + ")");
}

/// What changes from one golden to the next, on any machines. Lines are paired by
/// name, so that one more of them is one change.
class Changes {
 public:
  Changes(const Golden& old, const Golden& pending) {
    std::multimap<std::string_view, const GoldenLine*> now;
    for (const GoldenLine& line : pending.lines) now.emplace(line.name, &line);
    std::vector<std::string_view> gone, added;
    for (const GoldenLine& line : old.lines) {
      const auto found = now.find(line.name);
      if (found == now.end()) {
        gone.push_back(line.name);
        continue;
      }
      add(line, *found->second);
      now.erase(found);
    }
    for (const auto& [name, line] : now) added.push_back(name);
    if (old.lines.size() != pending.lines.size())
      words_ = fmt::format("  lines    {} become {}\n", old.lines.size(), pending.lines.size());
    if (!gone.empty()) words_ += fmt::format("  gone     {}\n", fmt::join(gone, ", "));
    if (!added.empty()) words_ += fmt::format("  added    {}\n", fmt::join(added, ", "));
  }
  [[nodiscard]] std::string text() const {
    if (lines_ == 0 && words_.empty() && projected_ == 0 && lost_.empty() && wider_ == 0)
      return "  change   none: every bit is equal\n";
    std::string text = words_;
    text += lines_ > 0 ? fmt::format("  change   {} lines differ; first {}\n", lines_, first_)
                       : "  change   none in the other lines\n";
    if (projected_ > 0) text += fmt::format("  added    projections of {} lines\n", projected_);
    if (!largest_words_.empty())
      text += fmt::format("           largest of a number: {}\n", largest_words_);
    if (wider_ > 0)
      text += fmt::format("  weaker   {} limits for other machines grow; most: {}\n", wider_,
                          widest_words_);
    for (const auto& [what, lines] : lost_)
      text += fmt::format("  weaker   {} of {} lines are lost; first {}\n", what, lines.count,
                          lines.first);
    return text;
  }

 private:
  void add(const GoldenLine& old, const GoldenLine& pending) {
    bool differs = old.digest != pending.digest || old.numbers.size() != pending.numbers.size();
    if (differs)
      note(fmt::format("{}: {} becomes {}", old.name, old.digest.empty() ? "it" : old.digest,
                       pending.digest));
    for (std::size_t i = 0; i < std::min(old.numbers.size(), pending.numbers.size()); ++i) {
      widen(fmt::format("{}: {}", old.name, old.numbers[i].name), old.numbers[i].drift,
            pending.numbers[i].drift);
      const double before = old.numbers[i].value, now = pending.numbers[i].value;
      if (GoldenRules::same_value(before, now)) continue;
      differs = true;
      const std::string words =
          fmt::format("{}: {}: {} becomes {} ({:.9g} and {:.9g}: {:.3g} ulp, {:.3e})", old.name,
                      old.numbers[i].name, to_hex(before), to_hex(now), before, now,
                      ulps_between(before, now), std::fabs(now - before));
      note(words);
      const double size = std::fabs(now - before);
      if (!largest_words_.empty() && !(size > largest_)) continue;
      largest_ = size;
      largest_words_ = words;
    }
    lines_ += differs ? 1 : 0;
    projected_ += !old.projections.has_value() && pending.projections.has_value() ? 1 : 0;
    if (old.projections.has_value() && pending.projections.has_value())
      widen(old.name + ": projections", old.projections->allowed, pending.projections->allowed);
    lose("projections", old, old.projections.has_value() && !pending.projections.has_value());
    lose("equal copies", old, !old.copies.empty() && pending.copies != old.copies);
    lose("the equal tensor", old, !old.same_as.empty() && pending.same_as != old.same_as);
  }
  /// What was allowed, and what would be.
  void widen(const std::string& what, double before, double now) {
    if (!(now > before)) return;
    ++wider_;
    const double times = now / before;  // infinite where nothing was allowed
    if (wider_ > 1 && !(times > widest_)) return;
    widest_ = times;
    widest_words_ = fmt::format("{}: {:.3e} becomes {:.3e}", what, before, now);
  }
  void lose(const char* what, const GoldenLine& old, bool is_lost) {
    if (!is_lost) return;
    Lost& lost = lost_[what];
    if (lost.count++ == 0) lost.first = old.name;
  }
  void note(const std::string& words) {
    if (first_.empty()) first_ = words;
  }

  struct Lost {
    std::size_t count = 0;
    std::string first;
  };

  std::size_t lines_ = 0, projected_ = 0, wider_ = 0;
  std::string words_, first_, largest_words_, widest_words_;
  double largest_ = 0, widest_ = 0;
  std::map<std::string, Lost> lost_;
};

std::string refusal_of(const Golden& pending) {
  if (const std::string number = non_finite_number(pending); !number.empty()) return number;
  if (!pending.parity.holds) return "its parity check failed";
  return unfit_for_goldens(pending.build);
}

}  // namespace

std::string review_text(const std::optional<AcceptedGolden>& old, const Golden& pending) {
  std::string text = fmt::format("{}: {} lines\n", pending.name, pending.lines.size());
  if (old.has_value()) {
    text += fmt::format("  old      accepted {}: {}\n           {}\n", old->entry.accepted,
                        old->entry.reason, origin_of(old->golden));
  } else {
    text += "  old      none\n";
  }
  text +=
      fmt::format("  new      recorded {}\n           {}\n", pending.recorded, origin_of(pending));
  if (old.has_value()) {
    if (const std::string stale = staleness(old->golden, pending); !stale.empty())
      text += fmt::format("  settings {}\n", stale);
    text += Changes(old->golden, pending).text();
  }
  text += fmt::format("  drift    {}\n  parity   {}: {}\n", pending.drift_rule,
                      pending.parity.holds ? "holds" : "FAILED", pending.parity.text);
  const std::string refusal = refusal_of(pending);
  return text +
         (refusal.empty()
              ? fmt::format("  accept   isoshard golden accept {} --reason TEXT\n", pending.name)
              : fmt::format("  refused  {}\n", refusal));
}

}  // namespace isoshard
