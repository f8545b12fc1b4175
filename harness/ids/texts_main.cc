// SPDX-License-Identifier: Apache-2.0
/// Prints what texts_golden.txt must be (docs/design.md, "Ids and texts").
#include <cstdio>

#include "harness/ids/rendered_texts.h"

int main() {
  return std::fputs(isoshard::rendered_texts().c_str(), stdout) < 0 ? 1 : 0;
}
