# SPDX-License-Identifier: Apache-2.0
"""Lines of the script that made recorded tensors, so that a verdict can name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import _bundle
from ._calls import caller

#: Calls of a step that make several tensors.
FORWARD, BACKWARD, CLIP, STEP = "forward", "backward", "clip", "step"


class CallSites:
    """FILE:LINE of the calls of the current step, each as its first call has it."""

    def __init__(self) -> None:
        self._sites: dict[str, str] = {}

    def see(self, what: str) -> None:
        """Notes who calls: one of the calls above, or activation/NAME/CALL."""
        if what not in self._sites:
            self._sites[what] = caller()

    def take(self) -> dict[str, str]:
        """Hands over the sites of the step that ends."""
        sites, self._sites = self._sites, {}
        return sites


def read_call_sites(directory: Path) -> dict[str, str]:
    """The site of each recorded tensor of a bundle that has one, by STEP/KIND/NAME/CALL."""
    found: dict[str, str] = {}
    for step in _bundle.read_manifest(directory)["steps"]:
        for rank in _bundle.ranks_of_step(directory, step):
            content = _bundle.read_records(directory, step, rank)
            sites: dict[str, str] = content.get("sites", {})
            if not sites:
                continue
            updated = {r["name"]: r["call"] for r in content["records"] if r["kind"] == "param"}
            for record in content["records"]:
                name, call = record["name"], record["call"]
                is_read = record["kind"] == "param" and call < updated[name]
                site = "" if is_read else _site_of(record, sites)
                if site:
                    found.setdefault(f"{step}/{record['kind']}/{name}/{call}", site)
    return found


def _site_of(record: dict[str, Any], sites: dict[str, str]) -> str:
    kind, name = record["kind"], record["name"]
    if kind in ("activation", "activation_grad"):
        return sites.get(f"activation/{name}/{record['call']}", "")
    if kind == "grad" and name.endswith(_bundle.CLIPPED):
        return sites.get(CLIP, "")
    if kind == "grad":  # its module made it
        module = name.rpartition(".")[0]
        return sites.get(f"activation/{module}/0", "") or sites.get(BACKWARD, "")
    if kind == "scalar":
        of_scalar = {"grad_norm": CLIP, "learning_rate": STEP}
        return sites.get(of_scalar.get(name, BACKWARD), "")
    return sites.get(FORWARD if kind == "data_id" else STEP, "")
