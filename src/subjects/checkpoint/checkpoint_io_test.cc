// SPDX-License-Identifier: Apache-2.0
// Parts of any layout come back in any other; what would be silently wrong is not written.
#include "subjects/checkpoint/checkpoint_io.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <functional>
#include <string>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "core/comm/thread/thread_world.h"
#include "core/mesh/mesh.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

const MeshShape& square() {
  static const MeshShape shape({{Axis::kDp, 2}, {Axis::kTp, 2}});
  return shape;
}

at::Tensor numbers(const Shape& shape) {
  return at::arange(1, numel_of(shape) + 1, at::kFloat).view(shape);
}

/// "rows" and "columns" are split over tp, "norm" is whole, "table" has two rows on tp rank 0 and
/// one, with padding, on tp rank 1, "run" is cut inside rows over all four ranks, unevenly; rank 2
/// has nothing of it.
std::vector<SavedPart> parts_of(const Mesh& mesh) {
  const int tp = mesh.coordinate(Axis::kTp);
  const auto part = [](std::string name, Layout layout, const at::Tensor& tensor) {
    return SavedPart{std::move(name), SavedKind::kParameter, std::move(layout),
                     tensor.contiguous()};
  };
  Layout rows = replicated({4, 6}), columns = replicated({4, 6}), table = replicated({3, 5}),
         run = replicated({3, 5});
  rows.placements = {shard(Axis::kTp, 0)};
  columns.placements = {shard(Axis::kTp, 1)};
  table.explicit_parts = run.explicit_parts = true;
  table.boxes = {{{0, 0}, {2 * tp, 0}, {tp == 0 ? 2 : 1, 5}}};
  const std::vector<std::pair<std::int64_t, std::int64_t>> cuts = {
      {0, 4}, {4, 8}, {12, 0}, {12, 3}};
  const auto [begin, count] = cuts[static_cast<std::size_t>(mesh.rank())];
  if (count > 0) run.flat = {{1, begin, count}};  // after one element of padding
  const at::Tensor padded_run = at::full({count + 2}, -1.0F);
  padded_run.narrow(0, 1, count).copy_(numbers({3, 5}).view({-1}).narrow(0, begin, count));
  at::Tensor padded_table = at::full({2, 5}, -1.0F);
  padded_table.narrow(0, 0, tp == 0 ? 2 : 1)
      .copy_(numbers({3, 5}).narrow(0, 2 * tp, tp == 0 ? 2 : 1));
  return {part("columns", columns, numbers({4, 6}).chunk(2, 1)[static_cast<std::size_t>(tp)]),
          part("norm", replicated({7}), numbers({7})),
          part("rows", rows, numbers({4, 6}).chunk(2, 0)[static_cast<std::size_t>(tp)]),
          part("run", run, padded_run), part("table", table, padded_table)};
}

RunProgress some_progress() {
  return {{5, 3, false}, "adamw", {{"norm", 3}, {"rows", 2}}, {{"loss_scale", 65536}}};
}

void write(const std::filesystem::path& folder, const RunProgress& progress,
           const std::function<void(std::vector<SavedPart>&, const Mesh&)>& edit = {}) {
  ThreadWorld world(4);
  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), 4);
    Mesh mesh(square(), comm);
    std::vector<SavedPart> parts = parts_of(mesh);
    if (edit) edit(parts, mesh);
    CheckpointIo().write(folder, progress, parts, mesh);
  });
}

TEST(CheckpointIo, PutsEveryLayoutTogetherAgain) {
  const TestFolder folder;
  write(folder.path(), some_progress());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());

  for (const auto& [name, saved] : checkpoint.tensors()) {
    EXPECT_TRUE(at::equal(checkpoint.read_whole(name), numbers(saved.shape))) << name;
  }

  EXPECT_EQ(checkpoint.tensors().size(), 5U);
  EXPECT_NO_THROW(checkpoint.require_intact());
  EXPECT_EQ(checkpoint.tensor("norm").hash_by_rank.size(), 1U) << "copies are written once";
  EXPECT_EQ(checkpoint.tensor("rows").hash_by_rank.size(), 2U);
  EXPECT_EQ(checkpoint.tensor("run").hash_by_rank.size(), 3U);
  EXPECT_EQ(folder.num_entries(), 4) << "rank 2 has nothing of its own";
}

TEST(CheckpointIo, ReadsPartsOfAnotherMesh) {
  const TestFolder folder;
  write(folder.path(), some_progress());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  ThreadWorld world(3);

  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 3}}), comm);
    Layout columns = replicated({4, 6});
    columns.placements = {shard(Axis::kTp, 1)};
    const auto tp = static_cast<std::size_t>(mesh.rank());
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const at::Tensor own = at::zeros({4, 2}, type);

      CheckpointIo().read(checkpoint, "rows", columns, mesh, own);

      EXPECT_TRUE(at::equal(own, numbers({4, 6}).chunk(3, 1)[tp].to(type)));
    }
    Layout flat = replicated({3, 5});
    flat.explicit_parts = true;
    flat.flat = {{0, 9, 2}, {3, 1 + 2 * mesh.rank(), 1}};
    const at::Tensor own = at::full({4}, -1.0F);

    CheckpointIo().read(checkpoint, "run", flat, mesh, own);

    EXPECT_TRUE(at::equal(
        own, at::tensor({10.0F, 11.0F, -1.0F, 2.0F + 2.0F * static_cast<float>(mesh.rank())})));
  });
}

TEST(CheckpointIo, KeepsProgress) {
  const TestFolder folder;
  write(folder.path(), some_progress());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());

  const RunProgress read = checkpoint.progress(1, 3);

  EXPECT_EQ(read.stream, some_progress().stream);
  EXPECT_EQ(read.rule, "adamw");
  EXPECT_EQ(read.updates, some_progress().updates);
  EXPECT_EQ(read.numbers, some_progress().numbers);
  EXPECT_EQ(checkpoint.steps_done(), 3);
  EXPECT_EQ(checkpoint.world_size(), 4);
}

TEST(CheckpointIo, TheIdIsThatOfTheContent) {
  const TestFolder first, second, third;
  write(first.path(), some_progress());
  write(second.path(), some_progress());
  RunProgress later = some_progress();
  later.numbers["loss_scale"] = 32768;
  write(third.path(), later);

  EXPECT_EQ(Checkpoint::open(first.path()).id(), Checkpoint::open(second.path()).id());
  EXPECT_NE(Checkpoint::open(first.path()).id(), Checkpoint::open(third.path()).id());
}

// Nothing may be written of a run whose state is wrong already.
TEST(CheckpointIo, RefusesWhatWouldBeSilentlyWrong) {
  const auto problem = [](const RunProgress& progress,
                          const std::function<void(std::vector<SavedPart>&, const Mesh&)>& edit,
                          const RunProgress* of_rank_3 = nullptr) -> std::string {
    const TestFolder folder;
    try {
      ThreadWorld world(4);
      world.run([&](Communicator& comm) {
        Mesh mesh(square(), comm);
        std::vector<SavedPart> parts = parts_of(mesh);
        if (edit) edit(parts, mesh);
        CheckpointIo().write(folder.path(),
                             mesh.rank() == 3 && of_rank_3 != nullptr ? *of_rank_3 : progress,
                             parts, mesh);
      });
    } catch (const InfrastructureError& error) {
      EXPECT_TRUE(folder.empty());
      return error.what();
    }
    return "it was written";
  };
  const auto spoil = [](int rank, std::string name, float value) {
    return [=](std::vector<SavedPart>& parts, const Mesh& mesh) {
      for (SavedPart& part : parts) {
        if (mesh.rank() != rank || part.name != name) continue;
        part.tensor = part.tensor.clone();
        part.tensor.view({-1})[0] = value;
      }
    };
  };
  RunProgress later = some_progress();
  ++later.stream.next_step;

  EXPECT_THAT(problem(some_progress(), spoil(3, "norm", 9)),
              HasSubstr("the copies of norm on ranks 0 and 3 differ"));
  EXPECT_THAT(problem(some_progress(), spoil(2, "columns", 9)),
              HasSubstr("the copies of columns on ranks 0 and 2 differ"));
  EXPECT_THAT(problem(some_progress(), spoil(1, "rows", std::numeric_limits<float>::infinity())),
              HasSubstr("rows of rank 1 holds a NaN"));
  EXPECT_THAT(problem(some_progress(), {}, &later),
              HasSubstr("rank 3 is at step 4, rank 0 at step 3"));
  EXPECT_THAT(problem(some_progress(), spoil(1, "run", 9)), HasSubstr("it was written"))
      << "padding is nobody's";
}

// Two folders of one name stand for the disks of two hosts.
TEST(CheckpointIo, OnDisksThatAreNotSharedIsWrittenNowhere) {
  const TestFolder first, second;
  ThreadWorld world(4);
  std::array<std::string, 4> told;

  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), 4);
    Mesh mesh(square(), comm);
    const TestFolder& own = mesh.rank() < 2 ? first : second;
    try {
      CheckpointIo().write(own.path(), some_progress(), parts_of(mesh), mesh);
    } catch (const InfrastructureError& error) {
      told[static_cast<std::size_t>(mesh.rank())] = error.what();
    }
  });

  for (const std::string& error : told) {
    EXPECT_THAT(error, HasSubstr("the checkpoint was not written, rank 0: "));
    EXPECT_THAT(error, HasSubstr("rank00003.safetensors: rank 3 on "));
    EXPECT_THAT(error, HasSubstr("rank 0 on "));
    EXPECT_THAT(error, HasSubstr("must be one that all hosts share"));
  }
  EXPECT_TRUE(first.empty());
  EXPECT_TRUE(second.empty());
}

// Bytes of a path need not be UTF-8, and what ranks tell each other must be.
TEST(CheckpointIo, AFolderThatCannotBeMadeIsNamedWhateverItsBytesAre) {
  const TestFolder folder;
  std::ofstream(folder.path() /
                "not\xFF"
                "a folder")
      << "a file";
  ThreadWorld world(4);
  std::array<std::string, 4> told;

  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), 4);
    Mesh mesh(square(), comm);
    try {
      CheckpointIo().write(folder.path() /
                               "not\xFF"
                               "a folder",
                           some_progress(), parts_of(mesh), mesh);
    } catch (const InfrastructureError& error) {
      told[static_cast<std::size_t>(mesh.rank())] = error.what();
    }
  });

  for (const std::string& error : told) EXPECT_THAT(error, HasSubstr("not\uFFFDa folder"));
}

TEST(CheckpointIo, AnElementThatNoRankSavedIsNamed) {
  const TestFolder folder;
  write(folder.path(), some_progress(), [](std::vector<SavedPart>& parts, const Mesh& mesh) {
    if (mesh.rank() == 1)
      std::erase_if(parts, [](const SavedPart& part) { return part.name == "run"; });
  });
  const Checkpoint checkpoint = Checkpoint::open(folder.path());

  try {
    checkpoint.require_intact();
    FAIL() << "it was taken";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no rank's file holds element 4 of run [3, 5]"));
  }
}

}  // namespace
}  // namespace isoshard
