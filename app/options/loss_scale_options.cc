// SPDX-License-Identifier: Apache-2.0
// From flags to a loss scale.
#include "app/options/loss_scale_options.h"

#include <fmt/format.h>

#include <boost/program_options/value_semantic.hpp>
#include <charconv>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
using Kind = LossScaleSettings::Kind;

double number_of(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  throw UsageError(
      fmt::format("--loss-scale {}: take dynamic, none, or a number that stays", text));
}

}  // namespace

void declare_loss_scale_options(OptionTable& table) {
  auto add = table.options.add_options();
  add("loss-scale", po::value<std::string>(),
      "fp16 with fp32 masters or autocast fp16: dynamic (as torch.amp.GradScaler), a number that "
      "stays, or none (default)");
  add("loss-scale-initial", po::value<double>(),
      "dynamic: the scale of the first step (default: 65536)");
  add("loss-scale-growth-interval", po::value<std::int64_t>(),
      "dynamic: so many steps without an infinity until it grows (default: 2000)");
  add("loss-scale-growth", po::value<double>(),
      "dynamic: the factor by which it grows (default: 2)");
  add("loss-scale-backoff", po::value<double>(),
      "dynamic: the factor by which it shrinks behind a skipped step (default: 0.5)");
}

void apply_loss_scale_options(const ParsedOptions& options, LossScaleSettings& settings) {
  if (options.given("loss-scale")) {
    const auto& text = options.get<std::string>("loss-scale");
    settings.kind = text == "dynamic" ? Kind::kDynamic
                    : text == "none"  ? Kind::kNone
                                      : Kind::kStatic;
    if (settings.kind == Kind::kStatic) settings.initial = number_of(text);
  }
  for (const char* const flag : {"loss-scale-initial", "loss-scale-growth-interval",
                                 "loss-scale-growth", "loss-scale-backoff"}) {
    if (options.given(flag) && settings.kind != Kind::kDynamic)
      throw UsageError(fmt::format("--{} needs --loss-scale dynamic", flag));
  }
  if (options.given("loss-scale-initial"))
    settings.initial = options.get<double>("loss-scale-initial");
  if (options.given("loss-scale-growth-interval"))
    settings.growth_interval = options.get<std::int64_t>("loss-scale-growth-interval");
  if (options.given("loss-scale-growth"))
    settings.growth_factor = options.get<double>("loss-scale-growth");
  if (options.given("loss-scale-backoff"))
    settings.backoff_factor = options.get<double>("loss-scale-backoff");
}

}  // namespace isoshard
