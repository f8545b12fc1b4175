// SPDX-License-Identifier: Apache-2.0
/// What the patterns of a diagnosis look at: one divergent tensor, what each rank holds of it, and
/// the runs around it.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/causes/view/values.h"
#include "harness/ids/cause.h"
#include "harness/verdict/tensor_judge.h"

namespace isoshard::detail {

/// What one rank holds and what it should hold, in fp64, with grad_scale divided out.
struct View {
  int rank;
  Box box;
  Values actual;
  Values expected;
};

/// The boxes that a rank kept of a record of a tensor of this shape, without what pads them, in
/// fp64; of flat ranges the largest one. Empty if bytes were not kept, or are a summand's or those
/// of another shape.
[[nodiscard]] std::vector<std::pair<Box, Values>> kept_boxes(const RankTrace& rank,
                                                             const Record& record,
                                                             const Shape& global_shape);

/// The place of an element of a box, counted in row-major order, in the whole tensor.
[[nodiscard]] Shape index_of(const Box& box, std::int64_t element);

/// One divergent tensor and the two runs. Refers to what it is made of.
class Evidence {
 public:
  Evidence(const Reference& reference, const Record& wanted, const Trace& actual,
           const std::vector<Held>& held, const TensorResult& result, const JudgePolicy& options);

  const Reference& reference;
  const Record& wanted;  ///< the reference's record
  const Trace& actual;
  const std::vector<Held>& held;
  const TensorResult& result;
  const JudgePolicy& options;
  Values whole;  ///< the reference's value in fp64; undefined for tensors too large to diagnose
  /// Of ranks that kept finite bytes, where the reference is finite, too, in boxes, one each, or in
  /// flat ranges: then of a box among them. Head and tail of a sequence are two boxes of one rank.
  std::vector<View> views;

  [[nodiscard]] const Held* held_by(int rank) const;
  /// Of a rank that has one box; nothing of one that has several.
  [[nodiscard]] const View* view_of(int rank) const;
  [[nodiscard]] const View* first_bad_view() const;
  [[nodiscard]] const std::vector<int>& bad_ranks() const { return result.findings.front().ranks; }
  /// Whether nothing of the run is coarser than fp32.
  [[nodiscard]] bool is_wide() const noexcept {
    return options.coarsest == Dtype::kFloat32 || options.coarsest == Dtype::kFloat64;
  }
  /// The relative error that still counts as equal.
  [[nodiscard]] double tolerance() const;
  /// What roundings may do to one element, as a share of it: the tolerance, and no more than 16
  /// bits may.
  [[nodiscard]] double noise() const;
  /// Whether a candidate explains what was seen: it is near in itself, and much nearer than the
  /// reference was.
  [[nodiscard]] bool explains(const Values& candidate, const Values& target, double error) const;
  /// The same of each element: what explains all but one explains nothing. Where the view is right
  /// the candidate must be so, too.
  [[nodiscard]] bool explains_each(const Values& candidate, const View& view) const;
  /// The factor that explains each element of what a rank holds; nothing if there is none, or too
  /// little to tell.
  [[nodiscard]] std::optional<double> factor_on(const View& view) const;
  /// Wrong views of the wrong ranks; empty if bytes of one of them are not there.
  [[nodiscard]] std::vector<const View*> bad_views() const;

  /// "micro-batches": how often activations or data passed in the tensor's step.
  [[nodiscard]] int num_micro_batches() const;
  /// "tp" for 3, "1/micro-batches" for 0.25, "2^-16" for 1.526e-05; nothing if the factor fits no
  /// formula of the run's numbers.
  [[nodiscard]] std::optional<std::string> formula_of(double factor, double relative = 0.02) const;
  /// A cause for a factor: "scale 3 = tp", "scale 2 = norm / max_norm: clipping not applied",
  /// "scale 1.37". `more` are further values of its row.
  [[nodiscard]] Cause scale_cause(double factor, NamedValues more = {}) const;
  /// The reference's gradient norm over the norm to clip to; 1 if nothing is clipped or it is not
  /// known.
  [[nodiscard]] double clip_ratio() const;
  /// "tp rank 1", "tp ranks 1, 2": the coordinates of world ranks on an axis.
  [[nodiscard]] std::string coordinates_in_words(const std::vector<int>& ranks, Axis axis) const;
  /// The axis along which being in `ranks` or not is decided by the coordinate alone, if there is
  /// one.
  [[nodiscard]] std::optional<Axis> axis_of(const std::vector<int>& ranks) const;
  /// The placeholder on_ranks: " on tp rank 1", " on ranks 1, 2"; empty if all that hold the tensor
  /// are wrong.
  [[nodiscard]] NamedValue on_bad_ranks() const;
  /// The box that a rank holds of a record with the wanted tensor's shape, without what pads it, in
  /// fp64; of flat ranges the largest one. Nothing if it holds several boxes, a summand, or a box
  /// of another shape.
  [[nodiscard]] std::optional<std::pair<Box, Values>> own_box(const RankTrace& rank,
                                                              const Record& record) const;
  /// The same of each box, if it holds several: of head and tail of a sequence there are two.
  [[nodiscard]] std::vector<std::pair<Box, Values>> own_boxes(const RankTrace& rank,
                                                              const Record& record) const;
  /// Where own_box() would cut what a rank holds of the tensor, its bytes kept or not.
  [[nodiscard]] std::optional<Box> place_on(const Held& holder) const;
  /// A parameter as forward of the tensor's step reads it; undefined if the reference has none.
  [[nodiscard]] Values parameter_read(const std::string& name) const;
  /// Whether the run has the record, and all parts that ranks hold of it are within the tensor's
  /// tolerance. What a run cannot have (before step 0) or need not (clipped gradients) is right.
  [[nodiscard]] bool is_right(const RecordKey& key) const;
  /// A scalar of a step, as the reference has it.   Errors   ShapeError unless it is one number.
  [[nodiscard]] std::optional<double> scalar(int step, NameRole role) const;
  /// The reference's value of a record, in fp64 as it was recorded.
  [[nodiscard]] Values reference_value(const RecordKey& key) const {
    return Values(reference.tensor(key));
  }

 private:
  [[nodiscard]] double clip_ratio_of(int step) const;
  /// The reference's gradient norm over the norm to clip to. Where that is not known, the factor
  /// that was taken out of the wanted gradient, or 1.
  [[nodiscard]] double norm_over_limit(int step) const;
  /// The factor between the reference's gradient and its clipped one, where the wanted tensor is a
  /// clipped gradient and all of its elements have that factor; else 1.
  [[nodiscard]] double factor_taken_out() const;
  /// The earlier step whose norm the gradient is clipped by, if it is too large by this factor.
  [[nodiscard]] std::optional<int> norm_clipped_by(double factor) const;
  void collect_views();
  void add_views(int rank, const std::vector<std::pair<Box, Values>>& boxes);
};

/// Whether a tensor has so many different numbers that nothing else equals it, or a multiple of it,
/// by chance.
[[nodiscard]] bool is_telling(const Values& values);
/// "model.layers.1.mlp" of "model.layers.1.mlp.up_proj"; empty without a dot.
[[nodiscard]] std::string parent_of(std::string_view name);
/// "3, 5, 8, ...": the first few.
[[nodiscard]] std::string some_of(const std::set<std::int64_t>& numbers);
/// Of whole numbers, in row-major order.
[[nodiscard]] std::vector<std::int64_t> whole_numbers(const Values& values);
/// Where a part lies in the whole tensor, as a key.
[[nodiscard]] Shape place_of(const PartStats& part, bool flat);
/// Whether a box is one of a tensor of this shape.
[[nodiscard]] bool lies_in(const Box& box, const Shape& shape);
[[nodiscard]] bool is_near(double a, double b, double relative) noexcept;

}  // namespace isoshard::detail
