# SPDX-License-Identifier: Apache-2.0
"""A pytest fixture: `isoshard_check` is isoshard.check with worker processes kept all session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ._level3 import Report


@pytest.fixture(scope="session")
def isoshard_check() -> Iterator[Callable[..., Report]]:
    """isoshard.check; its worker processes end with the session."""
    from ._level3 import check
    from ._workers import Workers  # torch is imported only where the fixture is used

    workers = Workers()
    yield partial(check, workers=workers)
    workers.close()
