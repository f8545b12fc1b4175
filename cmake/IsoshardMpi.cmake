# SPDX-License-Identifier: Apache-2.0
# MPI::MPI_C and MPIEXEC_EXECUTABLE where MPI is installed; otherwise a line that says what is
# missing.
include_guard(GLOBAL)

# Debian's openmpi-bin brings a wrapper without headers, with which FindMPI ends the configuration.
find_program(MPI_C_COMPILER NAMES mpicc)
if(MPI_C_COMPILER)
  execute_process(COMMAND ${MPI_C_COMPILER} -showme:incdirs
    OUTPUT_VARIABLE _mpi_folders OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  separate_arguments(_mpi_folders)
  foreach(_folder IN LISTS _mpi_folders)
    if(NOT IS_DIRECTORY "${_folder}")
      set(_mpi_lacks "${_folder}")
    endif()
  endforeach()
endif()
if(DEFINED _mpi_lacks)
  message(STATUS "MPI is left out: ${MPI_C_COMPILER} needs ${_mpi_lacks} (libopenmpi-dev)")
else()
  find_package(MPI QUIET COMPONENTS C)
  if(NOT MPI_C_FOUND)
    message(STATUS "MPI is left out: it was not found (libopenmpi-dev, openmpi-bin)")
  endif()
endif()
if(CMAKE_REQUIRE_FIND_PACKAGE_MPI AND NOT MPI_C_FOUND)
  message(FATAL_ERROR "this preset needs MPI; install libopenmpi-dev and openmpi-bin")
endif()
