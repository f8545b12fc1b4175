# SPDX-License-Identifier: Apache-2.0
# The bundles of examples/bundle_writer, written by Python's standard library alone:
# docs/reference/bundle.md says enough to write them.
#   cmake -DPYTHON=PYTHON3 -DWRITER=FILE.py -DJUDGE=ISOSHARD_JUDGE -DSTORED=DIR -DFOLDER=DIR
#         -P bundle_writer_test.cmake
# STORED has the bundles that an earlier run of the writer left (fixtures/frameworks).
include(${CMAKE_CURRENT_LIST_DIR}/run_programs.cmake)

file(REMOVE_RECURSE ${FOLDER})
# -I -S: no package of this machine is to be had
run(0 "" ${PYTHON} -I -S ${WRITER} ${FOLDER})
foreach(bundle reference right faulty_sum perturbed1)
  run(0 "linear" ${JUDGE} bundle check ${FOLDER}/${bundle})
endforeach()
run(1 "must be equal" ${JUDGE} compare ${FOLDER}/reference ${FOLDER}/right --verbose)
run(0 "13 records move in 3 perturbed runs" ${JUDGE} respond ${FOLDER}/reference
  ${FOLDER}/perturbed1 ${FOLDER}/perturbed2 ${FOLDER}/perturbed3)
run(0 "CONFORMS .within tolerance." ${JUDGE} compare ${FOLDER}/reference ${FOLDER}/right)
run(1 "What broke +gradient of w .step 0.: .*Likely cause .*scale 2 = dp" ${JUDGE} compare
  ${FOLDER}/reference ${FOLDER}/faulty_sum)

# The stored bundles hold the same numbers, so those that are judged without Python are these.
foreach(bundle reference right faulty_sum)
  file(GLOB_RECURSE tensors RELATIVE ${FOLDER}/${bundle} ${FOLDER}/${bundle}/*.safetensors)
  if(NOT tensors)
    message(FATAL_ERROR "${FOLDER}/${bundle} must hold tensors, got none")
  endif()
  foreach(file IN LISTS tensors)
    file(SHA256 ${FOLDER}/${bundle}/${file} fresh)
    file(SHA256 ${STORED}/${bundle}/${file} stored)
    if(NOT fresh STREQUAL stored)
      message(FATAL_ERROR "${STORED}/${bundle}/${file} must be what ${WRITER} writes")
    endif()
  endforeach()
endforeach()
file(REMOVE_RECURSE ${FOLDER})
