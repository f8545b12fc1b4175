// SPDX-License-Identifier: Apache-2.0
/// The job of the program, and worlds of it.
#include "suite/testing/gpu/nccl_test_world.h"

#include <memory>
#include <utility>

#include "core/comm/tcp/tcp_endpoint.h"
#include "suite/testing/gpu/device_buffers.h"

namespace isoshard {
namespace {

struct Attached {
  std::shared_ptr<TcpJob> job;
  std::shared_ptr<GpuApi> api;
  int device = 0;
  bool on_device = false;
};

// Never destroyed: programs of tests end by _exit.
Attached& attached() {
  static Attached& made = *new Attached;
  return made;
}

}  // namespace

void NcclTestWorld::attach(const Rendezvous& rendezvous, std::shared_ptr<GpuApi> api, int device,
                           bool on_device) {
  attached() = {std::make_shared<TcpJob>(rendezvous), std::move(api), device, on_device};
}

int NcclTestWorld::attached_size() {
  return attached().job->mesh().size();
}

int NcclTestWorld::attached_rank() {
  return attached().job->mesh().rank();
}

GpuApi& NcclTestWorld::api() {
  return *attached().api;
}

bool NcclTestWorld::is_on_device() {
  return attached().on_device;
}

NcclTestWorld::NcclTestWorld(int num_ranks, ReductionOrder order)
    : ProcessTestWorld("its output is shown at the end") {
  if (num_ranks != attached_size()) return;
  const Attached& of_program = attached();
  world_.emplace(of_program.job, of_program.api, of_program.device, order);
  communicator_ = world_->communicator(world_->rank());
  if (of_program.on_device) {
    communicator_ = std::make_unique<DeviceBuffers>(std::move(communicator_), of_program.api,
                                                    of_program.device);
  }
}

}  // namespace isoshard
