# SPDX-License-Identifier: Apache-2.0
# Writes the index of tests, from which `./isoshard test NAME` selects. It reads what CMake
# generated for ctest: so no test is missing, and nothing must be built.
#
# usage: cmake -DBUILD=BUILD_FOLDER -DINDEX=FILE -P list_tests.cmake
#
# One line for each ctest entry, fields separated by tabs, "-" where a field is empty:
#   name   suites   labels   environment   command   options
# Suites and labels are separated by commas; environment, command and options are words of a shell.
# Only an entry that runs a GoogleTest program has suites. Its command has no filter, so that one
# can be added; its options are the entry's own filter and report. Its environment lacks what only
# an entry of whole suites may have: shards, and the checks of the program's suites and labels.
cmake_minimum_required(VERSION 3.25)

set(index "")

# "a b" -> 'a b'
function(quote_for_shell variable word)
  if(NOT word MATCHES "^[A-Za-z0-9_./:=,@%+-]+$")
    string(REPLACE "'" "'\\''" word "${word}")
    set(word "'${word}'")
  endif()
  set(${variable} "${word}" PARENT_SCOPE)
endfunction()

# What CTestTestfile.cmake calls. Arguments are taken one by one, as they may hold semicolons.
function(add_test name)
  set(command "")
  set(options "")
  math(EXPR last "${ARGC} - 1")
  foreach(i RANGE 1 ${last})
    quote_for_shell(word "${ARGV${i}}")
    if(word MATCHES "^'?--gtest_(filter|output)=")
      string(APPEND options " ${word}")
    else()
      string(APPEND command " ${word}")
    endif()
  endforeach()
  string(STRIP "${command}" command)
  set_property(GLOBAL PROPERTY "command_${name}" "${command}")
  set_property(GLOBAL PROPERTY "options_${name}" "${options}")
  set_property(GLOBAL APPEND PROPERTY entries "${name}")
endfunction()

function(set_tests_properties name)
  math(EXPR last "${ARGC} - 2")
  foreach(i RANGE 2 ${last} 2)
    math(EXPR next "${i} + 1")
    set_property(GLOBAL PROPERTY "${ARGV${i}}_${name}" "${ARGV${next}}")
  endforeach()
endfunction()

function(subdirs)
  foreach(folder IN LISTS ARGV)
    cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY "${CMAKE_CURRENT_LIST_DIR}")
    include("${folder}/CTestTestfile.cmake")
  endforeach()
endfunction()

function(joined variable separator)
  list(JOIN ARGN "${separator}" text)
  if(text STREQUAL "")
    set(text "-")
  endif()
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

function(line_of variable name)
  foreach(property IN ITEMS command options ISOSHARD_SUITES LABELS ENVIRONMENT)
    get_property(value GLOBAL PROPERTY "${property}_${name}")
    set(${property} "${value}")
  endforeach()
  if(ISOSHARD_SUITES)
    list(FILTER ENVIRONMENT EXCLUDE REGEX
      "^(ISOSHARD_(WHOLE_SUITE|LISTED_SUITES|WORLD_SIZES)|GTEST_(TOTAL_SHARDS|SHARD_INDEX))=")
  endif()
  set(environment)
  foreach(setting IN LISTS ENVIRONMENT)
    quote_for_shell(word "${setting}")
    list(APPEND environment "${word}")
  endforeach()
  joined(suites "," ${ISOSHARD_SUITES})
  joined(labels "," ${LABELS})
  joined(environment " " ${environment})
  string(STRIP "${options}" options)
  joined(options " " "${options}")
  set(fields "${name}\t${suites}\t${labels}\t${environment}\t${command}\t${options}")
  set(${variable} "${fields}\n" PARENT_SCOPE)
endfunction()

include("${BUILD}/CTestTestfile.cmake")
get_property(entries GLOBAL PROPERTY entries)
foreach(name IN LISTS entries)
  line_of(line "${name}")
  string(APPEND index "${line}")
endforeach()
# It appears whole or not at all, as several launchers may write it.
string(RANDOM LENGTH 12 suffix)
file(WRITE "${INDEX}.${suffix}" "${index}")
file(RENAME "${INDEX}.${suffix}" "${INDEX}")
