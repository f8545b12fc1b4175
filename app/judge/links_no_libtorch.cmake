# SPDX-License-Identifier: Apache-2.0
# Fails when one of FILES needs LibTorch, itself or through a library that it needs.
#   cmake "-DFILES=PROGRAM;LIBRARY" -P links_no_libtorch.cmake
foreach(file IN LISTS FILES)
  foreach(tool "readelf;-d" "ldd")
    execute_process(COMMAND ${tool} ${file} RESULT_VARIABLE result OUTPUT_VARIABLE output
      ERROR_VARIABLE error)
    if(NOT result EQUAL 0)
      message(FATAL_ERROR "${tool} ${file} ended with ${result}:\n${error}")
    endif()
    if(NOT output MATCHES "libc\\.so")
      message(FATAL_ERROR "${tool} must list the libraries of ${file}, got:\n${output}")
    endif()
    if(output MATCHES "lib(torch|c10)[^ \n]*")
      message(FATAL_ERROR "${file} must need no LibTorch, but ${tool} lists ${CMAKE_MATCH_0}")
    endif()
  endforeach()
endforeach()
