// SPDX-License-Identifier: Apache-2.0
/// Files that cannot be read as what they are given as: exit 3, the file and what is wrong in it,
/// little memory, no rank started.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "app/testing/malformed_rows.h"
#include "core/io/raw_safetensors.h"
#include "core/io/tensor_files.h"

namespace isoshard::malformed {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kBadInput = 3;
// over what the program has mapped when it starts
constexpr std::size_t kMayGrowBy = std::size_t{64} << 20;
const std::filesystem::path kModel =
    std::filesystem::path(ISOSHARD_ORACLE_DIR) / "qwen2_untied_mha";

/// Writes `content` to `name`.
Craft file(std::string name, std::string content) {
  return
      [=](const TestFolder& folder) { std::ofstream(folder / name, std::ios::binary) << content; };
}

class MalformedFile : public testing::TestWithParam<Row> {
 protected:
  static void expect_refused() {
    const TestFolder folder;
    GetParam().craft(folder);
    const auto before = tree_of(folder.path());

    const ChildResult result = run_isoshard(folder.path(), GetParam().arguments, [] {
      refuse_new_processes();
      limit_growth(kMayGrowBy);
    });

    EXPECT_EQ(result.exit_code, kBadInput) << result.error << "signal " << result.signal;
    EXPECT_THAT(result.error, StartsWith("isoshard: "));
    for (const std::string& word : GetParam().words) EXPECT_THAT(result.error, HasSubstr(word));
    for (const char c : result.error)
      EXPECT_TRUE((c >= 0x20 && c < 0x7f) || c == '\n') << result.error;
    EXPECT_LT(result.error.size(), 20'000U);
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(tree_of(folder.path()), before);
  }
};

// ---- weights
// -------------------------------------------------------------------------------------------------

class MalformedWeights : public MalformedFile {};

const Arguments kWithWeights = {
    "verify", "--model", kModel / "config.json", "--init-weights", "w.safetensors", "--tp", "2",
    "--dp",   "1",       "--subjects",           "autotp",         "--dtype",       "fp32"};

Row weights(std::string name, Craft craft, std::vector<std::string> words,
            const std::string& path = "w.safetensors") {
  Arguments arguments = kWithWeights;
  arguments[4] = path;
  words.insert(words.begin(), path);
  return {std::move(name), std::move(craft), std::move(arguments), kBadInput, std::move(words)};
}

Row raw(std::string name, const std::string& content, std::vector<std::string> words) {
  return weights(std::move(name), file("w.safetensors", content), std::move(words));
}

/// A file with this entry for the tensor 't' and four bytes of data.
Row entry(std::string name, const std::string& json_text, std::vector<std::string> words) {
  words.emplace_back("tensor 't'");
  return raw(std::move(name), raw_safetensors("{\"t\":" + json_text + "}", "abcd"),
             std::move(words));
}

/// Two tensors of two bytes each over five bytes of data.
Row two(std::string name, const std::string& first, const std::string& second,
        std::vector<std::string> words) {
  return raw(
      std::move(name),
      raw_safetensors(R"({"p":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                          R"(},"q":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}",
                      "abcde"),
      std::move(words));
}

std::string repeated(const std::string& part, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += part;
  return text;
}

std::string many_keys() {
  std::string header = "{";
  for (int i = 0; i < 1'000'000; ++i) fmt::format_to(std::back_inserter(header), "\"{}\":0,", i);
  header.back() = '}';
  return raw_safetensors(header);
}

std::string twice() {
  const std::string t = R"("t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  return raw_safetensors("{" + t + "," + t + "}", "abcd");
}

INSTANTIATE_TEST_SUITE_P(
    Header, MalformedWeights,
    testing::Values(raw("Empty", "", {"is 0 bytes long"}),
                    raw("Short", "1234", {"is 4 bytes long"}),
                    raw("LengthZero", length_bytes(0), {"header length must be above 0"}),
                    raw("LengthOverTheFile", length_bytes(3) + "{}", {"3 bytes, but only 2"}),
                    raw("LengthOverTheCap", length_bytes(100'000'001) + "{}",
                        {"at most 100000000 bytes, got 100000001"}),
                    raw("LengthOf64Bits",
                        length_bytes(std::numeric_limits<std::uint64_t>::max()) + "{}",
                        {"18446744073709551615"}),
                    raw("NoJson", raw_safetensors("{\"a\"}"), {"strict JSON"}),
                    raw("NoObject", raw_safetensors("[1]"), {"must begin with '{', got '['"}),
                    raw("ByteOrderMark", raw_safetensors("\xEF\xBB\xBF{}"), {"must begin with"}),
                    raw("NoUtf8", raw_safetensors("{\"\xff\":1}"), {"strict JSON"}),
                    raw("TwoValues", raw_safetensors("{}{}"), {"strict JSON"}),
                    raw("Deep", raw_safetensors("{\"a\":" + std::string(100'000, '[')),
                        {"at most 8 levels deep"}),
                    raw("AMillionKeys", many_keys(), {"at most 262144 JSON values"}),
                    raw("ANumberOfAMegabyte",
                        raw_safetensors("{\"a\":" + std::string(1'000'000, '9') + "}"), {}),
                    raw("Twice", twice(), {"duplicate key 't'"})),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Entry, MalformedWeights,
    testing::Values(
        entry("NoEntry", "3", {"JSON number"}),
        entry("NoDtype", R"({"shape":[4],"data_offsets":[0,4]})", {"has no dtype"}),
        entry("UnknownDtype", R"({"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]})",
              {"unknown dtype 'F8_E4M3'"}),
        entry("DtypeAndSize", R"({"dtype":"F32","shape":[4],"data_offsets":[0,4]})",
              {"span the 16 bytes of shape and dtype, got 4"}),
        entry("ShapeOverflows",
              R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]})",
              {"below 2^63"}),
        entry("ShapeNegative", R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})", {"got -4"}),
        entry("ShapeOfFractions", R"({"dtype":"U8","shape":[4.0],"data_offsets":[0,4]})",
              {"got 4.0"}),
        entry("ShapeOf10000Dimensions",
              R"({"dtype":"U8","shape":[1)" + repeated(",1", 9'999) + R"(],"data_offsets":[0,4]})",
              {"at most 64 dimensions, got 10000"}),
        entry("OffsetsReversed", R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})",
              {"data_offsets [4, 0]"}),
        entry("OffsetsNegative", R"({"dtype":"U8","shape":[4],"data_offsets":[-1,3]})",
              {"must be a pair of non-negative integers"}),
        entry("OffsetsBeyondTheEnd", R"({"dtype":"U8","shape":[4],"data_offsets":[1,5]})",
              {"[1, 5] must lie inside the 4 bytes"}),
        entry("Truncated", R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", {"truncated?"}),
        two("Hole", "[0,2]", "[3,5]", {"tensor 'q'", "a hole"}),
        two("NotFromZero", "[1,3]", "[3,5]", {"tensor 'p'", "begins at byte 1"}),
        two("Overlap", "[0,2]", "[1,3]", {"tensor 'q'", "an overlap"}),
        two("BytesAfterTheLast", "[0,2]", "[2,4]", {"1 bytes follow the last tensor"}),
        raw("NameWithEscapes",
            raw_safetensors(R"({"\u001b[31m":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                            "abcd"),
            {"\\x1b[31m", "control character 0x1b"}),
        raw("NameWithNewline",
            raw_safetensors(R"({"a\nb":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abcd"),
            {"a\\x0ab"}),
        raw("NameWithNul",
            raw_safetensors(R"({"a\u0000b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                            "abcd"),
            {"a\\x00b"}),
        raw("NameOf4KiB",
            raw_safetensors("{\"" + std::string(4096, 'n') +
                                R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                            "abcd"),
            {"4096 bytes long"})),
    [](const auto& row) { return row.param.name; });

void make_socket(const TestFolder& folder) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  (folder / "w.safetensors").string().copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ::close(fd);
}

INSTANTIATE_TEST_SUITE_P(
    Kind, MalformedWeights,
    testing::Values(
        weights("Missing", [](const TestFolder&) {}, {"No such file"}),
        weights("Directory",
                [](const TestFolder& folder) {
                  std::filesystem::create_directory(folder / "w.safetensors");
                },
                {"is a directory, not a regular file"}),
        weights("Fifo",
                [](const TestFolder& folder) {
                  ASSERT_EQ(::mkfifo((folder / "w.safetensors").c_str(), 0600), 0);
                },
                {"is a FIFO, not a regular file"}),
        weights("Socket", make_socket, {"is a socket, not a regular file"}),
        weights(
            "Device", [](const TestFolder&) {}, {"is a device, not a regular file"}, "/dev/zero"),
        weights("PickleByName", file("w.pt", raw_safetensors("{}")), {"a pickle is never loaded"},
                "w.pt"),
        weights("ZippedPickleByContent",
                file("w.safetensors", "PK\x03\x04" + std::string(100, 'z')),
                {"a pickle is never loaded"}),
        weights("BarePickleByContent", file("w.safetensors", "\x80\x02}q" + std::string(100, 'z')),
                {"a pickle is never loaded"}),
        weights("PointerOfGitLfs",
                file("w.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
                {"git lfs pull"})),
    [](const auto& row) { return row.param.name; });

/// The model's own weights after `change`.
Craft changed(std::function<void(std::map<std::string, at::Tensor>&)> change) {
  return [change = std::move(change)](const TestFolder& folder) {
    const SafetensorsFile source = SafetensorsFile::open(kModel / "model.safetensors");
    std::map<std::string, at::Tensor> tensors;
    for (const std::string& name : source.names())
      tensors[name] = tensor_of(source.tensor(name)).clone();
    change(tensors);
    std::vector<NamedTensor> list;
    for (const auto& [name, tensor] : tensors) list.push_back({name, tensor.contiguous()});
    write_safetensors(folder / "w.safetensors", list);
  };
}

const char* const kNorm = "model.norm.weight";
const char* const kUp = "model.layers.1.mlp.up_proj.weight";
const char* const kEmbed = "model.embed_tokens.weight";

INSTANTIATE_TEST_SUITE_P(
    Fit, MalformedWeights,
    testing::Values(
        weights("MissingExtraRenamedAndTransposedAreAllListed", changed([](auto& w) {
                  w.erase(kNorm);
                  w["model.layers.0.self_attn.extra"] = at::ones({2});
                  w["model.layers.0.mlp.up_proj.weights"] =
                      w.extract("model.layers.0.mlp.up_proj.weight").mapped();
                  w[kUp] = w[kUp].t();
                }),
                {"model.norm.weight is missing",
                 "model.layers.0.self_attn.extra is not in the model",
                 "model.layers.0.mlp.up_proj.weight is missing",
                 "model.layers.0.mlp.up_proj.weights is not in the model",
                 "model.layers.1.mlp.up_proj.weight is [64, 176] where the model has [176, 64]"}),
        weights("ALayerTooMany",
                changed([](auto& w) { w["model.layers.2.mlp.up_proj.weight"] = w[kUp].clone(); }),
                {"model.layers.2.mlp.up_proj.weight is not in the model"}),
        weights("NoFloats", changed([](auto& w) { w[kNorm] = w[kNorm].to(at::kInt); }),
                {"model.norm.weight must be floating-point, got int32"}),
        weights("NaN",
                changed([](auto& w) { w[kUp][3][5] = std::numeric_limits<float>::quiet_NaN(); }),
                {kUp, "element [3, 5]", "nan"}),
        weights("InfinityAndNaNAreBothListed", changed([](auto& w) {
                  w[kEmbed][7][0] = -std::numeric_limits<float>::infinity();
                  w[kNorm][1] = std::numeric_limits<float>::quiet_NaN();
                }),
                {kEmbed, "element [7, 0]", "-inf", kNorm, "element [1]"})),
    [](const auto& row) { return row.param.name; });

TEST_P(MalformedWeights, AreRefusedWithFileAndReason) {
  expect_refused();
}

// What the rows above rest on: without a change these very arguments are refused only because no
// rank may start.
TEST_F(MalformedWeights, OfTheModelItselfAreRead) {
  const TestFolder folder;
  changed([](auto&) {})(folder);

  const ChildResult result = run_isoshard(folder.path(), kWithWeights, refuse_new_processes);

  EXPECT_EQ(result.exit_code, 4) << result.error;
  EXPECT_THAT(result.error + result.output, HasSubstr("cannot start a process for rank 0"));
}

// ---- config.json
// -------------------------------------------------------------------------------------------------

class MalformedConfigs : public MalformedFile {};

Row config(std::string name, Craft craft, std::vector<std::string> words) {
  words.emplace_back("./m");
  return {std::move(name),
          std::move(craft),
          {"verify", "--model", "./m", "--subjects", "ddp", "--dp", "2"},
          kBadInput,
          std::move(words)};
}

Craft text(std::string content) {
  return [=](const TestFolder& folder) {
    std::filesystem::create_directory(folder / "m");
    std::ofstream(folder / "m" / "config.json", std::ios::binary) << content;
  };
}

/// The model's own config with these fields; null removes one.
Craft patched(const json& patch) {
  json whole = json::parse(content_of(kModel / "config.json"));
  whole.merge_patch(patch);
  return text(whole.dump());
}

std::string with_keys(int count) {
  std::string content = "{";
  for (int i = 0; i < count; ++i) fmt::format_to(std::back_inserter(content), "\"{}\":0,", i);
  content.back() = '}';
  return content;
}

INSTANTIATE_TEST_SUITE_P(
    Text, MalformedConfigs,
    testing::Values(config("NoJson", text("model_type: qwen2"), {"strict JSON"}),
                    config("Empty", text(""), {"strict JSON"}),
                    config("NoObject", text("[1, 2]"), {"object"}),
                    config("Truncated", text("{\"model_type\": \"qwe"), {"strict JSON"}),
                    config("TrailingJunk", text("{} x"), {"strict JSON"}),
                    config("ByteOrderMark", text("\xEF\xBB\xBF{}"), {"byte-order mark"}),
                    config("NoUtf8", text("{\"a\": \"\xff\"}"), {"strict JSON"}),
                    config("NaN", text("{\"a\": NaN}"), {"strict JSON"}),
                    config("Deep", text("{\"a\":" + std::string(100'000, '[')),
                           {"must nest at most 64 levels deep"}),
                    config("AMillionKeys", text(with_keys(1'000'000)),
                           {"at most 262144 JSON values"}),
                    config("ANumberOfAMegabyte",
                           text("{\"a\":" + std::string(1'000'000, '9') + "}"), {"strict JSON"}),
                    config("Twice", text(R"({"hidden_size": 64, "hidden_size": 32})"),
                           {"duplicate key 'hidden_size'"}),
                    config("EscapesInAKey", text("{\"\x1b[31m\": 1}"), {"strict JSON"})),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Field, MalformedConfigs,
    testing::Values(config("Missing", patched({{"hidden_size", nullptr}}),
                           {"hidden_size is missing"}),
                    config("WrongType", patched({{"hidden_size", "64"}}),
                           {"hidden_size must be an integer, got \"64\""}),
                    config("List", patched({{"hidden_size", {64}}}), {"hidden_size must be"}),
                    config("Fraction", patched({{"vocab_size", 256.5}}),
                           {"vocab_size must be an integer, got 256.5"}),
                    config("Negative", patched({{"num_hidden_layers", -2}}),
                           {"num_hidden_layers must be", "got -2"}),
                    config("Layers", patched({{"num_hidden_layers", 2'000'000'000}}),
                           {"num_hidden_layers must be at most 100000 layers, got 2000000000"}),
                    config("Huge", patched({{"vocab_size", 18446744073709551615ULL}}),
                           {"vocab_size must be", "got 18446744073709551615"}),
                    config("HeadsDoNotDivide", patched({{"num_attention_heads", 6}}),
                           {"hidden_size must be divisible by num_attention_heads 6", "got 64"}),
                    config("UnknownType", patched({{"model_type", "qwem2"}}),
                           {"'qwem2' is unknown", "did you mean 'qwen2'?"})),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Kind, MalformedConfigs,
    testing::Values(config("Missing", file("m", "{}"), {"neither a folder nor a config.json"}),
                    config("EmptyFolder",
                           [](const TestFolder& folder) {
                             std::filesystem::create_directory(folder / "m");
                           },
                           {"no config.json"}),
                    config("Directory",
                           [](const TestFolder& folder) {
                             std::filesystem::create_directories(folder / "m" / "config.json");
                           },
                           {"is a directory"}),
                    config("Fifo",
                           [](const TestFolder& folder) {
                             std::filesystem::create_directory(folder / "m");
                             ASSERT_EQ(::mkfifo((folder / "m" / "config.json").c_str(), 0600), 0);
                           },
                           {"is a FIFO"})),
    [](const auto& row) { return row.param.name; });

TEST_P(MalformedConfigs, AreRefusedWithFileAndField) {
  expect_refused();
}

Row options_file(std::string name, Craft craft, std::vector<std::string> words) {
  words.emplace_back("o.json");
  return {std::move(name),
          std::move(craft),
          {"verify", "--config", "o.json"},
          kBadInput,
          std::move(words)};
}

class MalformedOptionsFile : public MalformedFile {};
INSTANTIATE_TEST_SUITE_P(
    Kind, MalformedOptionsFile,
    testing::Values(options_file("Missing", [](const TestFolder&) {}, {"No such file"}),
                    options_file("NoJson", file("o.json", "tp=2"), {"strict JSON"}),
                    options_file("NoObject", file("o.json", "[2]"), {"object"}),
                    options_file("UnknownOption", file("o.json", R"({"batch_sise": 2})"),
                                 {"'batch_sise'", "did you mean 'batch-size'?"}),
                    options_file("Nested", file("o.json", R"({"tp": {"degree": 2}})"), {"'tp'"}),
                    options_file("WrongType", file("o.json", R"({"tp": "two"})"), {"tp", "two"}),
                    options_file("Twice", file("o.json", R"({"tp": 2, "tp": 3})"),
                                 {"duplicate key 'tp'"})),
    [](const auto& row) { return row.param.name; });

TEST_P(MalformedOptionsFile, IsRefusedWithFileAndOption) {
  expect_refused();
}

}  // namespace
}  // namespace isoshard::malformed
