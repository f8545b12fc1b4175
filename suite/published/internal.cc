// SPDX-License-Identifier: Apache-2.0
// Worlds, digests and report lines of experiments.
#include "suite/published/internal.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "core/base/sha256.h"
#include "core/tensor/device.h"
#include "fixtures/cases/device_settings.h"
#include "harness/world/forked/forked_world.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/device/device_rank.h"

namespace isoshard::detail {

Findings::Findings(ExperimentKind kind, const ExperimentSettings& settings) {
  std::vector<std::string_view> dtypes, orders;
  for (const Dtype dtype : settings.dtypes) dtypes.push_back(name_of(dtype));
  for (const ReductionOrder order : settings.orders) orders.push_back(name_of(order));
  head_ = {{"experiment", name_of(kind)},
           {"tp", settings.tp},
           {"dtypes", dtypes},
           {"orders", orders},
           {"layers", settings.layers},
           {"hidden_size", settings.hidden_size},
           {"num_heads", settings.num_heads},
           {"ffn_size", settings.ffn_size},
           {"seq_length", settings.seq_length},
           {"batch_size", settings.batch_size},
           {"seed", settings.seed}};
}

void Findings::line(std::string_view text) {
  text_.append(text).append("\n");
}

void Findings::claim(bool holds, std::string text) {
  holds_ = holds_ && holds;
  line(fmt::format("{}: {}", holds ? "holds" : "FAILS", text));
  claims_.push_back({{"claim", std::move(text)}, {"holds", holds}});
}

ExperimentReport Findings::report() const {
  nlohmann::json json = head_;
  json["parts"] = parts_;
  json["claims"] = claims_;
  json["holds"] = holds_;
  return {holds_, text_, json.dump()};
}

namespace {

/// What DeviceRank and reports read of a case.
Case case_on_device(const ExperimentSettings& settings) {
  Case item;
  item.device = settings.device;
  return item;
}

/// A rank whose communicator takes tensors of its device, with the settings of that pinned.
class RankOnDevice final : public Rank {
 public:
  RankOnDevice(Rank& rank, const Case& item) : rank_(rank), device_(item, rank.comm()) {}
  [[nodiscard]] int rank() const noexcept override { return rank_.rank(); }
  [[nodiscard]] int size() const noexcept override { return rank_.size(); }
  [[nodiscard]] Communicator& comm() noexcept override { return device_.comm(); }
  void post_result(std::span<const std::byte> bytes) override { rank_.post_result(bytes); }
  void set_phase(std::string_view phase) noexcept override { rank_.set_phase(phase); }
  void check() const { device_.check(); }

 private:
  Rank& rank_;
  DeviceRank device_;
};

}  // namespace

c10::Device device_of(const Rank& rank, const ExperimentSettings& settings) {
  return settings.device == Device::Kind::kCpu ? c10::Device(c10::DeviceType::CPU)
                                               : device_of_rank(rank.rank());
}

std::map<std::string, std::string> environment_of(ExperimentKind kind,
                                                  const ExperimentSettings& settings) {
  auto environment = device_environment({case_on_device(settings)});
  if (settings.device != Device::Kind::kCpu) {
    std::vector<int> worlds = settings.tp;
    if (kind == ExperimentKind::kColumnRow)
      worlds.insert(worlds.end(), std::begin(kProbedDegrees), std::end(kProbedDegrees));
    environment["device.collectives"] = words_of_worlds(settings.device, std::move(worlds));
  }
  return environment;
}

std::vector<nlohmann::json> run_ranks(std::string name, int size, ReductionOrder order,
                                      const ExperimentSettings& settings,
                                      std::function<nlohmann::json(Rank&)> body) {
  WorldOptions options;
  options.size = size;
  options.name = std::move(name);
  options.deadline = std::chrono::milliseconds(settings.deadline_ms);
  options.order = order;
  options.transport = device_collectives(settings.device, size).transport;
  const WorldReport report = run_forked(std::move(options), [&](Rank& rank) {
    const at::NoGradGuard no_grad;
    RankOnDevice on_device(rank, case_on_device(settings));
    const std::string text = body(on_device).dump();
    on_device.check();
    rank.post_result(std::as_bytes(std::span(text.data(), text.size())));
  });
  require_ok(report);
  std::vector<nlohmann::json> results;
  for (const RankReport& rank : report.ranks) {
    const auto* begin = reinterpret_cast<const char*>(rank.result.data());
    results.push_back(nlohmann::json::parse(begin, begin + rank.result.size()));
  }
  return results;
}

std::string digest_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.cpu().contiguous();
  return sha256_hex(
      std::span(static_cast<const std::byte*>(dense.const_data_ptr()), dense.nbytes()));
}

bool digests_agree(const std::vector<nlohmann::json>& ranks) {
  const auto digest = [](const nlohmann::json& rank) {
    return rank.value("digest", std::string());
  };
  return !ranks.empty() && !digest(ranks[0]).empty() &&
         std::all_of(ranks.begin(), ranks.end(),
                     [&](const nlohmann::json& rank) { return digest(rank) == digest(ranks[0]); });
}

std::string layer_table_head() {
  return "Layer |        Max |         Mean |       Median |   %>1e-4 |   %>1e-3 |   %>1e-2\n"
         "------+------------+--------------+--------------+----------+----------+---------";
}

std::string layer_table_line(std::string_view layer, const Differences& d) {
  return fmt::format(
      "{:>5} | {:>10.6f} | {:>12.8f} | {:>12.8f} | {:>7.2f}% | {:>7.2f}% | {:>7.2f}%", layer, d.max,
      d.mean, d.median, d.percent_above(1e-4), d.percent_above(1e-3), d.percent_above(1e-2));
}

bool is_shown(std::int64_t layer, std::int64_t layers) {
  return layer < 6 || layer == 9 || layer == 13 || layer == 19 || layer + 1 == layers;
}

}  // namespace isoshard::detail
