// SPDX-License-Identifier: Apache-2.0
/// A wrong run never conforms, whatever its own bundle says: each row edits a bundle of a right run
/// as its author could, seals it again, and is told to be wrong, or is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "fixtures/cases/case_settings.h"
#include "harness/bundle/bundle.h"
#include "harness/judge/compare_bundles.h"
#include "harness/testing/bundle_edit.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/run_case.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using bundle_edit::edit_json;
using bundle_edit::edit_ranks;
using bundle_edit::edit_records;
using bundle_edit::edit_values;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kNorm = "model.norm.weight";

Case adamw(const char* subject) {
  Case item = step_case(subject, {.dp = 2, .tp = 2});
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 1e-2;
  item.steps = 2;
  return item;
}

/// reference, run (autotp, dp 2 x tp 2), ddp (dp 2) and emulated, written once.
const TestFolder& bundles() {
  static const TestFolder folder;
  static const bool is_written = [] {
    const Case item = adamw("autotp");
    Case data = adamw("ddp");
    data.degrees.tp = 1;
    const Reference reference = reference_of(item);
    const auto settings = [](const Case& c) { return bundle_settings(c, policy_of(c)); };
    write_bundle(folder / "reference", reference, settings(item));
    write_bundle(folder / "run", run_case(item, reference, {.keep = Keep::kEverything}),
                 settings(item));
    write_bundle(folder / "ddp", run_case(data, reference, {.keep = Keep::kEverything}),
                 settings(data));
    return true;
  }();
  (void)is_written;
  return folder;
}

/// What a comparison ends with: the exit code of the command, and what is printed.
struct End {
  int code = 0;
  std::string text;
};

End compared(const fs::path& reference, const fs::path& actual, const BundleRules& rules = {}) {
  try {
    const Verdict verdict = compare_bundles(reference, actual, {}, rules);
    std::string text = verdict.reason;
    for (const std::string& note : verdict.notes) text += "\n" + note;
    return {verdict.status == Status::kConforms ? 0 : 1, text};
  } catch (const UsageError& error) {
    return {2, error.what()};
  } catch (const FileError& error) {
    return {3, error.what()};
  } catch (const InfrastructureError& error) {
    return {4, error.what()};
  }
}

bool is_of(const std::string& name, const char* kind) {
  return name.starts_with(std::string(kind) + "/");
}

void scale_values(const fs::path& bundle, double factor, const std::string& begin) {
  const int changed = edit_values(bundle, [&](int, const std::string& name, auto& values) {
    if (!name.starts_with(begin)) return;
    for (double& value : values) value *= factor;
  });
  ASSERT_GT(changed, 0) << begin;
}

/// All values that begin so are multiplied, and what the bundle says divides them again.
std::function<void(const fs::path&)> scaled(double factor, std::string begin, json declared) {
  return [=](const fs::path& bundle) {
    scale_values(bundle, factor, begin);
    edit_records(bundle, [&](int, const std::string& name, json& record) {
      if (name.starts_with(begin)) record["grad_scale"] = declared;
    });
  };
}

void edit_manifest(const fs::path& bundle, const std::function<void(json&)>& edit) {
  edit_json(bundle / "manifest.json", edit);
}

/// Rank 1 and those of its tp line drift in one replicated tensor.
void drift(const fs::path& bundle, const std::string& begin, int only_rank = 1) {
  const int changed = edit_values(bundle, [&](int rank, const std::string& name, auto& values) {
    if (rank == only_rank && name.starts_with(begin))
      for (double& value : values) value = -value;
  });
  ASSERT_GT(changed, 0) << begin;
}

struct Wrong {
  std::string name;
  std::function<void(const fs::path& bundle)> edit;
  std::vector<int> codes;
  std::string word;  ///< in what is printed
  std::string run = "run";
};

void PrintTo(const Wrong& wrong, std::ostream* out) {
  *out << wrong.name;
}

class WrongBundles : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongBundles, NeverConform) {
  const TestFolder folder;
  const fs::path bad = folder / "bad";
  fs::copy(bundles() / GetParam().run, bad, fs::copy_options::recursive);
  GetParam().edit(bad);
  if (!fs::is_symlink(bad / "scalars.jsonl")) bundle_edit::seal(bad);

  const End end = compared(bundles() / "reference", bad);

  EXPECT_THAT(GetParam().codes, ::testing::Contains(end.code)) << end.text;
  EXPECT_NE(end.code, 0);
  EXPECT_THAT(end.text, HasSubstr(GetParam().word));
}

constexpr auto name_of_row = [](const auto& row) { return row.param.name; };

INSTANTIATE_TEST_SUITE_P(
    Scales, WrongBundles,
    ::testing::Values(
        Wrong{"Control", [](const fs::path& b) { scale_values(b, 2, "grad/"); }, {1}, "gradient"},
        Wrong{"OfGradients", scaled(3, "grad/", to_hex(3)), {1}, "gradient scale"},
        Wrong{"OfActivationGradients", scaled(7, "activation_grad/", to_hex(14)), {1},
              "gradient scale"},
        Wrong{"OfOneActivationGradient", scaled(0.5, "activation_grad/lm_head/", 1.0), {1},
              "gradient scale"},
        Wrong{"OfParameters", scaled(3, "param/model.norm.weight/", 3.0), {1}, "gradient scale"},
        Wrong{"OfMoments", scaled(3, "optimizer/", 3.0), {1}, "gradient scale"},
        Wrong{"OfActivations", scaled(3, "activation/lm_head/", to_hex(3)), {1}, "gradient scale"},
        Wrong{"OfTheLoss", scaled(1.5, "scalar/loss", 1.5), {1}, "gradient scale"},
        Wrong{"Negative", scaled(-1, "grad/", -1.0), {3}, "grad_scale"},
        Wrong{"Zero", scaled(1, "grad/", 0), {3}, "grad_scale"},
        Wrong{"NaN", scaled(1, "grad/", "nan"), {3}, "grad_scale"},
        Wrong{"Infinite", scaled(0, "grad/", "inf"), {3}, "grad_scale"},
        Wrong{"ThatUnderflows", scaled(0, "grad/", 1e-320), {1}, "gradient scale"}),
    name_of_row);

INSTANTIATE_TEST_SUITE_P(
    Settings, WrongBundles,
    ::testing::Values(
        Wrong{"CoarserDtype",
              [](const fs::path& b) {
                scale_values(b, 1.005, "grad/");
                edit_manifest(b, [](json& m) {
                  m["settings"]["judging"]["coarsest_dtype"] = "bf16";
                });
              },
              {1},
              ""},
        Wrong{"Deleted",
              [](const fs::path& b) {
                scaled(7, "activation_grad/", to_hex(14))(b);
                edit_manifest(b, [](json& m) { m.erase("settings"); });
              },
              {3},
              "training settings"},
        Wrong{"OfTrainingDeleted",
              [](const fs::path& b) {
                edit_manifest(b, [](json& m) { m["settings"].erase("training"); });
              },
              {3},
              "training settings"},
        Wrong{"Edited",
              [](const fs::path& b) {
                edit_manifest(b, [](json& m) { m["settings"]["training"]["steps"] = 1; });
              },
              {2},
              "different settings"},
        Wrong{"ThatMask",
              [](const fs::path& b) {
                scale_values(b, 1.5, "param/model.norm.weight/1");
                edit_records(b, [](int, const std::string&, json& r) { r["unmasked"] = 0; });
                edit_manifest(b, [](json& m) {
                  m["settings"]["judging"]["mask_small_gradients"] = true;
                  m["settings"]["judging"]["activation_grad_scale"] = 4;
                  m["settings"]["judging"]["partial"] = {"*/*"};
                });
              },
              {1},
              kNorm},
        Wrong{"NotRecordedEverything",
              [](const fs::path& b) {
                edit_ranks(b, [](int, json& d) { d["records"] = json::array(); });
                for (const auto& entry : fs::recursive_directory_iterator(b)) {
                  if (entry.path().extension() == ".safetensors")
                    write_safetensors(entry.path(), std::vector<SafetensorsEntry>{});
                }
                edit_manifest(b, [](json& m) {
                  m["not_recorded"] = {{{"pattern", "*"}, {"why", "no"}}};
                });
              },
              {1},
              "--not-recorded"},
        Wrong{"MeshOfOtherAxes",
              [](const fs::path& b) {
                edit_manifest(b, [](json& m) { m["mesh"][0]["axis"] = "cp"; });
                edit_records(b, [](int, const std::string&, json& r) {
                  for (json& p : r["placements"]) {
                    if (p["axis"] == "dp") p["axis"] = "cp";
                  }
                });
              },
              {3},
              "data.dp"}),
    name_of_row);

/// The rows of the ranks from 2 on are dropped, and the mesh is made to fit.
void drop_ranks(const fs::path& bundle, const char* axis) {
  for (const char* step : {"step0000", "step0001"}) {
    for (const char* rank : {"rank00002", "rank00003"}) {
      for (const char* suffix : {".done", ".json", ".safetensors"})
        fs::remove(bundle / step / (std::string(rank) + suffix));
    }
  }
  edit_manifest(bundle, [&](json& m) {
    for (json& entry : m["mesh"]) {
      if (entry["axis"] == axis) entry["degree"] = 1;
    }
  });
}

/// Splits a replicated tensor into two summands over an axis, one of them noise that cancels.
void cancel(const fs::path& bundle, const std::string& begin, const char* axis,
            const std::function<bool(int rank)>& is_first) {
  const int changed = edit_values(bundle, [&](int rank, const std::string& name, auto& values) {
    if (!name.starts_with(begin)) return;
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = is_first(rank) ? values[i] + 1024.0 * static_cast<double>(i % 7)
                                 : -1024.0 * static_cast<double>(i % 7);
  });
  ASSERT_GT(changed, 0) << begin;
  edit_records(bundle, [&](int, const std::string& name, json& record) {
    if (name.starts_with(begin))
      record["placements"].push_back({{"axis", axis}, {"kind", "partial"}, {"reduction", "sum"}});
  });
}

std::function<void(const fs::path&)> cancelled(std::string begin) {
  return [=](const fs::path& b) {
    cancel(b, begin, "tp", [](int rank) { return rank % 2 == 0; });
  };
}

void hold_nothing(json& record) {
  record["boxes"] = json::array();
  record["flat"] = json::array();
  record["placements"] = json::array();
}

/// The whole tensor, as a box.
void hold_all(json& record) {
  hold_nothing(record);
  const json zeros = json(std::vector<int>(record["global_shape"].size(), 0));
  record["boxes"] = {{{"local_offset", zeros},
                      {"global_offset", zeros},
                      {"size", record["global_shape"]}}};
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, WrongBundles,
    ::testing::Values(
        Wrong{"PartialParameter", cancelled("param/model.norm.weight/"), {1}, "partial sum"},
        Wrong{"PartialGradient", cancelled("grad/model.norm.weight/"), {1}, "partial sum"},
        Wrong{"PartialMoment", cancelled("optimizer/model.norm.weight"), {1}, "partial sum"},
        Wrong{"PartialActivation", cancelled("activation/model.norm/"), {1}, "partial sum"},
        Wrong{"PartialActivationGradient", cancelled("activation_grad/model.norm/"), {1},
              "partial sum"},
        Wrong{"PartialLoss", cancelled("scalar/loss/"), {1}, "partial sum"},
        Wrong{"ACopyThatDrifts", [](const fs::path& b) { drift(b, "param/model.norm.weight/1"); },
              {1}, "copies differ"},
        Wrong{"ACopyInNoBox",
              [](const fs::path& b) {
                drift(b, "param/model.norm.weight/1");
                edit_records(b, [](int rank, const std::string& name, json& record) {
                  if (name != "param/model.norm.weight/1") return;
                  rank == 1 ? hold_nothing(record) : hold_all(record);
                });
              },
              {3},
              "padding holds no values"},
        Wrong{"ACopyInAZeroedTensor",
              [](const fs::path& b) {
                const int changed = edit_values(b, [](int rank, const std::string& name, auto& v) {
                  if (rank == 1 && name == "param/model.norm.weight/1") v.assign(v.size(), 0.0);
                });
                ASSERT_EQ(changed, 1);
                edit_records(b, [](int rank, const std::string& name, json& record) {
                  if (name != "param/model.norm.weight/1") return;
                  rank == 1 ? hold_nothing(record) : hold_all(record);
                });
              },
              {3},
              "holds nothing of it"},
        Wrong{"OnlyAtTheRightRank",
              [](const fs::path& b) {
                drift(b, "param/model.norm.weight/1");
                edit_records(b, [](int, const std::string& name, json& record) {
                  if (name == "param/model.norm.weight/1")
                    record["placements"] = {{{"axis", "dp"}, {"kind", "only_at"}, {"coordinate", 0}}};
                });
              },
              {1, 3},
              kNorm,
              "ddp"},
        Wrong{"BoxesThatOverlap",
              [](const fs::path& b) {
                edit_records(b, [](int rank, const std::string& name, json& record) {
                  if (name != "param/model.norm.weight/1") return;
                  hold_all(record);
                  if (rank == 1) record["boxes"][0]["size"][0] = 1;
                });
              },
              {3},
              kNorm},
        Wrong{"ASmallerWhole",
              [](const fs::path& b) {
                edit_records(b, [](int, const std::string& name, json& record) {
                  if (name != "param/model.norm.weight/1") return;
                  record["global_shape"][0] = 8;
                  hold_all(record);
                });
              },
              {1, 3},
              kNorm},
        Wrong{"NotKept",
              [](const fs::path& b) {
                edit_records(b, [](int, const std::string& name, json& record) {
                  if (name == "param/model.norm.weight/1") record["kept"] = false;
                });
              },
              {3},
              ""},
        Wrong{"FewerRanks", [](const fs::path& b) { drop_ranks(b, "dp"); }, {1, 3}, ""},
        Wrong{"FewerRanksOfTp", [](const fs::path& b) { drop_ranks(b, "tp"); }, {1, 3}, ""}),
    name_of_row);

/// In records and in the tensors' names.
void rename(const fs::path& bundle, const std::string& from, const std::string& to_name,
            const char* to_kind = nullptr) {
  edit_records(bundle, [&](int, const std::string& name, json& record) {
    if (name != from) return;
    record["name"] = to_name;
    if (to_kind != nullptr) record["kind"] = to_kind;
  });
  const std::string kind = to_kind != nullptr ? to_kind : from.substr(0, from.find('/'));
  const std::string call = from.substr(from.rfind('/'));
  for (const auto& entry : fs::recursive_directory_iterator(bundle)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    std::vector<SafetensorsEntry> tensors;
    for (const std::string& name : file.names()) {
      const SafetensorsInfo& info = file.info(name);
      tensors.push_back({name == from ? kind + "/" + to_name + call : name, info.dtype, info.shape,
                         [&file, name] { return file.tensor(name); }});
    }
    write_safetensors(entry.path(), tensors);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Records, WrongBundles,
    ::testing::Values(
        Wrong{"RenamedToASummand",
              [](const fs::path& b) {
                rename(b, "activation/model.norm/0", "model.norm.partial");
              },
              {1},
              "was recorded by no rank"},
        Wrong{"RenamedToARecomputedOne",
              [](const fs::path& b) {
                rename(b, "activation/model.norm/0", "model.norm.recomputed");
              },
              {1},
              "model.norm"},
        Wrong{"OfAnotherKind",
              [](const fs::path& b) {
                rename(b, "grad/model.norm.weight/0", "model.norm.weight", "optimizer");
              },
              {1},
              kNorm},
        Wrong{"OfAnUnknownKind",
              [](const fs::path& b) { rename(b, "grad/model.norm.weight/0", kNorm, "note"); },
              {3},
              "no kind of record"},
        Wrong{"AStepLess",
              [](const fs::path& b) {
                fs::remove_all(b / "step0001");
                edit_manifest(b, [](json& m) { m["steps"] = {0}; });
              },
              {1},
              "was recorded by no rank"},
        Wrong{"ACallMore",
              [](const fs::path& b) {
                edit_records(b, [](int, const std::string& name, json& record) {
                  if (name == "activation/model.norm/0") record["call"] = 1;
                });
                for (const auto& entry : fs::recursive_directory_iterator(b)) {
                  if (entry.path().extension() != ".safetensors") continue;
                  const SafetensorsFile file = SafetensorsFile::open(entry.path());
                  std::vector<SafetensorsEntry> tensors;
                  for (const std::string& name : file.names()) {
                    const bool is_it = name == "activation/model.norm/0";
                    tensors.push_back({is_it ? "activation/model.norm/1" : name,
                                       file.info(name).dtype, file.info(name).shape,
                                       [&file, name] { return file.tensor(name); }});
                  }
                  write_safetensors(entry.path(), tensors);
                }
              },
              {1, 3},
              "model.norm"}),
    name_of_row);

// -- the seal -------------------------------------------------------------------------------------

struct Broken {
  std::string name;
  std::function<void(const fs::path& bundle)> edit;
  std::string word;
};

void PrintTo(const Broken& broken, std::ostream* out) {
  *out << broken.name;
}

class BrokenSeals : public ::testing::TestWithParam<Broken> {};

TEST_P(BrokenSeals, AreRefusedOnEitherSide) {
  const TestFolder folder;
  fs::copy(bundles() / "run", folder / "bad", fs::copy_options::recursive);
  GetParam().edit(folder / "bad");

  for (const auto& [reference, actual] :
       {std::pair(bundles() / "reference", folder / "bad"),
        std::pair(folder / "bad", bundles() / "run")}) {
    const End end = compared(reference, actual);
    EXPECT_EQ(end.code, 3) << end.text;
    EXPECT_THAT(end.text, HasSubstr(GetParam().word));
    EXPECT_THAT(end.text, HasSubstr("bad"));
  }
}

void flip_bit(const fs::path& file) {
  std::string content = content_of(file);
  content[content.size() - 5] = static_cast<char>(content[content.size() - 5] ^ 1);
  std::ofstream(file, std::ios::binary) << content;
}

std::function<void(const fs::path&)> listed(std::string name) {
  return [=](const fs::path& b) {
    edit_manifest(b, [&](json& m) {
      m["files"][name] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    });
  };
}

INSTANTIATE_TEST_SUITE_P(
    Seals, BrokenSeals,
    ::testing::Values(
        Broken{"ABitOfATensor",
               [](const fs::path& b) { flip_bit(b / "step0001/rank00002.safetensors"); },
               "another SHA-256"},
        Broken{"ABitThatNobodyReads", [](const fs::path& b) { flip_bit(b / "scalars.jsonl"); },
               "another SHA-256"},
        Broken{"AFileMore", [](const fs::path& b) { std::ofstream(b / "notes.txt") << "x"; },
               "notes.txt: is not among"},
        Broken{"AFileLess", [](const fs::path& b) { fs::remove(b / "scalars.jsonl"); },
               "scalars.jsonl: is missing"},
        Broken{"ALink",
               [](const fs::path& b) {
                 fs::rename(b / "scalars.jsonl", b.parent_path() / "elsewhere");
                 fs::create_symlink(b.parent_path() / "elsewhere", b / "scalars.jsonl");
               },
               "a symbolic link"},
        Broken{"ALinkedFolder",
               [](const fs::path& b) {
                 fs::rename(b / "step0001", b.parent_path() / "elsewhere");
                 fs::create_directory_symlink(b.parent_path() / "elsewhere", b / "step0001");
               },
               "a symbolic link"},
        Broken{"APathOut", listed("../bad/scalars.jsonl"), "must name files below"},
        Broken{"AnAbsolutePath", listed("/etc/passwd"), "must name files below"},
        Broken{"APathWithDots", listed("./scalars.jsonl"), "must name files below"},
        Broken{"ItsOwnManifest", listed("manifest.json"), "must name files below"},
        Broken{"NoFiles",
               [](const fs::path& b) { edit_manifest(b, [](json& m) { m.erase("files"); }); },
               "\"files\" must be"},
        Broken{"AHashThatIsNone",
               [](const fs::path& b) {
                 edit_manifest(b, [](json& m) { m["files"]["scalars.jsonl"] = "0123"; });
               },
               "64 lower-case hex digits"},
        Broken{"AKeyTwice",
               [](const fs::path& b) {
                 std::string text = content_of(b / "manifest.json");
                 text.replace(text.find("\"case\""), 0, "\"mesh\": [], ");
                 std::ofstream(b / "manifest.json") << text;
               },
               "duplicate key"},
        Broken{"TheOlderSchema",
               [](const fs::path& b) { edit_manifest(b, [](json& m) { m["schema"] = 1; }); },
               "--allow-unsealed"}),
    name_of_row);

// -- the trusted side -----------------------------------------------------------------------------

class WrongReferences : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongReferences, AreRefused) {
  const TestFolder folder;
  const fs::path bad = folder / "bad";
  fs::copy(bundles() / GetParam().run, bad, fs::copy_options::recursive);
  GetParam().edit(bad);
  bundle_edit::seal(bad);

  const End end = compared(bad, bundles() / "run");

  EXPECT_THAT(GetParam().codes, ::testing::Contains(end.code)) << end.text;
  EXPECT_THAT(end.text, HasSubstr(GetParam().word));
}

/// Edits one number of a gradient's response.
std::function<void(const fs::path&)> response(std::string field, std::function<json(double)> edit) {
  return [=](const fs::path& b) {
    edit_json(b / "responses.json", [&](json& j) {
      for (json& r : j["responses"]) {
        if (r["kind"] == "grad" && r["name"] == "model.layers.0.mlp.up_proj.weight")
          r[field] = edit(*parse_hex(r[field].get<std::string>()));
      }
    });
  };
}

INSTANTIATE_TEST_SUITE_P(
    Responses, WrongReferences,
    ::testing::Values(
        Wrong{"AbsoluteNorm", response("absolute_norm", [](double x) { return x * 1024; }), {3},
              "does not fit", "reference"},
        Wrong{"MaxAbs", response("max_abs", [](double x) { return x * 1024; }), {3}, "does not fit",
              "reference"},
        Wrong{"RelativeError", response("relative_error", [](double x) { return x * 1024; }), {3},
              "does not fit", "reference"},
        Wrong{"ScaleError", response("scale_error", [](double) { return 0.5; }), {3},
              "does not fit", "reference"},
        Wrong{"ReferenceNorm", response("reference_norm", [](double x) { return x * 2; }), {3},
              "does not fit", "reference"},
        Wrong{"ReferenceMaxAbs", response("reference_max_abs", [](double x) { return x / 2; }), {3},
              "does not fit", "reference"},
        Wrong{"Negative", response("scale_error", [](double) { return -1e-9; }), {3},
              "not negative", "reference"},
        Wrong{"NaN", response("absolute_norm", [](double) { return "nan"; }), {3}, "finite",
              "reference"},
        Wrong{"Infinite", response("relative_error", [](double) { return "inf"; }), {3}, "finite",
              "reference"},
        Wrong{"OfMoreRunsThanThereAre",
              [](const fs::path& b) {
                edit_json(b / "responses.json", [](json& j) { j["responses"][5]["runs"] = 7; });
              },
              {3},
              "must be of 1 to",
              "reference"},
        Wrong{"OfNoRun",
              [](const fs::path& b) {
                edit_json(b / "responses.json", [](json& j) { j["responses"][5]["runs"] = 0; });
              },
              {3},
              "must be of 1 to",
              "reference"},
        Wrong{"OfNoRecord",
              [](const fs::path& b) {
                edit_json(b / "responses.json", [](json& j) { j["responses"][5]["name"] = "x"; });
              },
              {3},
              "must be of a record",
              "reference"},
        Wrong{"ConsistentAndHuge",
              [](const fs::path& b) {
                edit_json(b / "responses.json", [](json& j) {
                  for (json& r : j["responses"]) {
                    for (const char* field : {"relative_error", "absolute_norm", "max_abs"})
                      r[field] = *parse_hex(r[field].get<std::string>()) * 0x1p+30;
                  }
                });
              },
              {1, 3},
              "",
              "reference"},
        Wrong{"ConsistentAndHugeInOneTensor",
              [](const fs::path& b) {
                edit_json(b / "responses.json", [](json& j) {
                  for (json& r : j["responses"]) {
                    if (r["kind"] != "grad" || r["name"] != kNorm) continue;
                    for (const char* field : {"relative_error", "absolute_norm", "max_abs"})
                      r[field] = *parse_hex(r[field].get<std::string>()) * 0x1p+30;
                  }
                });
              },
              {1, 3},
              kNorm,
              "reference"},
        Wrong{"CopiesThatDiffer", [](const fs::path& b) { drift(b, "param/model.norm.weight/1"); },
              {3}, "equal copies"},
        Wrong{"DropoutWithoutMasks",
              [](const fs::path& b) {
                edit_manifest(b, [](json& m) {
                  m["settings"]["training"]["model"]["attention_dropout"] = 0.1;
                });
              },
              {2, 3},
              "attention_dropout",
              "reference"}),
    name_of_row);

// -- what is right --------------------------------------------------------------------------------

TEST(RightBundles, Conform) {
  for (const char* run : {"run", "ddp"}) {
    const End end = compared(bundles() / "reference", bundles() / run);
    EXPECT_EQ(end.code, 0) << run << ": " << end.text;
  }
  for (const char* any : {"reference", "run", "ddp"}) {
    const End end = compared(bundles() / any, bundles() / any);
    EXPECT_EQ(end.code, 0) << any << " against itself: " << end.text;
  }
}

TEST(RightBundles, OfAnEmulationConformToThemselvesAndTheRunToThem) {
  const TestFolder folder;
  for (const char* subject : {"ddp", "autotp", "fsdp_tp", "megatron"}) {
    Case item = adamw(subject);
    if (std::string_view(subject) == "ddp") item.degrees.tp = 1;
    ASSERT_GT(item.world_size(), 1);
    const Reference emulated = make_emulated_reference(item, numerics_spec(item));
    Case single = reference_case(item);
    JudgePolicy policy = policy_of(single);
    policy.activation_grad_scale = policy_of(item).activation_grad_scale;
    const fs::path trusted = folder / (std::string("emulated_") + subject);
    write_bundle(trusted, emulated, bundle_settings(single, policy));
    write_bundle(folder / subject, run_case(item, emulated, {.keep = Keep::kEverything}),
                 bundle_settings(item, policy_of(item)));

    const End itself = compared(trusted, trusted);
    const End run = compared(trusted, folder / subject);

    EXPECT_EQ(itself.code, 0) << subject << ": " << itself.text;
    EXPECT_EQ(run.code, 0) << subject << ": " << run.text;
  }
}

TEST(RightBundles, SayWhatWasAllowed) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  fs::copy(bundles() / "run", run, fs::copy_options::recursive);
  rename(run, "scalar/grad_norm/0", "other_norm");
  edit_manifest(run, [](json& m) {
    m["settings"]["training"]["steps"] = 5;
    m["not_recorded"] = {{{"pattern", "scalar/grad_norm"}, {"why", "the framework hides it"}}};
  });
  bundle_edit::seal(run);
  BundleRules rules{.different = DifferentSettings::kAllowed};

  const End refused = compared(bundles() / "reference", run, rules);
  rules.not_recorded = {"scalar/grad_norm", "scalar/other_norm"};
  const Verdict allowed = compare_bundles(bundles() / "reference", run, {}, rules);

  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.text, HasSubstr("the framework hides it"));
  EXPECT_EQ(allowed.status, Status::kConforms) << allowed.reason;
  EXPECT_EQ(allowed.not_recorded.size(), 2U);
  EXPECT_THAT(allowed.notes, ::testing::Contains(HasSubstr("steps: reference 2, actual 5")));
}

TEST(RightBundles, OfAnyMeshButTheOneThatIsDemandedAreRefused) {
  BundleRules rules{.mesh = MeshShape({{Axis::kDp, 2}, {Axis::kTp, 2}})};

  EXPECT_EQ(compared(bundles() / "reference", bundles() / "run", rules).code, 0);
  EXPECT_EQ(compared(bundles() / "reference", bundles() / "ddp", rules).code, 3);
}

TEST(RightBundles, MayLeaveTheirLayoutsToBeInferred) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  fs::copy(bundles() / "run", run, fs::copy_options::recursive);
  int inferred = 0;
  edit_records(run, [&](int, const std::string& name, json& record) {
    if (!is_of(name, "param") && !is_of(name, "grad") && !is_of(name, "activation")) return;
    for (const char* field : {"global_shape", "placements", "boxes", "flat", "local_shape", "dtype",
                              "order", "unmasked", "kept", "step"})
      record.erase(field);
    record["layout"] = "infer";
    ++inferred;
  });
  bundle_edit::seal(run);

  const End end = compared(bundles() / "reference", run);

  EXPECT_EQ(end.code, 0) << end.text;
  EXPECT_GT(inferred, 100);
}

}  // namespace
}  // namespace isoshard
