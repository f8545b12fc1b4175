// SPDX-License-Identifier: Apache-2.0
/// What a rank records, without ATen: values are compared with the reference on the spot, and what
/// is worth keeping is kept.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/base/host_tensor.h"
#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"

namespace isoshard {

class Comparer;

enum class Keep : std::uint8_t { kNothing, kWhatDiffers, kEverything };

/// What ranks of one process have in common. Copies over ranks are most of a replicated model: each
/// is kept once in one arena, and compared once.
/// Ranks   may be used by several threads at once.
class ReplicaBytes {
 public:
  /// The place of these bytes in the arena: of equal ones that are there already, or of a new copy.
  [[nodiscard]] std::int64_t append(Arena& arena, const RecordKey& key,
                                    std::span<const std::byte> bytes);
  /// What comparing the same part with the same bytes (by their digest) said, if a rank has done
  /// it.
  [[nodiscard]] std::optional<PartStats> find(const RecordKey& key, const PartStats& part) const;
  void add(const RecordKey& key, const PartStats& part);

 private:
  struct Place {
    std::int64_t offset;
    std::size_t size;
  };
  mutable std::mutex mutex_;
  std::map<RecordKey, std::vector<Place>> places_;
  std::map<RecordKey, std::vector<PartStats>> compared_;
};

struct RecordOptions {
  MeshShape mesh;
  int rank = 0;
  const Reference* reference = nullptr;  ///< nullptr: nothing is compared
  Comparer* comparer = nullptr;          ///< nullptr: accumulate() compares
  Keep keep = Keep::kNothing;
  /// kWhatDiffers keeps a record if one of its parts differs in value and exceeds its share of the
  /// perturbed tolerance (its own squared error, or what it adds to the scale error, is more than
  /// 1/parts of what the whole tensor is allowed: if the whole exceeds, some part does), if it
  /// differs and there is no response, if it must be exact and is not, or if there is no reference
  /// for it. Partials, scalars and ids are always kept.
  /// Required unless kNothing or decides_only.
  std::shared_ptr<Arena> arena;
  /// Records say whether their tensor is to be kept (Record::kept); whoever writes keeps it.
  bool decides_only = false;
  /// Recorders of one process that have the same arena and reference.
  std::shared_ptr<ReplicaBytes> replica_bytes = nullptr;
  /// Where small gradients are masked (masks_small_gradients), parameters after a step are compared
  /// only where, in every step so far, the reference's gradient is larger than its allowed
  /// responses x gradient_margin (in a response run: that run's own largest difference stands for
  /// the response). What is demanded of the other elements masked_steps.h says; a judged run that
  /// breaks it is kept.
  JudgePolicy policy = {};
  RunPurpose purpose = RunPurpose::kJudged;
};

/// Writes the records of one rank, in execution order.
///
/// Errors   InfrastructureError if it shall keep tensors and has no arena.
class RecordWriter {
 public:
  explicit RecordWriter(RecordOptions options);
  ~RecordWriter();
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;
  void begin_step(int step);
  /// Errors   MeshError that names the record if the tensor is not what its layout says; as Arena
  ///          if memory is short.
  void write(const Site& site, const HostTensor& value);
  /// The tensor that write() would be given here by a rank that has what the reference has: bytes
  /// to hold a tensor of this shape against before it is fetched from where it is. A guess, of
  /// which nothing follows before all bytes were found equal. None where the reference says nothing
  /// of it: it has no such record, or one of another dtype or shape, ranks hold summands of it, or
  /// the run has other weights, as it shows how far the reference moves.
  ///
  /// Errors   as write.
  [[nodiscard]] std::optional<HostTensor> expected(const Site& site, Dtype dtype,
                                                   const Shape& shape) const;
  /// Takes over what another recorder compared with the same reference, as it is.
  /// Requires   record.compared, and begin_step of its step.
  void take(const Record& record);
  /// Whether kWhatDiffers would keep this record, by its statistics.
  [[nodiscard]] bool would_keep(const Record& record) const;
  /// What write or take added last.
  [[nodiscard]] const Record& last() const;
  /// Ends recording and hands over the records.
  [[nodiscard]] RankTrace finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isoshard
