# SPDX-License-Identifier: Apache-2.0
# What tests of commands share: programs that must end and say as they are expected to.

# run(CODE PATTERN COMMAND...): ends with CODE and prints what PATTERN matches; `output` has it.
function(run code pattern)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT result EQUAL code OR NOT output MATCHES "${pattern}")
    list(JOIN ARGN " " command)
    message(FATAL_ERROR
      "${command}\nmust end with ${code} and say '${pattern}', got ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# What is said is compared, not how it is broken into lines.
set(ENV{COLUMNS} 100000)

# without_this_run(TEXT VARIABLE): the text without the program that repeats it and the seconds that
# it took.
function(without_this_run text variable)
  string(REGEX REPLACE "(\n  Repeat it +)[^ \n]+ " "\\1" text "${text}")
  string(REGEX REPLACE " in [0-9.]+ (s|min)(\n|$)" "\\2" text "${text}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# expect_same(CODE PATTERN ARGUMENTS...): of compare, by PROGRAM (isoshard) and by JUDGE
# (isoshard-judge), which print the same.
function(expect_same code pattern)
  run(${code} "${pattern}" ${PROGRAM} compare ${ARGN})
  without_this_run("${output}" expected)
  run(${code} "${pattern}" ${JUDGE} compare ${ARGN})
  string(REPLACE "isoshard-judge: " "isoshard: " output "${output}")
  without_this_run("${output}" output)
  if(NOT output STREQUAL expected)
    message(FATAL_ERROR
      "compare ${ARGN}: isoshard says\n${expected}\nand isoshard-judge\n${output}")
  endif()
endfunction()
