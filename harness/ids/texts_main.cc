// SPDX-License-Identifier: Apache-2.0
/// Prints what texts_golden.txt must be (docs/internals/design.md, "Ids and texts"), or a page of
/// docs: ids_texts [cause|rule].
#include <cstdio>
#include <string>

#include "harness/ids/rendered_texts.h"

int main(int argc, char** argv) {
  const std::string text = argc > 1 ? isoshard::rendered_page(argv[1]) : isoshard::rendered_texts();
  return text.empty() || std::fputs(text.c_str(), stdout) < 0 ? 1 : 0;
}
