# SPDX-License-Identifier: Apache-2.0
"""Sees how a script clips its gradients between backward and the optimizer's step.

What a script does to gradients after backward completes them, or clips them. It completes them if
it reduces them over ranks, or divides them by a count of tokens. It clips them if it multiplies
them with a number that it has computed from the gradients themselves, or limits their elements to
a range. The arithmetic of Python is not seen: its number clips if its product with a norm that
Python has read has at most two digits, as limits have. The gradient before the first clipping is
what `before` keeps; whatever completes a gradient after that makes it part of backward again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ._calls import is_own
from ._dtensor import is_dtensor, local_of

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
#: Operators by which elements are multiplied, and those that limit elements to a range.
_SCALINGS = ("mul", "div", "_foreach_mul", "_foreach_div")
_LIMITS = (
    "clamp",
    "clamp_min",
    "clamp_max",
    "clip",
    "hardtanh",
    "_foreach_clamp_min",
    "_foreach_clamp_max",
)
#: Operators that make a factor of a norm: what a number is computed from with one of them counts.
_OF_FACTORS = (
    *("mul", "div", "add", "sub", "rsub", "reciprocal", "minimum", "maximum", "where"),
    *("clamp", "clamp_min", "clamp_max", "clip", "wait_tensor", "_to_copy", "detach", "alias"),
    *("clone", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand", "lift_fresh"),
)
#: Roundings by which two elements with the same factor may differ.
_ROUNDINGS = 8
_GRADIENT_OF = operator.attrgetter("grad")
#: What scripts add to a norm that they divide by.
_ADDED = (0.0, 1e-6, 1e-8, 1e-12)
#: A relative error that does not tell one limit from another, and how many of the last numbers that
#: were computed from gradients are looked at.
_TOO_COARSE, _LAST = 1e-4, 4


class GradientWatch(dispatch.TorchDispatchMode):
    """Looks at the operators that a script calls from `begin` on, until `end` or `pause`.

    It is below all modes that the script has entered, so that these may end while it looks.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        on_clipping: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters` gives all that may have a `grad`, by name; it is called by `begin`.

        `on_clipping` is called in the operator that clips.
        """
        super().__init__()
        self._parameters, self._on_clipping = parameters, on_clipping
        self._held: dict[str, torch.Tensor] = {}  # the parameters
        self._last: list[torch.Tensor | None] = []  # what each had as `grad` last
        #: Complete gradients, copied before their first clipping.
        self.before: dict[str, torch.Tensor] = {}
        #: Whether something was clipped, if only by a limit that changes no element.
        self.has_clipped = False
        self._known: dict[str, torch.Tensor] = {}  # what each `grad` was last
        self._places: dict[int, list[tuple[int, int, str]]] = {}  # begin, end, name by storage
        #: What was computed from gradients. Of a number: the norm that it was computed from, or it
        #: itself.
        self._derived: Any = WeakIdKeyDictionary()
        self._norms: list[torch.Tensor] = []  # by which gradients were multiplied
        self._limited: Any = WeakIdKeyDictionary()  # gradients with limited elements, elsewhere
        self._numbers: list[torch.Tensor] = []  # of those that were derived, kept alive
        self._read: list[tuple[torch.Tensor, float]] = []  # those that Python has read
        #: The last factors of gradients that are no known limit over a norm, by name.
        self.scaled: dict[str, float] = {}
        self._done: set[str] = set()  # gradients whose clipping is recorded already
        self._looks = False

    # -- when to look ------------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets what it has seen, and looks from here on: backward has ended."""
        self.end()
        self._held = dict(self._parameters())
        self._known = self._gradients()
        self._see_known()
        self.resume()

    def end(self) -> None:
        """Looks no more, and forgets what it has seen."""
        self.pause()
        self.before, self._known, self._places, self.scaled = {}, {}, {}, {}
        self._held, self._last = {}, []
        self._limited, self._done, self.has_clipped = WeakIdKeyDictionary(), set(), False
        self._forget_numbers()

    def _forget_numbers(self) -> None:
        self._derived, self._numbers, self._read, self._norms = WeakIdKeyDictionary(), [], [], []

    def norm(self) -> float | None:
        """The norm that all clipping of this step has used, if it is known."""
        found: set[float] = set()
        for number in self._norms:
            if any(p.is_partial() for p in getattr(number, "placements", ())):
                return None
            found.add(float(local_of(number)))
        return found.pop() if len(found) == 1 else None

    def pause(self) -> None:
        """Looks no more until `resume`."""
        if self._looks:
            self._looks = False
            self._move(is_in=False)

    def resume(self) -> None:
        """Looks again, if it has begun."""
        if self._known and not self._looks:
            self._looks = True
            self._move(is_in=True)

    def leave(self, names: Iterable[str]) -> None:
        """Gradients of these names are recorded: their clipping is one that torch makes."""
        self._done |= set(names)
        self.has_clipped = True

    def see_replaced(self) -> None:
        """Takes up what the script has assigned to `grad` in place of a gradient."""
        if not self._known:
            return
        if all(map(operator.is_, map(_GRADIENT_OF, self._held.values()), self._last)):
            return  # most operators find it so, and there are many
        own = self._gradients()
        replaced = [n for n, t in self._known.items() if own.get(n) is not t]
        for name in replaced:
            if name in own:
                self._settle(name, self._known[name].detach(), own[name])
            else:
                self.before.pop(name, None)
        self._known = own
        self._see_known()

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self._held.items() if p.grad is not None}

    def _move(self, *, is_in: bool) -> None:
        """Enters or leaves the stack of modes at its bottom."""
        above = []
        while len(dispatch._get_current_dispatch_mode_stack()) > 0:
            mode = dispatch._pop_mode()
            if mode is not self:
                above.append(mode)
        if is_in:
            dispatch._push_mode(self)
        for mode in reversed(above):
            dispatch._push_mode(mode)

    def _see_known(self) -> None:
        """Takes up where the gradients that are known have their memory."""
        self._places = {}
        self._last = [self._known.get(name) for name in self._held]
        for name, gradient in self._known.items():
            if _has_memory(local_of(gradient)):
                storage, begin, end = _span(local_of(gradient))
                self._places.setdefault(storage, []).append((begin, end, name))

    # -- operators ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own() or not self._looks:
            return func(*args, **kwargs)
        self.see_replaced()
        leaves = tree_leaves((args, kwargs))
        if func.namespace in _COLLECTIVES:
            return self._collective(func, args, kwargs, leaves)
        if not func._schema.is_mutable:
            result = func(*args, **kwargs)
            self._note_derived(func, leaves, result)
            return result
        written = list(_written(func, args, kwargs))
        names = self._names_of(written)
        open_ = [n for n in names if n not in self._done]
        held = {n: self._known[n].detach().clone() for n in open_}
        result = func(*args, **kwargs)
        self._note_written(func, args, kwargs, held)
        if not names:
            self._note_derived(func, leaves, written)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Calls an operator that exchanges tensors. Schemas of c10d do not say what they write."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_in_place = func._schema.name.endswith("_")
        if is_in_place:
            self._drop(self._names_of(tensors))
        result = func(*args, **kwargs)
        self._note_derived(func, leaves, [tensors, result] if is_in_place else result)
        return result

    def _note_written(self, func: Any, args: Any, kwargs: Any, held: dict[str, Any]) -> None:
        """An operator has changed gradients, which were `held` before."""
        name = _name_of(func)
        others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if not isinstance(leaf, bool)]
        if name in _LIMITS:
            self._keep(held)
        elif name in _SCALINGS and all(_is_number(other) for other in others):
            changed = {n: t for n, t in held.items() if self._differs(n, t)}
            if not any(isinstance(other, torch.Tensor) for other in others):
                for each, tensor in changed.items():
                    self._settle(each, tensor, self._known[each])
                return
            sources = self._sources_of(others)
            self._norms += sources if held else []
            self._keep(changed if sources else {})
        elif name.startswith("_amp_"):
            return  # it takes the loss scale out
        else:
            limited = any(t in self._limited for t in others if isinstance(t, torch.Tensor))
            for each, tensor in held.items():
                self._settle(each, tensor, self._known[each], is_limited=limited)

    def _sources_of(self, factors: list[Any]) -> list[torch.Tensor]:
        """The norms from which factors have been computed; none if they are no such numbers."""
        tensors = [factor for factor in factors if isinstance(factor, torch.Tensor)]
        return [n for n in map(self._derived.get, tensors) if n is not None]

    def _may_clip(self, factor: float, error: float) -> bool:
        """Whether a factor is what Python has read, or is a limit over a norm."""
        if error > _TOO_COARSE:
            return False
        read = [value for _, value in self._read]
        norms = [float(local_of(number)) for number in self._numbers[-_LAST:]]
        if read:
            norms += [read[-1], math.hypot(*read), math.sqrt(abs(math.fsum(read)))]
        is_read = any(math.isclose(factor, value, rel_tol=error) for value in [*read, *norms])
        return is_read or any(
            _is_limit(factor * (norm + added), error) for norm in norms for added in _ADDED
        )

    def _settle(
        self,
        name: str,
        before: torch.Tensor,
        after: torch.Tensor,
        *,
        is_limited: bool = False,
    ) -> None:
        """A gradient was written over: by itself times one factor, by its limited self, or anew."""
        is_limited = is_limited or after in self._limited
        if name in self._done:
            return
        a, b = local_of(before), local_of(after)
        if a.layout != torch.strided or b.layout != torch.strided:
            return  # clipping of sparse gradients is not seen
        if is_limited:
            self._keep({name: before.clone()})
        elif getattr(before, "placements", None) != getattr(after, "placements", None):
            self._drop([name])  # it was added up over ranks
        elif a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b):
            return
        elif (factor := _factor_of(a, b)) is None:
            self._drop([name])
        elif self._may_clip(factor, _error_of(a, b)):
            self._norms += [norm for norm, _ in self._read]
            self._keep({name: before.clone()})
        else:
            self.scaled[name] = factor

    def _differs(self, name: str, held: torch.Tensor) -> bool:
        return not torch.equal(local_of(held), local_of(self._known[name]))

    def _keep(self, held: dict[str, torch.Tensor]) -> None:
        if not held:
            return
        self._on_clipping()
        self.has_clipped = True
        for name, tensor in held.items():
            self.before.setdefault(name, tensor)

    def _drop(self, names: Iterable[str]) -> None:
        """What is written now completes these gradients; numbers of the old ones are forgotten."""
        found = [name for name in names if name not in self._done]
        for name in found:
            self.before.pop(name, None)
            self.scaled.pop(name, None)
        if found:
            self._forget_numbers()
            self.has_clipped = bool(self.before or self._done)

    def _note_derived(self, func: Any, inputs: list[Any], outputs: Any) -> None:
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        if not any(t in self._derived or self._is_gradient(t) for t in tensors):
            return
        name = _name_of(func)
        if name == "_local_scalar_dense":
            if tensors[0].is_floating_point() and tensors[0] in self._derived:
                self._read.append((self._derived[tensors[0]], float(outputs)))
            return
        limits = name in _LIMITS or any(t in self._limited for t in tensors)
        numbers = [t for t in tensors if t in self._derived and t.numel() == 1]
        numbers = [t for t in numbers if t.is_floating_point()]
        is_of_one = name in _OF_FACTORS and len(numbers) == 1
        found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        found += [leaf._local_tensor for leaf in found if is_dtensor(leaf)]
        for leaf in found:
            if self._is_gradient(leaf):
                continue
            is_number = leaf.numel() == 1 and leaf.is_floating_point()
            self._derived[leaf] = None
            if is_number:
                self._derived[leaf] = self._derived[numbers[0]] if is_of_one else leaf
                self._numbers.append(leaf)
            if limits and any(leaf.shape == t.shape for t in tensors):
                self._limited[leaf] = None

    # -- memory ------------------------------------------------------------------------------

    def _is_gradient(self, tensor: torch.Tensor) -> bool:
        return bool(self._names_of([tensor]))

    def _names_of(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """The gradients whose memory the tensors share."""
        found: dict[str, None] = {}
        for tensor in tensors:
            if not _has_memory(local_of(tensor)):
                continue
            storage, begin, end = _span(local_of(tensor))
            for first, last, name in self._places.get(storage, []):
                if begin < last and first < end:
                    found[name] = None
        return list(found)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in a storage of its own.

    Those of a program that is traced have none, and of a subclass its parts may have them.
    """
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.layout == torch.strided and not tensor.is_nested


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the bytes from its first element to its last one there."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return 0, 0, 0
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), begin, begin + (steps + 1) * size


def _name_of(func: Any) -> str:
    """The name of an operator, without what marks it as one in place."""
    name: str = func._schema.name.rpartition("::")[2]
    return name.removesuffix("_") if not name.startswith("__") else name


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


def _factor_of(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """The factor by which all elements have changed, if they have one."""
    if before.shape != after.shape or not before.numel() or not before.is_floating_point():
        return None
    a, b = before.double(), after.double()
    factor = (a * b).sum() / (a * a).sum()
    allowed = _error_of(before, after)
    is_one = bool(((b - factor * a).abs() <= allowed * (factor * a).abs()).all())
    return float(factor) if is_one else None


def _error_of(before: torch.Tensor, after: torch.Tensor) -> float:
    return _ROUNDINGS * float(max(torch.finfo(t.dtype).eps for t in (before, after)))


def _is_limit(number: float, error: float) -> bool:
    """Whether a number has at most two digits, but for roundings."""
    return math.isclose(number, float(f"{number:.1e}"), rel_tol=error)
