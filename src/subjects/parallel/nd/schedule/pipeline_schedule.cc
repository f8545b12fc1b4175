// SPDX-License-Identifier: Apache-2.0
// Names, placement, refusals and memory bounds of pipeline schedules.
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "subjects/parallel/nd/schedule/schedule_rounds.h"

namespace isoshard {
namespace {

struct KindName {
  std::string_view name;
  PipelineKind kind;
};
// The first name of a kind is the one that is written.
constexpr std::array kNames = {
    KindName{"GPipe", PipelineKind::kGPipe},
    KindName{"1F1B", PipelineKind::k1F1B},
    KindName{"Interleaved1F1B", PipelineKind::kInterleaved1F1B},
    KindName{"InterleavedZeroBubble", PipelineKind::kInterleavedZeroBubble},
    KindName{"ZBVZeroBubble", PipelineKind::kZbvZeroBubble},
    KindName{"Custom", PipelineKind::kCustom},
    KindName{"ZB1P", PipelineKind::kInterleavedZeroBubble},
    KindName{"ZBV", PipelineKind::kZbvZeroBubble}};
constexpr std::array<std::string_view, 2> kNotBuilt = {"LoopedBFS", "DualPipeV"};

/// Letters and digits only, in lower case.
std::string plain(std::string_view name) {
  std::string text;
  for (const unsigned char c : name)
    if (std::isalnum(c) != 0) text += static_cast<char>(std::tolower(c));
  return text;
}

void require(bool holds, const std::string& message) {
  if (!holds) throw UsageError(message);
}

void require_positive(std::string_view what, int count) {
  require(count >= 1, fmt::format("{} must be at least 1, got {}", what, count));
}

void require_one_stage_a_rank(const PipelineSpec& spec) {
  require(spec.stages_per_rank == 1,
          fmt::format("stages per rank must be 1 for {}, got {}; Interleaved1F1B takes several",
                      to_string(spec.kind), spec.stages_per_rank));
}

void require_whole_rounds(const PipelineSpec& spec) {
  const int rounds = num_rounds(spec);
  require(spec.micro_batches % rounds == 0,
          fmt::format(
              "micro-batches must be a multiple of their {} rounds (micro-batches / pp) for "
              "{} on pp {}, got {}; {} and {} are such numbers",
              rounds, to_string(spec.kind), spec.pp, spec.micro_batches,
              spec.micro_batches / rounds * rounds, (spec.micro_batches / rounds + 1) * rounds));
}

void require_placement(const PipelineSpec& spec, std::string_view advice) {
  require(spec.placement == default_placement(spec.kind),
          fmt::format("placement must be {} for {}, got {}; {}",
                      to_string(default_placement(spec.kind)), to_string(spec.kind),
                      to_string(spec.placement), advice));
}

}  // namespace

std::string to_string(const PipelineAction& action) {
  return fmt::format("{}{}{}", action.stage, static_cast<char>(action.kind), action.micro_batch);
}

std::string_view to_string(PipelineKind kind) {
  return std::ranges::find(kNames, kind, &KindName::kind)->name;
}

std::string_view to_string(StagePlacement placement) {
  return placement == StagePlacement::kLoop ? "loop" : "V";
}

PipelineKind pipeline_kind_of(std::string_view name) {
  const std::string wanted = plain(name);
  for (const KindName& known : kNames)
    if (plain(known.name) == wanted) return known.kind;
  for (const std::string_view known : kNotBuilt)
    if (plain(known) == wanted)
      throw NotBuiltError(fmt::format(
          "pipeline schedule {} is not built; its table may be given as a file", known));
  std::vector<std::string> names;
  names.reserve(kNames.size());
  for (const KindName& known : kNames) names.emplace_back(known.name);
  throw UsageError(fmt::format("pipeline schedule must be one of {}, got '{}'{}", join_names(names),
                               name, did_you_mean(name, names)));
}

StagePlacement default_placement(PipelineKind kind) {
  return kind == PipelineKind::kZbvZeroBubble ? StagePlacement::kV : StagePlacement::kLoop;
}

StagePlacement stage_placement_of(std::string_view name) {
  for (const StagePlacement placement : {StagePlacement::kLoop, StagePlacement::kV})
    if (plain(name) == plain(to_string(placement))) return placement;
  throw UsageError(
      fmt::format("the placement of stages (--stage-placement) must be loop or v, got '{}'", name));
}

PipelineSpec pipeline_spec(std::string_view name, int pp, int stages_per_rank,
                           std::string_view placement, int micro_batches) {
  const PipelineKind kind = pipeline_kind_of(name);
  return {kind, pp, stages_per_rank,
          placement.empty() ? default_placement(kind) : stage_placement_of(placement),
          micro_batches};
}

bool has_split_backward(PipelineKind kind) {
  return kind == PipelineKind::kInterleavedZeroBubble || kind == PipelineKind::kZbvZeroBubble;
}

int num_stages(const PipelineSpec& spec) {
  return spec.pp * spec.stages_per_rank;
}

int rank_of_stage(const PipelineSpec& spec, int stage) {
  const int turn = stage / spec.pp, place = stage % spec.pp;
  const bool goes_down = spec.placement == StagePlacement::kV && turn % 2 == 1;
  return goes_down ? spec.pp - 1 - place : place;
}

std::vector<int> stages_of_rank(const PipelineSpec& spec, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(spec); ++stage)
    if (rank_of_stage(spec, stage) == rank) stages.push_back(stage);
  return stages;
}

void require_schedulable(const PipelineSpec& spec) {
  require_positive("pp", spec.pp);
  require_positive("stages per rank", spec.stages_per_rank);
  require_positive("micro-batches", spec.micro_batches);
  switch (spec.kind) {
    case PipelineKind::kGPipe:
      require_one_stage_a_rank(spec);
      break;
    case PipelineKind::k1F1B:
      require_one_stage_a_rank(spec);
      require_filled(spec);
      break;
    case PipelineKind::kInterleaved1F1B:
      if (spec.placement == StagePlacement::kLoop) require_whole_rounds(spec);
      break;
    case PipelineKind::kInterleavedZeroBubble:
      require_placement(spec, "ZBVZeroBubble is the zero-bubble schedule on a V");
      require_whole_rounds(spec);
      break;
    case PipelineKind::kZbvZeroBubble:
      require_placement(spec, "InterleavedZeroBubble is the zero-bubble schedule on a loop");
      require(
          spec.stages_per_rank == 2,
          fmt::format("stages per rank must be 2 for ZBVZeroBubble, got {}", spec.stages_per_rank));
      break;
    case PipelineKind::kCustom:
      break;
  }
}

void require_filled(const PipelineSpec& spec) {
  require(spec.micro_batches >= num_stages(spec),
          fmt::format("micro-batches must be at least the number of stages {} (pp {} x {} stages "
                      "per rank), got {}; raise the local batch or lower pp",
                      num_stages(spec), spec.pp, spec.stages_per_rank, spec.micro_batches));
}

std::vector<int> memory_bound(const PipelineSpec& spec) {
  const int all = spec.stages_per_rank * spec.micro_batches;
  std::vector<int> bound(static_cast<std::size_t>(spec.pp), all);
  for (int rank = 0; rank < spec.pp; ++rank) {
    int formula = all;
    switch (spec.kind) {
      case PipelineKind::kGPipe:
      case PipelineKind::kCustom:
        break;
      case PipelineKind::k1F1B:
        formula = spec.pp - rank;
        break;
      case PipelineKind::kInterleaved1F1B:
        formula = spec.placement == StagePlacement::kV
                      ? num_stages(spec)
                      : 2 * (spec.pp - 1 - rank) + warm_up_of_last_rank(spec) + 1;
        break;
      case PipelineKind::kInterleavedZeroBubble:
        formula = spec.pp + warm_up_of_last_rank(spec);
        break;
      case PipelineKind::kZbvZeroBubble:
        formula = 2 * spec.pp;
        break;
    }
    bound[static_cast<std::size_t>(rank)] = std::min(all, formula);
  }
  return bound;
}

}  // namespace isoshard
