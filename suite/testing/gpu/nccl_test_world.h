// SPDX-License-Identifier: Apache-2.0
/// A world over NCCL, or over what stands in for it, with the interface of ThreadWorld, so that
/// tests run on both.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/nccl/nccl_world.h"
#include "core/comm/tcp/tcp_mesh.h"

namespace isoshard {

/// A world of all ranks of the program (nccl_main.cc). Every rank runs the same tests, and makes
/// the same worlds in the same order.
///
/// Guarantees   a world of another size than the attached one runs nothing. When run() returns, all
///              ranks have, the journal is exact for all ranks, and a test that failed on one rank
///              has failed on all.
///
///     NcclTestWorld world(NcclTestWorld::attached_size());
///     world.run([](Communicator& comm) { comm.barrier({}); });
class NcclTestWorld {
 public:
  /// Called once, before any test. `on_device`: tests that have their data on the host call with
  /// buffers of the device.
  static void attach(const Rendezvous& rendezvous, std::shared_ptr<GpuApi> api, int device,
                     bool on_device);
  [[nodiscard]] static int attached_size();
  [[nodiscard]] static int attached_rank();
  /// Of this process.
  [[nodiscard]] static GpuApi& api();
  [[nodiscard]] static bool is_on_device();
  /// How often run() has run a body in this process.
  [[nodiscard]] static int num_runs();

  explicit NcclTestWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);

  /// Runs body on this process's rank, waits for the others, and rethrows what body throws, which
  /// also aborts the world.
  void run(const std::function<void(Communicator&)>& body);

  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept;
  [[nodiscard]] bool is_aborted() const noexcept;
  [[nodiscard]] const Journal& journal() const noexcept;

 private:
  std::optional<NcclWorld> world_;  ///< none if the size is another one
  std::unique_ptr<Communicator> communicator_;
  std::vector<std::byte> empty_memory_;
  Journal empty_;
};

}  // namespace isoshard
