// SPDX-License-Identifier: Apache-2.0
// Recorders of tensors on a GPU: what they record does not depend on whether they fetched them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "core/tensor/device.h"
#include "harness/recorder/device/use_device_stats.h"
#include "harness/recorder/device_digest.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

const MeshShape kTp3({{Axis::kTp, 3}});

/// Counts what it is asked, and passes it on.
class CountedOnGpu final : public DeviceDigest {
 public:
  CountedOnGpu(std::unique_ptr<DeviceDigest> digest, int& count)
      : digest_(std::move(digest)), count_(&count) {}
  std::uint64_t digest_of(const at::Tensor& tensor) override {
    ++*count_;
    return digest_->digest_of(tensor);
  }

 private:
  std::unique_ptr<DeviceDigest> digest_;
  int* count_;
};

/// Equal shards of two dims, one that differs on rank 2, and one with NaN.
Body shards_on(c10::Device device) {
  return [device](Sink& sink, int rank) {
    const at::Tensor whole = values({300, 240}, 1).to(device);
    const auto record = [&](const char* name, int dim, const at::Tensor& local) {
      sink.on_record(
          site(RecordKind::kActivation, name, layout_of({300, 240}, {shard(Axis::kTp, dim)})),
          local);
    };
    record("x", 0, whole.narrow(0, rank * 100, 100));
    record("y", 1, whole.narrow(1, rank * 80, 80));
    record("z", 0, whole.narrow(0, rank * 100, 100) * (rank == 2 ? 2 : 1));
    at::Tensor poisoned = whole.narrow(0, rank * 100, 100).clone();
    poisoned[7][7] = NAN;
    record("nan", 0, poisoned);
  };
}

TEST(RecorderOnGpu, RecordsWhatItRecordsInHostMemory) {
  const Reference reference = synthetic::reference([](Sink& sink, int) {
    for (const char* name : {"x", "y", "z", "nan"})
      sink.on_record(site(RecordKind::kActivation, name, layout_of({300, 240})),
                     values({300, 240}, 1));
  });
  use_device_stats();
  const DeviceDigestMaker make = set_device_digest(c10::DeviceType::CUDA, {});
  const Trace fetched = run(kTp3, &reference, shards_on(device_of_rank(0)));
  int digests = 0;
  set_device_digest(c10::DeviceType::CUDA,
                    [&] { return std::make_unique<CountedOnGpu>(make(), digests); });

  const Trace left = run(kTp3, &reference, shards_on(device_of_rank(0)));
  const Trace in_host_memory = run(kTp3, &reference, shards_on(c10::Device("cpu")));

  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(left.ranks[rank].serialize(), fetched.ranks[rank].serialize()) << rank;
    EXPECT_EQ(left.ranks[rank].serialize(), in_host_memory.ranks[rank].serialize()) << rank;
  }
  EXPECT_EQ(digests, 3 * 4);
  EXPECT_EQ(left.ranks[0].records[0].parts[0].stats.unequal_values, 0);
  EXPECT_GT(left.ranks[2].records[2].parts[0].stats.unequal_values, 0);
}

}  // namespace
}  // namespace isoshard
