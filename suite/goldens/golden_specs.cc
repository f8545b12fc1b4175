// SPDX-License-Identifier: Apache-2.0
// The one list.
#include "suite/goldens/golden_specs.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "fixtures/cases/presets.h"
#include "subjects/model/config/builtin.h"

namespace isoshard {
namespace {

constexpr int kCurveSteps = 100, kCurveDp = 2;
constexpr double kSgdRateInBf16 = 0.02;

struct CurveSubject {
  const char* subject;
  int tp;
  bool has_masters;  ///< fp32 ones of bf16 parameters, as its users train
};
// All on two dp ranks, so that those with equal masters are judged against one reference.
constexpr CurveSubject kCurveSubjects[] = {{"reference", 1, false},
                                           {"ddp", 1, false},
                                           {"autotp", 2, false},
                                           {"fsdp_tp", 2, true},
                                           {"megatron", 2, true}};

std::string mesh_words(const Case& item) {
  std::string words;
  if (item.degrees.tp > 1) words += fmt::format("_tp{}", item.degrees.tp);
  if (item.degrees.dp > 1) words += fmt::format("_dp{}", item.degrees.dp);
  return words;
}

GoldenSpec curve(const CurveSubject& subject, Dtype dtype, OptimizerSettings::Kind optimizer) {
  Case item;
  item.config = builtin_config("small");
  item.subject = subject.subject;
  item.degrees.tp = subject.tp;
  item.degrees.dp = kCurveDp;
  item.dtype = dtype;
  item.steps = kCurveSteps;
  item.settings = verify_settings();
  if (dtype == Dtype::kBFloat16 && subject.has_masters)
    item.settings.master_dtype = Dtype::kFloat32;
  // At verify's rate runs of bf16 that differ by roundings are 3 % apart after 30 steps, and show
  // nothing.
  if (dtype == Dtype::kBFloat16) item.settings.optimizer.learning_rate = kSgdRateInBf16;
  if (optimizer == OptimizerSettings::Kind::kAdamW) {
    item.settings.optimizer = OptimizerSettings{};
    item.settings.optimizer.learning_rate = 1e-3;
  }
  return {fmt::format("curve_{}{}_{}_{}", item.subject, mesh_words(item), name_of(dtype),
                      name_of(optimizer)),
          GoldenKind::kCurve, item};
}

/// The small preset's tp 2 x dp 2 of a subject that the preset leaves out.
GoldenSpec step(const CurveSubject& subject, Dtype dtype) {
  Case item;
  item.config = builtin_config("small");
  item.subject = subject.subject;
  item.degrees.tp = item.degrees.dp = 2;
  item.dtype = dtype;
  item.settings = verify_settings();
  if (dtype == Dtype::kBFloat16 && subject.has_masters)
    item.settings.master_dtype = Dtype::kFloat32;
  return {"step_" + item.slug(), GoldenKind::kStep, item};
}

GoldenSpec lattice(const char* subject, const Degrees& degrees, Dtype dtype, int row_nonzeros,
                   ReductionOrder order) {
  Case item = lattice_case(row_nonzeros);
  item.subject = subject;
  item.degrees = degrees;
  item.dtype = dtype;
  item.reduction_order = order;
  const std::string order_word =
      order == ReductionOrder::kOrdered ? "" : fmt::format("_{}", name_of(order));
  return {fmt::format("{}_{}{}_{}{}", item.model_name, subject, mesh_words(item), name_of(dtype),
                      order_word),
          GoldenKind::kLattice, item};
}

std::vector<GoldenSpec> make_specs() {
  std::vector<GoldenSpec> specs;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const auto optimizer : {OptimizerSettings::Kind::kAdamW, OptimizerSettings::Kind::kSgd}) {
      for (const CurveSubject& subject : kCurveSubjects)
        specs.push_back(curve(subject, dtype, optimizer));
    }
  }
  for (const Case& item : small_preset())
    specs.push_back({"step_" + item.slug(), GoldenKind::kStep, item});
  for (const CurveSubject& subject : kCurveSubjects) {
    if (!subject.has_masters) continue;
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16})
      specs.push_back(step(subject, dtype));
  }
  specs.push_back(
      lattice("fsdp_tp", {.dp = 2, .tp = 2}, Dtype::kBFloat16, 1, ReductionOrder::kOrdered));
  specs.push_back(
      lattice("megatron", {.dp = 2, .tp = 2}, Dtype::kFloat32, 2, ReductionOrder::kOrdered));
  specs.push_back(lattice("ddp", {.dp = 2}, Dtype::kBFloat16, 1, ReductionOrder::kOrdered));
  specs.push_back(
      lattice("autotp", {.dp = 2, .tp = 2}, Dtype::kBFloat16, 1, ReductionOrder::kOrdered));
  specs.push_back(
      lattice("autotp", {.dp = 3, .tp = 2}, Dtype::kBFloat16, 1, ReductionOrder::kRing));
  specs.push_back(lattice("autotp", {.dp = 2, .tp = 2}, Dtype::kFloat32, 2, ReductionOrder::kTree));
  return specs;
}

}  // namespace

const std::vector<GoldenSpec>& golden_specs() {
  static const std::vector<GoldenSpec> specs = make_specs();
  return specs;
}

std::vector<GoldenSpec> select_goldens(const std::vector<std::string>& patterns) {
  if (patterns.empty()) return golden_specs();
  std::vector<GoldenSpec> selected;
  std::vector<bool> used(patterns.size());
  std::vector<std::string> known;
  for (const GoldenSpec& spec : golden_specs()) {
    known.push_back(spec.name);
    bool matches = false;
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if (::fnmatch(patterns[i].c_str(), spec.name.c_str(), 0) != 0) continue;
      used[i] = matches = true;
    }
    if (matches) selected.push_back(spec);
  }
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (!used[i])
      throw UsageError(
          fmt::format("no golden has the name '{}'{}; isoshard golden status lists them",
                      patterns[i], did_you_mean(patterns[i], known)));
  }
  return selected;
}

std::string look_further(const GoldenSpec& spec, std::size_t index) {
  const Case& item = spec.item;
  const bool is_reference = item.subject == "reference";
  const bool is_lattice_run = spec.kind == GoldenKind::kLattice;
  std::string command = "isoshard verify";
  if (is_lattice_run) {
    command += fmt::format(" --model {}", item.model_name == "lattice" ? "lattice" : "lattice-2");
  } else {
    command += " --preset small";
  }
  // The reference is what others are compared with: the simplest of them is replicas.
  command +=
      fmt::format(" --subjects {} --tp {} --dp {} --dtype {}", is_reference ? "ddp" : item.subject,
                  item.degrees.tp, item.degrees.dp, name_of(item.dtype));
  const OptimizerSettings& optimizer = item.settings.optimizer;
  if (optimizer.kind == OptimizerSettings::Kind::kAdamW) command += " --optimizer adamw";
  if (spec.kind == GoldenKind::kCurve && optimizer.kind == OptimizerSettings::Kind::kSgd) {
    command += fmt::format(" --learning-rate {}", optimizer.learning_rate);
  }
  if (item.settings.master_dtype.has_value())
    command += fmt::format(" --master-dtype {}", name_of(*item.settings.master_dtype));
  if (item.reduction_order != ReductionOrder::kOrdered)
    command += fmt::format(" --reduction-order {}", name_of(item.reduction_order));
  if (spec.kind == GoldenKind::kCurve)
    command += fmt::format(" --steps {}",
                           std::min<std::size_t>(index + 1, static_cast<std::size_t>(item.steps)));
  return command;
}

}  // namespace isoshard
