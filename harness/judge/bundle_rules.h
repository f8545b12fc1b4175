// SPDX-License-Identifier: Apache-2.0
/// What bundles must be before one is judged against another: nothing hidden, nothing excused,
/// responses that can be believed.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "harness/trace/reference.h"

namespace isoshard {

/// Errors   FileError that starts with `file` and names the first record whose tensor is not in the
///          bundle, and whose rank did not compare it either (Record::compared).
void require_kept(const Trace& trace, const std::filesystem::path& file);

/// Holds a judged run to layouts that hide no value:
///
/// - every record has its tensor, or was compared in its rank;
/// - elements that no part covers are padding, and 0;
/// - a rank that holds nothing of a tensor (an empty part, or only_at) is believed only where the
///   run cuts all tensors of that kind along one axis of the mesh, so that no rank of it holds a
///   copy of another's, and every rank of it holds something. So a copy that differs cannot be left
///   out. Along pp it is enough for data ids, losses and masks, and for what a layer computes in
///   its second call and later ones, that the parameters are cut so: they belong to one stage;
/// - of a parameter with several names each stage that computes its module, or lm_head, has a copy.
///
/// Ranks may hold nothing of what `allowed` names (matches_any). `num_names`: as
/// JudgePolicy::num_names. A parameter with several names, and what belongs to it, may be on two
/// stages of a pipeline whose other tensors are cut.
/// Errors   FileError that starts with `file` and names record and rank, or stage.
void require_honest_layouts(const Trace& trace, const std::vector<std::string>& allowed,
                            const std::filesystem::path& file,
                            const std::map<std::string, int, std::less<>>& num_names = {});

/// Holds the stored responses of a reference to each other and to its tensors: each has a record;
/// all numbers are finite and not negative; norms lie between the largest element and sqrt(numel)
/// times it; the reference's norm and largest element are those of the tensor as it was read (no
/// larger, where a mask left elements out); relative errors are the absolute ones over that norm,
/// and at least the scale errors. A tensor that moves by half its norm or more is rounding noise:
/// it moves by no more than 1e-6 (fp64), 1e-2 (fp32) or 0.5 (16 bits) of the largest norm of its
/// step and kind.
///
/// Holds the sums of redrawn runs to their tensors, too: differences exist that have these sums.
///
/// `is_masked`: small gradients were masked in the perturbed runs. `folder`: where responses.json
/// and redrawn.json lie.
/// Errors   FileError that starts with the file and names the record.
void require_fitting_responses(const Reference& reference, bool is_masked, Dtype coarsest,
                               const std::filesystem::path& folder);

}  // namespace isoshard
