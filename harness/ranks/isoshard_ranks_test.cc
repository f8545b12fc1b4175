// SPDX-License-Identifier: Apache-2.0
/// Claims about statistics that ranks make: they give the verdict of whole tensors, and whoever
/// forges them is refused.
#include "harness/ranks/isoshard_ranks.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/io/safetensors.h"
#include "harness/bundle/bundle.h"
#include "harness/judge/compare_bundles.h"
#include "harness/judge/respond_bundles.h"
#include "harness/testing/bundle_edit.h"
#include "harness/testing/synthetic.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using namespace synthetic;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing::ThrowsMessage;

constexpr const char* kSettings = R"({"training": {"dtype": "fp32"}})";
const MeshShape kMesh({{Axis::kTp, 2}});

/// One process, or two ranks that have half of the weight each. `moved` stands for roundings.
Body body(bool whole, double moved = 0, double fault = 0, bool is_perturbed = false) {
  return [=](Sink& sink, int rank) {
    const auto change = [&](const at::Tensor& tensor, int seed) {
      return tensor + moved * values(tensor.sizes().vec(), seed);
    };
    sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({3})),
                   at::tensor({3, 1, 2}, at::kLong));
    const at::Tensor w = values({64, 128}, 1);
    if (is_perturbed) w[0][0] *= 1 + 1.2e-7;
    const auto rows = layout_of({64, 128}, {shard(Axis::kTp, 0)});
    const auto mine = [&](const at::Tensor& tensor) {
      return whole ? tensor : tensor.narrow(0, rank * 32, 32).contiguous();
    };
    sink.on_record(site(RecordKind::kParam, "w", rows), mine(w));
    (void)sink.on_activation(site(RecordKind::kActivation, "x", layout_of({40, 80})),
                             change(values({40, 80}, 2), 12));
    sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                   at::full({1}, 5.5 + moved, at::kDouble));
    at::Tensor gradient = change(values({64, 128}, 3), 13);
    if (fault != 0) gradient[40] += fault;
    sink.on_record(site(RecordKind::kGrad, "w", rows), mine(gradient));
  };
}

struct Ranks {
  explicit Ranks(const fs::path& reference, int rank, std::string_view run,
                 const MeshShape& mesh = kMesh, const char* purpose = "judged") {
    json axes = json::array();
    for (const AxisDegree& axis : mesh.axes())
      axes.push_back({{"axis", name_of(axis.axis)}, {"degree", axis.degree}});
    const json options = {{"reference", reference.string()},
                          {"rank", rank},
                          {"run", run},
                          {"mesh", axes},
                          {"purpose", purpose}};
    object = isoshard_ranks_open(options.dump().c_str());
    if (object == nullptr) throw std::runtime_error(isoshard_ranks_message(nullptr));
  }
  ~Ranks() { isoshard_ranks_close(object); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  isoshard_ranks* object = nullptr;
};

/// Does to a bundle of whole tensors what its ranks would have done: compares each with the
/// reference, and lets those go that need not be kept.
void let_go(const fs::path& reference, const fs::path& run, const MeshShape& mesh = kMesh,
            const char* purpose = "judged") {
  const std::string id = json::parse(content_of(run / "manifest.json")).at("run");
  const bool is_judged = std::string_view(purpose) == "judged";
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const Ranks ranks(reference, rank, id, mesh, purpose);
    const fs::path stem = run / "step0000" / fmt::format("rank{:05}", rank);
    const SafetensorsFile file = SafetensorsFile::open(stem.string() + ".safetensors");
    std::vector<SafetensorsEntry> entries;
    bundle_edit::edit_json(stem.string() + ".json", [&](json& description) {
      for (json& record : description.at("records")) {
        const std::string name = bundle_edit::name_of(record);
        const HostTensor tensor = file.tensor(name);
        record["step"] = 0;
        const char* const result = isoshard_ranks_compare(ranks.object, record.dump().c_str(),
                                                          tensor.bytes.data(), tensor.bytes.size());
        ASSERT_NE(result, nullptr) << isoshard_ranks_message(ranks.object);
        const json said = json::parse(result);
        if (said.at("keep")) {
          entries.push_back({name, tensor.dtype, tensor.shape, [tensor] { return tensor; }});
          continue;
        }
        record["kept"] = false;
        record["compared"] = said.at("compared");
        if (said.contains("unmasked")) record["unmasked"] = said.at("unmasked");
        if (!is_judged) continue;
        std::size_t bytes = 0;
        const auto* const data =
            static_cast<const std::byte*>(isoshard_ranks_samples(ranks.object, &bytes));
        const auto samples = std::make_shared<std::vector<std::byte>>(data, data + bytes);
        const HostTensor sample{tensor.dtype,
                                {static_cast<std::int64_t>(bytes / size_of(tensor.dtype))},
                                *samples,
                                samples};
        entries.push_back(
            {"sample/" + name, sample.dtype, sample.shape, [sample] { return sample; }});
      }
    });
    const json with = json::parse(isoshard_ranks_compared_with(ranks.object));
    bundle_edit::edit_json(run / "manifest.json", [&](json& m) { m["compared_with"] = with; });
    const fs::path path = stem.string() + ".safetensors";
    write_safetensors(path, entries);
  }
  bundle_edit::seal(run);
}

class RanksTest : public testing::Test {
 protected:
  void SetUp() override {
    write_bundle(folder_ / "reference",
                 reference(body(true), [](int i) { return body(true, 1e-6 * (i + 1)); }),
                 kSettings);
  }
  /// A run of two ranks, of whole tensors or of statistics.
  fs::path run_of(double moved, double fault, bool is_whole) {
    const fs::path path = folder_ / fmt::format("run{}", num_runs_++);
    write_bundle(path, run(kMesh, nullptr, body(false, moved, fault), Keep::kEverything),
                 kSettings);
    if (!is_whole) let_go(folder_ / "reference", path);
    return path;
  }
  Verdict compare(const fs::path& path, const BundleRules& rules = {}) {
    return compare_bundles(folder_ / "reference", path, {}, rules);
  }
  /// Edits the statistics of a tensor's only part on rank 1, and seals the bundle again.
  fs::path forged(const fs::path& path, const std::string& of,
                  const std::function<void(json& record)>& edit) {
    bundle_edit::edit_records(path, [&](int rank, const std::string& name, json& record) {
      if (rank == 1 && name == of) edit(record);
    });
    bundle_edit::seal(path);
    return path;
  }

  /// Takes a tensor of rank 1 out of its file; its record says that it was compared.
  void drop(const fs::path& path, const std::string& name, const std::string& tensor,
            const json& part = {{"digest", "0123456789abcdef"}, {"numel", 1}}) {
    const std::string file = (path / "step0000" / "rank00001.safetensors").string();
    std::vector<SafetensorsEntry> entries;
    {
      const SafetensorsFile content = SafetensorsFile::open(file);
      for (const std::string& other : content.names()) {
        const HostTensor value = content.tensor(other);
        const auto bytes =
            std::make_shared<std::vector<std::byte>>(value.bytes.begin(), value.bytes.end());
        const HostTensor copy{value.dtype, value.shape, *bytes, bytes};
        if (other != tensor)
          entries.push_back({other, copy.dtype, copy.shape, [copy] { return copy; }});
      }
    }
    write_safetensors(file, entries);
    forged(path, name, [&](json& record) {
      record["kept"] = false;
      if (!record.contains("compared")) record["compared"] = json::array({part});
    });
  }

  TestFolder folder_;
  int num_runs_ = 0;
};
using RanksInC = RanksTest;
using RankStatistics = RanksTest;

TEST_F(RanksInC, SayWhatIsWrong) {
  EXPECT_EQ(isoshard_ranks_abi(), ISOSHARD_RANKS_ABI);
  EXPECT_EQ(isoshard_ranks_open("{"), nullptr);
  EXPECT_EQ(isoshard_ranks_open(nullptr), nullptr);
  EXPECT_THROW(Ranks(folder_ / "none", 0, "r"), std::runtime_error);
  EXPECT_THROW(Ranks(folder_ / "reference", 0, "r", kMesh, "something"), std::runtime_error);
  write_bundle(folder_ / "two", run(kMesh, nullptr, body(false), Keep::kEverything), kSettings);
  try {
    const Ranks ranks(folder_ / "two", 0, "r");
    FAIL() << "a reference of two ranks was taken";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a reference of one process, got"));
  }
}

TEST_F(RanksInC, RefuseRecordsThatDoNotFit) {
  const Ranks ranks(folder_ / "reference", 0, "r");
  json record = {{"step", 0},
                 {"kind", "activation"},
                 {"name", "x"},
                 {"call", 0},
                 {"dtype", "fp32"},
                 {"local_shape", {40, 80}},
                 {"global_shape", {40, 80}}};
  const std::vector<float> data(std::size_t{40} * 80, 1.0F);
  const auto compare = [&](std::size_t bytes) {
    const char* const result =
        isoshard_ranks_compare(ranks.object, record.dump().c_str(), data.data(), bytes);
    return result == nullptr ? std::string(isoshard_ranks_message(ranks.object)) : "compared";
  };

  EXPECT_THAT(compare(4), HasSubstr("must have 12800 bytes, got 4"));
  record["call"] = 1;
  EXPECT_THAT(compare(12800), HasSubstr("ascending order"));
  record["layout"] = "infer";
  record.erase("global_shape");
  EXPECT_THAT(compare(12800), HasSubstr("must be known"));
  EXPECT_EQ(isoshard_ranks_compare(ranks.object, nullptr, nullptr, 0), nullptr);
  EXPECT_EQ(isoshard_ranks_compare(nullptr, "", nullptr, 0), nullptr);
}

TEST_F(RanksInC, TellHowFarATensorIsFromAPlace) {
  const Ranks ranks(folder_ / "reference", 1, "r");
  const at::Tensor half = values({64, 128}, 1).narrow(0, 32, 32).contiguous();
  json record = {{"step", 0},
                 {"kind", "param"},
                 {"name", "w"},
                 {"call", 0},
                 {"dtype", "fp32"},
                 {"local_shape", {32, 128}},
                 {"global_shape", {64, 128}}};
  const auto error = [&](int row) {
    record["boxes"] = {
        {{"local_offset", {0, 0}}, {"global_offset", {row, 0}}, {"size", {32, 128}}}};
    return std::string(isoshard_ranks_error(ranks.object, record.dump().c_str(),
                                            half.const_data_ptr(), half.nbytes()));
  };

  EXPECT_EQ(error(32), "0x0.0p+0");
  EXPECT_NE(error(0), "0x0.0p+0");
}

TEST_F(RankStatistics, GiveTheVerdictOfWholeTensors) {
  for (const double fault : {0.0, 0.25}) {
    const Verdict whole = compare(run_of(1e-6, fault, true));
    const fs::path path = run_of(1e-6, fault, false);
    const Verdict ranks = compare(path);

    EXPECT_EQ(whole.status, fault == 0 ? Status::kConforms : Status::kDiverges) << whole.reason;
    EXPECT_EQ(ranks.status, whole.status) << ranks.reason;
    EXPECT_THAT(ranks.reason, StartsWith(whole.reason));
    EXPECT_THAT(ranks.reason, HasSubstr("compared in the judged ranks"));
    EXPECT_THAT(whole.reason, Not(HasSubstr("judged ranks")));
    ASSERT_EQ(ranks.findings.size(), whole.findings.size());
    for (std::size_t i = 0; i < whole.findings.size(); ++i) {
      EXPECT_EQ(ranks.findings[i].what, whole.findings[i].what);
      EXPECT_EQ(ranks.findings[i].evidence, whole.findings[i].evidence);
      EXPECT_EQ(ranks.findings[i].diagnosis, whole.findings[i].diagnosis);
      EXPECT_EQ(ranks.findings[i].ranks, whole.findings[i].ranks);
    }
    ASSERT_EQ(ranks.tensors.size(), whole.tensors.size());
    for (std::size_t i = 0; i < whole.tensors.size(); ++i)
      EXPECT_EQ(ranks.tensors[i].stats.sum_sq_diff, whole.tensors[i].stats.sum_sq_diff);
    // Of the wrong gradient rank 1 keeps its half.
    const Bundle bundle = read_bundle(path);
    const RecordKey wrong{0, RecordKind::kGrad, "w", 0};
    EXPECT_EQ(bundle.trace.ranks[1].find(wrong)->kept, fault != 0);
    EXPECT_FALSE(bundle.trace.ranks[0].find(wrong)->kept);
    EXPECT_TRUE(bundle.trace.ranks[0].find({0, RecordKind::kScalar, "loss", 0})->kept);
  }
}

TEST_F(RankStatistics, OfACopyThatDiffersAreFound) {
  const fs::path path = run_of(0, 0, false);
  forged(path, "activation/x/0", [](json& record) {
    record.at("compared")[0]["digest"] = "0123456789abcdef";
    record.at("compared")[0]["unequal_bits"] = 1;  // such as another NaN: values are equal
  });
  // Equal in value on both ranks: no finding. With an error that is allowed, copies still differ.
  EXPECT_EQ(compare(path).status, Status::kConforms);

  const fs::path other = run_of(1e-7, 0, false);
  forged(other, "activation/x/0",
         [](json& record) { record.at("compared")[0]["digest"] = "0123456789abcdef"; });
  const Verdict verdict = compare(other);
  EXPECT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.reason, HasSubstr("copies differ over tp"));
}

TEST_F(RankStatistics, OfAnotherReferenceAreRefused) {
  const fs::path path = run_of(0, 0, false);
  write_bundle(folder_ / "reference",
               reference(body(true, 1e-6), [](int i) { return body(true, 2e-6 * (i + 1)); }),
               kSettings);

  EXPECT_THAT([&] { (void)compare(path); },
              ThrowsMessage<FileError>(HasSubstr("got another reference")));
}

TEST_F(RankStatistics, OfOtherResponsesAreRefused) {
  const fs::path path = run_of(0, 0, false);
  write_bundle(folder_ / "reference",
               reference(body(true), [](int i) { return body(true, 2e-6 * (i + 1)); }), kSettings);

  EXPECT_THAT([&] { (void)compare(path); },
              ThrowsMessage<FileError>(HasSubstr("measure the responses first")));
}

TEST_F(RankStatistics, ThatNameNoReferenceAreRefused) {
  const fs::path path = run_of(0, 0, false);
  bundle_edit::edit_json(path / "manifest.json", [](json& m) { m.erase("compared_with"); });

  EXPECT_THAT([&] { (void)compare(path); },
              ThrowsMessage<FileError>(HasSubstr("must say which reference")));
}

TEST_F(RankStatistics, OfAReferenceAreRefused) {
  const fs::path path = run_of(0, 0, false);

  EXPECT_THAT([&] { (void)compare_bundles(path, path, {}); },
              ThrowsMessage<FileError>(HasSubstr("a trusted run must hold its tensors")));
}

struct Forgery {
  const char* name;
  const char* of;  ///< whose statistics
  double moved;    ///< of the run that is forged
  std::function<void(json& record)> edit;
  const char* words;
};

TEST_F(RankStatistics, ThatAreForgedAreRefused) {
  const auto part = [](const char* field, const json& value) {
    return [field, value](json& record) { record.at("compared")[0][field] = value; };
  };
  const auto larger = [](json& record) {
    json& p = record.at("compared")[0];
    p["sum_sq_reference"] = p["sum_sq_actual"] = p["dot"] = p["max_abs_reference"] = 1e9;
  };
  const Forgery forgeries[] = {
      // nothing differs, says a tensor that does
      {"equal", "grad/w/0", 1e-6,
       [](json& record) {
         json& p = record.at("compared")[0];
         for (const char* field : {"unequal_bits", "unequal_values", "max_abs", "max_ulp",
                                   "sum_sq_diff", "sum_abs_diff", "sum_diff"})
           p.erase(field);
         p["sum_sq_actual"] = p["dot"] = p.at("sum_sq_reference");
       },
       "differ by more than it says"},
      {"another digest", "param/w/0", 0, part("digest", "0123456789abcdef"),
       "equal tensors have equal digests"},
      // a smaller error, which does not contradict itself
      {"smaller", "grad/w/0", 1e-6,
       [](json& record) {
         json& p = record.at("compared")[0];
         p["max_abs"] = 1e-9;
         p["sum_sq_diff"] = 1e-18;
         p["sum_abs_diff"] = 1e-9;
         p["sum_diff"] = 0;
       },
       "differ by more than it says"},
      {"few elements", "grad/w/0", 1e-6, part("numel", 4095), "elements must be compared"},
      {"another norm", "grad/w/0", 1e-6, part("sum_sq_reference", 1.0), "the squared error must"},
      // in a tensor of another norm every error is small
      {"a larger norm", "grad/w/0", 1e-6, larger, "the reference has the squared norm"},
      {"a larger norm beside a NaN", "grad/w/0", 1e-6,
       [&](json& record) {
         larger(record);
         record.at("compared")[0]["nan_actual"] = 1;
       },
       "more NaNs or infinities"},
      {"a larger norm beside NaNs", "grad/w/0", 1e-6,
       [&](json& record) {
         larger(record);
         record.at("compared")[0]["nan_actual"] = record.at("compared")[0]["nan_reference"] = 1;
       },
       "other NaNs"},
      {"a NaN", "grad/w/0", 1e-6, part("nan_actual", 1), "more NaNs or infinities"},
      {"negative", "grad/w/0", 1e-6, part("unequal_values", -1), "a count must be"},
      {"a place outside", "grad/w/0", 1e-6, part("worst", 1 << 20), "a place must be"},
      {"a mask", "grad/w/0", 1e-6, [](json& record) { record["unmasked"] = 1; }, "a mask"},
      {"fewer parts", "grad/w/0", 1e-6, [](json& record) { record["compared"] = json::array(); },
       "must list the statistics of its 1 parts"},
      {"a partial sum", "grad/w/0", 1e-6,
       [](json& record) {
         record["placements"] = {{{"axis", "tp"}, {"kind", "partial"}, {"reduction", "sum"}}};
         record["boxes"] = {
             {{"local_offset", {0, 0}}, {"global_offset", {32, 0}}, {"size", {32, 128}}}};
       },
       "needs the tensor itself"},
  };
  for (const Forgery& forgery : forgeries) {
    const fs::path path = run_of(forgery.moved, 0, false);
    const Verdict verdict = compare(path);
    EXPECT_EQ(verdict.status, Status::kConforms) << forgery.name << ": " << verdict.reason;

    forged(path, forgery.of, forgery.edit);

    EXPECT_THAT([&] { (void)compare(path); }, ThrowsMessage<FileError>(HasSubstr(forgery.words)))
        << forgery.name;
  }
}

TEST_F(RankStatistics, OfNumbersOrWithoutSamplesAreRefused) {
  const fs::path number = run_of(0, 0, false);
  drop(number, "scalar/loss/0", "scalar/loss/0");
  EXPECT_THAT([&] { (void)compare(number); },
              ThrowsMessage<FileError>(HasSubstr("needs the tensor itself")));

  const fs::path bare = run_of(0, 0, false);
  drop(bare, "param/w/0", "sample/param/w/0");
  EXPECT_THAT([&] { (void)compare(bare); },
              ThrowsMessage<FileError>(HasSubstr("it has no samples")));
}

TEST_F(RankStatistics, OfARankWithoutElementsHaveNoNorm) {
  const auto uneven = [](bool whole, double moved) -> Body {
    return [=](Sink& sink, int rank) {
      body(whole)(sink, rank);
      const std::int64_t rows = whole || rank == 0 ? 64 : 0;  // rank 1 has none
      Layout layout = layout_of({64, 128});
      layout.explicit_parts = !whole;
      if (!whole) layout.boxes = {Box{{0, 0}, {rank * 64, 0}, {rows, 128}}};
      const at::Tensor u = values({64, 128}, 4) + moved * values({64, 128}, 14);
      sink.on_record(site(RecordKind::kGrad, "u", std::move(layout)), u.narrow(0, 0, rows));
    };
  };
  write_bundle(folder_ / "reference",
               reference(uneven(true, 0), [&](int i) { return uneven(true, 1e-6 * (i + 1)); }),
               kSettings);
  const fs::path path = folder_ / "uneven";
  const auto record = [&](double norm) {
    fs::remove_all(path);
    write_bundle(path, run(kMesh, nullptr, uneven(false, 1e-3), Keep::kEverything), kSettings);
    let_go(folder_ / "reference", path);
    drop(path, "grad/u/0", "grad/u/0",
         {{"digest", "0123456789abcdef"},
          {"numel", 0},
          {"sum_sq_reference", norm},
          {"sum_sq_actual", norm},
          {"dot", norm}});
  };

  record(0);
  const Verdict verdict = compare(path);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.at(0).key.name, "u");
  record(1e12);
  EXPECT_THAT([&] { (void)compare(path); },
              ThrowsMessage<FileError>(HasSubstr("no element, but a norm")));
}

TEST_F(RankStatistics, OfPerturbedRunsGiveTheSameResponses) {
  write_bundle(folder_ / "plain", reference(body(true)), kSettings);
  std::vector<fs::path> whole, compared;
  for (int i = 0; i < 3; ++i) {
    for (auto* paths : {&whole, &compared}) {
      paths->push_back(folder_ / fmt::format("p{}{}", i, paths == &whole ? "" : "c"));
      write_bundle(
          paths->back(),
          run(MeshShape(), nullptr, body(true, 1e-7 * (i + 1), 0, true), Keep::kEverything),
          kSettings);
    }
    let_go(folder_ / "plain", compared.back(), MeshShape(), "response");
  }

  EXPECT_EQ(respond_bundles(folder_ / "plain", whole), 5U);
  const std::string expected = content_of(folder_ / "plain" / "responses.json");
  fs::remove(folder_ / "plain" / "responses.json");
  bundle_edit::seal(folder_ / "plain");
  EXPECT_EQ(respond_bundles(folder_ / "plain", compared), 5U);

  EXPECT_EQ(content_of(folder_ / "plain" / "responses.json"), expected);
  write_bundle(folder_ / "other", reference(body(true, 1e-6)), kSettings);
  EXPECT_THAT([&] { (void)respond_bundles(folder_ / "other", compared); },
              ThrowsMessage<FileError>(HasSubstr("got another reference")));
}

TEST_F(RankStatistics, FiltersOfTheCommandLineAreCounted) {
  const fs::path path = folder_ / "less";
  write_bundle(path,
               run(
                   kMesh, nullptr,
                   [](Sink& sink, int rank) {
                     sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({3})),
                                    at::tensor({3, 1, 2}, at::kLong));
                     sink.on_record(
                         site(RecordKind::kGrad, "w", layout_of({64, 128}, {shard(Axis::kTp, 0)})),
                         values({64, 128}, 3).narrow(0, rank * 32, 32).contiguous());
                   },
                   Keep::kEverything),
               kSettings);

  EXPECT_EQ(compare(path).status, Status::kDiverges);
  const Verdict verdict = compare(path, {.only = {"grad/*"}});
  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("filters left out 3 records of the trusted run"));
  EXPECT_EQ(compare(path, {.only = {"param/*"}}).status, Status::kDiverges);
}

}  // namespace
}  // namespace isoshard
