// SPDX-License-Identifier: Apache-2.0
// The table of rules: an id, its stable name in reports, what is said where the rule is broken, and
// why the rule is there. The message of a refusal begins with the file that breaks the rule.
// Placeholders: named_values.h.
#include "harness/ids/rule.h"

#include <fmt/format.h>

#include <array>

namespace isoshard {
namespace {

constexpr auto kRules = [] {
  using enum RuleId;
  return std::to_array<IdRow<RuleId>>({
      {kNone, "", ""},
      // ---- verdicts that prove nothing ----
      {kRanksMissing, "ranks_missing",
       "{ranks} of {world_size} ranks are there; missing or doubled: {missing}",
       "A run is judged only if every rank of its mesh has recorded, and each once: nothing is "
       "known of what a missing rank computed."},
      {kReferenceEmpty, "reference_empty",
       "the reference is empty: record it again, with at least one step",
       "A reference without records cannot show that a run is right."},
      {kNothingCompared, "nothing_compared",
       "no finite tensor was compared: leave less out (--only, --not-recorded), and judge steps "
       "whose numbers are finite",
       "A verdict that compared nothing proves nothing. It is vacuous, and not a pass."},
      {kReferenceNotFinite, "reference_not_finite",
       "the reference has {nans} NaN and {infinities} infinities of {elements} numbers in "
       "{tensor}: nothing can be said of a run from there on. Judge the steps before it, or lower "
       "the learning rate or the loss scale until its numbers are finite",
       "Any run agrees with a NaN, so a reference that is not finite outside of a skipped step "
       "cannot judge what follows."},
      {kResponseMissing, "response_missing",
       "the reference has no response for {tensor}: run its perturbed runs, or give a tolerance",
       "A tolerance is measured: perturbed runs of the reference show how far roundings move "
       "each tensor. Without one, no error can be called small."},
      {kBiasMissing, "bias_of_sum_missing",
       "the reference does not say what is added to {tensor}: record the parameters that the "
       "reference begins with, too, or leave the tensor out of the run",
       "Summands of a module's output are compared with the output without its bias. Where the "
       "reference does not record the bias, their sum has nothing to be compared with."},
      {kBiasDoesNotFit, "bias_of_sum_does_not_fit",
       "{tensor} has no number for each column of the sum: record the bias as the module adds it, "
       "or leave the sum out of the run",
       "Summands of a module's output are compared with the output without its bias, which must "
       "have one number for each column."},
      {kNotJudgeable, "not_judgeable", "{problem}: record both runs again, with whole tensors",
       "A tensor whose parts were not kept, or cannot be put together, cannot be compared, so "
       "the verdict is not a pass."},
      {kAllZero, "all_zero",
       "every value of the {tensors} tensors is zero on both sides: nothing was computed, or "
       "nothing was written. Start from weights (--generic-weights), or from data, for which some "
       "value is not zero",
       "Memory that nobody wrote is often zero. Two runs of zeros agree, and show nothing."},
      {kGradientsZero, "gradients_zero",
       "all {gradients} gradients of parameters are zero on both sides: nothing of backward, or of "
       "the reduction of gradients, was seen. Start from weights (--generic-weights), or from "
       "data, for which some gradient is not zero",
       "Zeros are not evidence. A gradient that is zero on each rank is zero after a wrong "
       "reduction, too."},
      {kOverflowParts, "overflow_parts_runs",
       "{run} of the {gradients} gradients of step {step} are not finite in the run, and "
       "{reference} in the reference. Whether they overflow may depend on roundings there (legal "
       "runs of the reference differ in it, or its gradients are near the largest number of "
       "fp16), so nothing was compared from the norm of that step on. With a small enough loss "
       "scale nothing overflows, and what is not finite then is an error",
       "A run that skips another step than its reference trains other weights from there on. "
       "Where roundings may decide which step overflows, this is neither right nor wrong."},
      {kNothingMoved, "nothing_moved",
       "none of the {parameters} parameters after a step differs from what it was before it: no "
       "step of the optimizer was seen. Record a step whose learning rate is large enough to move "
       "a parameter",
       "A run that left its steps out ends with the same parameters as one whose learning rate is "
       "0, or too small to change a number."},
      {kAxisWithoutWitness, "axis_without_witness",
       "nothing shows that {axis} is used: its coordinates {first} and {second} (of {degree}) hold "
       "the same parts, or parts with the same contents, of every tensor that was compared. "
       "Parallelize the model over {axis}, give its ranks different samples if it splits the "
       "batch, or leave it out of the mesh",
       "Ranks that do the same work agree with the reference, whatever their collectives do. An "
       "axis counts as used if something tells each two of its coordinates apart: a compared "
       "tensor on which the loss depends, that is cut or summed along it, and whose parts differ "
       "there."},
      {kInconclusive, "inconclusive",
       "{weak} of {compared} comparisons are inconclusive, first {tensor}: {weakness}. Judge in "
       "float64, where roundings are smaller. If it is inconclusive there, too, judge fewer steps, "
       "or start from other weights (--generic-weights) or more samples",
       "A comparison must reject a wrong factor above the ceiling of its dtype, and a copy of "
       "the reference that is rolled by one place. If its tolerance is so wide that one of them "
       "would pass, a wrong tensor would pass, too."},
      {kTooFewStepsJudged, "too_few_steps_judged",
       "{judged:.2g} % of the elements of parameters after the step were judged in the best "
       "step, at least {least:.2g} % must be: elsewhere the gradients are below their responses. "
       "Judge in float64, where "
       "roundings are smaller, or with more samples",
       "An Adam step of a gradient that is noise has a random sign, so a mask leaves it out. Too "
       "large a mask would leave the optimizer unjudged."},
      {kTooManyInsensitive, "too_many_insensitive",
       "{insensitive:.3g} % of the elements of all gradients are in tensors below twice their own "
       "response, at most {most:.3g} % may be. Judge in float64, where roundings are smaller, or "
       "with more samples",
       "A gradient that is no larger than what roundings make of it is judged by its absolute "
       "error alone. If most gradients are, the run shows too little."},
      // ---- settings and meshes ----
      {kSettingsMissing, "settings_missing",
       "must state its training settings (\"settings\": {{\"training\": {{...}}}}), got "
       "none{?hint}",
       "Runs of other settings cannot be expected to agree, so each bundle states its own."},
      {kSettingsDiffer, "settings_differ",
       "the runs have different settings, so they cannot be expected to agree (allow it with "
       "--allow-different-settings):\n  {differences}{hint}",
       "Another learning rate or seed is another training: a difference of tensors would say "
       "nothing about the parallelism."},
      {kOtherMesh, "other_mesh", "the degree of {axis} must be {degree} (--mesh), got {got}",
       "The mesh of a judged run is its own word. --mesh says what was asked for, so that a run "
       "of another mesh is not taken for it."},
      {kMeshContradictsSettings, "mesh_contradicts_settings",
       "the mesh must have the {stated} dp ranks of its settings (data.dp), got {dp}",
       "The mesh says how many parts a whole has, so it must be that of the settings."},
      {kMasksMissing, "masks_missing",
       "{dropout} is {p:g}, and the bundle holds no masks, without which a run that draws others "
       "looks wrong; record them (kind mask), or set the dropout to 0",
       "Two runs with dropout agree only if they draw the same masks, so the trusted run must "
       "show its own."},
      {kGradientScalesDiffer, "gradient_scales_differ",
       "the records of kind {kind} must have one gradient scale, got {first} and {second}; "
       "record the same grad_scale with all of them",
       "The factor that a run declares on its gradients is divided out. With several, a wrong "
       "factor could be declared away."},
      {kStepRuleMissing, "step_rule_missing",
       "must state optimizer.learning_rate, weight_decay, beta1, beta2 and eps as numbers, which "
       "bound AdamW's steps of small gradients; one is missing or not a number",
       "Without the optimizer's numbers, a step of an element that the mask leaves out could be "
       "of any size."},
      // ---- trusted runs ----
      {kTrustedLayoutInferred, "trusted_layout_inferred",
       "a trusted run must say where its tensors lie, got the layout \"infer\" of {tensor}",
       "Layouts are inferred by comparing with the trusted run, which has nothing to be compared "
       "with."},
      {kTrustedStatistics, "trusted_statistics",
       "a trusted run must hold its tensors, got statistics of them (keep=\"what_differs\")",
       "Statistics are made against a trusted run; one that holds only statistics cannot be "
       "compared with."},
      {kTrustedCopiesDiffer, "trusted_copies_differ",
       "the trusted run's ranks {first_rank} and {second_rank} must hold equal copies of "
       "{tensor}, got different ones; it can be no reference",
       "Of copies that differ, at most one is right, and nothing says which."},
      {kTrustedPartsDoNotTile, "trusted_parts_do_not_tile",
       "the trusted run's parts must make whole tensors; {problem}",
       "A trusted run of several ranks is put together to what one process would have."},
      // ---- layouts ----
      {kTensorNotKept, "tensor_not_kept",
       "{tensor}: rank {rank} must have kept its tensor, got \"kept\": false; there is nothing "
       "to compare",
       "A record without its tensor, or statistics of it, shows nothing."},
      {kPaddingNotZero, "padding_not_zero",
       "{tensor}: element {element} of rank {rank} is in no part of the whole, and must be 0, "
       "got {value}; padding holds no values",
       "A run could put wrong values where its layout says that nothing is. Padding must be 0, "
       "so that nothing hides there."},
      {kRankHoldsNothing, "rank_holds_nothing",
       "{tensor}: rank {rank} says that it holds nothing of it, but the run does not cut the "
       "tensors of kind {kind} so that a rank may: other ranks hold copies",
       "A rank whose copy has drifted could say that it holds nothing. It may do so only where "
       "the run cuts all tensors of that kind along an axis."},
      {kTiedCopyMissing, "tied_copy_missing",
       "{tensor}: no rank of stage {stage} (pp) records it, but that stage computes {reader}, "
       "which reads it: its copy may have drifted",
       "Stages that read one tied parameter have a copy each. A copy that is not recorded may be "
       "another one."},
      {kCutBesideCopies, "cut_beside_copies",
       "{tensor} is said to be cut along {axis} and {copied}, which is not smaller, to be "
       "copied: ranks must show all that they hold; record the whole copy of each rank, or allow "
       "the first with --not-recorded '{pattern}'",
       "A rank that says it holds only a part shows only that part, and may hold a wrong rest. A "
       "system that cuts a small tensor cuts larger ones of its kind, too."},
      {kCutButNeverGathered, "cut_but_never_gathered",
       "{tensor} is said to be cut along {axis}, but the trusted side says that ranks of "
       "{subject} gather and scatter nothing there: each must have a copy, and show all of it",
       "Who shards a tensor gathers it. A system whose table of calls gathers nothing along an "
       "axis has copies there, and each of them is judged."},
      {kLayoutNotInferable, "layout_not_inferable",
       "the layout of {tensor} cannot be inferred: {problem}. The reference has [{reference}], "
       "the ranks have {shapes}; give its placements or boxes",
       "Shapes and values must leave one way in which the ranks' parts make the whole. Otherwise "
       "a permuted tensor could be read as a right one."},
      {kInferredNotKept, "inferred_layout_not_kept",
       "the layout of {tensor} cannot be inferred without its tensor",
       "A layout is inferred from values."},
      // ---- responses ----
      {kResponseOfNoRecord, "response_of_no_record",
       "a response must be of a record of the bundle, got one of {tensor}",
       "Responses are tolerances. One of a tensor that is not there belongs to another run."},
      {kResponseDoesNotFit, "response_does_not_fit",
       "the response of {tensor} does not fit: {problem}",
       "The numbers of a response bound each other and those of its tensor. Larger ones would "
       "widen the tolerance."},
      {kResponseTooLarge, "response_too_large",
       "the response of {tensor} does not fit: roundings in {dtype} move no tensor by "
       "{moved:.3g} where the largest of its kind has norm {largest:.3g}",
       "A response of a tensor that is noise is bounded by the largest tensor of its kind, so "
       "that a bundle cannot declare a tensor to be noise."},
      {kRedrawnDoesNotFit, "redrawn_run_does_not_fit",
       "run {run} of {tensor} does not fit its tensor: no differences have these sums",
       "Sums of differences bound each other (Cauchy-Schwarz). Others would widen what pooled "
       "comparisons allow."},
      {kPerturbedSettingsDiffer, "perturbed_settings_differ",
       "a perturbed run must have the reference's settings, got\n  {differences}",
       "A response is how far one ulp moves the reference's own training."},
      {kPerturbedDataDiffer, "perturbed_data_differ",
       "a perturbed run must read the reference's data and masks, got another {tensor}; draw "
       "them by a fixed seed",
       "Other samples move tensors by far more than roundings do, and would allow anything."},
      {kPerturbedTooFar, "perturbed_too_far",
       "weights must be moved by one ulp (a relative error of {allowed:.3g} in {dtype}), got "
       "{moved:.3g} in {tensor}",
       "Weights that move by more than a rounding give responses that are too wide."},
      {kPerturbedRecordMissing, "perturbed_record_missing",
       "a perturbed run must record what the reference records, got no {tensor}",
       "Each tensor needs its own response."},
      {kNotPerturbed, "not_perturbed",
       "a perturbed run must begin with weights that are moved by one ulp, got the reference's",
       "A second run of the reference has no differences, and would allow none."},
      {kPerturbedOnSeveralRanks, "perturbed_on_several_ranks",
       "a perturbed run that compares while it runs must be one process",
       "Responses are of whole tensors."},
      {kPerturbedTensorBesideStatistics, "perturbed_tensor_beside_statistics",
       "a perturbed run must have the statistics of all its records or all its tensors, got a "
       "tensor of {tensor} beside statistics",
       "A response is made of statistics alone or of tensors alone."},
      // ---- statistics that ranks made while they ran ----
      {kStatisticsNotCredible, "statistics_not_credible",
       "the statistics of {tensor} on rank {rank} cannot be believed: {problem}; record the run "
       "again, or with whole tensors",
       "A judged run that compares by itself could write any numbers. They must fit each other, "
       "the reference, and the elements that were kept at places which the run cannot choose."},
      {kComparedWithNothing, "compared_with_nothing",
       "must say which reference its ranks compared with (\"compared_with\"), got nothing",
       "Statistics are against one reference, and say nothing about another."},
      {kComparedWithOther, "compared_with_other_reference",
       "its ranks must have compared with the trusted run {trusted} (digest {wanted}), got "
       "another reference (digest {got}); record the run again with this one",
       "Statistics are against one reference, and say nothing about another."},
      {kComparedWithOtherResponses, "compared_with_other_responses",
       "its ranks must have compared with the responses that the trusted run has, got others; "
       "measure the responses first (respond), then record the run",
       "Ranks keep what differs by more than responses allow, so the judge must use the same "
       "ones."},
      // ---- bundles ----
      {kFileForm, "file_form", "{problem}",
       "A file must have the form that docs/reference/bundle.md, docs/reference/bundle.schema.json "
       "and docs/reference/report.md describe."},
      {kUnknownSchema, "unknown_schema",
       "the schema must be {newest}, which this program reads, got {got}",
       "Another schema may mean something else by the same fields."},
      {kRunIncomplete, "run_incomplete", "{file} is missing: the run is incomplete",
       "Every rank writes three files for every step, the last one when the step is complete. A "
       "run that died is not judged by what it had written."},
      {kFileChanged, "file_changed",
       "has another SHA-256 than manifest.json lists: the file has changed since the bundle was "
       "written",
       "A file that changed is not what the run recorded."},
      {kFileMissing, "file_missing",
       "is missing, though manifest.json lists it: the bundle is incomplete",
       "A bundle is judged whole, so that a part cannot be left away."},
      {kFileNotListed, "file_not_listed", "is missing: manifest.json does not list it",
       "Only files that manifest.json lists, with their hashes, are read."},
      {kFileTooMany, "file_too_many",
       "is not among the \"files\" of manifest.json; a bundle holds nothing else",
       "A file that is not listed is of another run, or was added later."},
      {kWriterKilled, "writer_killed",
       "was being written when its writer was killed; write the bundle again",
       "A bundle that was not finished may hold files of two runs."},
      {kOtherRun, "file_of_other_run", "{problem}", "Files of two runs cannot be judged as one."},
      {kTensorsAsDescribed, "tensors_not_as_described",
       "must hold the {described} tensors that its records describe, got {got}",
       "The tensors of a step are those that its records describe, and no others: what is not "
       "described is not judged."},
      {kRecordedTwice, "recorded_twice", "{tensor} is recorded twice",
       "A rank records a tensor once, or counts its calls: of two records one would be left out."},
      {kCallsNotCounted, "calls_not_counted",
       "the calls of {tensor} must be counted from 0 in the order of execution, got {got} where "
       "{due} is due",
       "A record that is left out must not go unnoticed."},
      {kPartsDoNotTile, "parts_must_tile", "{tensor}: {problem}",
       "The parts of all ranks must make the whole tensor, without gaps, and overlap only as "
       "whole copies."},
      {kLocalDoesNotFitLayout, "local_tensor_does_not_fit_layout", "{problem}",
       "A rank's tensor must have the shape that its layout gives it."},
      // ---- folders of runs ----
      {kReferenceOfSeveralRanks, "reference_of_several_ranks",
       "must be a run of one process, as it says that it is \"{subject}\", got one of several "
       "ranks; if it is to be judged, give it another subject, and if it is to be trusted, name "
       "both bundles: isoshard compare REFERENCE RUN",
       "A run of several ranks must not be spared the judge by calling itself a reference."},
      {kTwoReferences, "two_references",
       "must be the only plain reference with its settings, got {other} beside it; take the one "
       "away that is not to be trusted, or name both bundles: isoshard compare REFERENCE RUN",
       "Of two references, the first by name would be trusted."},
      {kEmulationWithoutRun, "emulation_without_run",
       "must have a run of {subject} with its settings beside it, as it says that it is the "
       "emulation of one, got {runs} for {emulations} emulations",
       "An emulation is not judged, so the run that it emulates must be there and is."},
      {kNoReferenceWithSettings, "no_reference_with_settings",
       "no plain reference beside it has its settings{differences}",
       "A run is judged against a reference of its own settings."},
      {kReferenceWithoutRun, "reference_without_run",
       "must have a run with its settings beside it, as it says that it is a reference, got "
       "none; take it away, or give it another subject if it is to be judged",
       "A run that calls itself a reference is not judged, so it must be the reference of some "
       "run."},
      // ---- checkpoints ----
      {kNoSharedDtype, "no_tensor_of_one_dtype",
       "{reference} and {actual} share no tensor of one dtype, so nothing was compared; the "
       "first other dtype is that of {tensor}. Save both in one dtype",
       "A verdict that compared nothing proves nothing."},
      {kNoFile, "no_such_file", "there is no such file or folder",
       "What is not there cannot be compared."},
      {kCheckpointToConvert, "checkpoint_to_convert",
       "is {format}, which this program does not read. Convert it with `{command}`, or compare "
       "with the command `isoshard` of the Python package, which converts by itself",
       "Reading a pickle can run code, so this program reads safetensors alone."},
      {kBundleForCheckpoint, "bundle_in_place_of_checkpoint",
       "is the manifest of a bundle, not of a checkpoint; compare bundles without --checkpoint",
       "A bundle is judged by its own rules, which know of ranks and steps."},
      // ---- curves ----
      {kNoCurves, "no_curves",
       "has no loss_*.json; isoshard train --output-dir {folder} writes them",
       "A folder without curves shows nothing of a training run."},
      {kCurveTwice, "curve_twice", "duplicate curve of {subject}, which {other} holds, too",
       "Of two curves of one subject, the first by name would be judged."},
      {kPerturbedCurveSteps, "perturbed_curve_of_other_length",
       "a perturbed run must have the {steps} steps of the reference, got {got}",
       "The spread of curves is measured step by step."},
      {kCurvesBeginElsewhere, "curves_begin_at_other_steps",
       "{reference} begins with step {first}, {actual} with step {other}: resume both from one "
       "checkpoint",
       "Runs that begin at different steps are compared from different weights."},
      {kCurveSettingsDiffer, "curve_settings_differ",
       "{reference} and {actual} ran with different settings, so their curves cannot be expected "
       "to agree (allow it with --allow-different-settings); reference is the first, actual the "
       "second:\n  {differences}",
       "Another learning rate or seed is another training, with another curve."},
  });
}();
static_assert(is_complete(kRules), "kRules must have one row for each RuleId, in its order");

}  // namespace

std::span<const IdRow<RuleId>> rows_of(RuleId) noexcept {
  return kRules;
}

const Rule* rule_of(const std::exception& error) noexcept {
  const auto* const broken = dynamic_cast<const BrokenRule*>(&error);
  return broken == nullptr ? nullptr : &broken->rule();
}

std::string message_of(const std::exception& error) {
  const Rule* const rule = rule_of(error);
  return rule == nullptr ? error.what() : error.what() + in_brackets(*rule);
}

std::string in_brackets(const Rule& rule) {
  return rule.empty() ? "" : fmt::format(" [{}]", name_of(rule.id));
}

void refuse(const std::filesystem::path& file, RuleId id, NamedValues values) {
  throw Refused<FileError>(file, said(id, std::move(values)));
}

}  // namespace isoshard
