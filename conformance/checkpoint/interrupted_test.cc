// SPDX-License-Identifier: Apache-2.0
// A run that ends while it writes leaves the older checkpoint as it was.
#include <sys/resource.h>

#include <csignal>

#include "core/base/error.h"
#include "harness/testing/test_child.h"
#include "subjects/checkpoint/checkpoint.h"
#include "suite/testing/checkpoint_cases.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

/// Files may not grow beyond a few KiB while one rank writes: what a full disk does, or, if the
/// signal is not ignored, a kill in the middle of a write.
class ShortOfSpace final : public CheckpointIo {
 public:
  ShortOfSpace(int rank, bool is_killed) : rank_(rank), is_killed_(is_killed) {}
  void write(const std::filesystem::path& folder, const RunProgress& progress,
             const std::vector<SavedPart>& parts, Mesh& mesh) const override {
    if (mesh.rank() == rank_) {
      ::signal(SIGXFSZ, is_killed_ ? SIG_DFL : SIG_IGN);
      set_limit(RLIMIT_FSIZE, 8192);
    }
    CheckpointIo::write(folder, progress, parts, mesh);
  }

 private:
  int rank_;
  bool is_killed_;
};

class CheckpointInterrupted : public ::testing::TestWithParam<int> {
 protected:
  CheckpointInterrupted() {
    run_alone(saved_to(item(), folder_.path(), 1));
    before_ = contents();
  }

  static Case item() { return long_case("fsdp_tp", {.dp = 2, .tp = 2}); }

  /// Saves once more, into the same folder.
  [[nodiscard]] std::string failure_of_saving(bool is_killed) const {
    RunOptions options = keeping(Keep::kNothing);
    options.edits.parts = [&](TrainerParts& parts, Mesh&) {
      parts.checkpoint_io = std::make_unique<ShortOfSpace>(GetParam(), is_killed);
    };
    try {
      (void)run_case(saved_to(item(), folder_.path()), Reference(), options);
    } catch (const InfrastructureError& error) {
      return error.what();
    }
    return "it was saved";
  }

  [[nodiscard]] std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      files[entry.path().filename().string()] = content_of(entry.path());
    }
    return files;
  }

  TestFolder folder_;
  std::map<std::string, std::string> before_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointInterrupted, ::testing::Values(0, 3));

TEST_P(CheckpointInterrupted, ByAFullDiskIsTheOldOneAndNothingElse) {
  const std::string failure = failure_of_saving(/*is_killed=*/false);

  EXPECT_THAT(failure,
              HasSubstr("the checkpoint is not written, rank " + std::to_string(GetParam())));
  EXPECT_THAT(failure, HasSubstr("File too large"));
  EXPECT_EQ(contents(), before_);
  EXPECT_EQ(resumed_case(item(), folder_.path()).first_step(), 1);
}

TEST_P(CheckpointInterrupted, ByAKillInTheMiddleOfWritingIsStillTheOldOne) {
  const std::string failure = failure_of_saving(/*is_killed=*/true);

  EXPECT_THAT(failure, HasSubstr("SIGXFSZ"));
  std::map<std::string, std::string> after = contents();
  EXPECT_GT(after.size(), before_.size()) << "the kill came before anything was written";
  for (const auto& [name, content] : before_) EXPECT_EQ(after[name], content) << name;
  const Case old = resumed_case(item(), folder_.path());
  ASSERT_EQ(old.first_step(), 1);
  require_usable_checkpoint(old);

  // The next one that is whole takes its place, and leaves nothing of either.
  run_alone(saved_to(item(), folder_.path()));
  EXPECT_EQ(resumed_case(item(), folder_.path()).first_step(), kStepsSaved);
  EXPECT_EQ(contents().size(), before_.size());
}

TEST_P(CheckpointInterrupted, ByCopiesThatDifferIsNotWritten) {
  RunOptions options = keeping(Keep::kNothing);
  options.edits.parts = [&](TrainerParts& parts, Mesh&) {
    struct Drifted final : CheckpointIo {
      explicit Drifted(int rank) : rank_(rank) {}
      void write(const std::filesystem::path& folder, const RunProgress& progress,
                 const std::vector<SavedPart>& parts, Mesh& mesh) const override {
        std::vector<SavedPart> own = parts;
        for (SavedPart& part : own) {
          if (mesh.rank() == rank_ && part.name == "model.norm.weight")
            part.tensor = part.tensor * 2;
        }
        CheckpointIo::write(folder, progress, own, mesh);
      }
      int rank_;
    };
    parts.checkpoint_io = std::make_unique<Drifted>(GetParam());
  };

  try {
    (void)run_case(saved_to(item(), folder_.path()), Reference(), options);
    FAIL() << "it was saved";
  } catch (const InfrastructureError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the copies of model.norm.weight on ranks"));
  }
  EXPECT_EQ(contents(), before_);
}

}  // namespace
}  // namespace isoshard
