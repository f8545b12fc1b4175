// SPDX-License-Identifier: Apache-2.0
// Our implementations behind the harness's Subject.
#include "suite/record/make_subject.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/mesh/mesh.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/train/trainer.h"
#include "suite/record/batches.h"
#include "suite/reference/device/device_rank.h"

namespace isoshard {
namespace {

// A Trainer and its mesh. Batches come in as the harness's named tensors.
class TrainerSubject final : public Subject {
 public:
  TrainerSubject(const Case& item, const MeshShape& shape, Communicator& world, Sink* sink,
                 const SubjectEdits& edits)
      : device_(item, world),
        mesh_(shape, device_.comm()),
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
  void state() override {
    trainer_.state();
    device_.check();
  }
  void save(const std::filesystem::path& folder) override { trainer_.save(folder); }

 private:
  static TrainerParts make_parts(const Case& item, Mesh& mesh, const SubjectEdits& edits) {
    TrainerParts parts =
        subject_spec(item.subject)
            .make_parts(trainer_config(item, case_weights(item), mesh.rank()), mesh, edits);
    if (!item.save_path.empty()) parts.training = settings_from_the_start(item);
    if (edits.parts) edits.parts(parts, mesh);
    return parts;
  }

  /// Below it are faults on the communicator, which see host memory.
  DeviceRank device_;
  Mesh mesh_;
  Trainer trainer_;
  std::string resumed_;  ///< folder of a checkpoint, or empty
};

/// Why a case has no declared arithmetic; empty if it has one.
std::string no_numerics(const Case& item) {
  if (subject_spec(item.subject).make_numerics == nullptr)
    return fmt::format(
        "{} publishes no arithmetic, so it has no emulated reference; judge it against the plain "
        "one",
        item.subject);
  // No test holds the emulation of another order of ranks to the plain reference yet.
  if (!item.mesh_order.empty())
    return "no arithmetic is published for tp as the slow axis; judge it against the plain "
           "reference";
  return "";
}

}  // namespace

NumericsSpec numerics_of(const Case& item) {
  if (const std::string problem = no_numerics(item); !problem.empty()) throw UsageError(problem);
  const std::unique_ptr<Model> model = make_model(item.config, item.attention);
  return subject_spec(item.subject)
      .make_numerics(*model, {item.mesh(), item.dtype, item.reduction_order, item.settings});
}

bool declares_numerics(const Case& item) {
  return no_numerics(item).empty();
}

std::unique_ptr<Subject> make_subject(const Case& item, Rank& rank, Sink* sink,
                                      const SubjectEdits& edits) {
  const MeshShape shape = is_reference(item.subject) ? mesh_of({}) : item.mesh();
  return std::make_unique<TrainerSubject>(item, shape, rank.comm(), sink, edits);
}

}  // namespace isoshard
