# SPDX-License-Identifier: Apache-2.0
# Runs failing_ranks and unjoined_ranks: all tests of suite Fails fail, those of suite Passes pass,
# with the counts and exit codes of GoogleTest.
#   cmake -DFAILING_RANKS=PROGRAM -DUNJOINED_RANKS=PROGRAM -DFOLDER=DIR
#   -P check_lost_failures.cmake
cmake_minimum_required(VERSION 3.25)
foreach(variable GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX GTEST_REPEAT GTEST_FILTER
    ISOSHARD_TEST_FAILS_IN)
  unset(ENV{${variable}})
endforeach()
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})

# Sets command, code, output, and of the JSON report tests and failures (-1 where there is none).
function(run program)
  file(REMOVE ${FOLDER}/result.json)
  execute_process(COMMAND ${program} --gtest_color=no --gtest_output=json:${FOLDER}/result.json
    ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 500)
  set(tests -1)
  set(failures -1)
  if(EXISTS ${FOLDER}/result.json)
    # No JSON where something failed outside of tests: GoogleTest 1.12 leaves a comma out.
    file(READ ${FOLDER}/result.json json)
    string(REGEX MATCH "\"tests\": ([0-9]+),.[ ]*\"failures\": ([0-9]+)," counts "${json}")
    set(tests ${CMAKE_MATCH_1})
    set(failures ${CMAKE_MATCH_2})
  endif()
  set(command "${program} ${ARGN}" PARENT_SCOPE)
  foreach(variable code output tests failures)
    set(${variable} "${${variable}}" PARENT_SCOPE)
  endforeach()
endfunction()

function(wrong claim)
  message(FATAL_ERROR "${command}: ${claim}\n"
    "exit code ${code}, ${tests} tests, ${failures} failures:\n${output}")
endfunction()

function(must_be variable value)
  if(NOT "${${variable}}" STREQUAL "${value}")
    wrong("${variable} must be ${value}, got ${${variable}}")
  endif()
endfunction()

function(must_match pattern)
  if(NOT output MATCHES "${pattern}")
    wrong("the output must match ${pattern}")
  endif()
endfunction()

# All tests that are selected fail, and the program says so.
function(must_fail)
  must_be(code 1)
  must_be(tests "${failures}")
  if(tests LESS 1)
    wrong("no test ran")
  endif()
endfunction()

# Stopped or ended by an exception, but not by the time limit.
function(must_end_by_signal)
  if(code MATCHES "^[0-9]+$" OR code MATCHES "timeout")
    wrong("a signal must end the program")
  endif()
endfunction()

foreach(program ${UNJOINED_RANKS} ${FAILING_RANKS})
  run(${program} --gtest_filter=Fails.*)
  must_fail()
  set(all ${tests})
  set(shown "${output}")
  run(${program} --gtest_filter=Passes.*)
  must_be(code 0)
  must_be(failures 0)
  if(tests LESS 1)
    wrong("no control ran")
  endif()
endforeach()
# A failure carries its file, its rank and the trace.
set(output "${shown}")
must_match("failing_ranks.cc:[0-9]+: Failure\n.rank 1. ")
must_match("in the third layer")

run(${FAILING_RANKS} --gtest_filter=Fails.Death* --gtest_death_test_style=threadsafe)
must_fail()

set(sum 0)
foreach(index 0 1 2)
  set(ENV{GTEST_TOTAL_SHARDS} 3)
  set(ENV{GTEST_SHARD_INDEX} ${index})
  run(${FAILING_RANKS} --gtest_filter=Fails.*)
  must_fail()
  math(EXPR sum "${sum} + ${failures}")
endforeach()
unset(ENV{GTEST_TOTAL_SHARDS})
unset(ENV{GTEST_SHARD_INDEX})
must_be(sum ${all})

run(${FAILING_RANKS} --gtest_filter=Repeat.* --gtest_repeat=3)
must_be(code 1)
run(${FAILING_RANKS} --gtest_filter=Fails.Expect --gtest_repeat=2)
must_fail()

# The program stops where it records the failure; the rank does not stop.
run(${FAILING_RANKS} --gtest_filter=Fails.Expect --gtest_break_on_failure)
must_end_by_signal()
must_match(".rank 1. ")
run(${FAILING_RANKS} --gtest_filter=Fails.Expect --gtest_throw_on_failure)
if(code EQUAL 0)
  wrong("the program must fail")
endif()
must_match(".rank 1. ")
foreach(flag break_on_failure throw_on_failure)
  run(${FAILING_RANKS} --gtest_filter=Passes.RankGoesOn* --gtest_${flag})
  must_be(code 0)
  must_be(tests 1)
endforeach()

# Where no test runs; the tests themselves pass.
foreach(suite SetUp TearDown)
  run(${FAILING_RANKS} --gtest_filter=${suite}.*)
  must_be(code 1)
  must_match(".rank 1. ")
endforeach()
foreach(place environment parameters initializer listener)
  set(ENV{ISOSHARD_TEST_FAILS_IN} ${place})
  run(${FAILING_RANKS} --gtest_filter=Passes.SumOfThreeRanks:*Parameters.*)
  must_be(code 1)
  must_match(".rank 1. ")
endforeach()
set(ENV{ISOSHARD_TEST_FAILS_IN} nowhere)
run(${FAILING_RANKS} --gtest_filter=Passes.SumOfThreeRanks:*Parameters.*)
must_be(code 0)
must_be(tests 2)
file(REMOVE_RECURSE ${FOLDER})
