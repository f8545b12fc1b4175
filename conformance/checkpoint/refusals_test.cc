// SPDX-License-Identifier: Apache-2.0
// A checkpoint that is not what was written, or not of this
// run, is refused before any rank starts, with the file and tensor named.
#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/io/tensor_files.h"
#include "subjects/checkpoint/checkpoint_content.h"
#include "suite/testing/checkpoint_cases.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kTensor = "model.layers.1.mlp.up_proj.weight";

Case saved_case() {
  Case item = long_case("autotp", {.dp = 2, .tp = 2}, Dtype::kBFloat16);
  item.settings.zero_stage = 1;
  return item;
}

void flip(char& byte, unsigned bits) {
  byte = static_cast<char>(static_cast<unsigned char>(byte) ^ bits);
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class CheckpointRefusals : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    original().emplace();
    run_alone(saved_to(saved_case(), original()->path()));
  }
  static void TearDownTestSuite() { original().reset(); }

  /// A checkpoint to spoil.
  CheckpointRefusals() {
    fs::copy(original()->path(), path());
    item_ = resumed_case(saved_case(), path());
  }

  [[nodiscard]] fs::path path() const { return folder_ / "copy"; }
  [[nodiscard]] fs::path file_of(int rank) const {
    return path() / rank_file_name(kStepsSaved, item_.resumed->id, rank);
  }
  [[nodiscard]] json manifest() const { return json::parse(content_of(path() / kManifestName)); }
  /// As if it had been written so.
  void write_manifest(json manifest) const {
    if (manifest.is_object()) manifest["sha256"] = manifest_sha256(manifest);
    write_text(path() / kManifestName, manifest.dump());
  }
  [[nodiscard]] const Case& item() const { return item_; }

  /// Changes the bytes of a tensor in a rank's file.
  void edit(int rank, const std::string& tensor,
            const std::function<void(std::span<char>)>& change) const {
    const SafetensorsFile file = SafetensorsFile::open(file_of(rank));
    std::string bytes = content_of(file_of(rank));
    const std::size_t size = file.bytes(tensor).size();
    const auto begin =
        static_cast<std::size_t>(file.info(tensor).begin) + (bytes.size() - data_bytes(file));
    change(std::span(bytes).subspan(begin, size));
    write_text(file_of(rank), bytes);
  }

  /// Makes the manifest agree with what a file now holds.
  void sign(int rank) const {
    json signed_manifest = manifest();
    const SafetensorsFile file = SafetensorsFile::open(file_of(rank));
    const std::string key = std::to_string(rank);
    signed_manifest["files"][key]["sha256"] = sha256_hex_of_file(file_of(rank));
    for (auto& [name, tensor] : signed_manifest["tensors"].items()) {
      if (tensor["parts"].contains(key))
        tensor["parts"][key] = hash_text(hash_of(file.bytes(name)));
    }
    write_manifest(signed_manifest);
  }

  /// What the controller says; nothing may start.
  [[nodiscard]] std::string refusal(const Case& wanted) const {
    try {
      (void)run_alone(wanted);
    } catch (const FileError& error) {
      return error.what();
    }
    return "it was taken";
  }
  [[nodiscard]] std::string refusal() const { return refusal(item()); }

 private:
  static std::optional<TestFolder>& original() {
    static std::optional<TestFolder> folder;
    return folder;
  }
  static std::size_t data_bytes(const SafetensorsFile& file) {
    std::uint64_t end = 0;
    for (const std::string& name : file.names()) end = std::max(end, file.info(name).end);
    return end;
  }

  TestFolder folder_;
  Case item_;
};

TEST_F(CheckpointRefusals, TakeTheCopyAsItIs) {
  EXPECT_EQ(refusal(), "it was taken");
  EXPECT_EQ(manifest().at("world_size"), 4);
}

TEST_F(CheckpointRefusals, OfAMissingRankFile) {
  fs::remove(file_of(1));

  EXPECT_THAT(refusal(),
              AllOf(HasSubstr(file_of(1).string()), HasSubstr("the file of rank 1 is missing")));
}

TEST_F(CheckpointRefusals, OfAFileOfAnotherWorld) {
  const TestFolder other;
  run_alone(saved_to(long_case("fsdp_tp", {.dp = 3, .tp = 2}, Dtype::kBFloat16), other.path()));
  const Case of_other = resumed_case(saved_case(), other.path());
  fs::copy(other / rank_file_name(kStepsSaved, of_other.resumed->id, 1), file_of(1),
           fs::copy_options::overwrite_existing);

  EXPECT_THAT(refusal(),
              AllOf(HasSubstr(file_of(1).string()),
                    HasSubstr("belongs to rank 1 of 6 of the checkpoint " + of_other.resumed->id),
                    HasSubstr("the manifest names rank 1 of 4 of " + item().resumed->id)));
}

TEST_F(CheckpointRefusals, OfARankFileInAnotherRanksPlace) {
  fs::copy(file_of(0), file_of(1), fs::copy_options::overwrite_existing);

  EXPECT_THAT(refusal(),
              AllOf(HasSubstr(file_of(1).string()), HasSubstr("belongs to rank 0 of 4")));
}

TEST_F(CheckpointRefusals, OfATruncatedFile) {
  fs::resize_file(file_of(1), fs::file_size(file_of(1)) - 1);

  EXPECT_THAT(refusal(), HasSubstr(file_of(1).string()));
}

TEST_F(CheckpointRefusals, OfAChangedTensor) {
  edit(1, kTensor, [](std::span<char> bytes) { flip(bytes[bytes.size() / 2], 1); });

  EXPECT_THAT(refusal(), AllOf(HasSubstr(file_of(1).string()),
                               HasSubstr(std::string(kTensor) + ": checksum mismatch")));
}

// Ranks see it, too, if a file changes behind the controller's back.
TEST_F(CheckpointRefusals, OfAChangedTensorOnARankThatReadsIt) {
  edit(1, kTensor, [](std::span<char> bytes) { flip(bytes[0], 1); });
  const Checkpoint checkpoint = Checkpoint::open(path());

  EXPECT_THROW((void)checkpoint.read_whole(kTensor), FileError);
  EXPECT_NO_THROW((void)checkpoint.read_whole("model.norm.weight"));
}

TEST_F(CheckpointRefusals, OfAWrongSha256) {
  json spoilt = manifest();
  std::string sha = spoilt["files"]["1"]["sha256"];
  sha[0] = sha[0] == '0' ? '1' : '0';
  spoilt["files"]["1"]["sha256"] = sha;
  write_manifest(spoilt);

  EXPECT_THAT(refusal(), AllOf(HasSubstr(file_of(1).string()), HasSubstr("checksum mismatch"),
                               HasSubstr(sha)));
}

// Nothing else covers what no tensor holds: streams, and what the optimizer counted.
TEST_F(CheckpointRefusals, OfAManifestThatWasChanged) {
  const std::vector<std::function<void(json&)>> changes = {
      [](json& m) { m["streams"][0]["seed"] = 99; },
      [](json& m) { m["optimizer"]["updates"][kTensor] = 77; },
      [](json& m) { m["mesh"][0]["degree"] = 9; }};
  const json good = manifest();
  for (const auto& change : changes) {
    json spoilt = good;
    change(spoilt);
    ASSERT_NE(spoilt, good);
    write_text(path() / kManifestName, spoilt.dump());

    EXPECT_THAT(refusal(), AllOf(HasSubstr(kManifestName), HasSubstr("checksum mismatch")));
  }
  write_text(path() / kManifestName, good.dump(3));
  EXPECT_EQ(refusal(), "it was taken") << "however it is laid out";
}

TEST_F(CheckpointRefusals, OfAWrongHashOfATensor) {
  json spoilt = manifest();
  spoilt["tensors"][kTensor]["parts"]["0"] = "0123456789abcdef";
  write_manifest(spoilt);

  EXPECT_THAT(refusal(),
              AllOf(HasSubstr(kTensor), HasSubstr("recorded in the manifest 0123456789abcdef")));
}

TEST_F(CheckpointRefusals, OfATensorThatTheManifestDoesNotHave) {
  json spoilt = manifest();
  spoilt["tensors"].erase(std::string(kTensor) + ".exp_avg");
  write_manifest(spoilt);

  EXPECT_THAT(refusal(), HasSubstr(std::string(kTensor) + ".exp_avg"));
}

TEST_F(CheckpointRefusals, OfAParameterThatLacksAStateOfTheOthers) {
  const std::string state = std::string(kTensor) + ".exp_avg";
  json spoilt = manifest();
  const json parts = spoilt["tensors"][state]["parts"];
  spoilt["tensors"].erase(state);
  write_manifest(spoilt);
  for (const auto& [rank, hash] : parts.items()) {
    const fs::path path = file_of(std::stoi(rank));
    std::vector<NamedTensor> rest;
    std::map<std::string, std::string> metadata;
    {
      const SafetensorsFile file = SafetensorsFile::open(path);
      metadata = file.metadata();
      for (const std::string& name : file.names()) {
        if (name != state && name != ranges_name(state))
          rest.push_back({name, tensor_of(file.tensor(name)).clone()});
      }
    }
    write_safetensors(path, rest, metadata);
    sign(std::stoi(rank));
  }

  EXPECT_THAT(refusal(), HasSubstr(std::string("[exp_avg_sq] for ") + kTensor));
}

TEST_F(CheckpointRefusals, OfAShardThatBeginsBeforeItsTensor) {
  const std::string master = std::string(kTensor) + ".master";
  const int rank = std::stoi(manifest()["tensors"][master]["parts"].items().begin().key());
  // the first number is where the first range begins, in 8 bytes
  edit(rank, ranges_name(master), [](std::span<char> bytes) {
    const std::int64_t begin = -1;
    std::memcpy(bytes.data(), &begin, sizeof begin);
  });
  sign(rank);

  EXPECT_THAT(refusal(), AllOf(HasSubstr(ranges_name(master)), HasSubstr("must place each of")));
}

TEST_F(CheckpointRefusals, OfANaNEvenIfAllHashesFit) {
  const std::string master = std::string(kTensor) + ".master";
  const int rank = std::stoi(manifest()["tensors"][master]["parts"].items().begin().key());
  edit(rank, master, [](std::span<char> bytes) {
    bytes[2] = '\xc0';
    bytes[3] = '\x7f';
  });
  sign(rank);

  EXPECT_THAT(refusal(), AllOf(HasSubstr(master), HasSubstr("not finite")));
}

TEST_F(CheckpointRefusals, OfParametersThatAreNotTheirMastersRounded) {
  const std::string master = std::string(kTensor) + ".master";
  const int rank = std::stoi(manifest()["tensors"][master]["parts"].items().begin().key());
  edit(rank, master, [](std::span<char> bytes) { flip(bytes[3], 0x80); });
  sign(rank);

  EXPECT_THAT(refusal(), HasSubstr(std::string("1 of 4608 elements of ") + kTensor +
                                   " differ from its master rounded to bf16"));
}

TEST_F(CheckpointRefusals, OfAnotherModelListWhatDoesNotFit) {
  Case wider = saved_case(), deeper = saved_case(), shallower = saved_case();
  wider.config.intermediate_size *= 2;
  ++deeper.config.num_layers;
  --shallower.config.num_layers;

  const auto problem = [&](const Case& wanted) -> std::string {
    try {
      (void)resumed_case(wanted, path());
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };

  EXPECT_THAT(problem(wider),
              HasSubstr(std::string(kTensor) + " is [96, 48] where the model has [192, 48]"));
  EXPECT_THAT(problem(deeper), HasSubstr("model.layers.2.mlp.up_proj.weight is missing"));
  EXPECT_THAT(problem(shallower), HasSubstr(std::string(kTensor) + " is not in the model"));
}

TEST_F(CheckpointRefusals, OfAnotherOptimizer) {
  Case sgd = saved_case();
  sgd.settings.optimizer = verify_settings().optimizer;

  try {
    (void)resumed_case(sgd, path());
    FAIL() << "it was taken";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(kManifestName), HasSubstr("adamw"),
                                    HasSubstr("sgd with momentum")));
  }
}

TEST_F(CheckpointRefusals, OfStreamsThatDifferBetweenRanksInAnotherWorld) {
  json spoilt = manifest();
  spoilt["streams"][3]["seed"] = 7;
  write_manifest(spoilt);
  const Checkpoint checkpoint = Checkpoint::open(path());

  EXPECT_EQ(checkpoint.progress(3, 4).stream.seed, 7U) << "each rank of the same world has its own";
  Case elsewhere = item();
  elsewhere.degrees.tp = 1;
  EXPECT_THAT(refusal(elsewhere), HasSubstr("rank 3 (seed 7")) << "before a rank starts";
  try {
    (void)checkpoint.progress(0, 2);
    FAIL() << "it was taken";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 3 (seed 7"));
  }
}

TEST_F(CheckpointRefusals, OfWhatIsNoCheckpoint) {
  const auto problem = [&](const fs::path& folder) -> std::string {
    try {
      (void)resumed_case(saved_case(), folder);
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };
  const std::vector<std::function<void(json&)>> spoilers = {
      [](json& m) { m.erase("streams"); },
      [](json& m) { m["schema"] = 2; },
      [](json& m) { m["id"] = "../../etc/passwd"; },
      [](json& m) { m["world_size"] = 5; },
      [](json& m) { m["world_size"] = -1; },
      [](json& m) { m["files"] = json::object(); },
      [](json& m) { m["tensors"] = 3; },
      [](json& m) {
        m["tensors"][kTensor]["shape"] = {-96, 48};
      },
      [](json& m) {
        m["tensors"][kTensor]["shape"] = {48, 96};
      },
      [](json& m) { m["tensors"][kTensor]["dtype"] = "int8"; },
      [](json& m) {
        m["tensors"][kTensor]["parts"] = {{"9", "0"}};
      },
      [](json& m) { m["streams"][0]["next_step"] = -3; },
      [](json& m) { m["files"]["x"] = m["files"]["0"]; },
      [](json& m) { m = json::array(); }};
  const json good = manifest();

  EXPECT_THAT(problem(path() / "nowhere"), HasSubstr("manifest.json"));
  for (std::size_t i = 0; i < spoilers.size(); ++i) {
    json spoilt = good;
    spoilers[i](spoilt);
    write_manifest(spoilt);
    EXPECT_THAT(problem(path()), HasSubstr((path() / "").string())) << "spoiler " << i;
  }
  write_text(path() / kManifestName, good.dump().substr(0, 500));
  EXPECT_THAT(problem(path()), HasSubstr("manifest.json"));
}

TEST_F(CheckpointRefusals, OfARunThatHasNoStepLeft) {
  Case done = item();
  done.steps = kStepsSaved;

  EXPECT_THROW((void)run_alone(done), UsageError);
}

// What no hash covers: a manifest that was sealed with numbers that no run can go on from.
TEST_F(CheckpointRefusals, OfAManifestThatDoesNotFit) {
  struct Spoiler {
    std::function<void(json&)> spoil;
    std::string words;
  };
  const std::string state = std::string(kTensor) + ".exp_avg";
  const std::vector<Spoiler> spoilers = {
      {[](json& m) { m["optimizer"]["updates"].erase(kTensor); }, "state"},
      {[](json& m) { m["optimizer"]["updates"] = json::object(); }, "state"},
      {[](json& m) { m["optimizer"]["updates"]["of.nobody"] = 1; }, "of.nobody"},
      {[](json& m) { m["optimizer"]["updates"][kTensor] = 0; }, "after 0 updates"},
      {[](json& m) { m["optimizer"]["updates"][kTensor] = -1; }, "must be from 0 to "},
      {[](json& m) { m["optimizer"]["updates"][kTensor] = 1.5; }, "got 1.5"},
      {[](json& m) { m["optimizer"]["updates"][kTensor] = kStepsSaved + 1; }, "the steps done"},
      {[](json& m) { m["streams"][3]["next_step"] = kStepsSaved + 1; }, "the same on every rank"},
      {[](json& m) { m["tensors"][kTensor]["kind"] = "optimizer"; }, "is not a parameter"},
      {[&](json& m) {
         m["tensors"][state]["shape"] = {1'000'000'000'000, 96};
       },
       state},
      {[&](json& m) { m["tensors"].erase(state); }, "which the manifest does not list"}};
  const json good = manifest();
  for (std::size_t i = 0; i < spoilers.size(); ++i) {
    json spoilt = good;
    spoilers[i].spoil(spoilt);
    ASSERT_NE(spoilt, good) << "spoiler " << i;
    write_manifest(spoilt);

    EXPECT_THAT(refusal(), AllOf(HasSubstr((path() / "").string()), HasSubstr(spoilers[i].words)))
        << "spoiler " << i;
  }
  write_manifest(good);
  EXPECT_EQ(refusal(), "it was taken");
}

}  // namespace
}  // namespace isoshard
