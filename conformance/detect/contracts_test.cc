// SPDX-License-Identifier: Apache-2.0
/// The contracts table parses, and a malformed one does not. (That its tests and faults exist is
/// checked by source_rules_test.)
#include "suite/faults/contracts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

TEST(Contracts, TheTableIsCompiledInWhole) {
  ASSERT_GT(contracts().size(), 30U);
  for (const Contract& contract : contracts()) {
    EXPECT_THAT(contract.id, ::testing::MatchesRegex("[a-z0-9_]+(\\.[a-z0-9_]+)+"));
    EXPECT_FALSE(contract.claim.empty()) << contract.id;
    EXPECT_FALSE(contract.tests.empty()) << contract.id;
    EXPECT_FALSE(contract.faults.empty()) << contract.id;
  }
}

TEST(Contracts, MalformedTablesAreRefused) {
  EXPECT_EQ(parse_contracts(
                "| id | claim | test | fault |\n|---|---|---|---|\n| a.b | c | `D.E` | `f` |\n")
                .front()
                .tests,
            "D.E");
  EXPECT_THROW((void)parse_contracts("| a.b | c | d |\n"), FileError);
  EXPECT_THROW((void)parse_contracts("| a.b | c | d | e |\n| a.b | c | d | e |\n"), FileError);
}

TEST(Contracts, NamesOfACellAreTakenApart) {
  using ::testing::ElementsAre;

  const ContractNames names = names_in(
      "A.One, dp_sum_missing, B.Two asserts that x, y; each test plants its error, A.One; "
      "C.Three with sum_order");

  EXPECT_THAT(names.tests, ElementsAre("A.One", "B.Two", "C.Three"));
  EXPECT_THAT(names.faults, ElementsAre("dp_sum_missing"));
  EXPECT_THAT(names.benign, ElementsAre("sum_order"));
  EXPECT_THAT(names.notes, ElementsAre("B.Two asserts that x, y", "each test plants its error",
                                       "C.Three with sum_order"));
}

TEST(Contracts, EachNamesATestAndWhatBreaksIt) {
  for (const Contract& contract : contracts()) {
    EXPECT_FALSE(names_in(contract.tests).tests.empty()) << contract.id;
    const ContractNames breakers = names_in(contract.faults);
    EXPECT_FALSE(breakers.tests.empty() && breakers.faults.empty() && breakers.notes.empty())
        << contract.id;
  }
}

TEST(Contracts, EachHasADerivation) {
  for (const Contract& contract : contracts())
    EXPECT_FALSE(derivation_of(contract.id).empty()) << contract.id;
  EXPECT_EQ(derivation_of("no.such.group"), "");
}

TEST(Contracts, TheMostSpecificDerivationCounts) {
  const auto sections = parse_derivations("# Title\nwords\n\n## a\none\n\ntwo\n\n## a.b\nthree\n");

  EXPECT_EQ(sections.at("a"), "one\n\ntwo");
  EXPECT_EQ(sections.at("a.b"), "three");
  EXPECT_NE(derivation_of("tp.row.bias"), derivation_of("tp.activations"));
  EXPECT_EQ(derivation_of("dp.data.split"), derivation_of("dp.data"));
}

}  // namespace
}  // namespace isoshard
