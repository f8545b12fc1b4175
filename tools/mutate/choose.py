# SPDX-License-Identifier: Apache-2.0
"""Which mutants are tried: a seeded choice in which every folder and every kind has its share."""

from __future__ import annotations

import collections
import hashlib
import math
import pathlib

from mutations import Mutant

LEAST_OF_A_FOLDER = 3


def order_of(mutant: Mutant, seed: int) -> str:
    """A number that depends on the seed and the mutant alone, so other sources do not move it."""
    return hashlib.sha256(f"{seed}\0{mutant.key}".encode()).hexdigest()


def in_turn(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """The mutants of one folder in the order in which they are taken: kinds in turn.

    A line is taken a second time only when every line was taken once.
    """
    piles: dict[str, list[Mutant]] = collections.defaultdict(list)
    for mutant in sorted(mutants, key=lambda m: order_of(m, seed)):
        piles[mutant.kind].append(mutant)
    kinds = sorted(piles, key=lambda kind: hashlib.sha256(f"{seed}\0{kind}".encode()).hexdigest())
    first, later, lines = [], [], set()
    for turn in range(max(map(len, piles.values()), default=0)):
        for kind in kinds:
            if turn >= len(piles[kind]):
                continue
            mutant = piles[kind][turn]
            line = (mutant.name, mutant.line)
            (later if line in lines else first).append(mutant)
            lines.add(line)
    return first + later


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` each folder gives: in proportion to the square root of what it has."""
    result = {folder: min(size, LEAST_OF_A_FOLDER) for folder, size in sizes.items()}
    if sum(result.values()) > count:
        result = dict.fromkeys(sizes, 0)
    while sum(result.values()) < count:
        open_folders = [f for f in sorted(sizes) if result[f] < sizes[f]]
        if not open_folders:
            break
        folder = min(open_folders, key=lambda f: ((result[f] + 1) / math.sqrt(sizes[f]), f))
        result[folder] += 1
    return result


def order_in_text(mutant: Mutant):
    """By file and place; of one place what is outside first, of one piece its statement."""
    place = (mutant.name, mutant.begin, -mutant.end)
    return (*place, not mutant.is_statement, mutant.kind, mutant.after)


def overlaps(one: Mutant, other: Mutant) -> bool:
    """True for two pieces of which neither lies in the other, which two switches cannot have."""
    return one.begin < other.begin < one.end < other.end


def is_about_words(mutant: Mutant) -> bool:
    """True for calls with a literal text among their arguments: mostly what an error will say."""
    return mutant.kind in ("arguments", "call") and '"' in mutant.before


class Choice:
    """Takes mutants folder by folder, and others for those that are dropped."""

    def __init__(self, mutants: list[Mutant], count: int, seed: int) -> None:
        folders: dict[str, list[Mutant]] = collections.defaultdict(list)
        for mutant in mutants:
            if is_about_words(mutant):
                continue
            folders[str(pathlib.PurePosixPath(mutant.name).parent)].append(mutant)
        self.queues = {folder: in_turn(found, seed) for folder, found in folders.items()}
        self.shares = shares({folder: len(found) for folder, found in folders.items()}, count)
        self.taken: dict[str, list[Mutant]] = {folder: [] for folder in folders}
        self.refill()

    def refill(self) -> None:
        """Takes what shares ask for."""
        for folder, queue in self.queues.items():
            taken = self.taken[folder]
            while len(taken) < self.shares[folder] and queue:
                mutant = queue.pop(0)
                same_file = [m for m in taken if m.name == mutant.name]
                if not any(overlaps(mutant, m) or overlaps(m, mutant) for m in same_file):
                    taken.append(mutant)

    def drop(self, mutants: set[Mutant]) -> None:
        """Takes others of the same folders in place of these."""
        for folder in self.taken:
            self.taken[folder] = [m for m in self.taken[folder] if m not in mutants]
        self.refill()

    def chosen(self) -> list[Mutant]:
        """All that are taken, in the order of folders, files and text."""
        taken = [m for found in self.taken.values() for m in found]
        return sorted(taken, key=order_in_text)
