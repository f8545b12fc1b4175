// SPDX-License-Identifier: Apache-2.0
// Calls on their way to the communicator below, each inside StepPart::kCommunication.
#include "suite/clock/metered_comm.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "core/comm/passes_on.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

std::int64_t bytes_in(const ConstBuffer& buffer) {
  return buffer.count * static_cast<std::int64_t>(size_of(buffer.dtype));
}

class MeteredCommunicator final : public Communicator, public PassesOn {
 public:
  MeteredCommunicator(std::unique_ptr<Communicator> owned, Communicator& inner, StepClock& clock,
                      UnderWay under_way)
      : owned_(std::move(owned)), inner_(&inner), clock_(clock), under_way_(std::move(under_way)) {}
  [[nodiscard]] const Communicator& below() const noexcept override { return *inner_; }
  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept override {
    return inner_->reduction_order();
  }
  [[nodiscard]] int world_rank_of(int rank) const override { return inner_->world_rank_of(rank); }

  Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(data),
                        [&] { return inner_->all_reduce(data, reduction, info); });
  }
  Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(output),
                        [&] { return inner_->all_gather(input, output, info); });
  }
  Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                      const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(input),
                        [&] { return inner_->reduce_scatter(input, output, reduction, info); });
  }
  using Communicator::all_to_all;
  Work all_gather_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                         const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(output),
                        [&] { return inner_->all_gather_uneven(input, output, counts, info); });
  }
  Work reduce_scatter_uneven(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             Reduction reduction, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(input), [&] {
      return inner_->reduce_scatter_uneven(input, output, counts, reduction, info);
    });
  }
  Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                  std::span<const std::int64_t> output_counts, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(input), [&] {
      return inner_->all_to_all(input, input_counts, output, output_counts, info);
    });
  }
  Work send(ConstBuffer data, int to, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(data), [&] { return inner_->send(data, to, info); });
  }
  Work recv(Buffer data, int from, const CallInfo& info) override {
    return metered_call(info.purpose, 0, [&] { return inner_->recv(data, from, info); });
  }
  Work send_recv(std::span<const Transfer> transfers) override {
    std::int64_t bytes = 0;
    for (const Transfer& transfer : transfers)
      bytes += transfer.is_send ? bytes_in(transfer.data) : 0;
    const Purpose purpose = transfers.empty() ? Purpose::kUnspecified : transfers[0].info.purpose;
    return metered_call(purpose, bytes, [&] { return inner_->send_recv(transfers); });
  }
  Work broadcast(Buffer data, int root, const CallInfo& info) override {
    return metered_call(info.purpose, bytes_in(data),
                        [&] { return inner_->broadcast(data, root, info); });
  }
  void barrier(const CallInfo& info) override {
    (void)metered_call(info.purpose, 0, [&] {
      inner_->barrier(info);
      return Work();
    });
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    std::unique_ptr<Communicator> group = inner_->split(color, key);
    return group == nullptr ? nullptr : metered(std::move(group), clock_, under_way_);
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  template <class Call>
  Work metered_call(Purpose purpose, std::int64_t bytes, const Call& call) {
    // a group of one moves nothing
    const std::int64_t moved = inner_->size() > 1 ? bytes : 0;
    const StepScope scope(clock_, StepPart::kCommunication, purpose);
    const Clock::time_point start = Clock::now();
    auto work = std::make_shared<Work>(call());
    const std::size_t number =
        clock_.add_call(purpose, moved, scope.before(), seconds_since(start));
    clock_.set_under_way(under_way_(), purpose);
    return Work([work, number, purpose, under_way = under_way_, &clock = clock_] {
      const StepScope waiting(clock, StepPart::kCommunication, purpose);
      const Clock::time_point begin = Clock::now();
      work->wait();
      clock.add_wait(number, purpose, waiting.before(), seconds_since(begin));
      clock.set_under_way(under_way());
    });
  }

  std::unique_ptr<Communicator> owned_;  // null for a communicator that someone else owns
  Communicator* inner_;
  StepClock& clock_;
  UnderWay under_way_;
};

}  // namespace

std::unique_ptr<Communicator> metered(std::unique_ptr<Communicator> inner, StepClock& clock,
                                      UnderWay under_way) {
  Communicator& below = *inner;
  return std::make_unique<MeteredCommunicator>(std::move(inner), below, clock,
                                               std::move(under_way));
}

std::unique_ptr<Communicator> metered(Communicator& inner, StepClock& clock, UnderWay under_way) {
  return std::make_unique<MeteredCommunicator>(nullptr, inner, clock, std::move(under_way));
}

bool knows_what_is_under_way(const Communicator& inner) noexcept {
  return dynamic_cast<const RegionCommunicator*>(&inner) != nullptr;
}

std::unique_ptr<Communicator> metered(std::unique_ptr<Communicator> inner, StepClock& clock) {
  const auto* const region = dynamic_cast<const RegionCommunicator*>(inner.get());
  if (region == nullptr) return metered(std::move(inner), clock, [] { return false; });
  return metered(std::move(inner), clock, [region] { return region->has_transfers_under_way(); });
}

}  // namespace isoshard
