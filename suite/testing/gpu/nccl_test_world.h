// SPDX-License-Identifier: Apache-2.0
/// A world over NCCL, or over what stands in for it, with the interface of ThreadWorld, so that
/// tests run on both.
#pragma once
#include <memory>

#include "core/comm/nccl/nccl_world.h"
#include "core/comm/tcp/tcp_mesh.h"
#include "harness/testing/process_test_world.h"

namespace isoshard {

/// A world of all ranks of the program (nccl_main.cc). Every rank runs the same tests, and makes
/// the same worlds in the same order.
///
/// Guarantees   a world of another size than the attached one runs nothing.
///
///     NcclTestWorld world(NcclTestWorld::attached_size());
///     world.run([](Communicator& comm) { comm.barrier({}); });
class NcclTestWorld : public ProcessTestWorld<NcclWorld> {
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

  explicit NcclTestWorld(int num_ranks, ReductionOrder order = ReductionOrder::kOrdered);
};

}  // namespace isoshard
