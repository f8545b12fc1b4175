# SPDX-License-Identifier: Apache-2.0
# compare --checkpoint, as a command: checkpoints of isoshard train, and safetensors files.
#   cmake -DPROGRAM=ISOSHARD -DJUDGE=ISOSHARD_JUDGE -DWEIGHTS=DIR -DFOLDER=DIR
#         -P checkpoint_command_test.cmake
# WEIGHTS is a folder with model.safetensors.
include(${CMAKE_CURRENT_LIST_DIR}/run_programs.cmake)

# expect(CODE PATTERN ARGUMENTS...): both programs, with these arguments of compare --checkpoint.
macro(expect code pattern)
  expect_same(${code} "${pattern}" --checkpoint ${ARGN})
endmacro()

file(REMOVE_RECURSE ${FOLDER})
set(train ${PROGRAM} train --preset small --dtype fp32 --optimizer adamw --steps 1
  --reference none)
run(0 "" ${train} --subjects ddp --dp 2 --save-checkpoint ${FOLDER}/dp2)
run(0 "" ${train} --subjects autotp --tp 2 --dp 2 --save-checkpoint ${FOLDER}/tp2)
run(0 "" ${train} --subjects ddp --dp 2 --lr 0.01 --save-checkpoint ${FOLDER}/other)
file(COPY ${WEIGHTS}/model.safetensors DESTINATION ${FOLDER}/weights)

expect(0 "CONFORMS .within tolerance" ${FOLDER}/dp2/ddp ${FOLDER}/tp2/autotp --rtol 1e-2)
expect(1 "DIVERGES" ${FOLDER}/dp2/ddp ${FOLDER}/tp2/autotp)
expect(1 "What broke +weight" ${FOLDER}/dp2/ddp ${FOLDER}/other/ddp --rtol 1e-5)
expect(0 "CONFORMS .exact" ${WEIGHTS}/model.safetensors ${FOLDER}/weights)
expect(1 "is not in ${FOLDER}/weights" ${FOLDER}/dp2/ddp ${FOLDER}/weights --verbose)
expect(2 "needs two checkpoints" ${FOLDER}/weights)
expect(2 "needs two checkpoints" ${FOLDER}/weights ${FOLDER}/weights)
expect(2 "--rename must be FROM=TO" ${WEIGHTS} ${FOLDER}/weights --rename a)
expect(2 "--mesh must be left out with --checkpoint" ${WEIGHTS} ${FOLDER}/weights --mesh dp=2)
expect(3 "no such file" ${FOLDER}/weights ${FOLDER}/missing)
file(WRITE ${FOLDER}/x.pt "PK")
expect(3 "python -m isoshard convert ${FOLDER}/x.pt ${FOLDER}/x.safetensors"
  ${FOLDER}/weights ${FOLDER}/x.pt)
foreach(program PROGRAM JUDGE)
  run(2 "--rename must come with --checkpoint" ${${program}} compare a b --rename a=b)
  run(0 "--checkpoint" ${${program}} compare --help)
endforeach()
file(REMOVE_RECURSE ${FOLDER})
