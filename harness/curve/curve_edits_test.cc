// SPDX-License-Identifier: Apache-2.0
// A correct run's curve file with one thing changed: whatever it is, the run no longer conforms.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/curve/curve_judge.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

Curve run_of(const std::string& subject, int dp) {
  Curve curve;
  curve.subject = subject;
  curve.title = "title of " + subject;
  curve.case_slug = "case";
  curve.mesh = {{"dp", dp}, {"tp", 1}};
  curve.settings =
      R"({"dtype":"fp32","optimizer":{"kind":"adamw","learning_rate":0.001},"data":{"dp":2}})";
  curve.fingerprint = {{"libtorch", "2.11.0"},
                       {std::string(kInitialWeightsKey), "0123456789abcdef01"},
                       {std::string(kBatchesKey), "fedcba987654321001"}};
  for (int step = 0; step < 4; ++step) {
    const double loss = 4 - step;
    curve.steps.push_back({step, loss, {loss - 0.25, loss + 0.25}, 2 * loss, 0.001});
  }
  return curve;
}

Curve reference() {
  Curve curve = run_of("reference", 1);
  curve.perturbed_runs = 5;
  curve.spreads.assign(4, {1e-4, 1e-4, 1e-4});
  return curve;
}

/// What `compare` says of two curve files.
std::string said_of(const json& reference_json, const json& actual_json) {
  try {
    const Curve expected = parse_curve(reference_json.dump(), "loss_reference.json"),
                actual = parse_curve(actual_json.dump(), "loss_ddp.json");
    refuse_different_settings(expected, actual);
    const CurveVerdict verdict = judge_curve(expected, actual, {});
    return std::string(name_of(verdict.status));
  } catch (const Error& error) {
    return std::string("refused: ") + error.what();
  }
}

std::string said_of(const json& actual) {
  return said_of(json::parse(curve_text(reference())), actual);
}

/// Every place of a file, inner ones too.
void collect(const json& value, const json::json_pointer& at,
             std::vector<json::json_pointer>& all) {
  if (!at.empty()) all.push_back(at);
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items()) collect(inner, at / key, all);
  } else if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i) collect(value[i], at / i, all);
  }
}

void remove(json& file, const json::json_pointer& at) {
  json& parent = file.at(at.parent_pointer());
  if (parent.is_array()) {
    parent.erase(std::stoul(at.back()));
  } else {
    parent.erase(at.back());
  }
}

/// What stands for people only, or says what ran: other words there are no other numbers.
bool is_label(const std::string& at) {
  for (const char* const label : {"/title", "/case", "/subject", "/fingerprint/libtorch"}) {
    if (at == label) return true;
  }
  return false;
}

TEST(CurveEdits, TheUneditedRunConforms) {
  EXPECT_EQ(said_of(json::parse(curve_text(run_of("ddp", 2)))), "conforms");
}

TEST(CurveEdits, NothingCanBeRemoved) {
  const json right = json::parse(curve_text(run_of("ddp", 2)));
  std::vector<json::json_pointer> places;
  collect(right, json::json_pointer(), places);
  ASSERT_GT(places.size(), 60U);

  for (const json::json_pointer& at : places) {
    if (is_label(at.to_string()) && at.to_string().starts_with("/fingerprint")) continue;
    json edited = right;
    remove(edited, at);
    EXPECT_NE(said_of(edited), "conforms") << at.to_string();
  }
}

TEST(CurveEdits, NothingCanBeOfAnotherKindOrEmpty) {
  const json right = json::parse(curve_text(run_of("ddp", 2)));
  std::vector<json::json_pointer> places;
  collect(right, json::json_pointer(), places);

  for (const json::json_pointer& at : places) {
    for (const json& other :
         {json(nullptr), json(""), json("x"), json("nan"), json::array(), json::object(), json(-1),
          json(0.5), json(1e300), json(true), json::array({nullptr})}) {
      if (is_label(at.to_string()) && other.is_string()) continue;
      json edited = right;
      edited.at(at) = other;
      if (edited == right) continue;
      // the degree of tp is a label: its copies have been compared when the file was written
      EXPECT_NE(said_of(edited), "conforms") << at.to_string() << " is " << other.dump();
    }
  }
}

void put(json& step, const char* key, double value) {
  step[key] = std::isfinite(value) ? json(value) : json(nullptr);
  step[std::string(key) + "_hex"] = to_hex(value);
}

void put_ranks(json& step, const std::vector<double>& values) {
  step["rank_losses"] = json::array();
  step["rank_losses_hex"] = json::array();
  for (const double value : values) {
    step["rank_losses"].push_back(std::isfinite(value) ? json(value) : json(nullptr));
    step["rank_losses_hex"].push_back(to_hex(value));
  }
}

struct Edit {
  const char* what;
  std::function<void(json& file)> change;
};

TEST(CurveEdits, WhatFitsTheSchemaAndIsWrongDoesNotConform) {
  const json right = json::parse(curve_text(run_of("ddp", 2)));
  const auto in_all = [](const std::function<void(json&)>& change) {
    return [change](json& file) {
      for (json& step : file["steps"]) change(step);
    };
  };
  std::vector<Edit> edits{
      {"rank losses emptied", in_all([](json& step) { put_ranks(step, {}); })},
      {"one rank loss for two", in_all([](json& step) { put_ranks(step, {step["loss"]}); })},
      {"three rank losses", in_all([](json& step) {
         const double loss = step["loss"];
         put_ranks(step, {loss, loss, loss});
       })},
      {"one rank's losses moved within their envelope", in_all([](json& step) {
         const double loss = step["loss"];
         put_ranks(step, {loss - 0.25, loss + 0.25 + 1e-5});
       })},
      {"rank losses swapped", in_all([](json& step) {
         const double loss = step["loss"];
         put_ranks(step, {loss + 0.25, loss - 0.25});
       })},
      {"mesh and rank losses of one rank",
       [&](json& file) {
         file["mesh"]["dp"] = 1;
         for (json& step : file["steps"]) put_ranks(step, {step["loss"]});
       }},
      {"settings emptied", [](json& file) { file["settings"] = json::object(); }},
      {"a setting of data removed", [](json& file) { file["settings"].erase("data"); }},
      {"digests of inputs removed",
       [](json& file) {
         file["fingerprint"] = {{"libtorch", "2.11.0"}};
       }},
      {"last step dropped", [](json& file) { file["steps"].erase(3); }},
      {"first step dropped", [](json& file) { file["steps"].erase(0); }},
      {"a step twice", [](json& file) { file["steps"].push_back(file["steps"][3]); }},
      {"steps in another order", [](json& file) { std::swap(file["steps"][1], file["steps"][2]); }},
      {"steps renumbered",
       [](json& file) {
         for (json& step : file["steps"]) step["step"] = step["step"].get<int>() + 1;
       }},
      {"numbers of steps swapped",
       [](json& file) {
         std::swap(file["steps"][1], file["steps"][2]);
         std::swap(file["steps"][1]["step"], file["steps"][2]["step"]);
       }},
  };
  for (const double bad : {kNan, kInf, -kInf}) {
    for (const char* const key : {"loss", "grad_norm", "learning_rate"}) {
      for (const std::size_t i : {0, 3})
        edits.push_back({key, [=](json& file) { put(file["steps"][i], key, bad); }});
    }
    edits.push_back({"rank losses", [=](json& file) { put_ranks(file["steps"][2], {3, bad}); }});
  }

  for (const Edit& edit : edits) {
    json edited = right;
    edit.change(edited);
    ASSERT_NE(edited, right) << edit.what;
    EXPECT_NE(said_of(edited), "conforms") << edit.what;
  }
}

TEST(CurveEdits, OfBothFilesAlikeShowNothing) {
  const auto of_both = [](const std::function<void(json&)>& change) {
    json expected = json::parse(curve_text(reference())),
         actual = json::parse(curve_text(run_of("ddp", 2)));
    change(expected);
    change(actual);
    return said_of(expected, actual);
  };
  EXPECT_NE(of_both([](json& file) {
              for (json& step : file["steps"]) put_ranks(step, {});
            }),
            "conforms");
  EXPECT_NE(of_both([](json& file) { file["steps"] = json::array(); }), "conforms");
  for (const double bad : {kNan, kInf}) {
    for (const char* const key : {"loss", "grad_norm", "learning_rate"})
      EXPECT_NE(of_both([&](json& file) { put(file["steps"][1], key, bad); }), "conforms") << key;
    EXPECT_NE(of_both([&](json& file) { put_ranks(file["steps"][1], {3, bad}); }), "conforms");
  }
  json expected = json::parse(curve_text(reference()));
  put(expected["steps"][1]["spread"], "loss", -1);
  EXPECT_THAT(said_of(expected, json::parse(curve_text(run_of("ddp", 2)))),
              testing::HasSubstr("must be finite and at least 0"));
}

}  // namespace
}  // namespace isoshard
