// SPDX-License-Identifier: Apache-2.0
/// Tensors of a device that the reference has, too, are left there, and what is recorded is the
/// same: on the device of tests, with digests of the emulated grid.
#include "harness/recorder/device_digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "harness/recorder/recorder.h"
#include "harness/stats/device/emulated_grid.h"
#include "harness/testing/device/test_device.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
const MeshShape kTp3({{Axis::kTp, 3}});

int digests_made = 0;

class EmulatedDigest final : public DeviceDigest {
 public:
  std::uint64_t digest_of(const at::Tensor& tensor) override {
    ++digests_made;
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_EQ(tensor.device().type(), kDevice);
    return device::emulate_digest(static_cast<const std::byte*>(tensor.const_data_ptr()),
                                  tensor.nbytes());
  }
};

/// Takes every tensor for the reference's.
class BlindDigest final : public DeviceDigest {
 public:
  explicit BlindDigest(std::uint64_t answer) : answer_(answer) {}
  std::uint64_t digest_of(const at::Tensor&) override { return answer_; }

 private:
  std::uint64_t answer_;
};

/// Puts a digest in place for as long as it lives.
class WithDigest {
 public:
  explicit WithDigest(DeviceDigestMaker make)
      : before_(set_device_digest(kDevice, std::move(make))) {}
  WithDigest(const WithDigest&) = delete;
  WithDigest& operator=(const WithDigest&) = delete;
  ~WithDigest() { set_device_digest(kDevice, before_); }

 private:
  DeviceDigestMaker before_;
};

DeviceDigestMaker emulated() {
  return [] { return std::make_unique<EmulatedDigest>(); };
}

at::Tensor whole() {
  return values({48, 60}, 1);
}

/// What one rank records.
struct Recorded {
  Site where;
  at::Tensor value;
  int step = 0;
};

Recorded of_kind(RecordKind kind, const std::string& name, Layout layout, at::Tensor value) {
  return {site(kind, name, std::move(layout)), std::move(value)};
}

Layout cut(int dim) {
  return layout_of({48, 60}, {shard(Axis::kTp, dim)});
}

/// Half of the flattened tensor, in two ranges that lie in another order and between padding.
Recorded flat_ranges() {
  Layout layout = layout_of({48, 60});
  layout.explicit_parts = true;
  layout.flat = {{5, 1440, 700}, {710, 100, 700}};
  const at::Tensor flat = whole().flatten();
  at::Tensor local = at::zeros({1415});
  local.narrow(0, 5, 700).copy_(flat.narrow(0, 1440, 700));
  local.narrow(0, 710, 700).copy_(flat.narrow(0, 100, 700));
  return of_kind(RecordKind::kActivation, "x", layout, local);
}

Reference reference_of_x() {
  return reference([](Sink& sink, int) {
    for (const RecordKind kind : {RecordKind::kActivation, RecordKind::kGrad, RecordKind::kParam})
      sink.on_record(site(kind, "x", layout_of({48, 60})), whole());
    sink.on_record(site(RecordKind::kMask, "m", layout_of({48, 60})), whole().gt(0));
    sink.on_record(site(RecordKind::kParam, "x", layout_of({48, 60})), whole() + 1);
    sink.on_record(site(RecordKind::kActivation, "special", layout_of({48, 60})),
                   whole().index_fill(1, at::tensor({3, 9}, at::kLong), NAN));
    sink.on_record(site(RecordKind::kScalar, "loss", layout_of({30})), values({30}, 3));
  });
}

/// Rank 1 of three records it, with its value on the device or in host memory.
Trace trace_of(const Reference* r, const std::vector<Recorded>& all, bool on_device,
               Keep keep = Keep::kWhatDiffers) {
  Trace trace;
  trace.mesh = kTp3;
  trace.ranks.push_back(run_rank(kTp3, 1, r, keep, [&](Sink& sink, int) {
    for (const Recorded& one : all) {
      if (one.step > 0) sink.begin_step(one.step);
      sink.on_record(one.where, on_device ? one.value.to(test_device()) : one.value);
    }
  }));
  return trace;
}

void expect_same(const Trace& got, const Trace& want) {
  const RankTrace &a = got.ranks.at(0), &b = want.ranks.at(0);
  EXPECT_EQ(a.serialize(), b.serialize());
  ASSERT_EQ(a.records.size(), b.records.size());
  for (std::size_t i = 0; i < a.records.size(); ++i) {
    if (!a.records[i].kept || !b.records[i].kept) continue;
    const HostTensor own = a.tensor(a.records[i]), other = b.tensor(b.records[i]);
    EXPECT_TRUE(std::ranges::equal(own.bytes, other.bytes)) << describe(a.records[i].key);
  }
}

/// How many bytes were fetched from the device; what was recorded is what is without digests, and
/// from host memory.
std::int64_t bytes_fetched(const Reference* r, const std::vector<Recorded>& all,
                           Keep keep = Keep::kWhatDiffers) {
  const WithDigest digest(emulated());
  const std::int64_t before = bytes_from_test_device();
  const Trace got = trace_of(r, all, true, keep);
  const std::int64_t fetched = bytes_from_test_device() - before;
  const WithDigest none({});
  expect_same(got, trace_of(r, all, true, keep));
  expect_same(got, trace_of(r, all, false, keep));
  return fetched;
}

class RecorderOnDevice : public testing::Test {
 protected:
  RecorderOnDevice() { (void)test_device(); }
  Reference reference_ = reference_of_x();
};

TEST_F(RecorderOnDevice, LeavesThereWhatTheReferenceHasToo) {
  const std::vector<Recorded> equal{
      of_kind(RecordKind::kActivation, "x", layout_of({48, 60}), whole()),
      of_kind(RecordKind::kGrad, "x", cut(0), whole().narrow(0, 16, 16)),
      of_kind(RecordKind::kParam, "x", cut(1), whole().narrow(1, 20, 20)),
      of_kind(RecordKind::kMask, "m", layout_of({48, 60}), whole().gt(0)),
      of_kind(RecordKind::kActivation, "special", layout_of({48, 60}),
              whole().index_fill(1, at::tensor({3, 9}, at::kLong), NAN))};
  ASSERT_EQ(equal[1].value.sizes(), (std::vector<std::int64_t>{16, 60}));
  digests_made = 0;

  EXPECT_EQ(bytes_fetched(&reference_, equal), 0);
  EXPECT_EQ(digests_made, 5);
  EXPECT_EQ(bytes_fetched(&reference_, {flat_ranges()}), 0) << "padding is 0, as a guess says";
  EXPECT_EQ(bytes_fetched(&reference_, equal, Keep::kEverything), 0) << "the reference's are kept";
}

TEST_F(RecorderOnDevice, LeavesThereWhatRepeatsAnEqualRecord) {
  Recorded again = of_kind(RecordKind::kActivation, "x", layout_of({48, 60}), whole());
  again.where.recomputed = true;
  Recorded read = of_kind(RecordKind::kParam, "x.read", cut(1), (whole() + 1).narrow(1, 20, 20));
  read.step = 1;
  Recorded mask = of_kind(RecordKind::kMask, "m", layout_of({48, 60}), whole().gt(0));
  mask.where.recomputed = true;

  EXPECT_EQ(bytes_fetched(&reference_, {again}), 0);
  EXPECT_EQ(bytes_fetched(&reference_, {mask}), 0);
  EXPECT_EQ(bytes_fetched(&reference_, {read}), 0);
}

TEST_F(RecorderOnDevice, FetchesWhatDiffersInOneBit) {
  at::Tensor changed = whole();
  changed[17][3] = changed[17][3].item<float>() + 1e-6F;
  at::Tensor negative_zero = at::zeros({48, 60});
  negative_zero[2][2] = -0.0F;
  const Reference zeros = reference([](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "x", layout_of({48, 60})), at::zeros({48, 60}));
  });
  const auto bytes = static_cast<std::int64_t>(whole().nbytes());

  EXPECT_EQ(bytes_fetched(&reference_,
                          {of_kind(RecordKind::kActivation, "x", layout_of({48, 60}), changed)}),
            bytes);
  EXPECT_EQ(bytes_fetched(&reference_,
                          {of_kind(RecordKind::kGrad, "x", cut(0), changed.narrow(0, 16, 16))}),
            bytes / 3);
  EXPECT_EQ(
      bytes_fetched(&zeros, {of_kind(RecordKind::kGrad, "x", layout_of({48, 60}), negative_zero)}),
      bytes)
      << "signed zeros are equal values, and no equal bytes";
}

TEST_F(RecorderOnDevice, FetchesWhatTheReferenceSaysNothingOf) {
  const auto bytes = static_cast<std::int64_t>(whole().nbytes());
  const auto activation = [](const std::string& name, Layout layout, at::Tensor value) {
    return std::vector<Recorded>{
        of_kind(RecordKind::kActivation, name, std::move(layout), std::move(value))};
  };
  digests_made = 0;

  EXPECT_EQ(bytes_fetched(&reference_, activation("other", layout_of({48, 60}), whole())), bytes);
  EXPECT_EQ(bytes_fetched(&reference_,
                          activation("x", layout_of({48, 60}, {partial(Axis::kTp)}), whole())),
            bytes);
  EXPECT_EQ(
      bytes_fetched(&reference_, activation("x", layout_of({48, 60}), whole().to(at::kDouble))),
      2 * bytes);
  EXPECT_EQ(
      bytes_fetched(&reference_, activation("x", layout_of({60, 48}), whole().view({60, 48}))),
      bytes);
  EXPECT_EQ(
      bytes_fetched(nullptr, activation("x", layout_of({48, 60}), whole()), Keep::kEverything),
      bytes);
  EXPECT_EQ(digests_made, 0);
}

TEST_F(RecorderOnDevice, FetchesWhatAPerturbedRunRecords) {
  const WithDigest digest(emulated());
  digests_made = 0;
  const std::int64_t before = bytes_from_test_device();

  (void)run(
      MeshShape(), &reference_,
      [](Sink& sink, int) {
        sink.on_record(site(RecordKind::kActivation, "x", layout_of({48, 60})),
                       whole().to(test_device()));
      },
      Keep::kNothing, {}, RunPurpose::kResponse);

  EXPECT_EQ(bytes_from_test_device() - before, static_cast<std::int64_t>(whole().nbytes()));
  EXPECT_EQ(digests_made, 0);
}

TEST_F(RecorderOnDevice, FetchesSmallTensorsWithoutADigest) {
  digests_made = 0;

  EXPECT_EQ(bytes_fetched(&reference_,
                          {of_kind(RecordKind::kScalar, "loss", layout_of({30}), values({30}, 3))}),
            30 * 4);
  EXPECT_EQ(digests_made, 0);
}

TEST_F(RecorderOnDevice, TakesTheDigestOfATensorThatIsNotDense) {
  const Reference r = reference([](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({60, 48})), whole().t());
  });

  EXPECT_EQ(
      bytes_fetched(&r, {of_kind(RecordKind::kActivation, "x", layout_of({60, 48}), whole().t())}),
      0);
}

// The control: nothing but the digest stands between a wrong tensor and the reference's bytes.
TEST_F(RecorderOnDevice, BelievesTheDigest) {
  const std::uint64_t of_reference =
      digest_of(static_cast<const std::byte*>(whole().const_data_ptr()), whole().nbytes());
  const WithDigest blind([of_reference] { return std::make_unique<BlindDigest>(of_reference); });
  const std::vector<Recorded> wrong{
      of_kind(RecordKind::kActivation, "x", layout_of({48, 60}), whole() * 2)};

  const Trace trace = trace_of(&reference_, wrong, true);

  EXPECT_EQ(trace.ranks[0].records[0].parts[0].stats.unequal_values, 0);
  EXPECT_NE(trace_of(&reference_, wrong, false).ranks[0].records[0].parts[0].stats.unequal_values,
            0);
}

TEST_F(RecorderOnDevice, NobodyMakesDigestsUntilAProgramSaysHow) {
  EXPECT_EQ(make_device_digest(kDevice), nullptr);
  EXPECT_EQ(make_device_digest(c10::DeviceType::CUDA), nullptr);
}

}  // namespace
}  // namespace isoshard
