// SPDX-License-Identifier: Apache-2.0
/// The calls of one rank in one step, axis by axis, in the order in which a step makes them.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/trace/collective_calls.h"
#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"

namespace isoshard {

/// Writes down the calls of one rank in one step.
class StepTable {
 public:
  StepTable(const Case& item, const NumericsSpec& numerics, const Model& model, int rank, int step);

  std::map<Axis, std::vector<ExpectedCall>> calls();

 private:
  /// Of this rank, in the order of the model.
  static std::vector<int> stages_of(const NumericsSpec& numerics, int rank);
  static int shard_rank_of(const NumericsSpec& numerics, int rank);
  [[nodiscard]] bool is_pipeline() const { return !numerics_.pipeline.stages.empty(); }
  /// Of a pipeline those that own stages read.
  void find_parameters();

  ExpectedCall* add(Axis axis, CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                    Reduction reduction = Reduction::kSum);
  /// nullptr in a group of one, which calls nobody.
  ExpectedCall* dp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                   Reduction reduction = Reduction::kSum);
  void tp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
          Reduction reduction = Reduction::kSum);
  void cp(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
          Reduction reduction = Reduction::kSum);
  /// To the next rank of a ring, and from the one before.
  void around(Purpose purpose, Dtype dtype, std::int64_t count);
  void in_pass(ExpectedCall* call) const { call->any_order = is_in_stages_; }
  /// Among those that have parts of one parameter together; they are called dp in the journal.
  ExpectedCall* shards(CollectiveOp op, Purpose purpose, Dtype dtype, std::int64_t count,
                       Reduction reduction = Reduction::kSum);

  /// That a rank's forward gets of a micro-batch.
  [[nodiscard]] std::int64_t tokens() const { return item_.batch_size * item_.seq_length / cp_; }
  [[nodiscard]] std::int64_t hidden() const { return tokens() * model_.config().hidden_size; }
  [[nodiscard]] Dtype dtype() const { return numerics_.precision.dtype; }
  [[nodiscard]] Dtype product_dtype() const;
  [[nodiscard]] bool is_sharded() const {
    return numerics_.data.sharding.keeps_runs && shards_ > 1;
  }

  [[nodiscard]] Region region_of(const std::string& module) const;

  // Backward goes no further than to the first parameter that is trained.
  void find_trained();
  /// The place of a module's first parameter, and that behind its last, among those in the order of
  /// forward; of a module without any the end.
  [[nodiscard]] std::pair<std::size_t, std::size_t> places_of(std::string_view module) const;
  /// Whether what the module gets, and what it gives, has a gradient.
  [[nodiscard]] bool has_input_gradient(std::string_view module) const {
    return first_trained_ < places_of(module).first;
  }
  [[nodiscard]] bool has_output_gradient(std::string_view module) const {
    return first_trained_ < places_of(module).second;
  }

  // A whole tensor of the residual stream enters a region, and its gradient leaves it.
  void enter(Purpose backward, bool is_forward);
  // A rank's summand leaves a region, and its gradient enters it.
  void leave(Purpose forward, bool is_forward, Dtype in);

  /// Of a module, or of the modules that are one product.
  void module(const std::string& name, bool is_forward);

  /// The modules of a layer in the order of execution, which is that of their parameters.
  [[nodiscard]] std::vector<std::string> modules_of(const std::string& layer) const;
  void layer(const std::string& name, bool is_forward);
  /// Along cp, where nothing else is called in a layer.
  void attention(const std::string& layer, bool is_forward);
  /// Of a token's keys, on this tp rank.
  [[nodiscard]] std::int64_t key_features(const std::string& layer) const;
  void embedding(bool is_forward);

  void report_loss();
  void add_shared();
  void over_stages(Purpose purpose, std::int64_t count);

  /// Parameters are gathered once, and gradients reduced once.
  void run_stages();
  /// Names of layers sort as text.
  [[nodiscard]] std::vector<std::string> groups_in_order() const;
  [[nodiscard]] bool is_elsewhere(int stage) const;
  void transfer(CollectiveOp op, Purpose purpose, Dtype in, std::int64_t count);
  /// Eight numbers a neighbor and direction, once a step.
  void tell_shapes();
  /// One micro-batch, forward and backward.
  void pass(int stage);
  /// How many layers before layer `index` of the model this rank does not have.
  [[nodiscard]] std::size_t first_layer_of_rank(std::size_t index) const;
  /// Of the residual stream.
  [[nodiscard]] Dtype stream_dtype() const { return dtype(); }

  void forward();

  void head();

  void backward();

  /// Elements of this tp rank's part of a parameter.
  [[nodiscard]] std::int64_t part_numel(const std::string& name) const;
  /// Elements of it that a dp rank steps.
  [[nodiscard]] std::int64_t stepped_numel(const std::string& name, int dp_rank) const;

  /// Of a group of parameters that are kept as runs and gathered together: one block a rank, where
  /// each parameter has as much room as its largest piece, which is the first.
  [[nodiscard]] std::int64_t block_numel(const std::string& group, bool of_trained_only) const;
  void gather(const std::string& group);
  void scatter(const std::string& group);

  void reduce_buckets();

  /// Each bucket lies padded in a buffer, of which each dp rank has an equal part.
  [[nodiscard]] bool is_distributed() const;

  void sum_over_holders();
  [[nodiscard]] static bool has_parameter(const std::vector<ParameterSpec>& specs,
                                          const std::string& name);
  [[nodiscard]] bool has_other_holders(const std::string& name) const;

  void norm();

  /// Stepped pieces come back to where forward reads them: flat buffers of all parameters, or
  /// bucket by bucket.
  void publish();

  const Case& item_;
  const NumericsSpec& numerics_;
  const Model& model_;
  int dp_, tp_, cp_, replicas_, shards_;
  std::vector<int> stages_;  ///< own ones, of a pipeline
  int shard_rank_, tp_rank_;
  bool is_in_stages_ = false;
  int steps_before_ = 0;              ///< of the same trainer, which forgets when it is loaded anew
  std::vector<ParameterSpec> specs_;  ///< that this rank has
  std::vector<ParameterSpec> trained_;  ///< those of them that are not frozen
  std::vector<std::string> in_order_;   ///< the model's parameters, as forward comes to them
  std::size_t first_trained_ = 0;       ///< among them
  std::size_t all_trained_ = 0;         ///< how many of them are trained
  std::vector<std::string> layers_;
  std::map<Axis, std::vector<ExpectedCall>> calls_;
};

}  // namespace isoshard
