# SPDX-License-Identifier: Apache-2.0
"""What each case is expected to do; all that is not named here is to conform."""

from __future__ import annotations

from fnmatch import fnmatchcase

from .spec import Expected, Spec

#: (pattern of ids, what is expected); the first that fits counts.
RULES: list[tuple[str, Expected]] = []


def expected_of(spec: Spec) -> Expected:
    """What is expected of a case."""
    for pattern, expected in RULES:
        if fnmatchcase(spec.id, pattern):
            return expected
    return Expected("conforms")
