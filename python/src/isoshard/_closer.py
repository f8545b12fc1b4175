# SPDX-License-Identifier: Apache-2.0
"""A closer look at a module whose first wrong tensor has no known cause.

Hooks of modules see their outputs. Between two modules a script calls functions of torch, and what
they give, and the gradients of it, show which line goes wrong. So the runs are made once more, and
each such function inside of one module is recorded. The verdict on them names the first wrong one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ._calls import caller, is_own
from ._data import Cause, CauseId
from ._pieces import REPLACED
from ._seconds import Seconds
from .errors import IsoshardError

if TYPE_CHECKING:
    from ._judge import Driver

_KINDS = ("activation", "activation_grad", "grad")
_STAGES = {"activation": "what is given by", "activation_grad": "the gradient of what is given by"}
#: Records of functions may be missing where ranks call other ones than the single process.
_OF_FUNCTIONS = "activation/*@*,activation_grad/*@*"
#: Functions that give nothing new, and those that perturbed runs compute by others.
_LEFT_OUT = ("__get__", "__set__", "register_hook", *REPLACED)
#: Bytes of results after which no more are recorded in one forward pass.
_MOST_BYTES = 256 << 20
#: A run of a closer look is ended after this many times the seconds of the judged run, and not
#: before it has taken _LEAST_SECONDS.
_MOST_TIMES, _LEAST_SECONDS = 5, 30.0


class FunctionTaps(TorchFunctionMode):
    """Sees what functions of torch give inside of a module's forward pass.

    The mode is entered before the script begins, so that it is below all modes of the script.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self._tap: Callable[[str, torch.Tensor], None] = lambda name, value: None
        self._depth = self._seen = 0

    def attach(
        self, module: torch.nn.Module, tap: Callable[[str, torch.Tensor], None]
    ) -> list[Any]:
        """Calls `tap` with a name, MODULE.FUNCTION@FILE:LINE, for each result; returns handles."""
        self._tap = tap

        def change(by: int) -> None:
            self._depth += by
            self._seen = self._seen if self._depth > 0 else 0

        return [
            module.register_forward_pre_hook(lambda *_: change(1)),
            module.register_forward_hook(lambda *_: change(-1), always_call=True),
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            torch.compiler.is_compiling()
            or self._depth <= 0
            or is_own()
            or not torch.is_grad_enabled()
        ):
            return result
        name = getattr(func, "__name__", "")
        if name in _LEFT_OUT:
            return result
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for made in tree_leaves(result):
            is_new = isinstance(made, torch.Tensor) and id(made) not in given
            if is_new and made.requires_grad and self._seen < _MOST_BYTES:
                self._seen += made.nbytes
                place = f"{self.module}." if self.module else ""
                self._tap(f"{place}{name.strip('_')}@{caller()}", made)
        return result


def look_closer(driver: Driver) -> Cause | None:
    """The first wrong function in the module of the first wrong tensor, as a cause of it.

    None where the verdict has a cause, where no function of that pass, forward or backward, is
    wrong, and where the reference is no run of the script.
    """
    if driver.options.reference is not None or not driver.options.closer_look:
        return None
    found = next(iter(findings_of(driver.folder)), None)
    if found is None or found["cause"] is not None or found["kind"] not in _KINDS:
        return None
    name = str(found["name"])
    module = name.rpartition(".")[0]
    if found["kind"] == "grad":  # the parameter of a module
        module = module.rpartition(".")[0]
    options = dataclasses.replace(
        driver.options,
        steps=int(found["step"]) + 1,
        report=None,
        quiet=True,
        verbose=False,
        not_recorded=[*driver.options.not_recorded, _OF_FUNCTIONS],
    )
    driver.say("closer look: all runs once more, with what functions of torch give ...")
    longest = driver.seconds.parts.get("run", 0.0)
    limit = min(driver.limit, max(_LEAST_SECONDS, _MOST_TIMES * longest))
    closer = type(driver)(options, driver.folder / "closer", Seconds(), driver.precision, limit)
    closer.functions_in = module
    try:
        closer.run_again()
    except (IsoshardError, OSError) as error:
        if driver.options.verbose:
            print(f"There is no closer look: {error}")
        return None  # the verdict stands without it
    kind = "activation" if found["kind"] == "activation" else "activation_grad"
    for finer in findings_of(closer.folder):
        if finer["kind"] == kind and "@" in finer["name"]:
            words = {"tensor": f"{_STAGES[kind]} {finer['name']}"}
            text = str(finer["diagnosis"]).partition(f"{finer['name']}: ")[2]
            if text:
                words["cause"] = f": {text}"
            cause = CauseId("function_wrong", {}, words)
            return Cause(int(found["step"]), str(found["kind"]), name, cause)
    return None


def findings_of(folder: Path) -> list[dict[str, Any]]:
    """The findings of a folder's verdict, in their order."""
    report = folder / "report" / "report.json"
    if not report.exists():
        return []
    (case,) = json.loads(report.read_text())["cases"]
    found: list[dict[str, Any]] = case["findings"]
    return found
