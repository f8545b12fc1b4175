// SPDX-License-Identifier: Apache-2.0
/// What the project knows of an implementation that it can judge: one row a subject.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/axis.h"
#include "subjects/parallel/numerics_spec.h"
#include "subjects/parallel/subject_traits.h"
#include "subjects/parallel/tensor/shard_plan.h"
#include "subjects/train/parts.h"

namespace isoshard {

/// Changes to a subject from outside: how faults replace its seams by faulty test doubles. Each may
/// be empty. Called on every rank.
struct SubjectEdits {
  /// Called before the parts that follow the plan are made.
  std::function<void(ShardPlan& plan, const Mesh& mesh)> plan;
  /// Called after the parts are made.
  std::function<void(TrainerParts& parts, Mesh& mesh)> parts;
};

/// kJudged: an implementation on several ranks. kReference: the trusted single process.
enum class SubjectRole : std::uint8_t { kJudged, kReference };

/// One subject. To add one: its strategy in a folder of src/subjects/parallel, a file beside this
/// one with its row, and the row's name in registry.cc.
struct SubjectSpec {
  std::string_view name;     ///< "autotp"; in flags, slugs and files
  std::string_view title;    ///< "DeepSpeed AutoTP"; in plots and reports
  std::string_view summary;  ///< what it copies, in one line
  /// The system that it is a copy of, written anew: what is judged here is the copy. Empty: none.
  std::string_view copy_of = {};
  std::vector<std::string_view> aliases = {};  ///< what the published scripts call it
  SubjectRole role = SubjectRole::kJudged;
  /// The axes over which it can spread; the degree of every other axis must be 1.
  std::vector<Axis> axes = {};
  /// The settings (fixtures/cases/setting.h) that only some subjects take, and this one does.
  std::vector<std::string_view> settings = {};
  SubjectTraits traits = {};
  /// Ranks    collective over the mesh.
  /// Errors   UsageError if `edits.plan` is given and the subject has no plan.
  TrainerParts (*make_parts)(const TrainerConfig& config, Mesh& mesh,
                             const SubjectEdits& edits) = nullptr;
  /// What it declares about its own arithmetic; nullptr: nothing.
  NumericsSpec (*make_numerics)(const Model& model, const NumericsInputs& inputs) = nullptr;

  [[nodiscard]] bool has(Axis axis) const noexcept;
  [[nodiscard]] bool takes(std::string_view setting) const noexcept;
  [[nodiscard]] bool is_reference() const noexcept { return role == SubjectRole::kReference; }
};

/// All rows; the reference comes last.
[[nodiscard]] std::span<const SubjectSpec> subject_specs();
/// Errors   UsageError with a suggestion and the names for a subject that is not registered.
[[nodiscard]] const SubjectSpec& subject_spec(std::string_view name);
/// Null for a name that is not registered, such as a user's own subject.
[[nodiscard]] const SubjectSpec* find_subject(std::string_view name) noexcept;
/// The name behind an alias; any other name as it is.
[[nodiscard]] std::string subject_name(std::string_view name_or_alias);
/// The title of a registered subject, any other name as it is.
[[nodiscard]] std::string title_of_subject(std::string_view name);
/// The trusted single process.
[[nodiscard]] const SubjectSpec& reference_subject();
/// Whether this is the name of the trusted single process.
[[nodiscard]] bool is_reference(std::string_view name) noexcept;
/// The subject whose runs others are compared with side by side: replicas, which split nothing.
[[nodiscard]] bool is_baseline(std::string_view name) noexcept;
/// The names of the judged subjects that have `axis`, of those that take `setting`.
[[nodiscard]] std::vector<std::string> subjects_with(Axis axis);
[[nodiscard]] std::vector<std::string> subjects_that_take(std::string_view setting);
/// The subject that a mesh stands for where none is named: with tp above 1 the first that has a tp
/// axis, with dp above 1 the first, else none.
[[nodiscard]] std::string_view usual_subject(bool has_tp, bool has_dp) noexcept;

/// The rows, each in a file of its own.
[[nodiscard]] SubjectSpec ddp_subject();
[[nodiscard]] SubjectSpec autotp_subject();
[[nodiscard]] SubjectSpec fsdp_tp_subject();
[[nodiscard]] SubjectSpec megatron_subject();
[[nodiscard]] SubjectSpec nd_subject();
[[nodiscard]] SubjectSpec plain_subject();

/// For subjects that shard nothing.   Errors   UsageError if a plan is to be edited.
void refuse_plan_edit(const SubjectEdits& edits, std::string_view subject);

}  // namespace isoshard
