# SPDX-License-Identifier: Apache-2.0
"""Where modules have an object that they imported by name."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A name in a module: `content[name]` is the object."""

    path: str  # of the module, with dots
    content: dict[str, Any]
    name: str


class _Ahead(NamedTuple):
    wanted: dict[int, Any]
    modules: dict[str, Any]
    places: list[Place]


_ahead: _Ahead | None = None


def look_ahead(objects: Iterable[Any]) -> None:
    """Reads all modules now, so that processes that are forked from this one need not.

    There each object that is read costs a copy of its page of memory.
    """
    global _ahead
    _ahead = None
    wanted = {id(o): o for o in objects}
    _ahead = _Ahead(wanted, dict(sys.modules), copies_of(wanted.keys()))


def copies_of(ids: Collection[int]) -> list[Place]:
    """All places of these objects."""
    places: list[Place] = []
    seen: Mapping[str, Any] = {}
    if _ahead is not None and all(i in _ahead.wanted for i in ids):
        seen = _ahead.modules
        places = [place for place in _ahead.places if id(place.content.get(place.name)) in ids]
    for path, module in list(sys.modules.items()):
        if module is not seen.get(path):
            content = getattr(module, "__dict__", {})
            places += [Place(path, content, n) for n, v in list(content.items()) if id(v) in ids]
    return places


def replace_copies(replaced: Mapping[int, Any]) -> None:
    """Puts objects in place of others, by id, in all modules that imported these by name."""
    if replaced:
        for _, content, name in copies_of(replaced.keys()):
            content[name] = replaced[id(content[name])]
