# SPDX-License-Identifier: Apache-2.0
# isoshard-judge compare and isoshard compare say the same, in text, report.json and exit code.
#   cmake -DPROGRAM=ISOSHARD -DJUDGE=ISOSHARD_JUDGE -DFOLDER=DIR -P same_words_test.cmake
function(run code)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT result EQUAL code)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nmust end with ${code}, got ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# expect_same(CODE ARGUMENTS...): both programs, with these arguments of compare.
function(expect_same code)
  run(${code} ${PROGRAM} compare ${ARGN})
  set(expected "${output}")
  run(${code} ${JUDGE} compare ${ARGN})
  string(REPLACE "isoshard-judge: " "isoshard: " output "${output}")
  if(NOT output STREQUAL expected)
    message(FATAL_ERROR
      "compare ${ARGN}: isoshard says\n${expected}\nand isoshard-judge\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${FOLDER})
run(0 ${PROGRAM} verify --preset small --subjects ddp --dp 2 --dtype fp32 --dump ${FOLDER}/runs)
run(1 ${PROGRAM} verify --preset small --subjects ddp --dp 2 --dtype fp32 --fault dp_sum_missing
  --dump ${FOLDER}/wrong)
file(GLOB reference ${FOLDER}/runs/reference_*)
file(GLOB right ${FOLDER}/runs/qwen2_dp2*)
file(GLOB wrong ${FOLDER}/wrong/qwen2_dp2*)
expect_same(0 ${reference} ${right})
expect_same(1 ${reference} ${wrong} --verbose)
expect_same(0 --input-dir ${FOLDER}/runs)
expect_same(1 ${reference} ${right} --rtol 0)
expect_same(2 ${reference})
expect_same(2 ${reference} ${right} --rtol 2)
expect_same(3 ${reference} ${FOLDER}/missing)

foreach(name PROGRAM JUDGE)
  run(1 ${${name}} compare ${reference} ${wrong} --output-dir ${FOLDER}/${name})
  foreach(file report.json report.txt)
    file(READ ${FOLDER}/${name}/${file} ${name}_${file})
  endforeach()
endforeach()
foreach(file report.json report.txt)
  if(NOT PROGRAM_${file} STREQUAL JUDGE_${file})
    message(FATAL_ERROR "${file} of isoshard-judge must be that of isoshard compare")
  endif()
endforeach()
file(REMOVE_RECURSE ${FOLDER})
