// SPDX-License-Identifier: Apache-2.0
/// docs/report.schema.json describes every report.json that is written.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "harness/cli/command.h"
#include "harness/report/report.h"
#include "harness/report/tables.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

/// The keywords of draft 2020-12 that the schema uses; any other makes the validator fail, so that none is there in vain.
class Schema {
 public:
  explicit Schema(json root) : root_(std::move(root)) {}

  /// What is wrong with `value`, with its place; empty if nothing is.
  [[nodiscard]] std::string problem(const json& value) const { return problem(root_, value, "$"); }

 private:
  static bool has_type(const json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    if (type == "number") return value.is_number();
    if (type == "integer")
      return value.is_number_integer() || (value.is_number() && std::floor(value.get<double>()) == value.get<double>());
    throw std::invalid_argument("the schema names the type " + type);
  }

  [[nodiscard]] std::string problem(const json& schema, const json& value, const std::string& at) const {
    if (schema.is_boolean()) return schema.get<bool>() ? "" : at + " is not allowed";
    for (const auto& [keyword, rule] : schema.items()) {
      std::string wrong = keyword_problem(schema, keyword, rule, value, at);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  [[nodiscard]] std::string keyword_problem(const json& schema, const std::string& keyword, const json& rule, const json& value,
                                            const std::string& at) const {
    if (keyword == "$schema" || keyword == "$id" || keyword == "title" || keyword == "description" || keyword == "$defs") return "";
    if (keyword == "$ref") return problem(root_.at(json::json_pointer(rule.get<std::string>().substr(1))), value, at);
    if (keyword == "type") {
      const json types = rule.is_array() ? rule : json::array({rule});
      const bool fits = std::any_of(types.begin(), types.end(), [&](const json& type) { return has_type(value, type); });
      return fits ? "" : fmt::format("{} is {}, not {}", at, value.type_name(), rule.dump());
    }
    if (keyword == "const") return value == rule ? "" : fmt::format("{} is not {}", at, rule.dump());
    if (keyword == "enum")
      return std::find(rule.begin(), rule.end(), value) != rule.end() ? ""
                                                                      : fmt::format("{} is {}, none of {}", at, value.dump(), rule.dump());
    if (keyword == "minimum") return !value.is_number() || value >= rule ? "" : fmt::format("{} is below {}", at, rule.dump());
    if (keyword == "anyOf") return any_of_problem(rule, value, at);
    if (keyword == "items") return items_problem(rule, value, at);
    if (keyword == "required") return required_problem(rule, value, at);
    if (keyword == "properties" || keyword == "additionalProperties")
      return keyword == "properties" ? properties_problem(schema, value, at) : additional_problem(schema, value, at);
    throw std::invalid_argument("the schema has the unknown keyword " + keyword);
  }

  [[nodiscard]] std::string any_of_problem(const json& choices, const json& value, const std::string& at) const {
    std::string all;
    for (const json& choice : choices) {
      const std::string wrong = problem(choice, value, at);
      if (wrong.empty()) return "";
      all += (all.empty() ? "" : " and ") + wrong;
    }
    return all;
  }
  [[nodiscard]] std::string items_problem(const json& rule, const json& value, const std::string& at) const {
    if (!value.is_array()) return "";
    for (std::size_t i = 0; i < value.size(); ++i) {
      std::string wrong = problem(rule, value[i], fmt::format("{}[{}]", at, i));
      if (!wrong.empty()) return wrong;
    }
    return "";
  }
  [[nodiscard]] static std::string required_problem(const json& rule, const json& value, const std::string& at) {
    if (!value.is_object()) return "";
    for (const json& name : rule) {
      if (!value.contains(name.get<std::string>())) return fmt::format("{} has no {}", at, name.dump());
    }
    return "";
  }
  [[nodiscard]] std::string properties_problem(const json& schema, const json& value, const std::string& at) const {
    if (!value.is_object()) return "";
    for (const auto& [name, rule] : schema.at("properties").items()) {
      if (!value.contains(name)) continue;
      std::string wrong = problem(rule, value.at(name), at + "." + name);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }
  [[nodiscard]] std::string additional_problem(const json& schema, const json& value, const std::string& at) const {
    if (!value.is_object()) return "";
    for (const auto& [name, member] : value.items()) {
      if (schema.contains("properties") && schema.at("properties").contains(name)) continue;
      std::string wrong = problem(schema.at("additionalProperties"), member, at + "." + name);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  json root_;
};

json read(const fs::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

class ReportSchema : public ::testing::Test {
 protected:
  ReportSchema()
      : schema_(read(fs::path(ISOSHARD_DOCS_DIR) / "report.schema.json")),
        folder_(fs::temp_directory_path() / fmt::format("isoshard-report-schema-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~ReportSchema() override { fs::remove_all(folder_); }

  /// The report that the command writes.
  [[nodiscard]] json written(int exit_code, std::vector<std::string> words) const {
    for (const char* word : {"--output-dir"}) words.emplace_back(word);
    words.push_back(folder_ / "report");
    const std::array commands = {verify_command(), compare_command()};
    EXPECT_EQ(run_command_line(commands, words), exit_code);
    return read(folder_ / "report" / "report.json");
  }

  Schema schema_;
  fs::path folder_;
};

TEST_F(ReportSchema, DescribesVerifyWithTablesAndCompare) {
  const json verify = written(0, {"verify", "--model", "tiny", "--subjects", "ddp", "autotp", "--tp", "2", "--dp", "2", "--dtype", "bf16",
                                  "--dump", folder_ / "runs"});

  EXPECT_THAT(schema_.problem(verify), IsEmpty());
  ASSERT_EQ(verify.at("cases").size(), 2U);
  ASSERT_EQ(verify.at("tables").size(), 1U);
  EXPECT_EQ(verify.at("tables")[0].at("columns").size(), 3U);
  EXPECT_THAT(schema_.problem(written(0, {"compare", "--input-dir", folder_ / "runs"})), IsEmpty());
}

TEST_F(ReportSchema, DescribesARunThatDiverges) {
  const json report = written(1, {"verify", "--fault", "mlp_input_grad_partial", "--tables", "on"});

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_FALSE(report.at("cases")[0].at("findings").empty());
  EXPECT_EQ(report.at("tables").size(), 1U);
}

TEST_F(ReportSchema, DescribesACaseThatBrokeDown) {
  const json report = written(4, {"verify", "--fault", "dp_sum_missing", "--dp", "1"});

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_EQ(report.at("cases")[0].at("status"), "incomplete");
}

TEST_F(ReportSchema, DescribesNumbersThatJsonLacks) {
  Verdict verdict;
  verdict.tensors.emplace_back().stats.max_abs = NAN;
  ComparisonTables tables;
  tables.modules = {"m"};
  tables.columns.emplace_back().output_norms["m"] = INFINITY;

  const json report = {{"schema", 1}, {"exit_code", 1}, {"cases", {report_json(verdict)}}, {"tables", {tables_json(tables)}}};

  EXPECT_THAT(schema_.problem(report), IsEmpty());
}

// One change each to a right report.
TEST_F(ReportSchema, RefusesWhatIsMissingExtraOrOfAnotherType) {
  Verdict verdict;
  verdict.tensors.emplace_back();
  ComparisonTables tables;
  tables.modules = {"m"};
  tables.columns.emplace_back().output_norms["m"] = 1;
  const json right = {{"schema", 1}, {"exit_code", 0}, {"cases", {report_json(verdict)}}, {"tables", {tables_json(tables)}}};
  ASSERT_THAT(schema_.problem(right), IsEmpty());
  const auto changed = [&](const char* pointer, const json& value) {
    json report = right;
    report[json::json_pointer(pointer)] = value;
    return schema_.problem(report);
  };
  json lacking = right;
  lacking.at("cases")[0].at("tensors")[0].erase("max_abs");

  EXPECT_THAT(schema_.problem(lacking), HasSubstr("$.cases[0].tensors[0] has no \"max_abs\""));
  EXPECT_THAT(changed("/extra", 1), HasSubstr("$.extra is not allowed"));
  EXPECT_THAT(changed("/schema", 2), HasSubstr("$.schema is not 1"));
  EXPECT_THAT(changed("/cases/0/status", "fine"), HasSubstr("$.cases[0].status is \"fine\""));
  EXPECT_THAT(changed("/cases/0/compared", -1), HasSubstr("below 0"));
  EXPECT_THAT(changed("/cases/0/tensors/0/max_abs", "large"), HasSubstr("max_abs"));
  EXPECT_THAT(changed("/tables/0/columns/0/modules/0/output_norm", true), HasSubstr("output_norm is boolean"));
  EXPECT_THAT(changed("/tables/0/columns/0/losses", {{{"dp_rank", 0}}}), HasSubstr("has no \"loss\""));
}

}  // namespace
}  // namespace isoshard
