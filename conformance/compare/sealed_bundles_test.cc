// SPDX-License-Identifier: Apache-2.0
/// What seals a bundle, what a reference must be, and that right bundles conform.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fixtures/cases/setting.h"
#include "harness/testing/said_matchers.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/make_subject.h"
#include "suite/testing/dumped_bundles.h"
#include "suite/testing/json_schema.h"

namespace isoshard::dumped {
namespace {

using ::testing::HasSubstr;

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

  for (const auto& [reference, actual] : {std::pair(bundles() / "reference", folder / "bad"),
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
               "the schema must be 2"}),
    name_of_row);

// -- the trusted side -----------------------------------------------------------------------------

class WrongReferences : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongReferences, AreRefused) {
  const TestFolder folder;
  const fs::path bad = folder / "bad";
  spoil(bad, GetParam().run, GetParam().edit);

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
        Wrong{"OfATensorTwiceAsLarge",
              [](const fs::path& b) {
                for (const char* field :
                     {"absolute_norm", "max_abs", "reference_norm", "reference_max_abs"})
                  response(field, [](double x) { return to_hex(x * 2); })(b);
              },
              {3},
              "the tensor has norm",
              "reference"},
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

/// The part of docs/reference/bundle.schema.json that describes one file.
Schema schema_of(const char* part) {
  json schema = json::parse(content_of(fs::path(ISOSHARD_DOCS_DIR) / "bundle.schema.json"));
  schema.erase("anyOf");
  schema["$ref"] = std::string("#/$defs/") + part;
  return Schema(std::move(schema));
}

TEST(RightBundles, AreAsTheSchemaSays) {
  int checked = 0;
  for (const char* bundle : {"reference", "run", "ddp"}) {
    for (const auto& entry : fs::recursive_directory_iterator(bundles() / bundle)) {
      if (entry.path().extension() != ".json") continue;
      const std::string name = entry.path().filename().string();
      const Schema schema = schema_of(name == "manifest.json"    ? "manifest"
                                      : name == "responses.json" ? "responses"
                                                                 : "rank");
      EXPECT_EQ(schema.problem(json::parse(content_of(entry.path()))), "") << entry.path();
      ++checked;
    }
  }
  EXPECT_EQ(checked, 2 + 2 + 1 + 2 * 4 + 1 + 2 * 2);  // two steps each
}

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
    const Reference emulated = make_emulated_reference(item, numerics_of(item));
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

TEST(RightBundles, AreHeldToTheGradientScaleThatIsDemanded) {
  const TestFolder folder;
  const fs::path tripled = folder / "tripled", claimed = folder / "claimed";
  for (const fs::path& bundle : {tripled, claimed})
    fs::copy(bundles() / "run", bundle, fs::copy_options::recursive);
  scaled(3, "activation_grad/", to_hex(6))(tripled);  // of dp 2
  scaled(1, "activation_grad/", to_hex(6))(claimed);
  for (const fs::path& bundle : {tripled, claimed}) bundle_edit::seal(bundle);
  const BundleRules own{.grad_scale = 2}, three_times{.grad_scale = 6};

  EXPECT_EQ(compared(bundles() / "reference", bundles() / "run", own).code, 0);
  EXPECT_EQ(compared(bundles() / "reference", tripled, three_times).code, 0);
  for (const auto& [bundle, rules] :
       {std::pair(bundles() / "run", three_times), std::pair(tripled, own),
        std::pair(tripled, BundleRules()), std::pair(claimed, three_times)}) {
    const End end = compared(bundles() / "reference", bundle, rules);
    EXPECT_EQ(end.code, 1) << bundle << ": " << end.text;
  }
}

TEST(RightBundles, MayLackOnlyWhatIsNamed) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  fs::copy(bundles() / "run", run, fs::copy_options::recursive);
  rename(run, "scalar/grad_norm/0", "other_norm");
  bundle_edit::seal(run);
  BundleRules named, others, wide;
  named.not_recorded = {"scalar/grad_norm", "scalar/other_norm"};
  others.not_recorded = {"scalar/loss", "grad/*"};
  wide.not_recorded = {"scalar/grad_*", "scalar/other_norm"};

  EXPECT_EQ(compared(bundles() / "reference", run).code, 1);
  EXPECT_EQ(compared(bundles() / "reference", run, others).code, 1) << "what is there is judged";
  EXPECT_EQ(compared(bundles() / "reference", run, named).code, 0);
  EXPECT_EQ(compared(bundles() / "reference", run, wide).code, 0);
}

TEST(RightBundles, MayBeSumsOverRanksOnlyWhereTheyAreNamed) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  fs::copy(bundles() / "run", run, fs::copy_options::recursive);
  const auto split_over_tp = [&](double factor) {
    edit_values(run, [&](int, const std::string& name, auto& values) {
      if (name.starts_with("grad/model.norm.weight/"))
        for (double& value : values) value *= factor;
    });
    bundle_edit::seal(run);
  };
  edit_records(run, [](int, const std::string& name, json& record) {
    if (name.starts_with("grad/model.norm.weight/"))
      record["placements"].push_back({{"axis", "tp"}, {"kind", "partial"}, {"reduction", "sum"}});
  });
  split_over_tp(0.5);
  BundleRules named, others;
  named.partial = {"grad/model.norm.weight*"};
  others.partial = {"scalar/loss"};

  EXPECT_EQ(compared(bundles() / "reference", run).code, 1);
  EXPECT_EQ(compared(bundles() / "reference", run, others).code, 1);
  const End end = compared(bundles() / "reference", run, named);
  EXPECT_EQ(end.code, 0) << end.text;
  split_over_tp(1.01);
  EXPECT_EQ(compared(bundles() / "reference", run, named).code, 1) << "a sum is judged, too";
}

TEST(RightBundles, TellWhoWroteThem) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  fs::copy(bundles() / "run", run, fs::copy_options::recursive);
  edit_manifest(run, [](json& m) {
    m["producer"] = {{"name", "tracer"}, {"version", "3.1"}};
    m["versions"] = {{"torch", "2.11.0"}, {"deepspeed", "0.18"}};
  });

  const End end = compared(bundles() / "reference", run);

  EXPECT_EQ(end.code, 0) << end.text;
  EXPECT_THAT(end.text, HasSubstr("the judged run was recorded by tracer 3.1, deepspeed 0.18, "
                                  "torch 2.11.0"));
  for (const json& wrong : {json("2.11.0"), json::array({"torch"}), json({{"torch", 2.11}}),
                            json({{"torch", nullptr}})}) {
    edit_manifest(run, [&](json& m) { m["versions"] = wrong; });
    const End refused = compared(bundles() / "reference", run);
    EXPECT_EQ(refused.code, 3) << wrong;
    EXPECT_THAT(refused.text, HasSubstr(wrong.is_object() ? "torch" : "\"versions\""));
  }
}

TEST(RightBundles, OfAnyMeshButTheOneThatIsDemandedAreRefused) {
  BundleRules rules{.mesh = MeshShape({{Axis::kDp, 2}, {Axis::kTp, 2}})};

  EXPECT_EQ(compared(bundles() / "reference", bundles() / "run", rules).code, 0);
  EXPECT_EQ(compared(bundles() / "reference", bundles() / "ddp", rules).code, 3);
}

TEST(RightBundles, OfAnotherSubjectMayMakeOtherCallsAndTheVerdictSaysSo) {
  const TestFolder folder;
  spoil(folder / "renamed", "run", [](const fs::path& bundle) {
    edit_manifest(bundle, [](json& manifest) { manifest["subject"] = "mine"; });
  });

  const End end = compared(bundles() / "reference", folder / "renamed");

  EXPECT_EQ(end.code, 0) << end.text;
  EXPECT_THAT(end.text, HasSubstr("collectives were not judged: the trusted run has tables of "));
  EXPECT_THAT(end.text, HasSubstr("this is a run of mine"));
}

TEST(RightBundles, AreHeldToTheCallsThatTheTrustedOneSays) {
  const Verdict verdict = compare_bundles(bundles() / "reference", bundles() / "run", {}, {});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.collectives, HasSubstr("calls of 4 ranks in 2 steps were compared with"));
}

TEST(RightBundles, MayLackCallsThatTheCommandLineNames) {
  const TestFolder folder;
  const fs::path run = folder / "run";
  const auto leave_out = [](const std::string& name) { return name.find("collectives.") == 7; };
  spoil(run, "run", [&](const fs::path& b) {
    for (const char* step : {"step0000", "step0001"}) {
      const fs::path path = b / step / "rank00002.safetensors";
      std::vector<SafetensorsEntry> tensors;
      const SafetensorsFile file = SafetensorsFile::open(path);
      for (const std::string& name : file.names()) {
        if (!leave_out(name))
          tensors.push_back({name, file.info(name).dtype, file.info(name).shape,
                             [&file, name] { return file.tensor(name); }});
      }
      write_safetensors(path, tensors);
      edit_json(b / step / "rank00002.json", [&](json& document) {
        json left = json::array();
        for (const json& record : document["records"]) {
          if (!record["name"].get<std::string>().starts_with("collectives."))
            left.push_back(record);
        }
        document["records"] = left;
      });
    }
  });

  const Verdict refused = compare_bundles(bundles() / "reference", run, {}, {});
  const Verdict allowed =
      compare_bundles(bundles() / "reference", run, {}, {.not_recorded = {"scalar/collectives.*"}});

  EXPECT_EQ(refused.status, Status::kDiverges);
  ASSERT_FALSE(refused.findings.empty());
  EXPECT_THAT(refused.findings.front(), FindingIs(FindingId::kCallsMissing));
  EXPECT_THAT(refused.findings.front().ranks, testing::ElementsAre(2));
  EXPECT_EQ(allowed.status, Status::kConforms) << allowed.reason;
  EXPECT_THAT(allowed.collectives, HasSubstr("as --not-recorded allows"));
}

// Nobody says then what the calls must be, and the verdict says that.
TEST(RightBundles, AreNotHeldToCallsWhereNobodySaysThem) {
  const TestFolder folder;
  const fs::path reference = folder / "reference", other = folder / "other";
  spoil(reference, "reference", [](const fs::path& b) {
    edit_manifest(b, [](json& m) { m["settings"]["judging"].erase("collectives"); });
  });
  spoil(other, "reference", [](const fs::path& b) {
    edit_manifest(b, [](json& m) { m["settings"]["judging"]["collectives"].erase(0); });
  });

  const Verdict none = compare_bundles(reference, bundles() / "run", {}, {}),
                of_ddp = compare_bundles(other, bundles() / "run", {}, {});

  for (const Verdict& verdict : {none, of_ddp}) {
    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_THAT(verdict.collectives, HasSubstr("recorded and not judged"));
  }
  EXPECT_THAT(of_ddp.notes, ::testing::Contains(HasSubstr("has tables of ddp (dp 2 x tp 1)")));
}

TEST(RightBundles, OfSeveralMicroBatchesConform) {
  const TestFolder folder;
  Case item = step_case("autotp", {.dp = 2, .tp = 2});
  item.micro_batches = 2;
  item.settings.zero_stage = 1;
  item.settings.autocast = Dtype::kFloat16;
  item.settings.loss_scale = {LossScaleSettings::Kind::kStatic, 1000};
  const Reference reference = make_reference(item, {});
  const auto settings = bundle_settings(item, policy_of(item));
  write_bundle(folder / "reference", reference, settings);
  write_bundle(folder / "run", run_case(item, reference, {.keep = Keep::kEverything}), settings);

  const End right = compared(folder / "reference", folder / "run");
  const int changed =
      edit_values(folder / "run", [](int rank, const std::string& name, auto& values) {
        if (rank >= 2 && name == "grad/model.norm.weight.micro_batch/0")
          for (double& value : values) value *= 2;
      });
  bundle_edit::seal(folder / "run");
  const End wrong = compared(folder / "reference", folder / "run");

  EXPECT_EQ(right.code, 0) << right.text;
  EXPECT_EQ(changed, 2);
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.text, HasSubstr("model.norm.weight.micro_batch"));
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
}  // namespace isoshard::dumped
