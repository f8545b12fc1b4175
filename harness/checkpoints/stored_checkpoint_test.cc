// SPDX-License-Identifier: Apache-2.0
/// Claims about reading checkpoints of unknown origin: what is right is read whole, what is wrong
/// is refused with the file's name, and other formats with the command that converts them.
#include "harness/checkpoints/stored_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/io/raw_safetensors.h"
#include "harness/checkpoints/checkpoint_files_for_tests.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using namespace checkpoint_tests;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

class CheckpointFiles : public testing::Test {
 protected:
  /// Claims that opening is refused with a message that holds the path and the text.
  void expect_refused(const fs::path& path, const std::string& file, const std::string& text) {
    EXPECT_THAT([&] { (void)open_checkpoint(path); },
                ThrowsMessage<FileError>(AllOf(HasSubstr(file), HasSubstr(text))));
  }
  TestFolder folder_;
};
using StoredCheckpoints = CheckpointFiles;
using MalformedCheckpoints = CheckpointFiles;
using OtherCheckpoints = CheckpointFiles;

TEST(NaturalNames, CountDigitsAsNumbers) {
  const std::set<std::string, NaturalOrder> names{"h.10.w", "h.2.w", "h.2", "h.02.w", "a"};

  EXPECT_THAT(names, ElementsAre("a", "h.2", "h.02.w", "h.2.w", "h.10.w"));
}

TEST(KindOfStored, StateIsNamedAfterItsParameter) {
  const std::set<std::string, std::less<>> names{"w", "v.exp_avg"};
  const auto is_tensor = [&](std::string_view name) { return names.contains(name); };

  for (const char* state : {"w.exp_avg", "w.anything", "v.step", "gone.master", "gone.exp_avg_sq"})
    EXPECT_EQ(kind_of_stored(state, is_tensor), RecordKind::kOptimizer) << state;
  for (const char* weight : {"w", "u.weight", "block.step", "step"})
    EXPECT_EQ(kind_of_stored(weight, is_tensor), RecordKind::kParam) << weight;
}

TEST_F(StoredCheckpoints, AreReadFromAFileAFolderAndAnIndex) {
  save(folder_ / "one.safetensors", model());
  save(folder_ / "folder/anything.safetensors", model());
  save_sharded(folder_ / "sharded", model(), 2);

  for (const char* path :
       {"one.safetensors", "folder", "sharded", "sharded/model.safetensors.index.json"}) {
    const StoredCheckpoint checkpoint = open_checkpoint(folder_ / path);
    EXPECT_EQ(checkpoint.tensors.size(), model().size()) << path;
    const HostTensor norm = checkpoint.tensors.find("model.norm.weight")->second.read();
    EXPECT_TRUE(std::ranges::equal(norm.bytes, numbered({4}, 5).bytes)) << path;
  }
}

TEST_F(StoredCheckpoints, SayWhatLiesBesideThem) {
  save(folder_ / "a/model.safetensors", model(),
       {{"isoshard.left_out", "epoch: a number\nrng: bytes"}});
  write_text(folder_ / "a/optimizer.pt", "PK");

  EXPECT_THAT(open_checkpoint(folder_ / "a").left_out,
              ElementsAre(HasSubstr("not converted: epoch: a number"), HasSubstr("rng: bytes"),
                          AllOf(HasSubstr("optimizer.pt: not compared"),
                                HasSubstr("python -m isoshard convert"))));
}

/// A checkpoint of this program: "w" [2, 3] cut over two ranks, and its moment.
/// `overlap`: rank 1 holds rank 0's last element, too, plus `change`.
void save_own(const fs::path& folder, bool overlap = false, float change = 0) {
  fs::create_directories(folder);
  const Tensor whole = numbered({2, 3}, 1);
  json files, parts;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string name = "step00000002-0123456789abcdef-rank0000" + std::to_string(rank);
    Tensor part{Dtype::kFloat32, {3}, {}};
    part.bytes.assign(whole.bytes.begin() + rank * 12, whole.bytes.begin() + rank * 12 + 12);
    const bool is_longer = overlap && rank == 1;
    if (is_longer) {
      float value = 0;
      std::memcpy(&value, whole.bytes.data() + 8, sizeof value);
      value += change;
      const auto* const first = reinterpret_cast<const std::byte*>(&value);
      part.bytes.insert(part.bytes.begin(), first, first + sizeof value);
      part.shape = {4};
    }
    Tensor ranges{Dtype::kInt64, {1, 2}, std::vector<std::byte>(16)};
    const std::int64_t range[2] = {rank * 3 - (is_longer ? 1 : 0), is_longer ? 4 : 3};
    std::memcpy(ranges.bytes.data(), range, sizeof range);
    Tensors tensors{{"w", part}, {"w:ranges", ranges}};
    if (rank == 0) tensors.emplace_back("w.exp_avg", numbered({2, 3}, 2));
    save(folder / (name + ".safetensors"), tensors);
    files[std::to_string(rank)] = {
        {"name", name + ".safetensors"},
        {"sha256", sha256_hex_of_file(folder / (name + ".safetensors"))}};
    parts[std::to_string(rank)] = "0123456789abcdef";
  }
  json manifest = {
      {"schema", 1},
      {"streams", json::array()},
      {"optimizer", {{"rule", "adamw"}, {"updates", {{"w", 2}}}}},
      {"numbers", {{"loss_scale", 1024.0}}},
      {"files", files},
      {"tensors",
       {{"w", {{"kind", "parameter"}, {"dtype", "fp32"}, {"shape", {2, 3}}, {"parts", parts}}},
        {"w.exp_avg",
         {{"kind", "optimizer"},
          {"dtype", "fp32"},
          {"shape", {2, 3}},
          {"parts", {{"0", "0123456789abcdef"}}}}}}}};
  const std::string text = manifest.dump();
  manifest["sha256"] = sha256_hex(std::as_bytes(std::span(text)));
  write_text(folder / "manifest.json", manifest.dump());
}

TEST_F(StoredCheckpoints, PartsOfOurOwnArePutTogether) {
  save_own(folder_ / "own");

  const StoredCheckpoint checkpoint = open_checkpoint(folder_ / "own");

  ASSERT_EQ(checkpoint.tensors.size(), 3U);
  const StoredTensor& whole = checkpoint.tensors.find("w")->second;
  EXPECT_EQ(whole.kind, RecordKind::kParam);
  EXPECT_TRUE(std::ranges::equal(whole.read().bytes, numbered({2, 3}, 1).bytes));
  const HostTensor step = checkpoint.tensors.find("w.step")->second.read();
  EXPECT_TRUE(std::ranges::equal(step.bytes, floats({}, {2}).bytes));
  EXPECT_THAT(checkpoint.left_out, ElementsAre(HasSubstr("the number loss_scale (1024.0)")));
}

TEST_F(MalformedCheckpoints, FilesThatHoldOneElementTwiceMustAgree) {
  save_own(folder_ / "equal", true);
  save_own(folder_ / "other", true, 0.5F);

  const HostTensor whole = open_checkpoint(folder_ / "equal").tensors.find("w")->second.read();
  EXPECT_TRUE(std::ranges::equal(whole.bytes, numbered({2, 3}, 1).bytes));
  EXPECT_THAT([&] { (void)open_checkpoint(folder_ / "other").tensors.find("w")->second.read(); },
              ThrowsMessage<FileError>(HasSubstr("w: element 2 must be the same in all files")));
}

TEST_F(MalformedCheckpoints, ChangedFilesOfOurOwnAreRefused) {
  save_own(folder_ / "own");
  const std::string rank1 = "step00000002-0123456789abcdef-rank00001.safetensors";
  Tensors tensors{{"w", numbered({3}, 9)}};
  save(folder_ / ("own/" + rank1), tensors);
  expect_refused(folder_ / "own", rank1, "checksum mismatch");
  fs::remove(folder_ / ("own/" + rank1));
  expect_refused(folder_ / "own", rank1, "the file of rank 1 is missing");
  write_text(folder_ / "own/manifest.json", R"({"schema": 1, "streams": [], "tensors": {}})");
  expect_refused(folder_ / "own", "manifest.json", "is not the manifest of a checkpoint");
}

TEST_F(MalformedCheckpoints, AreRefusedWithTheFileNamed) {
  const auto write = [&](const std::string& name, const std::string& bytes) {
    write_text(folder_ / name, bytes);
    return folder_ / name;
  };
  const std::string overlap = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                              R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const std::string one = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string fp8 = R"({"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})";
  const std::string parts = R"({"__metadata__":{"DCP_SHARDING_INFO":"{}"},)"
                            R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";

  expect_refused(write("overlap.safetensors", raw_safetensors(overlap, "12345678")),
                 "overlap.safetensors", "an overlap");
  expect_refused(write("long.safetensors", length_bytes(1U << 30) + "{}"), "long.safetensors",
                 "header length");
  expect_refused(write("cut.safetensors", raw_safetensors(one, "1234")), "cut.safetensors",
                 "is the file truncated?");
  expect_refused(write("tail.safetensors", raw_safetensors(one, "123456789")), "tail.safetensors",
                 "belong to none");
  expect_refused(write("fp8.safetensors", raw_safetensors(fp8, "1")), "fp8.safetensors", "F8_E4M3");
  expect_refused(write("parts.safetensors", raw_safetensors(parts, "1234")), "parts.safetensors",
                 "consolidate_safetensors_files");
  expect_refused(write("none.safetensors", raw_safetensors("{}")), "none.safetensors",
                 "at least one tensor");
  expect_refused(folder_ / "gone.safetensors", "gone.safetensors", "no such file");
  fs::create_directories(folder_ / "empty");
  expect_refused(folder_ / "empty", "empty", "got 0 safetensors files");
}

TEST_F(MalformedCheckpoints, IndexesThatDoNotFitTheirFilesAreRefused) {
  const fs::path index = folder_ / "s/model.safetensors.index.json";
  const std::string first = "model-00001.safetensors";
  const auto edit = [&](const std::function<void(json&)>& change) {
    fs::remove_all(folder_ / "s");
    save_sharded(folder_ / "s", model(), 2);
    std::ifstream file(index);
    json content = json::parse(file);
    change(content);
    write_text(index, content.dump());
  };

  edit([&](json&) { fs::remove(folder_ / "s" / first); });
  expect_refused(folder_ / "s", first, "is missing");
  edit([](json& content) { content["weight_map"]["ghost"] = "model-00001.safetensors"; });
  expect_refused(folder_ / "s", first, "lacks ghost");
  edit([](json& content) { content["weight_map"].erase("model.norm.weight"); });
  expect_refused(folder_ / "s", first, "holds model.norm.weight");
  edit([](json& content) { content["weight_map"]["model.norm.weight"] = "../x.safetensors"; });
  expect_refused(folder_ / "s", "index.json", "a name in the same folder");
  edit([](json& content) { content["weight_map"]["model.norm.weight"] = 7; });
  expect_refused(folder_ / "s", "index.json", "must be a string");
  edit([](json& content) { content.erase("weight_map"); });
  expect_refused(folder_ / "s", "index.json", "weight_map");
  write_text(index, "{");
  expect_refused(folder_ / "s", "index.json", "JSON");
  edit([&](json&) { save(folder_ / "s/model.safetensors", model()); });
  expect_refused(folder_ / "s", "s", "got both");
}

TEST_F(OtherCheckpoints, AreRefusedWithTheCommandThatConvertsThem) {
  const auto expect_converted = [&](const std::string& path, const std::string& what) {
    expect_refused(folder_ / path, path, what);
    EXPECT_THAT([&] { (void)open_checkpoint(folder_ / path); },
                RefusesBy<FileError>(RuleId::kCheckpointToConvert,
                                     {{"command", detail::convert_command(folder_ / path)}}));
  };
  write_text(folder_ / "dcp/.metadata", "x");
  write_text(folder_ / "megatron/metadata.json", "{}");
  write_text(folder_ / "megatron_root/latest_checkpointed_iteration.txt", "1");
  write_text(folder_ / "deepspeed/latest", "t");
  write_text(folder_ / "tag/zero_pp_rank_0_mp_rank_00_optim_states.pt", "x");
  write_text(folder_ / "bin/pytorch_model.bin", "x");
  write_text(folder_ / "x.pt", "x");

  expect_converted("dcp", "distributed checkpoint");
  expect_converted("megatron", "Megatron");
  expect_converted("megatron_root", "Megatron");
  expect_converted("deepspeed", "DeepSpeed");
  expect_converted("tag", "DeepSpeed");
  expect_converted("bin", "pickles");
  expect_converted("x.pt", "pickle");
  EXPECT_EQ(detail::convert_command("runs/x.pt"),
            "python -m isoshard convert runs/x.pt runs/x.safetensors");
  EXPECT_EQ(detail::convert_command("runs/t/"),
            "python -m isoshard convert runs/t runs/t.safetensors");
}

TEST_F(OtherCheckpoints, ABundleIsNamedSo) {
  write_text(folder_ / "run/manifest.json", R"({"schema": 2, "run": "a", "steps": [0]})");

  EXPECT_THAT([&] { (void)open_checkpoint(folder_ / "run"); },
              RefusesBy<FileError>(RuleId::kBundleForCheckpoint));
  EXPECT_THAT([&] { (void)open_checkpoint(folder_ / "absent"); },
              RefusesBy<FileError>(RuleId::kNoFile));
}

}  // namespace
}  // namespace isoshard
