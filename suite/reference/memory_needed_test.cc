// SPDX-License-Identifier: Apache-2.0
/// Claims about what a case needs: what runs is not refused, and what cannot fit is.
#include "suite/reference/memory_needed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kGiB = 1 << 30;

Case small_case() {
  return preset_cases("small").front();
}

TEST(MemoryNeededByCases, IsLessThanWhatTheCasesOfPresetsTake) {
  // measured: verify of the default preset takes 5.4 GiB, that of the small one 0.2
  for (const auto& [preset, taken] : {std::pair{"default", 5.4}, std::pair{"small", 0.2}}) {
    for (const Case& c : preset_cases(preset)) {
      const MemoryNeeded needed = memory_needed(c, Recorded::kEveryStep);
      EXPECT_LT(needed.total(), taken * kGiB) << c.slug();
      EXPECT_GT(needed.records, 0);
      EXPECT_GT(needed.ranks, 0);
      EXPECT_LT(needed.records, static_cast<double>(trace_capacity(c))) << c.slug();
    }
  }
}

TEST(MemoryNeededByCases, GrowsWithWhatIsRecordedAndWithReplicas) {
  Case c = small_case();
  const MemoryNeeded one = memory_needed(c, Recorded::kEveryStep);
  c.steps = 7;
  EXPECT_EQ(memory_needed(c, Recorded::kEveryStep).records, 7 * one.records);
  EXPECT_EQ(memory_needed(c, Recorded::kNumbers).records, 0);
  c.subject = "ddp";
  c.degrees = {.dp = 3};
  const double three = memory_needed(c, Recorded::kNumbers).ranks;
  c.degrees.dp = 6;
  EXPECT_EQ(memory_needed(c, Recorded::kNumbers).ranks, 2 * three);
}

TEST(MemoryNeededByCases, IsComparedWithTheMachinesAndToldInNumbers) {
  const Case c = small_case();
  const auto needed = static_cast<std::int64_t>(memory_needed(c, Recorded::kEveryStep).total()) + 1;

  EXPECT_NO_THROW(require_memory(c, Recorded::kEveryStep, {.bytes = needed}));
  EXPECT_NO_THROW(require_memory(c, Recorded::kEveryStep, {})) << "not known";
  EXPECT_THAT([&] { require_memory(c, Recorded::kEveryStep, {.bytes = needed / 2}); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr(c.slug() + " needs at least "),
                                              HasSubstr("GiB of memory, the machine has"))));
}

}  // namespace
}  // namespace isoshard
