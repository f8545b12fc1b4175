// SPDX-License-Identifier: Apache-2.0
/// Runs of a body on every rank, and the agreement after each.
#include "suite/testing/gpu/nccl_test_world.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <exception>

#include "core/comm/tcp/tcp_endpoint.h"
#include "suite/testing/gpu/device_buffers.h"

namespace isoshard {
namespace {

struct Attached {
  std::shared_ptr<TcpJob> job;
  std::shared_ptr<GpuApi> api;
  int device = 0;
  bool on_device = false;
  int num_runs = 0;
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

int NcclTestWorld::num_runs() {
  return attached().num_runs;
}

NcclTestWorld::NcclTestWorld(int num_ranks, ReductionOrder order)
    : empty_memory_(Journal::bytes(1) + 64),
      empty_(
          [this] {
            void* begin = empty_memory_.data();
            std::size_t space = empty_memory_.size();
            return static_cast<std::byte*>(std::align(64, Journal::bytes(1), begin, space));
          }(),
          1) {
  if (num_ranks != attached_size()) return;
  const Attached& of_program = attached();
  world_.emplace(of_program.job, of_program.api, of_program.device, order);
  communicator_ = world_->communicator(world_->rank());
  if (of_program.on_device) {
    communicator_ = std::make_unique<DeviceBuffers>(std::move(communicator_), of_program.api,
                                                    of_program.device);
  }
}

void NcclTestWorld::run(const std::function<void(Communicator&)>& body) {
  if (!world_) return;
  ++attached().num_runs;
  std::exception_ptr failure;
  try {
    body(*communicator_);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    world_->abort(fmt::format("rank {} failed: {}", world_->rank(), error.what()));
  }
  const bool has_failed = failure != nullptr || testing::Test::HasFailure();
  const bool failed_anywhere = world_->gather_journals(has_failed ? 1 : 0) != 0;
  if (failure) std::rethrow_exception(failure);
  if (failed_anywhere && !has_failed)
    ADD_FAILURE() << "another rank failed; its output is shown at the end";
}

void NcclTestWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  if (world_) world_->set_deadline(deadline);
}

bool NcclTestWorld::is_aborted() const noexcept {
  return world_ && world_->is_aborted();
}

const Journal& NcclTestWorld::journal() const noexcept {
  return world_ ? world_->journal() : empty_;
}

}  // namespace isoshard
