// SPDX-License-Identifier: Apache-2.0
/// Claims about trace memory, serialized traces, assembling and references.
#include "harness/trace/trace.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "core/base/error.h"
#include "core/memory/memory_pool.h"
#include "harness/testing/synthetic.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(Arena, HoldsWhatWasAppendedAtAlignedOffsets) {
  Arena arena(1 << 20, "test");

  const std::int64_t first = arena.append(bytes_of("abc"));
  const std::int64_t second = arena.append(bytes_of("defg"));

  EXPECT_EQ(first, 0);
  EXPECT_EQ(second, 64);
  EXPECT_EQ(arena.size(), 68U);
  EXPECT_EQ(std::memcmp(arena.data() + 64, "defg", 4), 0);
}

TEST(Arena, IsReadableAfterTheWritingProcessEndedAndSealed) {
  Arena arena(std::size_t{1} << 40, "test");  // far more than memory: only addresses are reserved
  const pid_t child = fork();
  if (child == 0) {
    arena.append(bytes_of(std::string(3 << 20, 'x')));
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);

  arena.seal();

  EXPECT_EQ(status, 0);
  EXPECT_EQ(arena.size(), std::size_t{3} << 20);
  EXPECT_EQ(arena.data()[arena.size() - 1], std::byte{'x'});
  EXPECT_THROW(arena.append(bytes_of("more")), InfrastructureError);
}

TEST(Arena, SaysHowMuchIsMissingWhenItIsFull) {
  Arena arena(128, "small");
  arena.append(bytes_of(std::string(100, 'x')));

  EXPECT_THAT([&] { arena.append(bytes_of(std::string(64, 'y'))); },
              ThrowsMessage<InfrastructureError>(HasSubstr("small is full: 128 bytes of 128")));
  EXPECT_EQ(arena.size(), 100U);
}

// Runs `body` in a forked process and waits for it.   Returns   its status.
template <class Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(Arena, IsReadOnlyForAllOnceItIsSealed) {
  Arena arena(1 << 20, "sealed");
  arena.append(bytes_of("abc"));
  arena.seal();
  auto* const data = const_cast<std::byte*>(arena.data());

  const int status = status_of_child([&] {
    std::signal(SIGSEGV, SIG_DFL);
    *data = std::byte{'x'};
  });

  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV)
      << "a forked process could write: " << status;
  EXPECT_EQ(*data, std::byte{'a'});
}

// Each grows by pieces that are no multiple of what the pool hands out, so that their memory lies
// mixed.
TEST(Arena, OfTwoThatGrowByTurnsEachKeepsItsOwn) {
  constexpr std::size_t kPiece = (std::size_t{3} << 20) + 100;
  constexpr int kPieces = 4;
  Arena even(std::size_t{1} << 30, "even"), odd(std::size_t{1} << 30, "odd");
  std::vector<std::int64_t> even_at, odd_at;
  const auto piece = [](int i, char whose) {
    return std::string(kPiece, static_cast<char>(whose + i));
  };
  for (int i = 0; i < kPieces; ++i) {
    even_at.push_back(even.append(bytes_of(piece(i, 'a'))));
    odd_at.push_back(odd.append(bytes_of(piece(i, 'A'))));
  }
  for (const bool is_sealed : {false, true}) {
    if (is_sealed) even.seal();
    if (is_sealed) odd.seal();
    for (int i = 0; i < kPieces; ++i) {
      const auto n = static_cast<std::size_t>(i);
      EXPECT_EQ(std::memcmp(even.data() + even_at[n], piece(i, 'a').data(), kPiece), 0) << i;
      EXPECT_EQ(std::memcmp(odd.data() + odd_at[n], piece(i, 'A').data(), kPiece), 0) << i;
    }
  }
}

// A touch of memory that is not there yet would be a fault, and where memory is short a SIGBUS
// instead of an error.
TEST(Arena, ObtainsMemoryAheadWhereverTheLastPieceEnded) {
  Arena arena(std::size_t{1} << 30, "ahead");
  // ends in memory that nobody had before
  arena.append(bytes_of(std::string(program_pool()->high_water() + (3 << 20) + 100, 'x')));
  arena.append(bytes_of(std::string(5000, 'y')));

  const auto ahead =
      (reinterpret_cast<std::uintptr_t>(arena.data()) + arena.size() + (512 << 10)) / 4096 * 4096;
  unsigned char is_there = 0;
  ASSERT_EQ(mincore(reinterpret_cast<void*>(ahead), 1, &is_there), 0);
  EXPECT_EQ(is_there & 1, 1);
}

TEST(Arena, IsProtectedInThePoolToo) {
  Arena arena(1 << 20, "sealed");
  const std::uint64_t mark = 0x1234567890abcdef;
  arena.append(std::as_bytes(std::span(&mark, 1)));
  MemoryPool& pool = *program_pool();
  // The pool's own address of the arena's only extent.
  std::byte* const probe = pool.take(MemoryPool::kExtentBytes, getpid());
  std::byte* place = probe;
  while (std::memcmp(place, &mark, sizeof mark) != 0 || pool.owner_of(place) >= 0)
    place -= MemoryPool::kExtentBytes;
  EXPECT_EQ(status_of_child([&] { *place = std::byte{0xef}; }), 0);

  arena.seal();

  const int status = status_of_child([&] {
    std::signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile std::byte*>(place) = std::byte{0};
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  pool.give_back(probe);
}

TEST(Arena, LeavesItsMemoryToTheNextOneOnlyWhereItWasMade) {
  // More than what lies free.
  const std::string bytes(program_pool()->high_water() + (5 << 20), 'x');
  auto first = std::make_unique<Arena>(std::size_t{1} << 30, "first");
  first->append(bytes_of(bytes));

  // A forked process has it, too, and lets it go.
  EXPECT_EQ(status_of_child([&] { first.reset(); }), 0);
  Arena second(std::size_t{1} << 30, "second");
  second.append(bytes_of(std::string(5 << 20, 'y')));
  EXPECT_EQ(std::memcmp(first->data(), bytes.data(), bytes.size()), 0);

  const std::size_t both = program_pool()->high_water();
  first.reset();
  Arena third(std::size_t{1} << 30, "third");
  third.append(bytes_of(bytes));
  EXPECT_EQ(program_pool()->high_water(), both);
}

TEST(ArenaDeathTest, WorksWhereFilesMayNotBeAsLargeAsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has no pool yet
  EXPECT_EXIT(
      {
        rlimit limit{};
        limit.rlim_cur = limit.rlim_max = 64 << 20;
        setrlimit(RLIMIT_FSIZE, &limit);
        Arena arena(1 << 20, "small");
        arena.append(bytes_of("abc"));
        arena.seal();
        _exit(program_pool() == nullptr && std::memcmp(arena.data(), "abc", 3) == 0 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

Record example_record() {
  Record record;
  record.key = {3, RecordKind::kGrad, "model.norm.weight", 1};
  record.order = 7;
  record.dtype = Dtype::kBFloat16;
  record.layout = layout_of({4, 6}, {shard(Axis::kTp, 1), partial(Axis::kDp, Reduction::kAvg)});
  record.grad_scale = 3;
  record.local_shape = {4, 3};
  record.parts.push_back({.box = {{0, 0}, {0, 3}, {4, 3}},
                          .range = {},
                          .stats = {.numel = 12, .max_abs = 0.5},
                          .digest = 42});
  record.unmasked = 5;
  record.kept = true;
  record.offset = 64;
  record.bytes = 24;
  return record;
}

TEST(RankTrace, SurvivesSerializing) {
  RankTrace trace;
  trace.rank = 5;
  trace.records = {example_record(), example_record()};
  trace.records[1].layout = layout_of({24});
  trace.records[1].layout.explicit_parts = true;
  trace.records[1].layout.flat = {{1, 2, 3}};

  const RankTrace got = RankTrace::deserialize(trace.serialize());

  ASSERT_EQ(got.rank, 5);
  ASSERT_EQ(got.records.size(), 2U);
  const Record& r = got.records[0];
  const Record want = example_record();
  EXPECT_EQ(r.key, want.key);
  EXPECT_EQ(r.order, 7);
  EXPECT_EQ(r.dtype, Dtype::kBFloat16);
  EXPECT_EQ(r.layout, want.layout);
  EXPECT_EQ(r.grad_scale, 3);
  EXPECT_EQ(r.local_shape, want.local_shape);
  ASSERT_EQ(r.parts.size(), 1U);
  EXPECT_EQ(r.parts[0].box, want.parts[0].box);
  EXPECT_EQ(r.parts[0].stats.max_abs, 0.5);
  EXPECT_EQ(r.parts[0].digest, 42U);
  EXPECT_EQ(r.unmasked, 5);
  EXPECT_TRUE(r.kept);
  EXPECT_EQ(r.offset, 64);
  EXPECT_EQ(r.bytes, 24);
  EXPECT_EQ(got.records[1].layout, trace.records[1].layout);
}

TEST(RankTrace, RefusesEveryTruncationAndTrailingBytes) {
  RankTrace trace;
  trace.records = {example_record()};
  std::vector<std::byte> bytes = trace.serialize();

  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW((void)RankTrace::deserialize(std::span(bytes.data(), size)), InfrastructureError)
        << size;
  }
  bytes.push_back({});
  EXPECT_THROW((void)RankTrace::deserialize(bytes), InfrastructureError);
}

TEST(RankTrace, AKeptTensorOutsideTheArenaIsAnError) {
  const MeshShape mesh;
  RankTrace trace = run_rank(mesh, 0, nullptr, Keep::kEverything, [](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({4})), at::ones({4}));
  });
  EXPECT_TRUE(at::equal(tensor_of(trace.tensor(trace.records[0])), at::ones({4})));
  trace.records[0].offset = 1 << 20;
  EXPECT_THROW((void)trace.tensor(trace.records[0]), InfrastructureError);
}

const MeshShape kDp2Tp3({{Axis::kDp, 2}, {Axis::kTp, 3}});

TEST(TraceAssemble, PutsShardsOfTwoAxesBackInPlace) {
  const at::Tensor whole = values({4, 6, 2}, 1);
  const Trace trace = run(
      kDp2Tp3, nullptr,
      [&](Sink& sink, int rank) {
        const at::Tensor local = whole.narrow(0, rank / 3 * 2, 2).narrow(1, rank % 3 * 2, 2);
        ASSERT_LT(local.numel(), whole.numel());
        sink.on_record(site(RecordKind::kActivation, "x",
                            layout_of({4, 6, 2}, {shard(Axis::kDp, 0), shard(Axis::kTp, 1)})),
                       local);
      },
      Keep::kEverything);

  EXPECT_TRUE(at::equal(tensor_of(trace.assemble({0, RecordKind::kActivation, "x", 0})), whole));
}

TEST(TraceAssemble, AddsPartialsOnceForEachReplica) {
  const Trace trace = run(
      kDp2Tp3, nullptr,
      [&](Sink& sink, int rank) {
        sink.on_record(site(RecordKind::kGrad, "sum", layout_of({3}, {partial(Axis::kTp)})),
                       at::full({3}, 1.0 + rank % 3));
        sink.on_record(
            site(RecordKind::kGrad, "avg", layout_of({3}, {partial(Axis::kTp, Reduction::kAvg)})),
            at::full({3}, 1.0 + rank % 3));
      },
      Keep::kEverything);

  EXPECT_TRUE(
      at::equal(tensor_of(trace.assemble({0, RecordKind::kGrad, "sum", 0})), at::full({3}, 6.0)));
  EXPECT_TRUE(
      at::equal(tensor_of(trace.assemble({0, RecordKind::kGrad, "avg", 0})), at::full({3}, 2.0)));
}

TEST(TraceAssemble, TakesTheLargestOfPartialMaxima) {
  const Trace trace = run(
      kDp2Tp3, nullptr,
      [&](Sink& sink, int rank) {
        const Layout layout = layout_of({3}, {partial(Axis::kTp, Reduction::kMax)});
        sink.on_record(site(RecordKind::kActivation, "max", layout),
                       at::full({3}, -1.0 - rank % 3));
        sink.on_record(site(RecordKind::kActivation, "nan", layout),
                       at::full({3}, rank % 3 == 1 ? NAN : 1.0));
      },
      Keep::kEverything);

  EXPECT_TRUE(at::equal(tensor_of(trace.assemble({0, RecordKind::kActivation, "max", 0})),
                        at::full({3}, -1.0)));
  EXPECT_TRUE(at::isnan(tensor_of(trace.assemble({0, RecordKind::kActivation, "nan", 0})))
                  .all()
                  .item<bool>());
}

TEST(TraceAssemble, FlatRangesAndPaddingAndGradScale) {
  const at::Tensor whole = values({7}, 2);
  const MeshShape dp2({{Axis::kDp, 2}});
  const Trace trace = run(
      dp2, nullptr,
      [&](Sink& sink, int rank) {
        Layout layout = layout_of({7});
        layout.explicit_parts = true;
        layout.flat =
            rank == 0 ? std::vector<FlatRange>{{0, 0, 4}} : std::vector<FlatRange>{{0, 4, 3}};
        const at::Tensor padded = rank == 0 ? whole.narrow(0, 0, 4)
                                            : at::cat({whole.narrow(0, 4, 3), at::full({1}, 99.0)});
        sink.on_record(site(RecordKind::kGrad, "w", layout, 2.0), padded * 2);
      },
      Keep::kEverything);

  EXPECT_TRUE(at::equal(tensor_of(trace.assemble({0, RecordKind::kGrad, "w", 0})), whole));
}

// Without their loss scale these gradients are below fp16's normal numbers, where 6e-8 is the least
// step: a twentieth of them.
TEST(TraceAssemble, RoundsInUnitsOfTheScaleThatIsAskedFor) {
  const double scale = 16384;
  const at::Tensor first = values({32}, 3, at::kHalf), second = values({32}, 4, at::kHalf);
  const Trace trace = run(
      MeshShape({{Axis::kTp, 2}}), nullptr,
      [&](Sink& sink, int rank) {
        // one more factor of 2 on both ranks: exact
        sink.on_record(
            site(RecordKind::kGrad, "w", layout_of({32}, {partial(Axis::kTp)}), 2 * scale),
            (rank == 0 ? first : second) * 2);
      },
      Keep::kEverything);
  const RecordKey key{0, RecordKind::kGrad, "w", 0};
  const at::Tensor sum = (first.to(at::kDouble) + second.to(at::kDouble)).to(at::kHalf);

  const HostTensor scaled = trace.assemble(key, scale);

  EXPECT_EQ(scaled.dtype, Dtype::kFloat16);
  EXPECT_TRUE(at::equal(tensor_of(scaled), sum));
  EXPECT_FALSE(at::equal(tensor_of(trace.assemble(key)) * scale, sum)) << "a weak test";
}

TEST(TraceAssemble, AGapIsAnError) {
  Trace trace = run(
      kDp2Tp3, nullptr,
      [&](Sink& sink, int) {
        sink.on_record(site(RecordKind::kActivation, "x", layout_of({6}, {shard(Axis::kTp, 0)})),
                       at::ones({2}));
      },
      Keep::kEverything);
  trace.ranks.resize(2);

  EXPECT_THAT(
      [&] {
        (void)trace.assemble({0, RecordKind::kActivation, "x", 0});
      },
      ThrowsMessage<MeshError>(HasSubstr("gap")));
}

TEST(Reference, IsOneProcessWithEverythingKept) {
  const Body body = [](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({4})), at::ones({4}));
  };
  EXPECT_THROW(Reference(run(kDp2Tp3, nullptr, body, Keep::kEverything)), MeshError);
  EXPECT_THROW(Reference(run(MeshShape(), nullptr, body, Keep::kNothing)), VacuousError);
  EXPECT_THROW(Reference(run(
                   MeshShape(), nullptr, [](Sink&, int) {}, Keep::kEverything)),
               VacuousError);
  EXPECT_TRUE(
      at::equal(tensor_of(reference(body).tensor({0, RecordKind::kGrad, "w", 0})), at::ones({4})));
}

TEST(Reference, AResponseIsTheLargestMovementOfAllRuns) {
  const auto with = [](double value) {
    return Body([value](Sink& sink, int) {
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({2})),
                     at::tensor({3.0, value}, at::kDouble));
    });
  };

  const Reference r = reference(with(4.0), [&](int i) { return with(4.0 + 0.5 * (i == 1)); });

  const Response* response = r.response({0, RecordKind::kGrad, "w", 0});
  ASSERT_NE(response, nullptr);
  EXPECT_EQ(r.response_runs(), 3);
  EXPECT_DOUBLE_EQ(response->relative_error, 0.1);
  EXPECT_DOUBLE_EQ(response->absolute_norm, 0.5);
  EXPECT_DOUBLE_EQ(response->max_abs, 0.5);
  EXPECT_NEAR(response->scale_error, 2.0 / 25, 1e-15);
  EXPECT_EQ(r.response({0, RecordKind::kGrad, "v", 0}), nullptr);
}

TEST(Stage, TheFirstRecordOfAParameterIsTheWeightAsRead) {
  EXPECT_EQ(stage_of({0, RecordKind::kParam, "w", 0}), Stage::kParametersRead);
  EXPECT_EQ(stage_of({0, RecordKind::kParam, "w", 1}), Stage::kParameterAfterStep);
  EXPECT_EQ(stage_of({1, RecordKind::kParam, "w", 0}), Stage::kParameterAfterStep);
  EXPECT_EQ(stage_of({0, RecordKind::kScalar, "grad_norm", 0}), Stage::kGradNorm);
  EXPECT_EQ(stage_of({0, RecordKind::kScalar, "loss_per_dp_rank", 0}), Stage::kForward);
  EXPECT_EQ(stage_of({0, RecordKind::kScalar, "learning_rate", 0}), Stage::kStepSettings);
  EXPECT_EQ(stage_of({0, RecordKind::kScalar, "tokens_seen", 0}), Stage::kLogged);
}

}  // namespace
}  // namespace isoshard
