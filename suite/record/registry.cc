// SPDX-License-Identifier: Apache-2.0
// Our implementations behind the harness's Subject.
#include "suite/record/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/mesh/mesh.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/parallel/ddp/ddp_arithmetic.h"
#include "subjects/parallel/fsdp/fsdp_tp_arithmetic.h"
#include "subjects/parallel/megatron/megatron_arithmetic.h"
#include "subjects/parallel/megatron/megatron_plan.h"
#include "subjects/parallel/tensor/autotp_arithmetic.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/train/trainer.h"
#include "suite/record/batches.h"

namespace isoshard {
namespace {

using MakeParts = TrainerParts (*)(const Case& item, const TrainerConfig& config, Mesh& mesh,
                                   const SubjectEdits& edits);

void refuse_plan_edit(const SubjectEdits& edits, std::string_view subject) {
  if (edits.plan)
    throw UsageError(fmt::format(
        "a fault in the plan of {} is not possible: it shards nothing; take autotp", subject));
}

using MakeArithmetic = Arithmetic (*)(const Model& model, const ArithmeticInputs& inputs);

struct Entry {
  SubjectInfo info;
  MakeParts make_parts;
  MakeArithmetic make_arithmetic;  // nullptr: the subject publishes none
};

const std::vector<Entry>& registry() {
  static const std::vector<Entry> entries = {
      {{"ddp", "PyTorch DDP: replicas, bucketed gradient all-reduce during backward"},
       [](const Case&, const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
         refuse_plan_edit(edits, "ddp");
         return ddp_parts(config, mesh);
       },
       ddp_arithmetic},
      {{"autotp",
        "DeepSpeed AutoTP: column- and row-parallel linear layers, gradients averaged over dp, "
        "ZeRO 0, 1 or 2"},
       [](const Case&, const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
         const auto model = make_model(config.model, config.attention);
         ShardPlan plan = autotp_plan(*model, mesh.degree(Axis::kTp),
                                      config.settings.make_vocab_size_divisible_by);
         if (edits.plan) edits.plan(plan, mesh);
         return autotp_parts(config, mesh, std::move(plan));
       },
       autotp_arithmetic},
      {{"fsdp_tp",
        "FSDP2 + DTensor: parameters sharded by rows over dp, gathered layer by layer, on top of "
        "column and row layers"},
       [](const Case&, const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
         const auto model = make_model(config.model, config.attention);
         ShardPlan plan = autotp_plan(*model, mesh.degree(Axis::kTp),
                                      config.settings.make_vocab_size_divisible_by);
         if (edits.plan) edits.plan(plan, mesh);
         return fsdp_tp_parts(config, mesh, std::move(plan));
       },
       fsdp_tp_arithmetic},
      {{"megatron",
        "Megatron-Core: sequence and vocabulary split over tp, fp32 main gradients, distributed "
        "optimizer"},
       [](const Case&, const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
         const auto model = make_model(config.model, config.attention);
         ShardPlan plan = megatron_plan(*model, mesh.degree(Axis::kTp),
                                        config.settings.make_vocab_size_divisible_by);
         if (edits.plan) edits.plan(plan, mesh);
         return megatron_parts(config, mesh, std::move(plan));
       },
       megatron_arithmetic},
      {{"reference", "the trusted single process: nothing sharded, nothing reduced"},
       [](const Case& item, const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
         refuse_plan_edit(edits, "the reference");
         return plain_parts(config, mesh, item.degrees.dp);
       },
       nullptr},
  };
  return entries;
}

const Entry& entry_of(std::string_view name) {
  std::vector<std::string> known;
  for (const Entry& entry : registry()) {
    if (entry.info.name == name) return entry;
    known.push_back(entry.info.name);
  }
  throw UsageError(fmt::format("unknown subject '{}'{}; known are {}", name,
                               did_you_mean(name, known), join_names(known)));
}

// A Trainer and its mesh. Batches come in as the harness's named tensors.
class TrainerSubject final : public Subject {
 public:
  TrainerSubject(const Case& item, const MeshShape& shape, Communicator& world, Sink* sink,
                 const SubjectEdits& edits)
      : mesh_(shape, world),
        trainer_(make_parts(item, mesh_, edits), mesh_, sink),
        resumed_(item.resumed.has_value() ? item.resumed->path : "") {}

  void setup() override {
    if (resumed_.empty()) {
      trainer_.setup();
    } else {
      trainer_.resume(resumed_);
    }
  }
  void forward_backward(std::span<const Batch> micro_batches) override {
    std::vector<TokenBatch> batches;
    for (const Batch& batch : micro_batches) batches.push_back(to_token_batch(batch));
    trainer_.forward_backward(batches);
  }
  void reduce_gradients() override { trainer_.reduce_gradients(); }
  void clip() override { trainer_.clip(); }
  void step() override { trainer_.step(); }
  void state() override { trainer_.state(); }
  void save(const std::filesystem::path& folder) override { trainer_.save(folder); }

 private:
  static TrainerParts make_parts(const Case& item, Mesh& mesh, const SubjectEdits& edits) {
    TrainerParts parts =
        entry_of(item.subject)
            .make_parts(item, trainer_config(item, case_weights(item)), mesh, edits);
    if (edits.parts) edits.parts(parts, mesh);
    return parts;
  }

  Mesh mesh_;
  Trainer trainer_;
  std::string resumed_;  ///< folder of a checkpoint, or empty
};

/// Why a case has no record of its arithmetic; empty if it has one.
std::string no_arithmetic(const Case& item) {
  if (entry_of(item.subject).make_arithmetic == nullptr)
    return fmt::format(
        "{} publishes no arithmetic, so it has no emulated reference; judge it against the plain "
        "one",
        item.subject);
  // What the record has no words for is refused: one that leaves it out would be wrong.
  if (!item.mesh_order.empty())
    return "no arithmetic is published for tp as the slow axis; judge it against the plain "
           "reference";
  return "";
}

}  // namespace

std::vector<SubjectInfo> subjects() {
  std::vector<SubjectInfo> infos;
  for (const Entry& entry : registry()) {
    if (entry.info.name != "reference") infos.push_back(entry.info);
  }
  return infos;
}

void require_subject(std::string_view name) {
  (void)entry_of(name);
}

Arithmetic arithmetic_of(const Case& item) {
  if (const std::string problem = no_arithmetic(item); !problem.empty()) throw UsageError(problem);
  const std::unique_ptr<Model> model = make_model(item.config, item.attention);
  return entry_of(item.subject)
      .make_arithmetic(
          *model, {item.degrees.dp, item.degrees.tp, item.dtype, item.reduction_order,
                   item.settings.bucket_bytes, item.settings.make_vocab_size_divisible_by,
                   item.settings.autocast, item.settings.zero_stage, item.settings.master_dtype,
                   item.settings.sequence_parallel, item.settings.distributed_optimizer,
                   item.settings.reduce_dtype, item.settings.output_dtype});
}

bool declares_arithmetic(const Case& item) {
  return no_arithmetic(item).empty();
}

std::unique_ptr<Subject> make_subject(const Case& item, Rank& rank, Sink* sink,
                                      const SubjectEdits& edits) {
  const MeshShape shape =
      item.subject == "reference" ? MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}) : item.mesh();
  return std::make_unique<TrainerSubject>(item, shape, rank.comm(), sink, edits);
}

}  // namespace isoshard
