// SPDX-License-Identifier: Apache-2.0
// The one precompiled header: what nearly every ATen source and
// test includes. Sources still include what they use. GCC instantiates the templates that a
// precompiled header left pending in every source again: autograd's custom_function.h cost each of
// them 1.3 s, nlohmann/json.hpp 0.5 s, more than the few sources that need them save.
#pragma once
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#if __has_include(<gmock/gmock.h>)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#endif
