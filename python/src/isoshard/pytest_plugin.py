# SPDX-License-Identifier: Apache-2.0
"""A pytest fixture: `isoshard_check` is isoshard.check with worker processes kept all session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ._environment import PRECISIONS

if TYPE_CHECKING:
    from ._level3 import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --isoshard-precision, and isoshard_precision for the configuration file."""
    text = "in which precisions isoshard_check judges (default: ISOSHARD_PRECISION, or both)"
    group = parser.getgroup("isoshard")
    group.addoption("--isoshard-precision", choices=PRECISIONS, help=text)
    parser.addini("isoshard_precision", text)


@pytest.fixture(scope="session")
def isoshard_check(pytestconfig: pytest.Config) -> Iterator[Callable[..., Report]]:
    """isoshard.check; its worker processes end with the session."""
    from ._level3 import check
    from ._workers import Workers  # torch is imported only where the fixture is used

    workers = Workers()
    given = pytestconfig.getoption("--isoshard-precision")
    precision = given or pytestconfig.getini("isoshard_precision") or None
    yield partial(check, workers=workers, precision=precision)
    workers.close()
