// SPDX-License-Identifier: Apache-2.0
/// Bundles that are cut, mixed or tampered with, given to `compare`: the exit code says which, the
/// message names file and tensor.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <random>

#include "app/testing/exit_codes.h"
#include "app/testing/malformed_rows.h"
#include "core/io/tensor_files.h"
#include "harness/testing/bundle_edit.h"

namespace isoshard::malformed {
namespace {

namespace fs = std::filesystem;
using bundle_edit::edit_json;
using nlohmann::json;
using ::testing::HasSubstr;

using namespace codes;
// [48, 48], its rows sharded over tp
const char* const kWeight = "model.layers.0.self_attn.q_proj.weight";

/// A reference and two runs on tp 2 of one model, made once by the program itself.
const TestFolder& dumped_runs() {
  static const TestFolder folder;
  static const bool is_made = [] {
    for (const char* seed : {"1", "2"}) {
      const ChildResult result =
          run_isoshard(folder.path(), {"verify", "--model", "tiny", "--tp", "2", "--dp", "1",
                                       "--subjects", "autotp", "--dtype", "fp32", "--seq-length",
                                       "8", "--batch-size", "1", "--seed", seed, "--dump", seed});
      if (result.exit_code != kConforms)
        throw std::runtime_error("no runs to damage: " + result.error + result.output);
      for (const auto& entry : fs::directory_iterator(folder / seed)) {
        const std::string name = entry.path().filename().string();
        const char* kind = name.starts_with("reference")  ? "reference"
                           : name.starts_with("emulated") ? "emulated"
                                                          : "run";
        fs::rename(entry.path(), folder / seed / kind);
      }
    }
    return true;
  }();
  (void)is_made;
  return folder;
}

std::string stem(int rank) {
  return "run/step0000/rank0000" + std::to_string(rank);
}

Craft remove(std::string name) {
  return [=](const TestFolder& folder) { ASSERT_GT(fs::remove_all(folder / name), 0U); };
}

Craft manifest(std::function<void(json&)> edit) {
  return [=](const TestFolder& folder) { edit_json(folder / "run/manifest.json", edit); };
}

/// Edits the record of kWeight on both ranks.
Craft record(std::function<void(json& record, int rank)> edit) {
  return [=](const TestFolder& folder) {
    for (const int rank : {0, 1}) {
      edit_json(folder / (stem(rank) + ".json"), [&](json& description) {
        for (json& entry : description["records"]) {
          if (entry["name"] == kWeight && entry["kind"] == "param" && entry["call"] == 0)
            edit(entry, rank);
        }
      });
    }
  };
}

/// Rows [begin, begin + 24) of the weight on `rank`.
void place_rows(json& record, std::int64_t begin) {
  record["boxes"] = {{{"local_offset", {0, 0}}, {"global_offset", {begin, 0}}, {"size", {24, 48}}}};
  record["flat"] = json::array();
  record["placements"] = json::array();
}

/// The tensors of each rank's file and its records, both after `edit`.
Craft contents(
    std::function<void(std::map<std::string, at::Tensor>& tensors, json& records)> edit) {
  return [=](const TestFolder& folder) {
    for (const int rank : {0, 1}) {
      const fs::path file = folder / (stem(rank) + ".safetensors");
      std::map<std::string, at::Tensor> tensors;
      {
        const SafetensorsFile source = SafetensorsFile::open(file);
        for (const std::string& name : source.names())
          tensors[name] = tensor_of(source.tensor(name)).clone();
      }
      edit_json(folder / (stem(rank) + ".json"),
                [&](json& description) { edit(tensors, description["records"]); });
      std::vector<NamedTensor> list;
      for (const auto& [name, tensor] : tensors) list.push_back({name, tensor});
      write_safetensors(file, list);
    }
  };
}

void drop(std::map<std::string, at::Tensor>& tensors, json& records, const std::string& name) {
  for (auto entry = records.begin(); entry != records.end();)
    entry = (*entry)["name"] == name ? records.erase(entry) : entry + 1;
  std::erase_if(tensors, [&](const auto& item) {
    return item.first.find("/" + name + "/") != std::string::npos;
  });
}

Row compared(std::string name, int exit_code, std::vector<std::string> words, Craft craft) {
  return {std::move(name),
          std::move(craft),
          {"compare", "reference", "run", "--verbose"},
          exit_code,
          std::move(words)};
}

class MalformedBundles : public testing::TestWithParam<Row> {};

INSTANTIATE_TEST_SUITE_P(
    Incomplete, MalformedBundles,
    testing::Values(compared("ARank", kIncomplete, {"rank00001", "incomplete"},
                             [](const TestFolder& folder) {
                               for (const char* suffix : {".done", ".json", ".safetensors"})
                                 fs::remove(folder / (stem(1) + suffix));
                             }),
                    compared("ADone", kIncomplete, {"rank00001.done is missing", "incomplete"},
                             remove(stem(1) + ".done")),
                    compared("RecordsOfARank", kIncomplete, {"rank00000.json is missing"},
                             remove(stem(0) + ".json")),
                    compared("TensorsOfARank", kIncomplete, {"rank00000.safetensors is missing"},
                             remove(stem(0) + ".safetensors")),
                    compared("AStep", kIncomplete, {"step0000", "incomplete"},
                             remove("run/step0000")),
                    compared("TheManifest", kIncomplete, {"manifest.json is missing", "incomplete"},
                             remove("run/manifest.json")),
                    compared("MoreRanksAreClaimed", kIncomplete, {"rank00002", "incomplete"},
                             manifest([](json& m) { m["mesh"][1]["degree"] = 2'000'000'000; })),
                    compared("MoreStepsAreClaimed", kIncomplete, {"step999999", "incomplete"},
                             manifest([](json& m) {
                               m["steps"] = {0, 999'999};
                             }))),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Mixed, MalformedBundles,
    testing::Values(compared("ARankOfAnotherRun", kBadInput,
                             {"rank00001", "belongs to another run than manifest.json"},
                             [](const TestFolder& folder) {
                               for (const char* suffix : {".done", ".json", ".safetensors"}) {
                                 fs::copy_file(dumped_runs() / "2" / (stem(1) + suffix),
                                               folder / (stem(1) + suffix),
                                               fs::copy_options::overwrite_existing);
                               }
                             }),
                    compared("ADoneOfAnotherRun", kBadInput, {"belongs to another run"},
                             [](const TestFolder& folder) {
                               std::ofstream(folder / (stem(1) + ".done")) << "0123456789abcdef\n";
                             }),
                    compared("AnotherRanksFiles", kBadInput,
                             {"another rank or step than its name says"},
                             [](const TestFolder& folder) {
                               fs::copy_file(folder / (stem(0) + ".json"),
                                             folder / (stem(1) + ".json"),
                                             fs::copy_options::overwrite_existing);
                             }),
                    compared("OtherSettings", kUsage, {"different settings", "seed"},
                             [](const TestFolder& folder) {
                               fs::remove_all(folder / "run");
                               fs::copy(dumped_runs() / "2" / "run", folder / "run",
                                        fs::copy_options::recursive);
                             })),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Tiles, MalformedBundles,
    testing::Values(compared("Gap", kBadInput, {kWeight}, record([](json& r, int rank) {
                               r["global_shape"] = {49, 48};
                               place_rows(r, rank * 25);
                             })),
                    compared("Overlap", kBadInput, {kWeight}, record([](json& r, int rank) {
                               r["global_shape"] = {47, 48};
                               place_rows(r, rank * 23);
                             })),
                    compared("OutsideTheTensor", kBadInput, {kWeight, "lies outside"},
                             record([](json& r, int rank) { place_rows(r, rank * 25); })),
                    compared("Negative", kBadInput, {"-1"},
                             record([](json& r, int) { place_rows(r, -1); })),
                    compared("OverflowingShape", kBadInput, {"global_shape", "must be below 2^63"},
                             record([](json& r, int) {
                               r["global_shape"] = {1LL << 40, 1LL << 40};
                             })),
                    compared("HugeSize", kBadInput, {"global_shape"}, record([](json& r, int) {
                               r["global_shape"] = {1LL << 62, 48};
                             })),
                    compared("RanksDisagree", kBadInput, {kWeight, "the same global shape"},
                             record([](json& r, int rank) {
                               place_rows(r, rank * 24);
                               if (rank == 1) r["global_shape"] = {50, 48};
                             }))),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Files, MalformedBundles,
    testing::Values(
        compared("NoFolder", kBadInput, {"run/manifest.json", "No such file"}, remove("run")),
        compared("AFile", kBadInput, {"run"},
                 [](const TestFolder& folder) {
                   fs::remove_all(folder / "run");
                   std::ofstream(folder / "run") << "{}";
                 }),
        compared("ManifestIsNoJson", kBadInput, {"manifest.json", "strict JSON"},
                 [](const TestFolder& folder) {
                   fs::resize_file(folder / "run/manifest.json", 100);
                 }),
        compared("ManifestIsAFifo", kBadInput, {"manifest.json", "is a FIFO"},
                 [](const TestFolder& folder) {
                   fs::remove(folder / "run/manifest.json");
                   ASSERT_EQ(::mkfifo((folder / "run/manifest.json").c_str(), 0600), 0);
                 }),
        compared("UnknownSchema", kBadInput, {"the schema must be 2"},
                 manifest([](json& m) { m["schema"] = 3; })),
        compared("NoMesh", kBadInput, {"\"mesh\" is missing"},
                 manifest([](json& m) { m.erase("mesh"); })),
        compared("MeshOfDegreeZero", kBadInput,
                 {"manifest.json", "the degree of tp must be at least 1, got 0"},
                 manifest([](json& m) { m["mesh"][1]["degree"] = 0; })),
        compared("MeshOverflows", kBadInput, {"the number of ranks must be at most"},
                 manifest([](json& m) {
                   m["mesh"][0]["degree"] = 2'000'000'000;
                   m["mesh"][1]["degree"] = 2'000'000'000;
                 })),
        compared("EscapesInTheSubject", kBadInput, {"subject", "\\x1b[31m", "control character"},
                 manifest([](json& m) { m["subject"] = "\x1b[31mred"; })),
        compared("EscapesInAName", kBadInput, {"rank00000.json", "\\x1b]0;", "control character"},
                 record([](json& r, int) { r["name"] = "\x1b]0;title\x07"; })),
        compared("UnknownKind", kBadInput, {"must be param, grad", "got \"parms\""},
                 record([](json& r, int) { r["kind"] = "parms"; })),
        compared("UnknownDtype", kBadInput, {"unknown dtype 'fp31'"},
                 record([](json& r, int) { r["dtype"] = "fp31"; })),
        compared("AnotherDtypeThanItsTensor", kBadInput,
                 {kWeight, "the dtype and shape of its record"},
                 record([](json& r, int) { r["dtype"] = "bf16"; })),
        compared("ShardOfADimThatIsNotThere", kBadInput, {kWeight},
                 record([](json& r, int) { r["placements"][0]["dim"] = 7; })),
        compared("TruncatedTensors", kBadInput, {"rank00001.safetensors", "truncated?"},
                 [](const TestFolder& folder) {
                   const fs::path file = folder / (stem(1) + ".safetensors");
                   fs::resize_file(file, fs::file_size(file) - 1);
                 }),
        compared("BytesAfterTheTensors", kBadInput,
                 {"rank00001.safetensors", "follow the last tensor"},
                 [](const TestFolder& folder) {
                   std::ofstream(folder / (stem(1) + ".safetensors"), std::ios::app) << "PK";
                 })),
    [](const auto& row) { return row.param.name; });

// Row 54 of docs/internals/failures.md for traces: whole files, other contents. All of them are
// listed.
INSTANTIATE_TEST_SUITE_P(
    Contents, MalformedBundles,
    testing::Values(compared("NothingWrong", kConforms, {"CONFORMS"}, [](const TestFolder&) {}),
                    compared("MissingTensors", kDiverges,
                             {"DIVERGES", "missing", "model.norm.weight",
                              "model.layers.1.mlp.up_proj.weight"},
                             contents([](auto& tensors, json& records) {
                               drop(tensors, records, "model.norm.weight");
                               drop(tensors, records, "model.layers.1.mlp.up_proj.weight");
                             })),
                    compared("NoTensorAtAll", kDiverges, {"missing"},
                             contents([](auto& tensors, json& records) {
                               tensors.clear();
                               records.clear();
                             })),
                    compared("ANaN", kDiverges, {"DIVERGES", "model.norm.weight"},
                             contents([](auto& tensors, json&) {
                               for (auto& [name, tensor] : tensors) {
                                 if (name.find("param/model.norm.weight/0") == 0)
                                   tensor[3] = std::numeric_limits<float>::quiet_NaN();
                               }
                             })),
                    compared("OneBitOfOneRank", kDiverges, {"DIVERGES", kWeight},
                             contents([](auto& tensors, json&) {
                               tensors.at(std::string("param/") + kWeight + "/0")
                                   .template data_ptr<float>()[5] *= -1;
                             }))),
    [](const auto& row) { return row.param.name; });

TEST_P(MalformedBundles, AreToldByCodeAndName) {
  const TestFolder folder;
  for (const char* name : {"reference", "run"})
    fs::copy(dumped_runs() / "1" / name, folder / name, fs::copy_options::recursive);
  GetParam().craft(folder);
  if (fs::is_regular_file(folder / "run/manifest.json") &&
      json::accept(content_of(folder / "run/manifest.json")))
    bundle_edit::seal(folder / "run");  // hashes hide no other fault
  const auto before = tree_of(folder.path());

  const ChildResult result =
      run_isoshard(folder.path(), GetParam().arguments, refuse_new_processes);

  const std::string text = result.error + result.output;
  EXPECT_EQ(result.exit_code, GetParam().exit_code) << text << "signal " << result.signal;
  for (const std::string& word : GetParam().words) EXPECT_THAT(text, HasSubstr(word));
  for (const char c : text) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 || c == '\n') << text;
  EXPECT_EQ(tree_of(folder.path()), before);
}

// All places of a JSON value, the innermost last.
void list_places(const json& value, const json::json_pointer& place,
                 std::vector<json::json_pointer>& places) {
  if (!value.is_structured()) return;
  for (const auto& [key, inner] : value.items()) {
    const json::json_pointer here =
        value.is_array() ? place / static_cast<std::size_t>(std::stoul(key)) : place / key;
    places.push_back(here);
    list_places(inner, here, places);
  }
}

TEST_F(MalformedBundles, WithAnyOneValueReplacedAreComparedOrRefused) {
  const std::vector<json> values = {-1,
                                    0,
                                    3,
                                    1LL << 31,
                                    1LL << 62,
                                    std::numeric_limits<std::uint64_t>::max(),
                                    1e308,
                                    0.5,
                                    nullptr,
                                    "x",
                                    "",
                                    json::array(),
                                    json::object(),
                                    true,
                                    {-1},
                                    {1LL << 40, 1LL << 40},
                                    "0x1p+2000",
                                    "nan"};
  const TestFolder folder;
  for (const char* name : {"reference", "run"})
    fs::copy(dumped_runs() / "1" / name, folder / name, fs::copy_options::recursive);
  std::mt19937 random(45);
  for (int i = 0; i < 40; ++i) {
    const fs::path file = folder / (i % 4 == 0 ? "run/manifest.json" : stem(i % 2) + ".json");
    const std::string original = content_of(file);
    json content = json::parse(original);
    json& part = content.contains("records")
                     ? content["records"][random() % content["records"].size()]
                     : content;
    std::vector<json::json_pointer> places;
    list_places(part, json::json_pointer(), places);
    const json::json_pointer place = places[random() % places.size()];
    part[place] = values[random() % values.size()];
    std::ofstream(file) << content.dump();
    if (json::parse(content_of(folder / "run/manifest.json")).is_object())
      bundle_edit::seal(folder / "run");

    const ChildResult result = run_isoshard(
        folder.path(), {"compare", random() % 2 == 0 ? "reference" : "run", "run"}, [] {
          refuse_new_processes();
          limit_growth(std::size_t{512} << 20);
        });

    EXPECT_THAT(result.exit_code,
                testing::AnyOf(kConforms, kDiverges, kUsage, kBadInput, kIncomplete))
        << file.filename() << " " << place << " = " << part[place] << ": signal " << result.signal
        << " " << result.error;
    if (result.exit_code == kIncomplete) {
      EXPECT_THAT(result.error, HasSubstr("is missing")) << place << " = " << part[place];
    }
    std::ofstream(file) << original;
    bundle_edit::seal(folder / "run");
  }
}

// Row 61 of docs/internals/failures.md: what nobody wrote is equal on both sides, and shows
// nothing.
TEST_F(MalformedBundles, ThatHoldNothingButZerosOnBothSidesAreVacuous) {
  for (const float value : {0.0F, std::numeric_limits<float>::signaling_NaN()}) {
    const TestFolder folder;
    for (const char* name : {"reference", "run"}) {
      fs::copy(dumped_runs() / "1" / name, folder / name, fs::copy_options::recursive);
      for (const auto& entry : fs::directory_iterator(folder / name / "step0000")) {
        if (entry.path().extension() != ".safetensors") continue;
        std::vector<NamedTensor> tensors;
        {
          const SafetensorsFile source = SafetensorsFile::open(entry.path());
          for (const std::string& tensor : source.names())
            tensors.push_back({tensor, tensor_of(source.tensor(tensor)).clone()});
        }
        for (NamedTensor& item : tensors) {
          if (item.tensor.is_floating_point()) item.tensor.fill_(value);
        }
        write_safetensors(entry.path(), tensors);
      }
      fs::remove(folder / name / "responses.json");  // no response fits zeros
      fs::remove(folder / name / "redrawn.json");
      bundle_edit::seal(folder / name);
    }

    const ChildResult result =
        run_isoshard(folder.path(), {"compare", "reference", "run"}, refuse_new_processes);

    EXPECT_EQ(result.exit_code, kDiverges) << result.output << result.error;
    EXPECT_THAT(result.output, HasSubstr("VACUOUS")) << result.error;
  }
}

TEST_F(MalformedBundles, ThatAreDamagedAsReferenceAreToldToo) {
  for (const char* name : {"manifest.json", "step0000/rank00000.done"}) {
    const TestFolder folder;
    fs::copy(dumped_runs() / "1" / "reference", folder / "reference", fs::copy_options::recursive);
    fs::remove(folder / "reference" / name);

    const ChildResult result =
        run_isoshard(folder.path(), {"compare", "reference", "reference"}, refuse_new_processes);

    EXPECT_EQ(result.exit_code,
              std::string_view(name) == "manifest.json" ? kIncomplete : kBadInput);
    EXPECT_THAT(result.error, HasSubstr(name));
    EXPECT_THAT(result.error, HasSubstr("incomplete"));
  }
}

}  // namespace
}  // namespace isoshard::malformed
