# SPDX-License-Identifier: Apache-2.0
"""The text of a stand-alone script that shows one wrong tensor of a training script.

The text needs torch and nothing of this package. It starts the ranks itself. Each rank runs the
training script with a few hooks around it, saves the tensor when the step is made, and ends.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._repro_places import Places

MOST_LINES = 60
#: Ends the first line of every script that is written here.
MARK = "exit code 1: the bug is there, 0: it is gone, 2: a run failed"
_COLUMNS = 100
#: Parts of names that wrappers add.
_WRAPPERS = r"^(module\.)+|_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
#: As isoshard._hooks names inputs of modules.
_INPUTS = {"core": "o_proj", "act": "down_proj"}


class NotShown(Exception):
    """No script can show this tensor; the message is a clause that says why."""


@dataclass(frozen=True)
class Wrong:
    """The tensor to show, and what is allowed of it."""

    step: int
    kind: str
    name: str
    call: int
    title: str  #: such as: gradient of w (step 0)
    cause: str
    places: Places
    factor: float  #: by which the value of a rank is multiplied to be the true one
    bound: float
    bound_is: str  #: relative (error), absolute (error) or scale (error of the factor)
    bound_from: str  #: where the bound comes from, in words
    parameter: str  #: a parameter of the model, which tells the model from other modules
    calls: int = 1  #: of the module in one forward pass
    is_clipped: bool = False  #: whether the script clips gradients with torch's function


@dataclass(frozen=True)
class Start:
    """How the training script is started."""

    script: str  #: its path from `folder`, or the name of a module
    arguments: Sequence[str]
    world_size: int
    mesh: str
    folder: str  #: where it runs, from the folder of the written script
    is_module: bool = False
    single: Sequence[str] | None = None  #: script and arguments of one process, if they are others
    environment: dict[str, str] = field(default_factory=dict)  #: that the launcher adds
    adds_local_rank: bool = False
    no_dropout: bool = False
    shrinks_meshes: bool = False  #: whether a DeviceMesh has one rank in one process
    is_float64: bool = False  #: whether torch's default dtype is float64
    is_careful: bool = False  #: reads gradients before the step, adds up DTensors that are summands
    is_brief: bool = False  #: whether lines are saved: each sentence about the tensor is one


@dataclass
class _Hooks:
    """What the hooks around the training script do to save the tensor."""

    value: str = ""  #: what is saved at an optimizer's step; empty if `more` saves it
    find: str = ""  #: what is found in `module`, when the model is called, as a generator
    begin: list[str] = field(default_factory=list)  #: when it is found
    passes: list[str] = field(default_factory=list)  #: before each call of the model
    more: list[str] = field(default_factory=list)
    is_of_holder: bool = False  #: whether the step is of the optimizer that holds what was found
    is_before: bool = False  #: whether it is saved before the step


def plain(name: str) -> str:
    """A name without what wrappers add."""
    return re.sub(_WRAPPERS, "", name)


def write(wrong: Wrong, start: Start, name: str) -> str:
    """The text of the script that is to be stored under `name`; raises NotShown."""
    run = [*_run(start), *_whole(wrong, start)]
    parts = [_head(wrong, start, name), _rank_main(wrong, start), run, _main(wrong, start)]
    return "\n\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(wrong: Wrong, start: Start, name: str) -> list[str]:
    title = wrong.title[:1].upper() + wrong.title[1:]
    needs = start.script if start.is_module else os.path.join(start.folder, start.script)
    said = [
        f"{title}: {start.world_size} ranks ({start.mesh}) differ from one process.",
        *([f"Likely cause: {wrong.cause.rstrip('.')}."] if wrong.cause else []),
        f"It needs torch and {os.path.normpath(needs)}. (isoshard repro wrote it.)",
    ]
    texts = [text.replace("\\", "/").replace('"', "'") for text in said]
    lines = [line for text in texts for line in textwrap.wrap(text, _COLUMNS - 3)]
    if start.is_brief:
        lines = [textwrap.shorten(text, _COLUMNS - 3, placeholder=" ...") for text in texts]
    hooks = _hooks_of(wrong, start)
    register = [f"from torch.optim.optimizer import {_register(hooks)}"] if hooks.value else []
    gap = [] if start.is_brief else [""]
    return [
        f"# python {name}    {MARK}",
        f'"""{lines[0]}',
        *lines[1:],
        '"""',
        f"import os, {'re, ' if hooks.find else ''}runpy, socket, sys, tempfile",
        *gap,
        "import torch",
        *register,
        *gap,
        *([f'WRAPPERS = r"{_WRAPPERS}"'] if hooks.find else []),
        f"ALLOWED = {wrong.bound:.4g}  # {wrong.bound_from}",
    ]


# -- what runs on each rank ----------------------------------------------------------------------


def _hooks_of(wrong: Wrong, start: Start) -> _Hooks:
    """What is hooked depends on the kind of the tensor."""
    kind, name = wrong.kind, wrong.name
    find = f'p for n, p in module.named_parameters() if {_IS_NAMED}"{wrong.parameter}"'
    if kind == "param" and wrong.step == 0 and wrong.call == 0:
        return _Hooks("", find, ["save(found[0])"])
    if kind == "param":
        return _Hooks("found[0]", find, is_of_holder=True)
    if kind == "grad" and wrong.is_clipped:
        return _Hooks("", find, more=_clipping("found[0].grad", wrong.step))
    if kind == "grad":
        return _Hooks("found[0].grad", find, is_of_holder=True, is_before=start.is_careful)
    if kind == "optimizer" and name.endswith(".buffer"):
        own = plain(name.removesuffix(".buffer"))
        find = f'b for n, b in module.named_buffers() if {_IS_NAMED}"{own}"'
        return _Hooks("found[0]", find)
    if kind == "optimizer":
        key = name.rpartition(".")[2]
        if key == "hyperparameters":
            raise NotShown("settings of an optimizer differ, and no tensor")
        return _Hooks(f'optimizer.state[found[0]]["{key}"]', find, is_of_holder=True)
    if kind == "data_id":
        passes = [f"seen.append({_argument(name)})"]
        return _Hooks("torch.cat(seen)", find, passes=passes)
    if kind == "scalar" and name in ("loss", "loss_per_dp_rank"):
        return _Hooks("sum(seen)", more=_LOSS)
    if kind == "scalar" and name == "grad_norm":
        return _Hooks(more=_clipping("norm", wrong.step))
    if kind in ("activation", "activation_grad"):
        return _of_module(wrong)
    raise NotShown(f"a script can hook no record of kind {kind} and name {name}")


_IS_NAMED = 're.sub(WRAPPERS, "", n) == '


def _clipping(value: str, step: int) -> list[str]:
    function = "torch.nn.utils.clip_grad._clip_grads_with_norm_"
    if step == 0:  # the first call counts, and does not return
        lines = ["def clipped(parameters, max_norm, norm, *args, **kwargs):"]
        return [*lines, f"    save({value})", f"{function} = clipped"]
    return [
        "def clipped(parameters, max_norm, norm, *args, **kwargs):",
        "    steps.append(norm)",
        f"    if len(steps) > {step}:",
        f"        save({value})",
        "    clip(parameters, max_norm, norm, *args, **kwargs)",
        f"clip, {function} = {function}, clipped",
    ]


_LOSS = [
    "def from_loss(losses, *args, **kwargs):",
    "    seen.append(losses.detach().double().reshape(1))",
    "    return backward(losses, *args, **kwargs)",
    "backward, torch.autograd.backward = torch.autograd.backward, from_loss",
]


def _of_module(wrong: Wrong) -> _Hooks:
    """The output or input of a module in each micro-batch, or its gradient."""
    outer, _, last = wrong.name.rpartition(".")
    is_input = last in _INPUTS
    name = ".".join([*filter(None, [outer]), _INPUTS[last]]) if is_input else wrong.name
    find = 'm for n, m in module.named_modules() if re.sub(WRAPPERS, "", n + ".") == '
    what = "args[0]" if is_input else "out[0] if isinstance(out, (tuple, list)) else out"
    hook = "register_forward_pre_hook" if is_input else "register_forward_hook"
    more = [f"def observe(_, args{'' if is_input else ', out'}):"]
    condition = "torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1"
    passes: list[str] = []
    if wrong.calls > 1:
        more = ["calls = []", *more, "    calls.append(0)"]
        condition += f" and len(calls) == {wrong.call + 1}"
        passes = ["calls.clear()"]
    more += [f"    if {condition}:"]
    if wrong.kind == "activation":
        more += [f"        seen.append({what})"]
    else:
        more += [f"        ({what}).register_hook(seen.append)"]
    begin = [f"found[0].{hook}(observe)"]
    return _Hooks("torch.cat(seen)", f'{find}"{name}."', begin, passes, more)


def _argument(name: str) -> str:
    """An argument of the model's call, by the name that isoshard._hooks gives it."""
    first, *path = name.split(".")
    numbered = re.fullmatch(r"input(\d+)", first)
    value = f'kwargs["{first}"]'
    if first == "input_ids":
        value = f"(args[0] if args else {value})"
    elif numbered is not None:
        value = f"args[{numbered[1]}]"
    return value + "".join(f"[{part}]" if part.isdigit() else f"[{part!r}]" for part in path)


def _rank_main(wrong: Wrong, start: Start) -> list[str]:
    hooks = _hooks_of(wrong, start)
    lines = ["def rank_main(rank, folder):  # runs the script until the tensor is known"]
    lines += ["    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))"]
    lines += ["    torch.set_default_dtype(torch.float64)"] if start.is_float64 else []
    names, values = ["call", "found"], ["torch.nn.Module.__call__", "[None]"]
    text = "".join([hooks.value, *hooks.passes, *hooks.more])
    used = [n for n in ("seen", "steps") if n in text or (n == "steps" and wrong.step)]
    lines += [f"    {', '.join([*names, *used])} = {', '.join([*values, *['[]' for _ in used]])}"]
    if hooks.find or start.no_dropout:
        lines += _called(hooks, start)
    lines += ["    def save(value):"]
    if wrong.kind == "grad" and start.is_careful:
        lines += ['        if any(p.is_partial() for p in getattr(value, "placements", ())):']
        lines += ["            value = value.full_tensor()"]
    value = 'getattr(value.detach(), "to_local", value.detach)().double()'
    shape = ".reshape(1)" if _is_number(wrong) else ""
    lines += [f'        torch.save({value}{shape}, f"{{folder}}/{{rank}}")']
    lines += ["        torch.distributed.is_initialized() and torch.distributed.barrier()"]
    lines += ["        os._exit(0)  # until the barrier other ranks may need this one"]
    lines += _step(wrong, hooks)
    lines += [f"    {line}" for line in hooks.more]
    lines += _SHRINKING if start.shrinks_meshes else []
    return [*lines, *(f"    {line}" for line in _script(start))]


def _called(hooks: _Hooks, start: Start) -> list[str]:
    """The hook of all modules: the first one that has what is looked for is the model."""
    condition, _, value = hooks.find.rpartition(" == ")
    lines = ["    def called(module, *args, **kwargs):"]
    lines += ["        if found[0] is None and torch.is_grad_enabled():"]
    lines += [f"            found[:] = [{condition}"]
    lines += [f"                        == {value}] or [None]"]
    begin = [*(_NO_DROPOUT if start.no_dropout else []), *hooks.begin]
    begin += ["found.append(module)"] if hooks.passes else []
    if len(begin) == 1:
        lines += [f"            found[0] is not None and {begin[0]}"]
    elif begin:
        lines += ["            if found[0] is not None:"]
        lines += [f"                {line}" for line in begin]
    if hooks.passes:
        lines += ["        if module is found[-1] and torch.is_grad_enabled():"]
        lines += [f"            {line}" for line in hooks.passes]
    lines += ["        return call(module, *args, **kwargs)"]
    return [*lines, "    torch.nn.Module.__call__ = called"]


def _is_number(wrong: Wrong) -> bool:
    return wrong.kind in ("scalar", "optimizer") and wrong.places.shape == [1]


def _step(wrong: Wrong, hooks: _Hooks) -> list[str]:
    """The hook of an optimizer's step: of the one that holds the parameter, or of the first one."""
    if not hooks.value:
        return []
    lines = ["    def stepped(optimizer, *_):"]
    held = 'p for g in optimizer.param_groups for p in g["params"] if p is found[0]'
    what = "seen" if "seen" in hooks.value else "found"
    if wrong.step == 0:  # the first step counts
        condition = f"[{held}]" if hooks.is_of_holder else f"any(t is not None for t in {what})"
        lines += [f"        if {condition}:", f"            save({hooks.value})"]
    else:
        number = "len(steps)" if hooks.is_of_holder else "steps.count(steps[0])"
        lines += [f"        steps.extend({held})" if hooks.is_of_holder else _FIRST]
        lines += [f"        if {number} > {wrong.step}:", f"            save({hooks.value})"]
        lines += ["        seen.clear()"] if what == "seen" else []
    return [*lines, f"    {_register(hooks)}(stepped)"]


_FIRST = "        steps.append(optimizer)  # the steps of the first one count"


def _register(hooks: _Hooks) -> str:
    return f"register_optimizer_step_{'pre' if hooks.is_before else 'post'}_hook"


_NO_DROPOUT = [
    "for part in module.modules():  # as isoshard judge --no-dropout did",
    "    if isinstance(part, torch.nn.modules.dropout._DropoutNd):",
    "        part.p = 0.0",
]
_SHRINKING = [
    '    if os.environ["WORLD_SIZE"] == "1":  # a DeviceMesh of any shape has one rank',
    "        import torch.distributed.device_mesh as meshes",
    "        make = meshes.init_device_mesh",
    "        meshes.init_device_mesh = lambda device, shape, **names: make(",
    "            device, (1,) * len(shape), **names)",
]


def _script(start: Start) -> list[str]:
    """Lines that run the training script."""
    words = _words([start.script, *start.arguments])
    if start.single is not None:
        words = f'{_words(start.single)} if os.environ["WORLD_SIZE"] == "1" else {words}'
    folder = "" if start.is_module else os.path.dirname(start.script)
    lines = [f'sys.argv, sys.path[0] = {words}, os.path.abspath("{folder}")']
    if start.adds_local_rank:
        lines += ['sys.argv.insert(1, f"--local_rank={rank}")']
    if start.is_module:
        return [*lines, 'runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)']
    return [*lines, 'runpy.run_path(sys.argv[0], run_name="__main__")']


def _words(words: Sequence[str]) -> str:
    return "[" + ", ".join(repr(w) if '"' in w or "\\" in w else f'"{w}"' for w in words) + "]"


# -- what starts the ranks -----------------------------------------------------------------------


def _run(start: Start) -> list[str]:
    more = "".join(f", {name}={value!r}" for name, value in start.environment.items())
    return [
        "def run(world):  # what each rank has",
        '    port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])',
        '    os.environ.update({key: str(world) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},',
        f'                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port{more})',
        "    with tempfile.TemporaryDirectory() as folder:",
        "        torch.multiprocessing.spawn(rank_main, (folder,), world)",
        '        return [torch.load(f"{folder}/{rank}") for rank in range(world)]',
    ]


def _wholes(wrong: Wrong, world_size: int) -> str:
    """An expression for the whole tensors that the ranks have."""
    places = wrong.places
    narrowed = places.narrowed()
    scale = places.weight * wrong.factor
    factor = "" if scale == 1.0 else f" * {scale!r}"
    if narrowed is not None:
        dim, begins, sizes = narrowed
        firsts = {len(copy) for copy in places.copies}
        everyone = [[rank] for rank in range(world_size)]
        if firsts == {1}:
            is_all = places.copies == everyone
            parts = "parts" if is_all else f"(parts[r] for r, in {places.copies})"
            return f"(part{factor} for part in {parts})" if factor else parts
        if len({(begins[rank], sizes[rank]) for rank in places.copies[0]}) == 1:
            return f"(sum(parts[r] for r in ranks){factor} for ranks in {places.copies})"
        ends = [[begins[rank] + sizes[rank] for rank in copy] for copy in places.copies]
        is_in_order = all(
            [begins[rank] for rank in copy] == [0, *end[:-1]]
            for copy, end in zip(places.copies, ends, strict=True)
        )
        if is_in_order and places.copies == [list(range(world_size))]:
            return f"[torch.cat(parts, {dim}){factor}]"
        if is_in_order:
            parts = f"torch.cat([parts[r] for r in ranks], {dim})"
            return f"({parts}{factor} for ranks in {places.copies})"
    return f"(whole(ranks, parts, right){factor} for ranks in {places.copies})"


def _whole(wrong: Wrong, start: Start) -> list[str]:
    """The function that puts boxes together, where they are needed."""
    if "whole(ranks" not in _wholes(wrong, start.world_size):
        return []
    boxes = [wrong.places.boxes.get(rank, []) for rank in range(start.world_size)]
    return [
        "",
        "",
        "def whole(ranks, parts, right):  # boxes: begins in a rank's part and the whole, sizes",
        f"    boxes, result = {boxes}, torch.zeros_like(right)",
        "    for rank, own, begin, size in ((r, *box) for r in ranks for box in boxes[r]):",
        "        at = tuple(slice(b, b + n) for b, n in zip(begin, size))",
        "        result[at] += parts[rank][tuple(slice(b, b + n) for b, n in zip(own, size))]",
        "    return result",
    ]


def _main(wrong: Wrong, start: Start) -> list[str]:
    right = {
        "relative": "off.norm() <= ALLOWED * right.norm()",
        "absolute": "off.norm() <= ALLOWED",
        "scale": "abs(factor - 1) <= ALLOWED",
    }[wrong.bound_is]
    return [
        'if __name__ == "__main__":',
        f'    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "{start.folder}"))',
        "    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))",
        f"    right, parts, is_right = run(1)[0], run({start.world_size}), True",
        f"    for actual in {_wholes(wrong, start.world_size)}:",
        "        off = (actual - right).abs()",
        "        factor, at = (actual * right).sum() / right.square().sum(), off.argmax()",
        '        print(f"norm {actual.norm():.6g}, right is {right.norm():.6g}; "',
        '              f"factor {factor:.6g}; largest difference {off.max():.3g}: "',
        '              f"{actual.flatten()[at]:.6g}, right is {right.flatten()[at]:.6g}")',
        f"        is_right = is_right and bool({right})",
        "    sys.exit(0 if is_right else 1)",
    ]
