// SPDX-License-Identifier: Apache-2.0
// The list of subjects, and questions about it.
#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/reference_name.h"
#include "core/base/suggest.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

template <class Wanted>
std::vector<std::string> judged_names(const Wanted& wanted) {
  std::vector<std::string> names;
  for (const SubjectSpec& spec : subject_specs()) {
    if (!spec.is_reference() && wanted(spec)) names.emplace_back(spec.name);
  }
  return names;
}

}  // namespace

bool SubjectSpec::has(Axis axis) const noexcept {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

bool SubjectSpec::takes(std::string_view setting) const noexcept {
  return std::find(settings.begin(), settings.end(), setting) != settings.end();
}

std::span<const SubjectSpec> subject_specs() {
  static const std::vector<SubjectSpec> specs = {ddp_subject(),     autotp_subject(),
                                                 fsdp_tp_subject(), megatron_subject(),
                                                 nd_subject(),      plain_subject()};
  return specs;
}

const SubjectSpec* find_subject(std::string_view name) noexcept {
  const std::span<const SubjectSpec> specs = subject_specs();
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [&](const SubjectSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

const SubjectSpec& subject_spec(std::string_view name) {
  if (const SubjectSpec* const found = find_subject(name)) return *found;
  std::vector<std::string> names, accepted;
  for (const SubjectSpec& spec : subject_specs()) names.emplace_back(spec.name);
  accepted = names;
  for (const SubjectSpec& spec : subject_specs())
    accepted.insert(accepted.end(), spec.aliases.begin(), spec.aliases.end());
  throw UsageError(fmt::format("unknown subject '{}'{}; it must be one of {}", name,
                               did_you_mean(name, accepted), join_names(names)));
}

std::string subject_name(std::string_view name_or_alias) {
  for (const SubjectSpec& spec : subject_specs()) {
    if (std::find(spec.aliases.begin(), spec.aliases.end(), name_or_alias) != spec.aliases.end())
      return std::string(spec.name);
  }
  return std::string(name_or_alias);
}

std::string title_of_subject(std::string_view name) {
  const SubjectSpec* const spec = find_subject(name);
  return std::string(spec == nullptr ? name : spec->title);
}

const SubjectSpec& reference_subject() {
  return subject_specs().back();
}

bool is_reference(std::string_view name) noexcept {
  return name == kReferenceName;
}

bool is_baseline(std::string_view name) noexcept {
  return name == kBaselineName;
}

std::vector<std::string> subjects_with(Axis axis) {
  return judged_names([&](const SubjectSpec& spec) { return spec.has(axis); });
}

std::vector<std::string> subjects_that_take(std::string_view setting) {
  return judged_names([&](const SubjectSpec& spec) { return spec.takes(setting); });
}

std::string_view usual_subject(bool has_tp, bool has_dp) noexcept {
  if (!has_tp && !has_dp) return "";
  for (const SubjectSpec& spec : subject_specs()) {
    if (!has_tp || spec.has(Axis::kTp)) return spec.name;
  }
  return "";
}

void refuse_plan_edit(const SubjectEdits& edits, std::string_view subject) {
  if (!edits.plan) return;
  throw UsageError(fmt::format(
      "a fault in the sharding plan needs a subject that has one, got {}; take one of {}", subject,
      join_names(subjects_with(Axis::kTp))));
}

}  // namespace isoshard
