// SPDX-License-Identifier: Apache-2.0
/// The table of one case for the terminal.
#include "harness/report/text/verdict_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/mesh/mesh_words.h"
#include "harness/report/text/hanging.h"
#include "harness/verdict/would_miss.h"

namespace isoshard {
namespace {

constexpr std::size_t kMaxRows = 48;  ///< of module outputs, unless every tensor is asked for
constexpr std::size_t kMaxFindings = 10;
constexpr std::size_t kTitleWidth = 17;  ///< of a card

std::size_t width_of(const RenderOptions& options) {
  return options.columns == 0 ? kLineWidth : options.columns;
}

class Table {
 public:
  Table(const Verdict& verdict, const RenderOptions& options)
      : verdict_(verdict), options_(options) {}

  std::string run() {
    const std::string copy =
        verdict_.copy_of.empty() ? "" : fmt::format(", copy of {}", verdict_.copy_of);
    text_ = fmt::format("{}  {}{}  ({})\n", verdict_.case_slug, verdict_.subject, copy,
                        words_of(verdict_.mesh.axes(), "one process"));
    int last_step = 0;
    for (const TensorComparison& t : verdict_.tensors) last_step = std::max(last_step, t.key.step);
    for (int step = 0; step <= last_step && !verdict_.tensors.empty(); ++step) {
      if (last_step > 0) text_ += fmt::format(" step {}\n", step);
      scalars(step, Stage::kStepSettings);
      summary(step, Stage::kDataIds, "data ids");
      summary(step, Stage::kMasks, "masks");
      summary(step, Stage::kParametersRead, "weights as read");
      losses(step);
      modules(step);
      summary(step, Stage::kActivationGrad, "activation gradients");
      summary(step, Stage::kParameterGrad, "gradients");
      scalars(step, Stage::kGradNorm);
      summary(step, Stage::kClippedGrad, "clipped gradients");
      summary(step, Stage::kOptimizerState, "optimizer state");
      summary(step, Stage::kParameterAfterStep, "parameters after step");
      scalars(step, Stage::kProgress);
      scalars(step, Stage::kLogged);
    }
    sensitivity();
    if (verdict_.equal_to_emulation.has_value())
      entry("declared arithmetic", fmt::format("{} tensors bit-identical to the emulated reference",
                                               *verdict_.equal_to_emulation));
    if (verdict_.runs > 1 && verdict_.status == Status::kConforms)
      entry("repeated", fmt::format("{} runs, all equal bit by bit", verdict_.runs));
    if (!verdict_.collectives.empty()) entry("collectives", verdict_.collectives);
    axes();
    pools();
    if (!verdict_.would_miss.empty()) entry("would miss", verdict_.would_miss);
    published();
    not_recorded();
    skipped();
    for (const std::string& note : verdict_.notes) entry("note", note);
    coverage("missing", verdict_.missing);
    coverage("extra", verdict_.extra);
    findings();
    text_ += painted(verdict_line(verdict_), verdict_.status, options_.color) + "\n";
    return std::move(text_);
  }

 private:
  std::string paint(const std::string& text, std::string_view code) const {
    return options_.color ? fmt::format("\033[1;{}m{}\033[0m", code, text) : text;
  }

  /// A line of the table, or several.
  void entry(std::string_view title, const std::string& text, std::string_view code = "") {
    const std::string lines = hanging(fmt::format("  {:<22}", title), text, width_of(options_));
    text_ += code.empty() ? lines : paint(lines, code);
  }

  /// What shows that each axis is used.
  void axes() {
    for (const AxisWitness& witness : verdict_.witnesses) {
      std::string words = witness.tensor.empty() ? "nothing shows that it is used"
                                                 : "differs between ranks in " + witness.tensor;
      if (witness.alike.has_value() && !witness.tensor.empty())
        words += fmt::format("; nothing tells coordinates {} and {} apart", witness.alike->first,
                             witness.alike->second);
      entry(fmt::format("{} = {}", name_of(witness.axis), witness.degree), words);
    }
  }

  /// What is said of a tensor beside its numbers.
  std::string mark(const TensorComparison& t) const {
    if (!t.within) return paint("  <-- not within", "31");
    return t.insensitive ? "  insensitive" : "";
  }

  std::vector<const TensorComparison*> select(int step, Stage stage, bool scalar) const {
    std::vector<const TensorComparison*> chosen;
    for (const TensorComparison& t : verdict_.tensors) {
      if (t.key.step == step && t.stage == stage && (t.key.kind == RecordKind::kScalar) == scalar)
        chosen.push_back(&t);
    }
    return chosen;
  }

  /// One line for all tensors of a stage, and one more for each that matters.
  void summary(int step, Stage stage, std::string_view title) {
    const auto tensors = select(step, stage, false);
    if (tensors.empty()) return;
    double max_abs = 0, worst = 0, sum_abs = 0, judged = 0, whole = 0;
    std::int64_t numel = 0;
    std::size_t outside = 0, unequal = 0;
    const TensorComparison* worst_tensor = nullptr;
    for (const TensorComparison* t : tensors) {
      max_abs = std::max(max_abs, t->stats.max_abs);
      sum_abs += t->stats.sum_abs_diff;
      numel += t->stats.numel;
      judged += t->unmasked_share * static_cast<double>(t->elements);
      whole += static_cast<double>(t->elements);
      outside += t->within ? 0 : 1;
      unequal += t->stats.unequal_values != 0 ? 1 : 0;
      if (!t->insensitive && t->stats.relative_error() > worst) {
        worst = t->stats.relative_error();
        worst_tensor = t;
      }
    }
    std::string words = fmt::format("{} tensors", tensors.size());
    if (unequal == 0) {
      words += ", all equal";
    } else {
      words += fmt::format(", max abs {:.3g}, mean abs {:.3g}", max_abs,
                           numel > 0 ? sum_abs / static_cast<double>(numel) : 0);
      if (worst_tensor != nullptr)
        words += fmt::format(", largest relative {:.3g} ({})", worst, worst_tensor->key.name);
    }
    if (judged < whole) words += fmt::format(", {:.3g} % of elements judged", 100 * judged / whole);
    if (outside > 0) words += paint(fmt::format(", {} not within", outside), "31");
    entry(title, words);
    rows(tensors, !options_.all_tensors);
  }

  void header() {
    text_ += fmt::format("    {:<31}{:>10}{:>10}{:>8}{:>9}{:>8}\n", "norms and errors", "reference",
                         "actual", "max abs", "relative", "allowed");
  }

  /// A name that is too long, and one with a mark, has a line of its own.
  void row(const TensorComparison& t) {
    constexpr std::size_t kNameWidth = 31;
    const Stats& s = t.stats;
    std::string name = t.key.call == 0 || t.key.kind == RecordKind::kParam
                           ? t.key.name
                           : fmt::format("{} (call {})", t.key.name, t.key.call);
    const std::string allowed =
        t.level == Level::kExact ? "equal" : fmt::format("{:.1e}", t.allowed_relative_error);
    const std::string words = mark(t);
    if (!words.empty() || name.size() > kNameWidth) {
      text_ += fmt::format("    {}{}\n", name, words);
      name.clear();
    }
    text_ += fmt::format("    {:<{}}{:>10.4g}{:>10.4g}{:>8.1e}{:>9.1e}{:>8}\n", name, kNameWidth,
                         std::sqrt(s.sum_sq_reference), std::sqrt(s.sum_sq_actual), s.max_abs,
                         s.relative_error(), allowed);
  }

  void rows(const std::vector<const TensorComparison*>& tensors, bool only_outside) {
    std::size_t shown = 0;
    for (const TensorComparison* t : tensors) {
      if (only_outside && (t->within || shown >= kMaxFindings)) continue;
      if (shown++ == 0) header();
      row(*t);
    }
  }

  void losses(int step) { scalars(step, Stage::kForward); }

  void scalars(int step, Stage stage) {
    for (const TensorComparison* t : select(step, stage, true)) {
      if (stage == Stage::kProgress && t->within) continue;  // counters: only wrong ones say much
      const bool several = t->reference_values.size() > 1;
      if (t->actual_values.size() != t->reference_values.size())
        entry(t->key.name, "not there on every rank");
      for (std::size_t i = 0; i < t->actual_values.size() && i < t->reference_values.size(); ++i) {
        const double r = t->reference_values[i], a = t->actual_values[i];
        const double difference = std::fabs(a - r);
        entry(several ? fmt::format("{}[{}]", t->key.name, i) : t->key.name,
              fmt::format("reference {:.9g}, actual {:.9g} (rel. {:.2e}){}", r, a,
                          difference == 0 ? 0 : difference / std::fabs(r), mark(*t)));
      }
    }
  }

  /// Parts of a layer (model.layers.0.mlp) are shown; what lies deeper is named when it is not
  /// within.
  static bool is_module(const TensorComparison& t) {
    return std::count(t.key.name.begin(), t.key.name.end(), '.') <= 3;
  }

  void modules(int step) {
    const auto all = select(step, Stage::kForward, false);
    if (all.empty()) return;
    std::vector<const TensorComparison*> shown;
    std::size_t hidden = 0;
    for (const TensorComparison* t : all) {
      const bool wanted =
          options_.all_tensors || !t->within || (is_module(*t) && shown.size() < kMaxRows);
      if (wanted) {
        shown.push_back(t);
      } else {
        ++hidden;
      }
    }
    summary_line_of_forward(all, hidden);
    rows(shown, false);
  }

  void summary_line_of_forward(const std::vector<const TensorComparison*>& all,
                               std::size_t hidden) {
    entry("module outputs",
          fmt::format("{} tensors{}", all.size(),
                      hidden > 0 ? fmt::format(", {} within tolerance not shown", hidden) : ""));
  }

  /// What would have been rejected, at level perturbed; and what could not show much.
  void sensitivity() {
    const TensorComparison* weakest = nullptr;
    std::size_t judged = 0, rejected = 0, flat = 0;
    std::vector<std::string> insensitive, weak;
    for (const TensorComparison& t : verdict_.tensors) {
      if (t.level != Level::kPerturbed || t.key.kind == RecordKind::kScalar ||
          t.allowed_relative_error == 0)
        continue;
      if (t.insensitive) {
        insensitive.push_back(describe(t.key));
        continue;
      }
      ++judged;
      rejected += t.rolled_copy == ShiftedCopy::kRejected ? 1 : 0;
      flat += t.rolled_copy == ShiftedCopy::kFlat ? 1 : 0;
      if (weakest == nullptr || t.scale_sensitivity > weakest->scale_sensitivity) weakest = &t;
      if (!t.weakness.empty()) weak.push_back(fmt::format("{}: {}", describe(t.key), t.weakness));
    }
    if (weakest != nullptr) {
      entry("sensitivity",
            fmt::format("a scale error of {:.2g} rejected everywhere (weakest: {}); a rolled copy "
                        "in {} of {}{}",
                        weakest->scale_sensitivity, describe(weakest->key), rejected, judged,
                        flat > 0 ? fmt::format(", {} vary by roundings only", flat) : ""));
    }
    names("insensitive", "judged by absolute error", insensitive, false);
    const bool is_shown_otherwise = verdict_.equal_to_emulation.has_value();
    names("inconclusive", is_shown_otherwise ? "judged by the emulated arithmetic" : "", weak,
          !is_shown_otherwise);
  }

  void names(std::string_view title, std::string_view words, const std::vector<std::string>& list,
             bool is_bad) {
    if (list.empty()) return;
    entry(title, fmt::format("{} tensors{}{}", list.size(), words.empty() ? "" : ", ", words),
          is_bad ? "31" : "");
    for (std::size_t i = 0; i < list.size() && (i < kMaxFindings || options_.all_tensors); ++i)
      text_ += fmt::format("    {}\n", list[i]);
    if (list.size() > kMaxFindings && !options_.all_tensors)
      text_ += fmt::format("    and {} more\n", list.size() - kMaxFindings);
  }

  void pools() {
    if (verdict_.pools.empty()) return;
    double most = 0;
    const PooledComparison* worst = nullptr;
    std::size_t outside = 0;
    for (const PooledComparison& p : verdict_.pools) {
      outside += p.within ? 0 : 1;
      const double share = p.allowed_scale.used_by(p.scale);
      if (worst == nullptr || !(share <= most)) {
        most = share;
        worst = &p;
      }
    }
    entry("pooled",
          fmt::format("{} pools against redrawn runs, {} outside; largest scale error {:.2g} of "
                      "what is allowed ({}: {:.6g})",
                      verdict_.pools.size(), outside, most, worst->name, worst->scale),
          outside > 0 ? "31" : "");
  }

  void published() {
    for (const PublishedBound& bound : verdict_.published) {
      std::string words = fmt::format("{} up to {:.2g}", bound.what, bound.limit);
      if (!bound.tensor.empty()) {
        words = fmt::format("{}: {:.2e} of {:.2g} ({}){}", bound.what, bound.measured, bound.limit,
                            bound.tensor, bound.holds ? "" : "  <-- broken");
      }
      if (bound.too_wild > 0) {
        words +=
            fmt::format("; {} not judged by it, as correct runs are farther apart", bound.too_wild);
      }
      entry("published bound", words, bound.holds ? "" : "31");
    }
  }

  void not_recorded() {
    const std::vector<std::string>& names = verdict_.not_recorded;
    if (names.empty()) return;
    entry("not recorded", fmt::format("{} tensor{} of the reference, as allowed, first {}",
                                      names.size(), names.size() == 1 ? "" : "s", names.front()));
    if (!options_.all_tensors) return;
    for (const std::string& name : names) text_ += fmt::format("    {}\n", name);
  }

  void skipped() {
    const std::int64_t count = verdict_.skipped;
    if (count == 0) return;
    entry("not compared", fmt::format("{} tensor{} of steps whose gradients are not finite, or of "
                                      "later ones",
                                      count, count == 1 ? "" : "s"));
  }

  void coverage(std::string_view title, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text_ += paint(fmt::format("  {} ({}):\n", title, names.size()), "31");
    for (const std::string& name : names) text_ += fmt::format("    {}\n", name);
  }

  void findings() {
    std::size_t shown = 0;
    for (const Finding& f : verdict_.findings) {
      if (shown >= kMaxFindings && !options_.all_tensors) {
        text_ += fmt::format("  and {} more findings\n", verdict_.findings.size() - shown);
        return;
      }
      text_ += fmt::format("  {} {}", paint(shown == 0 ? "first:" : "then:", "31"), f.what);
      if (!f.ranks.empty())
        text_ +=
            fmt::format("; rank{} {}", f.ranks.size() > 1 ? "s" : "", fmt::join(f.ranks, ", "));
      text_ += "\n";
      if (!f.evidence.empty())
        text_ += fmt::format("    {}{}\n", f.evidence,
                             f.confirmed ? " (confirmed by the controller)" : "");
      if (!f.diagnosis.empty()) text_ += fmt::format("    likely cause: {}\n", f.diagnosis);
      if (f.id != FindingId::kNone)
        text_ += fmt::format("    ids: {}{}{}\n", name_of(f.id), f.cause.empty() ? "" : ", ",
                             name_of(f.cause.id));
      ++shown;
    }
  }

  const Verdict& verdict_;
  const RenderOptions& options_;
  std::string text_;
};

}  // namespace

std::string render(const Verdict& verdict, const RenderOptions& options) {
  return Table(verdict, options).run();
}

std::string painted(const std::string& line, Status status, bool color) {
  return color ? fmt::format("\033[1;{}m{}\033[0m", status == Status::kConforms ? "32" : "31", line)
               : line;
}

std::string card_text(const Card& card, const RenderOptions& options) {
  std::string text;
  for (const CardRow& row : card)
    text +=
        hanging(fmt::format("  {:<{}}", row.title, kTitleWidth), words_of(row), width_of(options));
  return text;
}

std::string repeat_text(const std::vector<std::string>& command, const RenderOptions& options) {
  std::vector<std::string> words;
  for (const std::string& word : command) words.push_back(shell_word(word));
  constexpr std::size_t kOneLine = std::numeric_limits<std::size_t>::max();
  return hanging_command(fmt::format("  {:<{}}", kRepeatTitle, kTitleWidth), words,
                         options.columns == 0 ? kOneLine : options.columns);
}

std::string short_verdict_line(const Verdict& verdict) {
  std::string line = fmt::format("{} {} ({})", verdict.subject, verdict.case_slug,
                                 words_of(verdict.mesh.axes(), "one process"));
  if (verdict.status != Status::kConforms) {
    line = fmt::format("{}  {}", words_of_verdict(verdict), line);
    return verdict.findings.empty()
               ? fmt::format("{}: {}{}", line, verdict.reason, in_brackets(verdict.rule))
               : line;
  }
  line = fmt::format("CONFORMS ({})  {}: {} tensors", name_of(verdict.strength), line,
                     verdict.compared);
  if (const std::string weakest = weakest_point(verdict); !weakest.empty())
    line += "; weakest: " + weakest;
  return line;
}

std::string verdict_line(const Verdict& verdict) {
  return fmt::format("{}  {} {} ({}): {}{}", words_of_verdict(verdict), verdict.subject,
                     verdict.case_slug, words_of(verdict.mesh.axes(), "one process"),
                     verdict.reason, in_brackets(verdict.rule));
}

}  // namespace isoshard
