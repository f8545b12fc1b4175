# SPDX-License-Identifier: Apache-2.0
# Verifies a folder of about 100 million parameters, written by GENERATOR, with PROGRAM at tp 2 x
# dp 2, in FOLDER.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
execute_process(COMMAND ${GENERATOR} ${FOLDER}/model RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "the generator failed: ${result}")
endif()
execute_process(COMMAND ${PROGRAM} verify --model ${FOLDER}/model --tp 2 --dp 2 --subjects autotp
  --dtype fp32
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
file(REMOVE_RECURSE ${FOLDER})
if(NOT result EQUAL 0 OR NOT output MATCHES "1 of 1 case conforms")
  message(FATAL_ERROR "exit ${result}: ${output}")
endif()
