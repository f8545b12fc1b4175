// SPDX-License-Identifier: Apache-2.0
// A plain run outside of any world, whose records nobody wants.
#include "suite/reference/warm_up_training.h"

#include <memory>
#include <set>
#include <utility>

#include "core/comm/shm/shm_world.h"
#include "core/tensor/device.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "harness/recorder/recorder.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/rank.h"
#include "subjects/registry/subject_spec.h"
#include "suite/reference/plain_run.h"

namespace isoshard {
namespace {

class RankInController final : public Rank {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  [[nodiscard]] Communicator& comm() noexcept override { return *comm_; }
  void post_result(std::span<const std::byte>) override {}
  void set_phase(std::string_view) noexcept override {}

 private:
  ShmWorld world_{1};
  std::unique_ptr<Communicator> comm_ = world_.communicator(0);
};

}  // namespace

void warm_up_training(const std::vector<Case>& cases) {
  if (!forks_ranks_here(default_launcher())) return;
  if (has_devices()) return;  // after a backward pass the process could not fork ranks
  std::set<Dtype> dtypes;
  for (const Case& c : cases) dtypes.insert(c.dtype);
  for (const Dtype dtype : dtypes) {
    Case item = small_preset().front();
    item.subject = reference_subject().name;
    item.degrees.dp = 1;
    item.dtype = dtype;
    item.data.kind = DataSource::Kind::kRandomIds;
    const CaseData data(item);
    RankInController rank;
    RecordOptions recording;
    recording.mesh = world_of_one();
    Recorder recorder(std::move(recording));
    plain_spec(item, whole_batch_run(data, case_weights(item))).body(rank, recorder);
    (void)recorder.finish();
  }
}

}  // namespace isoshard
