// SPDX-License-Identifier: Apache-2.0
/// A wrong run never conforms, whatever its own bundle says: each row edits a bundle of a right run
/// as its author could, seals it again, and is told to be wrong, or is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>

#include "harness/compare/dumped_runs.h"
#include "suite/testing/dumped_bundles.h"

namespace isoshard::dumped {
namespace {

using ::testing::HasSubstr;

class WrongBundles : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongBundles, NeverConform) {
  const TestFolder folder;
  const fs::path bad = folder / "bad";
  spoil(bad, GetParam().run, GetParam().edit);

  const End end = compared(bundles() / "reference", bad);

  EXPECT_THAT(GetParam().codes, ::testing::Contains(end.code)) << end.text;
  EXPECT_NE(end.code, 0);
  EXPECT_THAT(end.text, HasSubstr(GetParam().word));
}

INSTANTIATE_TEST_SUITE_P(
    Scales, WrongBundles,
    ::testing::Values(
        Wrong{"Control", [](const fs::path& b) { scale_values(b, 2, "grad/"); }, {1}, "gradient"},
        Wrong{"OfGradients", scaled(3, "grad/", to_hex(3)), {1}, "gradient scale"},
        Wrong{"OfActivationGradients",
              scaled(7, "activation_grad/", to_hex(14)),
              {1},
              "gradient scale"},
        Wrong{"OfOneActivationGradient",
              scaled(0.5, "activation_grad/lm_head/", 1.0),
              {1},
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
    ::testing::Values(Wrong{"CoarserDtype",
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
                              edit_manifest(
                                  b, [](json& m) { m["settings"]["training"]["steps"] = 1; });
                            },
                            {2},
                            "different settings"},
                      Wrong{"ThatMask",
                            [](const fs::path& b) {
                              scale_values(b, 1.5, "param/model.norm.weight/1");
                              edit_records(
                                  b, [](int, const std::string&, json& r) { r["unmasked"] = 0; });
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
  return [=](const fs::path& b) { cancel(b, begin, "tp", [](int rank) { return rank % 2 == 0; }); };
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
  record["boxes"] = {
      {{"local_offset", zeros}, {"global_offset", zeros}, {"size", record["global_shape"]}}};
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, WrongBundles,
    ::testing::Values(
        Wrong{"PartialParameter", cancelled("param/model.norm.weight/"), {1}, "partial sum"},
        Wrong{"PartialGradient", cancelled("grad/model.norm.weight/"), {1}, "partial sum"},
        Wrong{"PartialMoment", cancelled("optimizer/model.norm.weight"), {1}, "partial sum"},
        Wrong{"PartialActivation", cancelled("activation/model.norm/"), {1}, "partial sum"},
        Wrong{"PartialActivationGradient",
              cancelled("activation_grad/model.norm/"),
              {1},
              "partial sum"},
        Wrong{"PartialLoss", cancelled("scalar/loss/"), {1}, "partial sum"},
        Wrong{"ACopyThatDrifts",
              [](const fs::path& b) { drift(b, "param/model.norm.weight/1"); },
              {1},
              "copies differ"},
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
        Wrong{
            "OnlyAtTheRightRank",
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

INSTANTIATE_TEST_SUITE_P(
    Records, WrongBundles,
    ::testing::Values(
        Wrong{"RenamedToASummand",
              [](const fs::path& b) { rename(b, "activation/model.norm/0", "model.norm.partial"); },
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
              "the kind of a record must be"},
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

/// Rewrites the tensors of a rank and step 1; `edit` may change bytes, or leave a tensor out by
/// returning false.
void edit_tensors(const fs::path& bundle, int rank,
                  const std::function<bool(const std::string& name, std::span<std::byte>)>& edit) {
  const fs::path path = bundle / "step0001" / fmt::format("rank{:05}.safetensors", rank);
  std::vector<SafetensorsEntry> tensors;
  {
    const SafetensorsFile file = SafetensorsFile::open(path);
    for (const std::string& name : file.names()) {
      const HostTensor tensor = file.tensor(name);
      const auto bytes =
          std::make_shared<std::vector<std::byte>>(tensor.bytes.begin(), tensor.bytes.end());
      if (!edit(name, *bytes)) continue;
      tensors.push_back(
          {name, tensor.dtype, tensor.shape, [=, dtype = tensor.dtype, shape = tensor.shape] {
             return HostTensor{dtype, shape, *bytes, bytes};
           }});
    }
  }
  write_safetensors(path, tensors);
}

/// One element more in the third call of rank 1 along dp.
void change_a_call(const fs::path& bundle) {
  int changed = 0;
  edit_tensors(bundle, 1, [&](const std::string& name, std::span<std::byte> bytes) {
    if (name != "scalar/collectives.dp.rank1/0") return true;
    constexpr std::size_t kCount = (2 * 6 + 5) * sizeof(std::int64_t);
    std::int64_t count = 0;
    std::memcpy(&count, bytes.data() + kCount, sizeof(count));
    ++count;
    std::memcpy(bytes.data() + kCount, &count, sizeof(count));
    ++changed;
    return true;
  });
  ASSERT_EQ(changed, 1);
}

void delete_calls(const fs::path& bundle) {
  edit_tensors(bundle, 1, [](const std::string& name, std::span<std::byte>) {
    return name != "scalar/collectives.dp.rank1/0";
  });
  edit_json(bundle / "step0001" / "rank00001.json", [](json& document) {
    json left = json::array();
    for (const json& record : document["records"]) {
      if (record["name"] != "collectives.dp.rank1") left.push_back(record);
    }
    ASSERT_EQ(left.size() + 1, document["records"].size());
    document["records"] = left;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Collectives, WrongBundles,
    ::testing::Values(
        Wrong{"OfOtherBytes", change_a_call, {1}, "collectives.dp.rank1 (step 1): call 3 "},
        Wrong{"OfOtherBytesOnAMeshSpelledOtherwise",
              [](const fs::path& b) {
                change_a_call(b);
                edit_manifest(b, [](json& m) {
                  m["mesh"] = json::array({{{"axis", "dp"}, {"degree", 2}}});
                });
              },
              {1},
              "collectives.dp.rank1 (step 1): call 3 ",
              "ddp"},
        Wrong{"OfDdp", change_a_call, {1}, "collectives.dp.rank1 (step 1): call 3 ", "ddp"},
        Wrong{"Deleted", delete_calls, {1}, "collectives.dp.rank1 (step 1): were not recorded"}),
    name_of_row);

TEST(UnreadBundles, FiltersThatFitNothingAreRefused) {
  const fs::path reference = bundles() / "reference", run = bundles() / "run";

  const End only = compared(reference, run, {.only = {"grads/*"}}),
            step = compared(reference, run, {.steps = {7}});

  EXPECT_EQ(only.code, 2);
  EXPECT_THAT(only.text, HasSubstr("--only must fit a record of the trusted run, got 'grads/*'"));
  EXPECT_EQ(step.code, 2);
  EXPECT_THAT(step.text, HasSubstr("--at-steps must name steps of the trusted run, got 7"));
}

TEST(UnreadBundles, AStepRuleThatIsNotStatedIsRefused) {
  const TestFolder folder;
  const auto with_eps = [&](const char* name, const json& eps) {
    for (const char* run : {"reference", "run"}) {
      const fs::path bundle = folder / name / run;
      fs::create_directories(bundle.parent_path());
      fs::copy(bundles() / run, bundle, fs::copy_options::recursive);
      edit_manifest(bundle, [&](json& m) {
        json& optimizer = m["settings"]["training"]["optimizer"];
        ASSERT_TRUE(optimizer.contains("eps"));
        if (eps.is_null())
          optimizer.erase("eps");
        else
          optimizer["eps"] = eps;
      });
      bundle_edit::seal(bundle);
    }
    return compared(folder / name / "reference", folder / name / "run");
  };

  const End without = with_eps("without", nullptr), as_text = with_eps("text", "1e-8");

  EXPECT_EQ(without.code, 3) << without.text;
  EXPECT_THAT(without.text, HasSubstr("must state optimizer.learning_rate"));
  EXPECT_EQ(as_text.code, 0) << "YAML makes a text of 1e-8; " << as_text.text;
}

TEST(UnreadBundles, OfAFolderAreNotPassedOver) {
  const TestFolder folder;
  for (const char* run : {"reference", "run", "ddp"})
    fs::copy(bundles() / run, folder / run, fs::copy_options::recursive);
  edit_manifest(folder / "ddp", [](json& m) { m["subject"] = "emulated ddp"; });

  EXPECT_THROW((void)dumped_pairs(folder.path()), FileError) << "no ddp is there that it emulates";
  edit_manifest(folder / "ddp", [](json& m) { m["subject"] = "ddp"; });
  EXPECT_NO_THROW((void)dumped_pairs(folder.path()));
  fs::remove(folder / "ddp" / "manifest.json");
  EXPECT_THROW((void)dumped_pairs(folder.path()), InfrastructureError) << "a run that was killed";
}

}  // namespace
}  // namespace isoshard::dumped
