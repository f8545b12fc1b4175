// SPDX-License-Identifier: Apache-2.0
/// Why a collective is called: what faults, journal, expected-collective tables and reports read.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/base/axis.h"
#include "core/base/param_class.h"

namespace isoshard {

enum class Purpose : std::uint8_t {
  kUnspecified,
  kRowParallelForward,
  kColumnParallelBackward,
  kSequenceGather,
  kSequenceScatter,
  kVocabParallelEmbed,
  kVocabParallelMax,
  kVocabParallelLogsumexp,
  kVocabParallelTarget,
  kVocabParallelSmoothing,
  kVocabParallelBackward,
  /// The class of each piece stands in its Segment: grad_reduce.norm is (kGradReduce, kNorm).
  kGradReduce,
  kParamGather,
  kClipNorm,
  kLossReduce,
  kTokenCount,
  kPipeForward,
  kPipeBackward,
  kRingKv,
  kRingDkv,
  kSetup,  ///< split, rendezvous and the like; faults never touch it
};

/// row_parallel.forward, column_parallel.backward, ..., grad_reduce, clip_norm, ..., setup,
/// unspecified.
[[nodiscard]] std::string_view name_of(Purpose purpose) noexcept;

/// One named piece of a flat buffer. `offset` and `count` are in elements of the buffer.
struct Segment {
  std::string name;  ///< parameter or tensor, by its Hugging Face name
  ParamClass param_class = ParamClass::kOther;
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

/// The description that a caller gives with every collective. `segments` may be empty (no claim
/// about the content); it must outlive the call, not the Work.
struct CallInfo {
  Purpose purpose = Purpose::kUnspecified;
  Axis axis = Axis::kWorld;
  std::span<const Segment> segments{};
};

}  // namespace isoshard
