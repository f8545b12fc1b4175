// SPDX-License-Identifier: Apache-2.0
// Turns: an action, then its transfers.
#include "subjects/parallel/nd/pipeline.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <string>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/nd/exchange.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"

namespace isoshard {
namespace {

constexpr std::size_t kMostDims = 6;
// scalar type, number of dims, dims
using Header = std::array<std::int64_t, 2 + kMostDims>;

Header header_of(const at::Tensor& tensor) {
  if (tensor.dim() > static_cast<std::int64_t>(kMostDims)) {
    throw ShapeError(fmt::format("what goes between stages must have at most {} dims, got {}",
                                 kMostDims, tensor.dim()));
  }
  Header header{};
  header[0] = static_cast<std::int64_t>(tensor.scalar_type());
  header[1] = tensor.dim();
  std::ranges::copy(tensor.sizes(), header.begin() + 2);
  return header;
}

at::Tensor empty_like(const Header& header, std::optional<at::Device> device) {
  const std::vector<std::int64_t> shape(header.begin() + 2, header.begin() + 2 + header[1]);
  return at::empty(
      shape, at::TensorOptions().dtype(static_cast<at::ScalarType>(header[0])).device(device));
}

int receiver_of(const StageTransfer& transfer) {
  return transfer.is_send ? transfer.peer_stage : transfer.stage;
}

}  // namespace

Pipeline::Pipeline(PipelineSpec spec, std::vector<ModelSection> stages,
                   const std::vector<ParameterSpec>& specs, Communicator& pp)
    : spec_(spec), pp_(&pp) {
  if (stages.size() != static_cast<std::size_t>(num_stages(spec_))) {
    throw UsageError(fmt::format("a pipeline of {} stages must get as many sections, got {}",
                                 num_stages(spec_), stages.size()));
  }
  spec_.micro_batches = 0;
  find_shared(stages, specs);
  numbers_ = stages_of_rank(spec_, pp.rank());
  for (const int stage : numbers_) {
    own_.push_back(stages.at(static_cast<std::size_t>(stage)));
    parameters_.emplace_back();
    for (const ParameterSpec& parameter : specs) {
      if (reads(own_.back(), parameter) && !is_shared(parameter.name))
        parameters_.back().insert(parameter.name);
    }
  }
}

void Pipeline::find_shared(const std::vector<ModelSection>& stages,
                           const std::vector<ParameterSpec>& specs) {
  for (const ParameterSpec& parameter : specs) {
    std::vector<int> ranks;
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      if (reads(stages[stage], parameter))
        ranks.push_back(rank_of_stage(spec_, static_cast<int>(stage)));
    }
    if (ranks.size() < 2) continue;
    if (ranks.size() > 2 || ranks[0] == ranks[1]) {
      throw NotBuiltError(
          fmt::format("{} is built for two stages on two ranks that read it, got stages on the "
                      "ranks {}; take a model without tie_word_embeddings, or --stage-placement "
                      "loop",
                      parameter.name, fmt::join(ranks, ", ")));
    }
    if (ranks[0] == pp_->rank())
      shared_.push_back({parameter.name, parameter.param_class, ranks[1], true});
    if (ranks[1] == pp_->rank())
      shared_.push_back({parameter.name, parameter.param_class, ranks[0], false});
  }
}

void Pipeline::add_shared(std::map<std::string, at::Tensor, std::less<>>& gradients) {
  for (const Shared& shared : shared_) {
    const auto found = gradients.find(shared.name);
    if (found == gradients.end()) continue;  // frozen
    at::Tensor& own = found->second;
    const at::Tensor other = exchanged(own, shared.peer, shared.peer, *pp_, Purpose::kGradReduce,
                                       Axis::kPp, shared.name, shared.param_class);
    own = shared.is_first ? own + other : other + own;
  }
}

bool Pipeline::is_shared(std::string_view parameter) const {
  return std::ranges::any_of(shared_, [&](const Shared& s) { return s.name == parameter; });
}

std::vector<int> Pipeline::readers_of(std::string_view parameter) const {
  std::vector<int> readers{pp_->rank()};
  for (const Shared& shared : shared_)
    if (shared.name == parameter) readers.push_back(shared.peer);
  std::ranges::sort(readers);
  return readers;
}

std::size_t Pipeline::index_of(int stage) const {
  return static_cast<std::size_t>(std::ranges::find(numbers_, stage) - numbers_.begin());
}

void Pipeline::prepare(int num_micro_batches) {
  if (spec_.micro_batches == num_micro_batches) return;
  spec_.micro_batches = num_micro_batches;
  const PipelineSchedule schedule = make_schedule(spec_);
  require_sound(schedule);
  turns_ = own_turns(schedule);
}

std::vector<PipelineTurn> Pipeline::own_turns(const PipelineSchedule& schedule) const {
  return pipeline_turns(schedule).at(static_cast<std::size_t>(pp_->rank()));
}

void Pipeline::run(std::size_t num_micro_batches, const StageWork& work) {
  prepare(static_cast<int>(num_micro_batches));
  take(turns_, work);
}

// Micro-batch by micro-batch, each through all stages.
void Pipeline::run_forward(std::size_t num_micro_batches, const StageWork& work) {
  PipelineSchedule schedule{spec_, PipelineTable(static_cast<std::size_t>(spec_.pp))};
  schedule.spec.micro_batches = static_cast<int>(num_micro_batches);
  for (int m = 0; m < schedule.spec.micro_batches; ++m) {
    for (int stage = 0; stage < num_stages(spec_); ++stage) {
      schedule.table[static_cast<std::size_t>(rank_of_stage(spec_, stage))].push_back(
          PipelineAction{ActionKind::kForward, stage, m});
    }
  }
  take(own_turns(schedule), work);
}

void Pipeline::take(const std::vector<PipelineTurn>& turns, const StageWork& work) {
  try {
    take_turns(turns, work);
  } catch (const std::exception& error) {
    pp_->abort(fmt::format("rank {} of the pipeline: {}", pp_->rank(), error.what()));
    throw;
  }
}

void Pipeline::take_turns(const std::vector<PipelineTurn>& turns, const StageWork& work) {
  for (const PipelineTurn& turn : turns) {
    if (turn.action.has_value()) act(*turn.action, work);
    if (!turn.transfers.empty()) exchange(turn.transfers, work.device);
  }
  wait_for_groups(num_arrived_ + on_their_way_.size());
  num_arrived_ = 0;
  due_.clear();
  activations_.clear();
  gradients_.clear();
  shapes_.clear();
}

void Pipeline::act(const PipelineAction& action, const StageWork& work) {
  const auto micro_batch = static_cast<std::size_t>(action.micro_batch);
  const std::size_t stage = index_of(action.stage);
  if (action.kind == ActionKind::kBackwardWeight) {
    work.backward_weight(stage, micro_batch);
    return;
  }
  const bool is_forward = action.kind == ActionKind::kForward;
  if (const auto due = due_.find({!is_forward, action.stage, action.micro_batch});
      due != due_.end()) {
    wait_for_groups(due->second);
  }
  at::Tensor input;
  const auto given = passed(!is_forward).find({action.stage, action.micro_batch});
  if (given != passed(!is_forward).end()) {
    input = std::move(given->second);
    passed(!is_forward).erase(given);
  }
  const auto& compute = is_forward                             ? work.forward
                        : action.kind == ActionKind::kBackward ? work.backward
                                                               : work.backward_input;
  at::Tensor result = compute(stage, micro_batch, input);
  const int next = action.stage + (is_forward ? 1 : -1);
  if (next < 0 || next >= num_stages(spec_)) return;
  passed(!is_forward)[{next, action.micro_batch}] = result.contiguous();
}

// Both sides see what is new in the same turn.
void Pipeline::tell_shapes(const std::vector<StageTransfer>& transfers,
                           std::optional<at::Device> device) {
  std::vector<Header> headers(transfers.size());
  std::vector<Transfer> told;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const StageTransfer& transfer = transfers[i];
    if (shapes_.contains({transfer.is_gradient, receiver_of(transfer)})) continue;
    if (transfer.is_send) {
      headers[i] =
          header_of(passed(transfer.is_gradient).at({transfer.peer_stage, transfer.micro_batch}));
    }
    told.push_back({transfer.is_send,
                    transfer.peer_rank,
                    {reinterpret_cast<std::byte*>(headers[i].data()),
                     static_cast<std::int64_t>(headers[i].size()), Dtype::kInt64},
                    {Purpose::kSetup, Axis::kPp, {}}});
  }
  if (told.empty()) return;
  pp_->send_recv(told).wait();
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const std::pair key{transfers[i].is_gradient, receiver_of(transfers[i])};
    if (!shapes_.contains(key)) shapes_[key] = empty_like(headers[i], device);
  }
}

void Pipeline::exchange(const std::vector<StageTransfer>& transfers,
                        std::optional<at::Device> device) {
  tell_shapes(transfers, device);
  std::vector<Transfer> all;
  std::vector<at::Tensor> alive;
  std::vector<Segment> segments(transfers.size());
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const StageTransfer& transfer = transfers[i];
    Passed& passed_on = passed(transfer.is_gradient);
    const std::pair place{receiver_of(transfer), transfer.micro_batch};
    at::Tensor tensor;
    if (transfer.is_send) {
      const auto own = passed_on.find(place);
      tensor = std::move(own->second);
      passed_on.erase(own);
    } else {
      tensor = at::empty_like(shapes_.at({transfer.is_gradient, place.first}));
      passed_on[place] = tensor;
      due_[{transfer.is_gradient, place.first, place.second}] =
          num_arrived_ + on_their_way_.size() + 1;
    }
    segments[i] = {fmt::format("stage {} micro-batch {}", place.first, place.second),
                   ParamClass::kOther, 0, tensor.numel()};
    const Purpose purpose = transfer.is_gradient ? Purpose::kPipeBackward : Purpose::kPipeForward;
    all.push_back({transfer.is_send,
                   transfer.peer_rank,
                   buffer_of(tensor),
                   {purpose, Axis::kPp, std::span(&segments[i], 1)}});
    alive.push_back(std::move(tensor));
  }
  on_their_way_.push_back({std::move(alive), pp_->send_recv(all)});
}

// In the order in which they were issued.
void Pipeline::wait_for_groups(std::size_t count) {
  for (; num_arrived_ < count; ++num_arrived_) {
    on_their_way_.front().work.wait();
    on_their_way_.pop_front();
  }
}

}  // namespace isoshard
