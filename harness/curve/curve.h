// SPDX-License-Identifier: Apache-2.0
/// The curve of one training run: the loss of every step and the settings of the run, as plain data
/// and as a JSON file.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// Keys of a curve's fingerprint that two runs must share, like settings: digests of their initial
/// weights and of their batches.
inline constexpr std::string_view kInitialWeightsKey = "initial_weights_sha256",
                                  kBatchesKey = "batches_sha256";

struct CurveStep {
  int step = 0;
  double loss = 0;  ///< of the global batch: what was minimized
  /// Each dp rank's own mean, by dp coordinate.
  std::vector<double> rank_losses;
  double grad_norm = 0;  ///< before clipping
  double learning_rate = 0;
};
[[nodiscard]] bool is_finite(const CurveStep& step) noexcept;

/// How far, in one step, the perturbed runs of a reference are from it: the largest difference over
/// these runs.
struct CurveSpread {
  double loss = 0, rank_loss = 0, grad_norm = 0;
};

struct Curve {
  std::string subject;              ///< "autotp"
  std::string title;                ///< "DeepSpeed AutoTP": what people call it
  std::string case_slug;            ///< "qwen2_tp2_dp2_steps100"
  std::map<std::string, int> mesh;  ///< axis -> degree: {"dp", 2}, {"tp", 2}
  /// JSON object: "training" of a bundle's settings (harness/bundle/run_settings.h).
  std::string settings = "{}";
  /// What ran: "library" -> "2.11.0", "reduction_order" -> "ordered", ...
  std::map<std::string, std::string> fingerprint;
  std::vector<CurveStep> steps;      ///< in order, from step 0, none left out
  int perturbed_runs = 0;            ///< that `spreads` are of
  std::vector<CurveSpread> spreads;  ///< of a reference, by step; else empty
};

/// How many dp ranks a step has a loss of: "data.dp" of the settings, which a reference shares with
/// the runs that are judged against it; else the degree of the mesh, which a reference does not
/// share. None: neither says.
[[nodiscard]] std::optional<int> num_rank_losses(const Curve& curve);

/// "DeepSpeed AutoTP (TP=2, DP=2)".
[[nodiscard]] std::string label_of(const Curve& curve);

/// A file name in a folder of curves: "loss_autotp.json".
[[nodiscard]] std::string curve_file_name(const Curve& curve);

/// The text of a curve file (docs/reference/loss.schema.json): every number as decimal, for people
/// and tools, and as hex float, for the bits.
[[nodiscard]] std::string curve_text(const Curve& curve);

/// Errors   FileError that starts with `origin`: not the JSON of a curve, a missing or wrong value,
///          a name that is empty, a key that curves do not have, a step that is missing, repeated
///          or out of order, a decimal that does not equal its hex float, another number of rank
///          losses than num_rank_losses, a mesh that its settings contradict.
[[nodiscard]] Curve parse_curve(std::string_view text, const std::filesystem::path& origin);

/// Errors   as write_file_atomically.
void write_curve(const std::filesystem::path& path, const Curve& curve);
/// Errors   as parse_curve; FileError if the file is missing or unreadable.
[[nodiscard]] Curve read_curve(const std::filesystem::path& path);
/// Every loss_*.json of a folder, the reference first, then by name.
/// Errors   as read_curve; FileError if there is none, or two of one subject.
[[nodiscard]] std::vector<Curve> read_curves(const std::filesystem::path& folder);

/// Whether a file looks like a curve (not like a bundle's folder): a regular file that ends in
/// .json.
[[nodiscard]] bool is_curve_file(const std::filesystem::path& path);

}  // namespace isoshard
