// SPDX-License-Identifier: Apache-2.0
// What a run loads is held to a run that loads nothing: an error that every resumed run shares
// shows, and one that only saving would notice is a verdict.
#include <cstdlib>
#include <utility>

#include "subjects/optim/learning_rate.h"
#include "subjects/optim/wrapped_optimizer.h"
#include "suite/testing/checkpoint_cases.h"
#include "suite/train/judge_training.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A schedule that is one step ahead once the run was loaded, in whatever run it is put.
RunOptions ahead_after_resume() {
  struct Tells final : CheckpointIo {
    explicit Tells(std::shared_ptr<bool> loaded) : is_loaded(std::move(loaded)) {}
    RunProgress progress(const Checkpoint& checkpoint, const Mesh& mesh) const override {
      *is_loaded = true;
      return CheckpointIo::progress(checkpoint, mesh);
    }
    std::shared_ptr<bool> is_loaded;
  };
  struct Ahead final : LearningRate {
    Ahead(std::unique_ptr<LearningRate> right, std::shared_ptr<const bool> loaded)
        : LearningRate(0, {}), inner(std::move(right)), is_loaded(std::move(loaded)) {}
    double at(std::int64_t step) const override { return inner->at(*is_loaded ? step + 1 : step); }
    std::unique_ptr<LearningRate> inner;
    std::shared_ptr<const bool> is_loaded;
  };
  RunOptions options;
  options.edits.parts = [](TrainerParts& parts, Mesh&) {
    const auto is_loaded = std::make_shared<bool>(false);
    parts.checkpoint_io = std::make_unique<Tells>(is_loaded);
    parts.learning_rate = std::make_unique<Ahead>(std::move(parts.learning_rate), is_loaded);
  };
  return options;
}

Case reloaded_case() {
  Case item = long_case("autotp", {.dp = 3, .tp = 2});
  item.reload_after = kStepsSaved;
  EXPECT_EQ(item.world_size(), 6);
  return item;
}

TEST(Uninterrupted, AScheduleThatIsOneStepAheadAfterAReloadDiverges) {
  const Case item = reloaded_case();

  for (const ReferenceKind kind : {ReferenceKind::kAuto, ReferenceKind::kPlain}) {
    const Verdict right = CaseJudge({.reference = kind}).judge_case(item).verdict;
    const Verdict wrong =
        CaseJudge({.reference = kind, .run = ahead_after_resume()}).judge_case(item).verdict;

    EXPECT_EQ(right.status, Status::kConforms) << name_of(kind) << ": " << right.reason;
    ASSERT_EQ(wrong.status, Status::kDiverges) << name_of(kind) << ": " << wrong.reason;
    EXPECT_EQ(wrong.findings.front().key.step, kStepsSaved) << wrong.reason;
  }
}

// With nowhere to write, a run that saved or loaded would end here.
TEST(Uninterrupted, TheReferenceOfAReloadedCaseSavesAndLoadsNothing) {
  const Case item = reloaded_case();
  Case straight = item;
  straight.reload_after = 0;
  ASSERT_EQ(::setenv("TMPDIR", "/nowhere", 1), 0);
  const Reference reference = make_reference(item);
  ASSERT_EQ(::unsetenv("TMPDIR"), 0);
  Trace once = reference.trace();
  // The state is recorded a second time, where the judged run has what it loaded.
  const auto repeated = std::erase_if(once.ranks.front().records, [](const Record& record) {
    const bool is_state = record.key.kind == RecordKind::kParam ||
                          record.key.kind == RecordKind::kOptimizer ||
                          record.key.name == "optimizer_steps" || record.key.name == "rng_state";
    return is_state && record.key.step == kStepsSaved - 1 && record.key.call == 1;
  });

  EXPECT_GT(repeated, 50U);
  EXPECT_EQ(equality_of(make_reference(straight, {.responses = 0}).trace(), once).difference, "");
  EXPECT_EQ(reference.response_runs(), 3);
}

/// Rank `drifting` moves a parameter by itself after each step.
RunOptions drifting(int drifting) {
  struct Drifts final : WrappedOptimizer {
    using WrappedOptimizer::WrappedOptimizer;
    void step(NamedTensors& parameters, const NamedTensors& gradients) override {
      inner().step(parameters, gradients);
      parameters.at("model.norm.weight").mul_(1.001);
    }
  };
  RunOptions options;
  options.edits.parts = [drifting](TrainerParts& parts, Mesh& mesh) {
    if (mesh.rank() == drifting)
      parts.optimizer = std::make_unique<Drifts>(std::move(parts.optimizer));
  };
  return options;
}

TEST(Uninterrupted, AReloadedRunWhoseCopiesDifferIsAVerdict) {
  const Case item = reloaded_case();

  for (const ReferenceKind kind : {ReferenceKind::kAuto, ReferenceKind::kPlain}) {
    const Verdict verdict =
        CaseJudge({.reference = kind, .run = drifting(4)}).judge_case(item).verdict;

    ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
    const Finding& first = verdict.findings.front();
    EXPECT_EQ(first.key.name, "model.norm.weight") << verdict.reason;
    EXPECT_EQ(first.key.step, 0) << verdict.reason;
    EXPECT_GT(verdict.missing.size(), 100U) << "the run ended where it would have been saved";
  }
}

CurveVerdict trained_from(const Case& resumed, const RunOptions& of_every_run) {
  TrainOptions options;
  options.run = of_every_run;
  const TrainedCase reference = train_reference(resumed, kPerturbedRuns, options);
  return judge_training(reference.curve, train_case(resumed, options));
}

// The reference and the run are wrong alike wherever both load: only a reference that loads nothing
// can tell.
TEST(Uninterrupted, TrainingResumedOneStepAheadInEveryRunDiverges) {
  const TestFolder folder;
  Case start = long_case("autotp", {.dp = 2, .tp = 2});
  start.steps = 12;
  (void)train_case(saved_to(start, folder.path(), 6), {});
  const Case resumed = resumed_case(start, folder.path());
  ASSERT_EQ(resumed.first_step(), 6);
  ASSERT_EQ(why_not_one_run(resumed), "");

  const CurveVerdict right = trained_from(resumed, {}),
                     wrong = trained_from(resumed, ahead_after_resume());

  EXPECT_EQ(right.status, Status::kConforms) << right.reason;
  EXPECT_EQ(right.steps, 6);
  EXPECT_EQ(wrong.status, Status::kDiverges) << wrong.reason;
}

// What cannot be trained anew from the first step on is said.
TEST(Uninterrupted, ACheckpointSaysTheSettingsOfItsRun) {
  const TestFolder first, second;
  const Case start = long_case("ddp", {.dp = 3});
  run_alone(saved_to(start, first.path()));
  const Case resumed = resumed_case(start, first.path());
  Case other = resumed;
  other.settings.optimizer.learning_rate *= 2;
  Case of_other_mesh = resumed_case(long_case("fsdp_tp", {.dp = 2, .tp = 2}), first.path());
  Case of_other_subject = resumed_case(long_case("autotp", {.dp = 3, .tp = 2}), first.path());

  EXPECT_EQ(why_not_one_run(start), "");
  EXPECT_EQ(why_not_one_run(resumed), "");
  EXPECT_EQ(why_not_one_run(of_other_subject), "") << "another subject goes on with the same run";
  EXPECT_THAT(why_not_one_run(other), HasSubstr("optimizer.learning_rate"));
  EXPECT_THAT(why_not_one_run(of_other_mesh), HasSubstr("data.dp"));
  // One that went on with other settings has no settings from its first step on.
  run_alone(saved_to(other, second.path(), kStepsSaved + 1));
  EXPECT_THAT(why_not_one_run(resumed_case(other, second.path())),
              HasSubstr("does not say with which settings its run began"));
  run_alone(saved_to(resumed, second.path(), kStepsSaved + 1));
  EXPECT_EQ(why_not_one_run(resumed_case(start, second.path())), "");
}

}  // namespace
}  // namespace isoshard
