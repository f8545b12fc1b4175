# SPDX-License-Identifier: Apache-2.0
# What a run prints unless more is asked for: a line for what conforms, a card for what does not,
# and a closing line; no line is longer than the terminal is wide; the card's command works.
#   cmake -DPROGRAM=ISOSHARD -DJUDGE=ISOSHARD_JUDGE -DFOLDER=DIR -P brief_output_test.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
unset(ENV{COLUMNS})

# printed(CODE COMMAND...): runs it; `lines` are the lines of its standard output.
function(printed code)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${FOLDER} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result EQUAL code)
    message(FATAL_ERROR "${ARGN}\nmust end with ${code}, got ${result}:\n${output}${error}")
  endif()
  # a list has no place for these
  string(REPLACE ";" "," output "${output}")
  string(REPLACE "[" "(" output "${output}")
  string(REPLACE "]" ")" output "${output}")
  string(REPLACE "\\" "@" output "${output}")
  string(REGEX REPLACE "\n$" "" output "${output}")
  string(REPLACE "\n" ";" lines "${output}")
  set(lines "${lines}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(require_lines number)
  list(LENGTH lines count)
  if(NOT count EQUAL number)
    message(FATAL_ERROR "${ARGN} must print ${number} lines, got ${count}:\n${output}")
  endif()
endfunction()

# No line is longer than `width`, but for one word that does not fit beside its title.
function(require_width width)
  foreach(line IN LISTS lines)
    string(LENGTH "${line}" length)
    string(STRIP "${line}" words)
    string(REGEX REPLACE "^(What broke|Likely cause|Where|What to look at|Repeat it) +" "" words
      "${words}")
    if(length GREATER width AND words MATCHES " ")
      message(FATAL_ERROR "a line must have at most ${width} columns, got ${length}:\n${line}")
    endif()
  endforeach()
endfunction()

# The command of the last card, as it would be pasted.
function(require_repeatable code)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${FOLDER} OUTPUT_VARIABLE text
    ERROR_VARIABLE error RESULT_VARIABLE result)
  string(REGEX MATCH "\n  Repeat it +(([^\n]*\\\\\n)*[^\n]*)" found "${text}")
  set(command "${CMAKE_MATCH_1}")
  if(NOT found OR NOT command MATCHES "^[^ ]*isoshard")
    message(FATAL_ERROR "the card must say how to repeat the run, got:\n${text}${error}")
  endif()
  execute_process(COMMAND sh -c "${command}" WORKING_DIRECTORY ${FOLDER} RESULT_VARIABLE again
    OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result EQUAL code OR NOT again EQUAL code)
    message(FATAL_ERROR
      "${command}\nmust end with ${code} as the run did (${result}), got ${again}:\n"
      "${output}${error}")
  endif()
endfunction()

set(faulty verify --fault mlp_input_grad_partial)
set(small verify --preset small)

printed(0 ${PROGRAM} ${small})
require_lines(9 "verify of eight cases that conform")
foreach(line IN LISTS lines)
  if(NOT line MATCHES "^(CONFORMS |8 of 8 cases conform .exact. in [0-9.]+ s$)")
    message(FATAL_ERROR "must be a verdict or the closing line: ${line}")
  endif()
endforeach()
require_width(100)

printed(0 ${PROGRAM} ${small} --quiet)
require_lines(1 "--quiet")
printed(1 ${PROGRAM} ${faulty} --quiet)
require_lines(1 "--quiet")

# One case that diverges: its line, five rows, a blank line and the closing line.
set(ENV{COLUMNS} 100000)
printed(1 ${PROGRAM} ${faulty})
require_lines(8 "verify of one case that diverges")
foreach(arguments "" --verbose)
  set(ENV{COLUMNS} 60)
  printed(1 ${PROGRAM} ${faulty} ${arguments})
  require_width(60)
  printed(0 ${PROGRAM} ${small} --subjects ddp --dp 2 ${arguments})
  require_width(60)
endforeach()
require_repeatable(1 ${PROGRAM} ${faulty})
unset(ENV{COLUMNS})
require_repeatable(1 ${PROGRAM} ${faulty})

# The judge alone.
printed(0 ${PROGRAM} ${small} --subjects ddp --dp 2 --dtype fp32 --dump runs)
printed(1 ${PROGRAM} ${faulty} --dump "wrong runs")
file(GLOB reference ${FOLDER}/runs/reference_*)
file(GLOB right ${FOLDER}/runs/qwen2_dp2*)
file(GLOB wrong_reference "${FOLDER}/wrong runs/reference_*")
file(GLOB wrong "${FOLDER}/wrong runs/tiny*")
set(ENV{COLUMNS} 100000)
printed(0 ${JUDGE} compare ${reference} ${right})
require_lines(2 "compare of a run that conforms")
printed(1 ${JUDGE} compare ${wrong_reference} ${wrong})
require_lines(8 "compare of a run that diverges")
printed(1 ${JUDGE} compare ${wrong_reference} ${wrong} --quiet)
require_lines(1 "--quiet")
set(ENV{COLUMNS} 60)
require_repeatable(1 ${JUDGE} compare ${wrong_reference} ${wrong})

# What follows from wrong data is not listed.
printed(1 ${PROGRAM} verify --fault same_batch_on_all_dp_ranks --output-dir data)
file(READ ${FOLDER}/data/report.json report)
string(JSON count LENGTH "${report}" cases 0 findings)
math(EXPR last "${count} - 1")
foreach(i RANGE ${last})
  string(JSON stage GET "${report}" cases 0 findings ${i} stage)
  if(NOT stage STREQUAL "data ids")
    message(FATAL_ERROR "findings must be of the data alone, got one of ${stage}")
  endif()
endforeach()
file(REMOVE_RECURSE ${FOLDER})
