// SPDX-License-Identifier: Apache-2.0
/// Which samples a data-parallel rank takes.
///
/// A *global batch* is what all dp ranks take at once: dp x batch_size samples, the d-th run of
/// batch_size for dp coordinate d. Global batches are numbered from 0 over the whole run:
/// micro-batch m of step s is number s x micro-batches + m.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace isoshard {

/// What happens at the end of an epoch that is not a whole number of global batches. kDrop: the
/// rest is left out. kPad: the last batch is filled with the epoch's first samples, repeatedly if
/// it needs more than there are, as PyTorch's DistributedSampler does. kError: such a data set is
/// refused.
enum class TailPolicy : std::uint8_t { kDrop, kPad, kError };
/// drop, pad, error.
[[nodiscard]] std::string_view name_of(TailPolicy policy) noexcept;
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] TailPolicy parse_tail_policy(std::string_view name);

/// A seam: a faulty test double may stand in from outside.
///
/// Requires     the coordinate is on the dp axis alone: ranks of one tp group ask for the same one
///              and so get the same samples.
/// Guarantees   a pure function: any rank, or a process that stands for all of them, may ask for
///              any batch in any order.
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// The sample numbers of `dp_coordinate` in one global batch, in the order of its micro-batch.
  [[nodiscard]] virtual std::vector<std::int64_t> samples(std::int64_t global_batch,
                                                          int dp_coordinate) const = 0;
};

/// Samples 0, 1, 2, ... without end and without an order of their own: global batch k holds the
/// next dp x batch_size numbers.
/// Errors   UsageError with the numbers for a degree or batch size < 1, a batch < 0, a coordinate
///          outside the degree.
class ContiguousSampler final : public Sampler {
 public:
  ContiguousSampler(int dp_degree, std::int64_t batch_size);
  [[nodiscard]] std::vector<std::int64_t> samples(std::int64_t global_batch,
                                                  int dp_coordinate) const override;

 private:
  int dp_degree_;
  std::int64_t batch_size_;
};

/// The position of a run in its data: `position` samples of the order of epoch `epoch` have been
/// taken.
struct SamplerPosition {
  std::int64_t epoch = 0, position = 0;
  friend bool operator==(const SamplerPosition&, const SamplerPosition&) = default;
};

struct EpochSamplerSettings {
  std::int64_t num_samples = 0;
  int dp_degree = 1;
  std::int64_t batch_size = 1;
  bool shuffle = false;    ///< else every epoch has the order 0, 1, 2, ...
  std::uint64_t seed = 0;  ///< of the order; each epoch has its own
  TailPolicy tail = TailPolicy::kPad;
  SamplerPosition start = {};  ///< where global batch 0 begins
};

/// A data set of known size, epoch after epoch: each epoch is an order of all its samples, cut into
/// global batches.
///
/// Guarantees   dp ranks get disjoint samples (kPad: but for the samples that fill up the end),
///              together each sample of the epoch once (kDrop: but for the rest, fewer than a
///              global batch). The order depends on seed, epoch and number of samples only, so a
///              run may be resumed with another dp degree: it continues after the samples that were
///              taken.
/// Errors       UsageError with the numbers: sizes < 1, a start outside the epoch, kDrop with fewer
///              samples than one global batch, kError with a rest; and as ContiguousSampler.
/// Source       torch.utils.data.DistributedSampler (kPad's filling); Megatron-LM
///              MegatronPretrainingSampler (contiguous runs).
///
///     const EpochSampler sampler({.num_samples = 10, .dp_degree = 2, .batch_size = 2, .shuffle =
///       true});
///     sampler.samples(0, 1);  // of dp rank 1
class EpochSampler final : public Sampler {
 public:
  explicit EpochSampler(const EpochSamplerSettings& settings);
  [[nodiscard]] std::vector<std::int64_t> samples(std::int64_t global_batch,
                                                  int dp_coordinate) const override;
  /// The position of the run after `global_batches`. A sampler with this position as its `start`
  /// continues from there.
  [[nodiscard]] SamplerPosition position_after(std::int64_t global_batches) const;
  /// The number of samples that the global batches of one epoch take: at least the number of
  /// samples with kPad, at most with kDrop.
  [[nodiscard]] std::int64_t samples_per_epoch() const {
    return batches_in(settings_.num_samples) * unit_;
  }
  /// All samples of an epoch in its order.   Determinism   the same on every machine.
  [[nodiscard]] std::vector<std::int64_t> order_of(std::int64_t epoch) const;

 private:
  /// Epoch and position at which a global batch begins.
  [[nodiscard]] SamplerPosition begin_of(std::int64_t global_batch) const;
  [[nodiscard]] std::int64_t batches_in(std::int64_t num_samples) const;

  EpochSamplerSettings settings_;
  std::int64_t unit_;  ///< samples of a global batch
  mutable std::int64_t cached_epoch_ = -1;
  mutable std::vector<std::int64_t> cached_order_;
};

}  // namespace isoshard
