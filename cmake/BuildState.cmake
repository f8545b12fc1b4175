# SPDX-License-Identifier: Apache-2.0
# Writes what the sources are to OUTPUT, if that is not what it says already. Run by every build.
# usage: cmake -DSOURCE=... -DOUTPUT=... -DSANITIZERS=... -P BuildState.cmake
# Untracked files do not count: no CMake list names them, so they are not built. Goldens and pages
# are no part of the program.
set(commit "")
set(state unknown)
execute_process(COMMAND git rev-parse --verify HEAD WORKING_DIRECTORY ${SOURCE} RESULT_VARIABLE
  result OUTPUT_VARIABLE head
  ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(result STREQUAL "0")
  execute_process(COMMAND git --no-optional-locks status --porcelain --untracked-files=no -- .
    ":!golden" ":!docs" ":!*.md"
    WORKING_DIRECTORY ${SOURCE} RESULT_VARIABLE result OUTPUT_VARIABLE changes ERROR_QUIET
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(result STREQUAL "0")
    set(commit ${head})
    set(state clean)
    if(NOT changes STREQUAL "")
      set(state dirty)
    endif()
  endif()
endif()
set(text "#define ISOSHARD_BUILD_COMMIT \"${commit}\"\n#define ISOSHARD_BUILD_STATE \"${state}\"\n")
string(APPEND text "#define ISOSHARD_BUILD_SANITIZERS \"${SANITIZERS}\"\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL old)
  file(WRITE ${OUTPUT} "${text}")
endif()
