// SPDX-License-Identifier: Apache-2.0
/// For tests: runs of one or more ranks made up in one process, recorded by real recorders.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness/recorder/recorder.h"
#include "harness/trace/reference.h"

namespace isoshard::synthetic {

inline const MeshShape kDp2Tp3({{Axis::kDp, 2}, {Axis::kTp, 3}});

/// The policy for runs of a few tensors that show no axis.
inline JudgePolicy with_unused_axes(JudgePolicy policy = {}) {
  policy.may_be_unused = {Axis::kDp, Axis::kTp, Axis::kPp, Axis::kCp};
  return policy;
}

/// What a rank does: begin steps and record tensors on the sink it is given.
using Body = std::function<void(Sink& sink, int rank)>;

inline Site site(RecordKind kind, std::string name, Layout layout, double grad_scale = 1) {
  return {kind, std::move(name), std::move(layout), grad_scale};
}

inline Layout layout_of(Shape global_shape, std::vector<Placement> placements = {}) {
  Layout layout;
  layout.global_shape = std::move(global_shape);
  layout.placements = std::move(placements);
  return layout;
}

/// Deterministic values in [-1, 1), different for each seed.
inline at::Tensor values(const Shape& shape, std::int64_t seed, at::ScalarType dtype = at::kFloat) {
  const at::Tensor index =
      at::arange(numel_of(shape), at::kDouble) + static_cast<double>(seed * 1000 + 1);
  const at::Tensor mixed = (index * 12.9898).sin().mul(43758.5453);
  return mixed.sub(mixed.floor()).mul(2).sub(1).to(dtype).reshape(shape).contiguous();
}

inline RankTrace run_rank(const MeshShape& mesh, int rank, const Reference* reference, Keep keep,
                          const Body& body, const JudgePolicy& policy = {},
                          RunPurpose purpose = RunPurpose::kJudged) {
  RecordOptions options;
  options.mesh = mesh;
  options.rank = rank;
  options.reference = reference;
  options.keep = keep;
  options.arena = std::make_shared<Arena>(std::size_t{64} << 20, "synthetic");
  options.policy = policy;
  options.purpose = purpose;
  Recorder recorder(options);
  recorder.begin_step(0);
  body(recorder, rank);
  return recorder.finish();
}

inline Trace run(const MeshShape& mesh, const Reference* reference, const Body& body,
                 Keep keep = Keep::kWhatDiffers, const JudgePolicy& policy = {},
                 RunPurpose purpose = RunPurpose::kJudged) {
  Trace trace;
  trace.subject = "synthetic";
  trace.case_slug = "case";
  trace.mesh = mesh;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    // As from another process: the records go through their serialized form.
    RankTrace recorded = run_rank(mesh, rank, reference, keep, body, policy, purpose);
    RankTrace arrived = RankTrace::deserialize(recorded.serialize());
    arrived.arena = recorded.arena;
    trace.ranks.push_back(std::move(arrived));
  }
  return trace;
}

inline Reference reference(const Body& body) {
  Trace trace = run(MeshShape(), nullptr, body, Keep::kEverything);
  trace.subject = "reference";
  return Reference(std::move(trace));
}

/// A reference with `runs` responses: in each, `perturbed(run)` is what the single process does.
inline Reference reference(const Body& body, const std::function<Body(int run)>& perturbed,
                           int runs = 3, const JudgePolicy& policy = {}) {
  Reference result = reference(body);
  for (int i = 0; i < runs; ++i)
    result.add_response(
        run(MeshShape(), &result, perturbed(i), Keep::kNothing, policy, RunPurpose::kResponse));
  return result;
}

}  // namespace isoshard::synthetic
