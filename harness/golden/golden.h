// SPDX-License-Identifier: Apache-2.0
/// A golden: the numbers of an earlier accepted run and the record of their origin, as plain data
/// and as a JSON file (docs/reference/goldens.md, docs/reference/golden.schema.json).
#pragma once
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/golden/build_info.h"
#include "harness/golden/projections.h"

namespace isoshard {

/// One number of a line. Where kernels round alike it must be equal in every bit; elsewhere within
/// `drift`.
struct GoldenNumber {
  std::string name;  ///< "loss", "loss of dp rank 1", "norm"
  double value = 0;
  double drift = 0;  ///< how far it may be off on a machine that rounds differently; 0: nowhere
};

/// A step of a curve, or a tensor of a run.
struct GoldenLine {
  std::string name;    ///< "step 12"; "gradient of model.norm.weight (step 0)"
  std::string digest;  ///< of the tensor's bits, 16 hex digits; empty in a curve
  /// Beside a digest: looked at where that differs; none: it must be equal everywhere.
  std::vector<GoldenNumber> numbers;
  /// Beside a digest and its numbers, of all ranks' elements. None in goldens of schema 1.
  std::optional<StoredProjections> projections = {};
  /// A letter for each rank, and ranks with equal bits have equal letters: "abab"; '-' for a rank
  /// that holds nothing. Copies are equal on every machine. Empty where no two ranks are equal.
  std::string copies = {};
  /// The name of an earlier line that is the same tensor seen at another place: it has the same
  /// bits on every machine. Empty if there is none.
  std::string same_as = {};
};

/// The first two ranks that have equal letters in `golden` and not in `actual`, or a rank that
/// holds the tensor in one of them only, in words; empty if there is none. Of an empty `golden`
/// nothing is asked.
[[nodiscard]] std::string broken_copy(const std::string& golden, const std::string& actual);

/// Whether the run agreed with its reference when it was recorded.
struct GoldenParity {
  bool holds = false;
  std::string text;  ///< what was compared with what, and the verdict in words
};

struct Golden {
  /// "curve_autotp_tp2_dp2_bf16_adamw"; also the file's
  std::string name;
  /// Setting -> value as JSON text: what decides what is computed.
  std::map<std::string, std::string> config;
  std::string weights_sha256;  ///< of the initial weights, in fp32
  std::string inputs_sha256;   ///< of token ids and labels of all steps
  /// Where: "cpu", "libtorch", "backend", "threads", "reduction_order"
  std::map<std::string, std::string> fingerprint;
  /// How that machine rounds (fixtures/oracle/arithmetic_digest.h), 16 hex digits.
  std::string arithmetic;
  std::string drift_rule;  ///< in words: what the drifts of its numbers are
  GoldenParity parity;
  BuildInfo build;       ///< that recorded it
  std::string recorded;  ///< when: "2026-11-21T22:05:00Z"
  std::vector<GoldenLine> lines;
};

/// SHA-256 of the config's settings, in the order of their names.
[[nodiscard]] std::string config_sha256(const Golden& golden);

/// The first number that is NaN or infinite, or that may drift by such a number, in words; empty if
/// there is none.
[[nodiscard]] std::string non_finite_number(const Golden& golden);

/// A file name: NAME.json.
[[nodiscard]] std::string golden_file_name(std::string_view name);

/// The text of a golden's file: one line of text for each of its lines, numbers as hex floats.
[[nodiscard]] std::string golden_text(const Golden& golden);

/// Errors   GoldenError that starts with `origin`: not the JSON of a golden, a value that is
///          missing or of a wrong type, fewer or more lines than its count, a config that does not
///          match its hash.
[[nodiscard]] Golden parse_golden(std::string_view text, const std::filesystem::path& origin);

}  // namespace isoshard
