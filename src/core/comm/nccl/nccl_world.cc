// SPDX-License-Identifier: Apache-2.0
/// Worlds as their processes hold them, and how processes come to have one.
#include "core/comm/nccl/nccl_world.h"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "core/base/error.h"
#include "core/comm/backend.h"
#include "core/comm/nccl/nccl_communicator.h"
#include "core/comm/nccl/nccl_rank.h"
#include "core/comm/passes_on.h"
#include "core/comm/tcp/tcp_endpoint.h"

namespace isoshard {
namespace {

constexpr std::string_view kNotBuilt =
    "backend nccl is not part of this program; use shm, which needs no GPU, or build with CUDA and "
    "NCCL (./isoshard --gpu, docs/reference/gpu.md) and run isoshard-gpu";

GpuApiFactory& factory() {
  static GpuApiFactory made;
  return made;
}

std::shared_ptr<GpuApi> api_of(const RankVariables& variables) {
  return factory()(variables.local_rank, variables.local_size);
}

RankVariables needed_variables() {
  if (!factory()) throw NotBuiltError(std::string(kNotBuilt));
  return read_rank_variables([](const char* name) { return std::getenv(name); });
}

int device_of(GpuApi& api, int local_rank) {
  const int devices = api.num_devices();
  if (devices > 0) return local_rank % devices;
  throw GpuError(
      fmt::format("a rank of backend nccl must have a GPU, got none ({}); use shm", api.name()));
}

}  // namespace

void set_gpu_api(GpuApiFactory made) {
  factory() = std::move(made);
}

const GpuApiFactory& gpu_api() noexcept {
  return factory();
}

class NcclWorld::Impl {
 public:
  explicit Impl(std::shared_ptr<NcclRank> made) : rank(std::move(made)) {}
  std::shared_ptr<NcclRank> rank;
};

NcclWorld::NcclWorld(std::shared_ptr<TcpJob> job, std::shared_ptr<GpuApi> api, int device,
                     ReductionOrder order)
    : impl_(std::make_unique<Impl>(
          std::make_shared<NcclRank>(std::move(job), std::move(api), device, order))) {}
NcclWorld::~NcclWorld() = default;

int NcclWorld::size() const noexcept {
  return impl_->rank->endpoint().size();
}

int NcclWorld::rank() const noexcept {
  return impl_->rank->endpoint().rank();
}

std::unique_ptr<Communicator> NcclWorld::communicator(int rank) {
  if (rank != this->rank()) {
    throw UsageError(fmt::format(
        "a process of an attached world has the communicator of its own rank {} only, got {}",
        this->rank(), rank));
  }
  return std::make_unique<NcclCommunicator>(impl_->rank);
}

void NcclWorld::abort(std::string_view reason) noexcept {
  impl_->rank->abort(reason);
}

bool NcclWorld::is_aborted() const noexcept {
  return impl_->rank->endpoint().is_aborted();
}

void NcclWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  impl_->rank->endpoint().set_deadline(deadline);
}

void NcclWorld::set_patience(std::optional<std::chrono::milliseconds> patience) noexcept {
  impl_->rank->endpoint().set_patience(patience);
}

const Journal& NcclWorld::journal() const noexcept {
  return impl_->rank->endpoint().journal();
}

std::uint64_t NcclWorld::gather_journals(std::uint64_t word) {
  return impl_->rank->endpoint().gather_journals(word);
}

std::shared_ptr<TcpJob> meet_at(const RankVariables& variables,
                                std::optional<std::chrono::steady_clock::time_point> deadline) {
  return std::make_shared<TcpJob>(Rendezvous{.rank = variables.rank,
                                             .size = variables.size,
                                             .address = variables.address,
                                             .port = variables.port,
                                             .listening_socket = variables.listening_socket,
                                             .job = variables.job,
                                             .deadline = deadline});
}

namespace {

class NcclAttachedJob final : public AttachedJob {
 public:
  NcclAttachedJob()
      : variables_(needed_variables()),
        api_(api_of(variables_)),
        device_(device_of(*api_, variables_.local_rank)),
        job_(meet_at(variables_)),
        agreement_(job_, ReductionOrder::kOrdered) {}

  [[nodiscard]] int rank() const noexcept override { return variables_.rank; }
  [[nodiscard]] int size() const noexcept override { return variables_.size; }
  std::unique_ptr<AttachedWorld> make_world(ReductionOrder order) override {
    return std::make_unique<NcclWorld>(job_, api_, device_, order);
  }
  std::uint64_t largest(std::uint64_t own) override { return agreement_.gather_journals(own); }
  void finish() override {
    if (!std::exchange(is_finished_, true)) (void)agreement_.gather_journals(0);
  }
  [[nodiscard]] std::string library() const override { return api_->name(); }
  [[nodiscard]] bool may_fork() const noexcept override { return false; }
  // The others see that this process is gone.
  void end_all(int code) noexcept override { ::_Exit(code); }

 private:
  RankVariables variables_;
  std::shared_ptr<GpuApi> api_;
  int device_;
  std::shared_ptr<TcpJob> job_;
  TcpEndpoint agreement_;  ///< a world without calls, which outlives those that break
  bool is_finished_ = false;
};

}  // namespace

std::unique_ptr<AttachedJob> attach_nccl_job() {
  return std::make_unique<NcclAttachedJob>();
}

std::unique_ptr<Communicator> attach_nccl_world(const AttachOptions& options) {
  const RankVariables variables = needed_variables();
  if (options.expected_size != 0 && options.expected_size != variables.size) {
    throw UsageError(fmt::format(
        "the attached world must have {} ranks, as expected, got {}; start it with "
        "torchrun --nproc-per-node {} --no-python, or mpirun -n {}",
        options.expected_size, variables.size, options.expected_size, options.expected_size));
  }
  const std::shared_ptr<GpuApi> api = api_of(variables);
  const int device = device_of(*api, variables.local_rank);
  auto rank =
      std::make_shared<NcclRank>(meet_at(variables, options.deadline), api, device, options.order);
  if (options.deadline) rank->endpoint().set_deadline(*options.deadline);
  return std::make_unique<NcclCommunicator>(std::move(rank));
}

bool takes_device_memory(const Communicator& comm) noexcept {
  const Communicator* inner = &comm;
  while (const auto* const passing = dynamic_cast<const PassesOn*>(inner))
    inner = &passing->below();
  return dynamic_cast<const NcclCommunicator*>(inner) != nullptr;
}

std::string_view why_nccl_is_not_built() noexcept {
  return factory() ? std::string_view() : kNotBuilt;
}

}  // namespace isoshard
