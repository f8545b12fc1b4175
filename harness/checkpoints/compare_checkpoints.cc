// SPDX-License-Identifier: Apache-2.0
/// Two checkpoints as two runs of one process that recorded weights and optimizer state once.
#include "harness/checkpoints/compare_checkpoints.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "harness/checkpoints/rounded.h"
#include "harness/checkpoints/stored_causes.h"
#include "harness/checkpoints/stored_checkpoint.h"
#include "harness/checkpoints/tied_embeddings.h"
#include "harness/ids/phrase.h"
#include "harness/ids/rule.h"
#include "harness/judge/first_cause.h"
#include "harness/judge/judge.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/parts.h"
#include "harness/verdict/parts/first_bad_element.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

/// Causes are looked for in so many tensors at most: each is read again.
constexpr std::size_t kMaxCauses = 400;

/// A weight's second record of a step stands behind the step, so that tolerances count for it.
constexpr int kStoredWeightCall = 1;

RecordKey key_of(const std::string& name, RecordKind kind) {
  return {0, kind, name, kind == RecordKind::kParam ? kStoredWeightCall : 0};
}

/// "weight NAME", "optimizer state NAME".
std::string words_of(const RecordKey& key) {
  return fmt::format("{} {}", key.kind == RecordKind::kParam ? "weight" : "optimizer state",
                     key.name);
}

std::optional<std::string> renamed(const Renaming& rule, const std::string& name) {
  const std::size_t star = rule.from.find('*');
  if (star == std::string::npos) return name == rule.from ? std::optional(rule.to) : std::nullopt;
  const std::string_view head = std::string_view(rule.from).substr(0, star),
                         tail = std::string_view(rule.from).substr(star + 1);
  if (name.size() < head.size() + tail.size() || !name.starts_with(head) || !name.ends_with(tail))
    return std::nullopt;
  std::string result = rule.to;
  result.replace(result.find('*'), 1,
                 name.substr(head.size(), name.size() - head.size() - tail.size()));
  return result;
}

void rename(StoredCheckpoint& checkpoint, const std::vector<Renaming>& rules) {
  if (rules.empty()) return;
  StoredTensors tensors;
  for (auto& [old_name, tensor] : checkpoint.tensors) {
    std::string name = old_name;
    for (const Renaming& rule : rules) {
      if (const std::optional<std::string> other = renamed(rule, old_name)) {
        name = *other;
        break;
      }
    }
    if (!tensors.emplace(name, std::move(tensor)).second)
      throw UsageError(fmt::format(
          "--rename must give every tensor of {} a name of its own, got {} twice, once for {}",
          checkpoint.path.string(), name, old_name));
  }
  checkpoint.tensors = std::move(tensors);
}

class Comparison {
 public:
  Comparison(const fs::path& reference, const fs::path& actual, const CheckpointRules& rules,
             Comparer* comparer)
      : rules_(rules),
        comparer_(comparer),
        reference_(open_checkpoint(reference)),
        actual_(open_checkpoint(actual)) {
    rename(actual_, rules.renamings);
    for (std::string& note : fill_tied(reference_, actual_)) notes_.push_back(std::move(note));
    for (const StoredCheckpoint* side : {&reference_, &actual_})
      notes_.insert(notes_.end(), side->left_out.begin(), side->left_out.end());
  }

  Verdict run() {
    check_dtypes();
    leave_out();
    const Reference reference = read_reference();
    const Trace run = read_actual(reference);
    JudgePolicy policy;
    policy.rtol = rules_.rtol;
    policy.level = rules_.rtol.has_value() ? Level::kPerturbed : Level::kExact;
    policy.not_recorded = rules_.not_recorded;
    policy.coarsest = coarsest_;
    Verdict verdict = judge(reference, run, policy);
    require_unchanged_inputs();
    conclude(verdict);
    return verdict;
  }

 private:
  /// Tensors whose dtypes differ are rounded, or found and not compared any further.
  void check_dtypes() {
    for (auto& [name, actual] : actual_.tensors) {
      const auto found = reference_.tensors.find(name);
      if (found == reference_.tensors.end() || found->second.dtype == actual.dtype) continue;
      StoredTensor& reference = found->second;
      StoredTensor& finer =
          unit_roundoff(reference.dtype) < unit_roundoff(actual.dtype) ? reference : actual;
      const Dtype coarser = &finer == &reference ? actual.dtype : reference.dtype;
      if (rules_.rounds_to_coarser && can_round(finer.dtype, coarser)) {
        finer.read = [read = finer.read, coarser] { return rounded(read(), coarser); };
        finer.dtype = coarser;
        ++num_rounded_;
        if (&finer == &reference) ++num_coarser_;
        continue;
      }
      const RecordKey key = key_of(name, reference.kind);
      NamedValues measured = {{"reference", name_of(reference.dtype)},
                              {"actual", name_of(actual.dtype)}};
      if (can_round(finer.dtype, coarser))
        measured.push_back(NamedValue::words("hint", phrase(PhraseId::kRoundingIsOffered)));
      Finding finding =
          make_finding(key, words_of(key), FindingId::kStoredInOtherDtype, {}, std::move(measured));
      finding.confirmed = true;
      findings_.push_back(std::move(finding));
    }
    for (const Finding& finding : findings_) {
      reference_.tensors.erase(finding.key.name);
      actual_.tensors.erase(finding.key.name);
    }
  }

  /// What only the second one has, and need not.
  void leave_out() {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : actual_.tensors) {
      if (!reference_.tensors.contains(name) &&
          matches_any(rules_.not_recorded, key_of(name, tensor.kind)))
        names.push_back(name);
    }
    if (names.empty()) return;
    num_left_out_ = names.size();
    for (const std::string& name : names) actual_.tensors.erase(name);
    notes_.push_back(fmt::format("{} tensors are in the second checkpoint only, as allowed: {}",
                                 names.size(), fmt::join(names, ", ")));
  }

  static Record record_of(const std::string& name, const StoredTensor& tensor, std::size_t order,
                          const MeshShape& mesh) {
    Record record;
    record.key = key_of(name, tensor.kind);
    record.order = static_cast<std::int64_t>(order);
    record.dtype = tensor.dtype;
    record.layout = replicated(tensor.shape);
    record.local_shape = tensor.shape;
    record.parts = parts_of(record, mesh, 0);
    return record;
  }

  static std::shared_ptr<Arena> arena_for(const StoredTensors& tensors, const char* name) {
    std::size_t bytes = 64;
    for (const auto& [unused, tensor] : tensors)
      bytes += static_cast<std::size_t>(numel_of(tensor.shape)) * size_of(tensor.dtype) + 64;
    return std::make_shared<Arena>(bytes, name);
  }

  static void keep(Record& record, Arena& arena, const HostTensor& tensor) {
    record.offset = arena.append(tensor.bytes);
    record.bytes = static_cast<std::int64_t>(tensor.bytes.size());
    record.kept = true;
  }

  Reference read_reference() {
    Trace trace{"reference", reference_.path.string(), MeshShape(), {RankTrace()}};
    const auto arena = arena_for(reference_.tensors, "checkpoint-reference");
    for (const auto& [name, tensor] : reference_.tensors) {
      Record record = record_of(name, tensor, trace.ranks[0].records.size(), trace.mesh);
      keep(record, *arena, tensor.read());
      if (unit_roundoff(record.dtype) > unit_roundoff(coarsest_)) coarsest_ = record.dtype;
      trace.ranks[0].records.push_back(std::move(record));
    }
    if (trace.ranks[0].records.empty())
      throw Refused<VacuousError>(
          said(RuleId::kNoSharedDtype, {{"reference", reference_.path.string()},
                                        {"actual", actual_.path.string()},
                                        {"tensor", findings_.front().key.name}}));
    trace.ranks[0].arena = arena;
    return Reference(std::move(trace));
  }

  /// Tensors are compared where they lie in their files; those that differ are kept.
  Trace read_actual(const Reference& reference) const {
    Trace trace{"checkpoint", actual_.path.filename().string(), MeshShape(), {RankTrace()}};
    if (trace.case_slug.empty()) trace.case_slug = actual_.path.parent_path().filename().string();
    const auto arena = arena_for(actual_.tensors, "checkpoint-actual");
    for (const auto& [name, stored] : actual_.tensors) {
      Record record = record_of(name, stored, trace.ranks[0].records.size(), trace.mesh);
      const HostTensor tensor = stored.read();
      const Record* const wanted = reference.find(record.key);
      bool is_equal = wanted != nullptr;
      for (PartStats& part : record.parts) {
        if (numel_of(part, false) == 0) continue;
        part.digest = digest_of(tensor.bytes.data(), tensor.bytes.size());
        if (wanted == nullptr || wanted->layout.global_shape != record.layout.global_shape) {
          is_equal = false;
          continue;
        }
        compare_part(part, record, tensor.bytes.data(), reference.bytes(*wanted), wanted->dtype, 1,
                     nullptr, comparer_);
        is_equal = is_equal && part.stats.unequal_values == 0 && part.stats.nonfinite_mismatch == 0;
      }
      if (!is_equal) keep(record, *arena, tensor);
      trace.ranks[0].records.push_back(std::move(record));
    }
    trace.ranks[0].arena = arena;
    return trace;
  }

  /// What the judge calls a tensor, and what it is called here.
  using WordsByName = std::map<std::string, std::string>;

  [[nodiscard]] WordsByName stored_words() const {
    WordsByName words;
    for (const StoredCheckpoint* side : {&reference_, &actual_}) {
      for (const auto& [name, tensor] : side->tensors) {
        const RecordKey key = key_of(name, tensor.kind);
        words.emplace(describe(key), words_of(key));
      }
    }
    return words;
  }

  /// A finding of the judge as one of stored tensors: without steps and ranks.
  [[nodiscard]] Finding as_stored(const Finding& judged, const WordsByName& words) const {
    FindingId id = judged.id;
    NamedValues values = judged.values, measured = judged.measured;
    if (id == FindingId::kMissing || id == FindingId::kExtra) {
      const StoredCheckpoint& other = id == FindingId::kMissing ? actual_ : reference_;
      id = FindingId::kNotInCheckpoint;
      values = {{"checkpoint", other.path.string()}};
    }
    detail::leave_out_rank(measured);
    Finding finding =
        make_finding(judged.key, words_of(judged.key), id, std::move(values), std::move(measured));
    finding.stage = judged.stage;
    finding.confirmed = judged.confirmed;
    set_cause(finding, judged.cause, words);
    return finding;
  }

  static void set_cause(Finding& finding, Cause cause, const WordsByName& words) {
    if (cause.empty()) return;
    const auto of = std::ranges::find(cause.values, "of", &NamedValue::name);
    const bool is_borrowed = of != cause.values.end();
    if (is_borrowed) of->value = words.at(word_of(cause.values, "of"));
    const std::string tensor = is_borrowed ? word_of(cause.values, "of") : words_of(finding.key);
    finding.diagnosis = phrase(PhraseId::kCauseOf, {{"tensor", tensor}, {"cause", cause.text}});
    if (is_borrowed)
      finding.diagnosis = phrase(PhraseId::kOfAnotherTensor, {{"diagnosis", finding.diagnosis}});
    finding.diagnosis += detail::words_of_shared(cause.values);
    finding.cause = std::move(cause);
  }

  /// Stored tensors in the place of records of a step on ranks, and what this class found.
  void conclude(Verdict& verdict) {
    const WordsByName words = stored_words();
    StoredCauses causes(reference_.tensors, actual_.tensors);
    std::size_t num_causes = 0;
    for (Finding& finding : verdict.findings) {
      finding = as_stored(finding, words);
      if (num_causes++ >= kMaxCauses) continue;
      if (Cause cause = causes.cause_of(finding.key.name); !cause.empty()) {
        finding.diagnosis = cause.text;
        finding.cause = std::move(cause);
      }
    }
    for (std::vector<std::string>* list :
         {&verdict.missing, &verdict.extra, &verdict.not_recorded}) {
      for (std::string& name : *list) name = words.at(name);
    }
    if (!findings_.empty()) {
      verdict.findings.insert(verdict.findings.begin(), findings_.begin(), findings_.end());
      set_diverges(verdict);
    }
    if (!verdict.findings.empty()) {
      const Finding& first = verdict.findings.front();
      verdict.reason = fmt::format("first {}{}", first.what,
                                   first.diagnosis.empty() ? "" : "; " + first.diagnosis);
    }
    note_zeros(verdict);
    const bool lacks_tensors = num_left_out_ > 0 || reference_.lacks_tensors ||
                               actual_.lacks_tensors || !verdict.not_recorded.empty();
    if (lacks_tensors && verdict.status == Status::kConforms) {
      verdict.strength = Strength::kWithinTolerance;
      verdict.reason += "; some tensors were left out (see the notes)";
    }
    if (num_rounded_ > 0) {
      notes_.push_back(fmt::format(
          "{} tensors were rounded to the coarser dtype of the two, as --allow-different-dtypes "
          "allows",
          num_rounded_));
      if (verdict.strength == Strength::kExact) verdict.strength = Strength::kWithinTolerance;
      if (verdict.status == Status::kConforms) {
        verdict.reason += fmt::format("; {} of them in the coarser of two dtypes", num_rounded_);
        if (num_coarser_ > 0)
          verdict.reason += fmt::format(
              ", {} as the judged checkpoint keeps them so: what it has lost by that is not judged",
              num_coarser_);
      }
    }
    verdict.notes.insert(verdict.notes.end(), notes_.begin(), notes_.end());
  }

  void note_zeros(const Verdict& verdict) {
    std::size_t tensors = 0;
    for (const TensorComparison& t : verdict.tensors)
      tensors += t.stats.unequal_values == 0 && t.stats.unequal_bits != 0 ? 1 : 0;
    if (tensors > 0)
      notes_.push_back(fmt::format(
          "{} tensors are equal but for the signs of zeros or the bits of NaNs", tensors));
  }

  const CheckpointRules& rules_;
  Comparer* comparer_;
  StoredCheckpoint reference_, actual_;
  std::vector<std::string> notes_;
  std::vector<Finding> findings_;
  Dtype coarsest_ = Dtype::kFloat64;
  std::size_t num_left_out_ = 0;  ///< tensors of the second one that need not be in the first
  std::size_t num_rounded_ = 0, num_coarser_ = 0;  ///< of them, those that the judged one rounded
};

}  // namespace

Verdict compare_checkpoints(const fs::path& reference, const fs::path& actual,
                            const CheckpointRules& rules, Comparer* comparer) {
  std::error_code ignored;
  if (fs::equivalent(reference, actual, ignored))
    throw UsageError(fmt::format("compare --checkpoint needs two checkpoints, got {} twice",
                                 reference.string()));
  return Comparison(reference, actual, rules, comparer).run();
}

std::vector<Renaming> parse_renamings(const std::string& text) {
  std::vector<Renaming> rules;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    const std::size_t equals = part.find('=');
    const Renaming rule{part.substr(0, equals),
                        equals == std::string::npos ? "" : part.substr(equals + 1)};
    const auto stars = [](const std::string& side) { return std::ranges::count(side, '*'); };
    if (rule.from.empty() || rule.to.empty() || stars(rule.from) > 1 ||
        stars(rule.from) != stars(rule.to))
      throw UsageError(fmt::format(
          "--rename must be FROM=TO, such as 'module.*=*', with one * on both sides or none, got "
          "'{}'",
          part));
    rules.push_back(rule);
  }
  return rules;
}

}  // namespace isoshard
