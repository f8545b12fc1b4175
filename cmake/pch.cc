// SPDX-License-Identifier: Apache-2.0
// Empty: this file exists to compile the precompiled header once.
