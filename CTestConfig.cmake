# SPDX-License-Identifier: Apache-2.0
# Settings of a CTest dashboard run (`ctest -D Experimental`): results stay on the machine, nothing
# is submitted.
set(CTEST_PROJECT_NAME "isoshard")
set(CTEST_NIGHTLY_START_TIME "01:00:00 UTC")
set(CTEST_DROP_METHOD "")
set(CTEST_SUBMIT_URL "")
set(CTEST_CUSTOM_MAXIMUM_PASSED_TEST_OUTPUT_SIZE 4096)
set(CTEST_CUSTOM_MAXIMUM_FAILED_TEST_OUTPUT_SIZE 1048576)
