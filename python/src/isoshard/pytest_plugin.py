# SPDX-License-Identifier: Apache-2.0
"""A pytest fixture: `isoshard_check` is isoshard.check with worker processes kept all session.

The reports of a test that fails are kept in a folder of its own, which the failure names.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ._environment import PRECISIONS
from .errors import Divergence, IsoshardError

if TYPE_CHECKING:
    from ._level3 import Report

_MOST_CHARACTERS = 150  # of a folder's name; file systems take 255 bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --isoshard-precision, also for the configuration file, and --isoshard-reports."""
    text = "in which precisions isoshard_check judges (default: ISOSHARD_PRECISION, or both)"
    group = parser.getgroup("isoshard")
    group.addoption("--isoshard-precision", choices=PRECISIONS, help=text)
    parser.addini("isoshard_precision", text)
    group.addoption(
        "--isoshard-reports",
        type=Path,
        metavar="DIR",
        help="where isoshard_check leaves report.html and report.json of each failing test, in a "
        "folder named after its node id (default: below pytest's temporary folder). The failure "
        "names the folder; a passing test leaves none",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers what keeps the reports of failing tests."""
    config.pluginmanager.register(_Reports(config), _Reports.NAME)


@pytest.fixture(scope="session")
def isoshard_check(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Report]]:
    """isoshard.check; its worker processes end with the session.

    The reports of a failing test are kept (--isoshard-reports), those of its last check that did
    not conform. A passing test leaves none.
    """
    from ._level3 import check
    from ._workers import Workers  # torch is imported only where the fixture is used

    workers = Workers()
    given = pytestconfig.getoption("--isoshard-precision")
    precision = given or pytestconfig.getini("isoshard_precision") or None
    reports = pytestconfig.pluginmanager.get_plugin(_Reports.NAME)
    assert isinstance(reports, _Reports)

    def check_in_test(
        *arguments: Any, raises: bool = True, keep: str | Path | None = None, **named: Any
    ) -> Report:
        __tracebackhide__ = True
        with tempfile.TemporaryDirectory(
            prefix="isoshard-check-", ignore_cleanup_errors=True
        ) as temporary:
            folder = Path(temporary if keep is None else keep)
            named = {"workers": workers, "precision": precision, **named}
            if keep is None:
                named.setdefault("made_by", reports.command)
            try:
                report = check(*arguments, raises=False, keep=folder, **named)
            except IsoshardError as error:  # its message says all: our frames would hide it
                raise error.with_traceback(None) from None
            if report.conforms:
                return report
            kept = reports.keep(folder, tmp_path_factory)
        if raises:
            message = f"{report.card.rstrip()}\n  Reports          {kept}"
            raise Divergence(message, report.text, report.exit_code)
        return report

    yield check_in_test
    workers.close()


class _Reports:
    """Knows which test runs, and removes its reports unless it fails."""

    NAME = "isoshard-reports"

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        given: Path | None = config.getoption("--isoshard-reports")
        self._parent = given and config.invocation_params.dir / given  # tests may change folders
        self._test = ""
        self.command: list[str] = []  # the words that repeat the test
        self._has_failed = False
        self._kept: Path | None = None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, None, None]:
        """Removes the reports of an earlier run first, and those of a passing test in the end."""
        self._test, self._has_failed, self._kept = str(item.nodeid), False, None
        file = os.path.relpath(item.path, self._config.invocation_params.dir)
        self.command = ["pytest", "::".join([file, *self._test.split("::")[1:]])]
        if self._parent is not None:
            shutil.rmtree(self._folder_in(self._parent), ignore_errors=True)
        yield
        if self._kept is not None and not self._has_failed:
            shutil.rmtree(self._kept, ignore_errors=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes that some part of the test failed: set-up, call or teardown."""
        self._has_failed |= report.failed

    def keep(self, checked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Copies the reports of a check to the folder of the test, which it returns."""
        parent = self._parent or tmp_path_factory.getbasetemp() / "isoshard-reports"
        self._kept = self._folder_in(parent)
        shutil.rmtree(self._kept, ignore_errors=True)
        self._kept.mkdir(parents=True)
        for precision, folder in (("", checked), (".float64", checked / "float64")):
            for ending in ("html", "json"):
                report = folder / "report" / f"report.{ending}"
                if report.exists():
                    shutil.copy(report, self._kept / f"report{precision}.{ending}")
        return self._kept

    def _folder_in(self, parent: Path) -> Path:
        """The test's id in letters that every system takes in names, and a hash of all of it."""
        name = re.sub(r"[^\w.=-]+", "-", self._test, flags=re.ASCII).strip("-")
        digest = hashlib.sha256(self._test.encode()).hexdigest()[:8]
        return parent / f"{name[:_MOST_CHARACTERS]}-{digest}"
