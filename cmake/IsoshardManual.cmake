# SPDX-License-Identifier: Apache-2.0
# Manual pages and shell completion of both programs, made by the programs themselves from what
# their commands declare, and installed.
include_guard(GLOBAL)

set(_isoshard_manual_dir ${PROJECT_BINARY_DIR}/manual)
add_custom_command(OUTPUT ${_isoshard_manual_dir}/.made
  COMMAND ${CMAKE_COMMAND} -DPROGRAMS=$<TARGET_FILE:isoshard_app>,$<TARGET_FILE:isoshard_judge_app>
    -DFOLDER=${_isoshard_manual_dir} -P ${PROJECT_SOURCE_DIR}/cmake/MakeManual.cmake
  COMMAND ${CMAKE_COMMAND} -E touch ${_isoshard_manual_dir}/.made
  DEPENDS isoshard_app isoshard_judge_app ${PROJECT_SOURCE_DIR}/cmake/MakeManual.cmake
  COMMENT "Manual pages and shell completion" VERBATIM)
add_custom_target(isoshard_manual ALL DEPENDS ${_isoshard_manual_dir}/.made)

install(DIRECTORY ${_isoshard_manual_dir}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR}
  COMPONENT runtime)
install(DIRECTORY ${_isoshard_manual_dir}/bash/
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT runtime)
install(DIRECTORY ${_isoshard_manual_dir}/zsh/
  DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions COMPONENT runtime)
install(DIRECTORY ${_isoshard_manual_dir}/fish/
  DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT runtime)
