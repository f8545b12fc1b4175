# SPDX-License-Identifier: Apache-2.0
# Writes the manual pages and the completion of PROGRAMS (paths, separated by commas) below FOLDER.
#   cmake -DPROGRAMS=FILE,FILE -DFOLDER=DIR -P MakeManual.cmake
function(write_output file)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text RESULT_VARIABLE result
    ERROR_VARIABLE error)
  if(NOT result EQUAL 0 OR text STREQUAL "")
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command} must print a text, got exit code ${result}: ${error}")
  endif()
  file(WRITE ${file} "${text}")
  set(text "${text}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${FOLDER})
string(REPLACE "," ";" PROGRAMS "${PROGRAMS}")
foreach(program IN LISTS PROGRAMS)
  get_filename_component(name ${program} NAME)
  write_output(${FOLDER}/bash/${name} ${program} completion bash)
  write_output(${FOLDER}/zsh/_${name} ${program} completion zsh)
  write_output(${FOLDER}/fish/${name}.fish ${program} completion fish)
  write_output(${FOLDER}/man1/${name}.1 ${program} man)
  # the program's page names a page of each command
  string(REGEX MATCHALL "[a-z]+\\(1\\)" pages "${text}")
  foreach(page IN LISTS pages)
    string(REPLACE "(1)" "" command ${page})
    write_output(${FOLDER}/man1/${name}-${command}.1 ${program} man ${command})
  endforeach()
endforeach()
