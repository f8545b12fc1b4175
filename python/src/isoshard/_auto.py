# SPDX-License-Identifier: Apache-2.0
"""Level 0: records a script that knows nothing of it, from inside its process.

The driver says what to do in the environment variable ISOSHARD_AUTO. The model is the first
module that is called with gradients enabled after an optimizer was built; its optimizers are
those that hold its parameters.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _calls
from ._checks import (
    compiled_names,
    joined_later,
    not_trained,
    outside_parameters,
    replaced_parameters,
    switch_dropout_off,
)
from ._closer import FunctionTaps
from ._course import Course
from ._deepspeed import EngineHooks, is_engine, perturb_engine
from ._generic import move_recorded, read_shapes, write_shapes
from ._hooks import Hooks
from ._label_counts import LabelCounts
from ._megatron import MegatronHooks, is_megatron, optimizers_of, perturb_megatron, watch
from ._mesh import parse_mesh
from ._names import compiled_root, named_parameters, unwrapped
from ._options import Options
from ._perturb import perturb
from ._pipeline import PipelineHooks, Stages, calling_schedule
from ._presets import with_preset
from ._recorder import Recorder, world
from ._replay import Replay
from .errors import IsoshardError, NotTrained, RecordError, UsageError

VARIABLE = "ISOSHARD_AUTO"
#: How the name of a rank's message ends if the script is wrong, and not the recording.
FINDING = ".finding.txt"


@dataclass
class AutoConfig:
    """What the driver wants recorded."""

    directory: str
    mesh: str | None = None
    steps: int = 2
    perturb: int | None = None
    tables: list[str] = field(default_factory=list)  # which perturbed runs leave as they are
    stop: bool = True
    single: bool = False
    subject: str = "script"
    case: str = "training step"
    no_dropout: bool = False
    options_file: str | None = None
    model_config: str | None = None  # where to write the model's config, as JSON
    compare_with: str | None = None
    precision: str = "native"  # "float64": all of the process computes in float64 (_float64)
    generic_weights: bool = False
    functions_in: str | None = None  # record the functions in this module, too; "": in the model
    sees_loss_inputs: bool = False  # record what the loss takes besides the model's output
    replay: str | None = None  # the plan of inputs that take the place of the script's own
    shapes: str | None = None  # of the reference's parameters: it writes them, the run reads them
    follow: bool = False  # whether to leave what each step began with, up to the one that counts
    begin_at: int = 0  # the first step that is recorded; others come before it
    end_at: int | None = None  # the step at which the process ends, with nothing recorded
    overrides: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """For the environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> AutoConfig:
        """From the environment variable."""
        return AutoConfig(**json.loads(text))


def error_folder(directory: Path) -> Path:
    """Where ranks leave what went wrong, for the driver."""
    return directory.with_name(directory.name + ".errors")


def notes_folder(directory: Path) -> Path:
    """Where ranks leave what float64 changed in them."""
    return directory.with_name(directory.name + ".logs")


_OPTION_NAMES = (
    "rename",
    "layouts",
    "transform",
    "preset",
    "not_recorded",
    "training",
    "judging",
    "activations",
    "grad_scale",
    "loss_reduction",
    "allow_draws",
    "only",
    "at_steps",
)


def options_of(path: str | None, overrides: dict[str, Any]) -> Options:
    """Options from a Python file that defines some of their names, and from the command line."""
    values: dict[str, Any] = {}
    if path is not None:
        if not Path(path).exists():
            raise UsageError(f"The options file must exist, got {path}.")
        content = runpy.run_path(path)
        values = {name: content[name] for name in _OPTION_NAMES if name in content}
        if not values:
            raise UsageError(
                f"The options file must define one of {', '.join(_OPTION_NAMES)}, "
                f"got none in {path}."
            )
    return Options(**{**values, **overrides})


class AutoRecorder:
    """Waits for the model and the optimizer of a script, and records its first steps."""

    def __init__(self, config: AutoConfig) -> None:
        self.config = config
        self.options = options_of(config.options_file, config.overrides)
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.megatron: list[weakref.ref[Any]] = []  # Megatron-Core's wrappers around them
        self.recorder: Recorder | None = None
        self.hooks: Hooks | None = None
        self.root: torch.nn.Module | None = None
        self._own: set[int] = set()  # the modules of the recorded model
        self._seen: list[torch.nn.Module] = []
        #: Outermost modules that were called, and of whose parameters no optimizer holds any.
        self._not_held: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._inside: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # they and their parts
        self.is_done = self.has_error = False
        self._replay: Replay | None = None
        self._labels = LabelCounts()
        self._functions: FunctionTaps | None = None
        self._sealing: threading.Thread | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.course = Course(config.begin_at, config.end_at) if config.follow else None

    def install(self) -> None:
        """Puts the two hooks in place: on building optimizers and on calling modules."""
        recorder = self
        init = torch.optim.Optimizer.__init__

        def new_init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            recorder.optimizers.append(weakref.ref(optimizer))
            optimizer.register_step_pre_hook(recorder._watch_first_closure)
            optimizer.register_step_pre_hook(recorder._before_unrecorded_step)
            if recorder.course is not None:
                optimizer.register_step_post_hook(recorder.course.count)
            watch(recorder.megatron)
            if recorder.hooks is not None and not recorder._steps_itself(recorder.root):
                recorder._refuse_steps_of(optimizer)

        self._set(torch.optim.Optimizer, "__init__", new_init)
        self._call = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorder._before_call(module, (args, kwargs))
            return recorder._call(module, *args, **kwargs)

        self._set(torch.nn.Module, "__call__", call)
        _calls.begin_early()
        self._labels.install()
        if self.config.functions_in is not None:
            self._functions = FunctionTaps(self.config.functions_in)
            _enter(self._functions)
        if self.config.sees_loss_inputs:
            plan = self.config.replay
            self._replay = Replay(None if plan is None else Path(plan))
            _enter(self._replay.loss_inputs)
        if self.config.single:
            _shrink_meshes()

    def _watch_first_closure(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The model's first call may be in the closure of a step that has begun (LBFGS)."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or self.hooks is not None or self.is_done or self.has_error:
            return None

        def watched() -> Any:
            has_begun = self.hooks is not None
            result = closure()
            if not has_begun and self.hooks is not None:
                self.hooks.begin_in_closure(optimizer)
            self._before_unrecorded_step(optimizer, (), {})
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _before_unrecorded_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Why no recording has begun may be that all parameters were replaced."""
        if self.hooks is not None or self.is_done or self.has_error:
            return
        for module in list(self._not_held):
            self._refuse_replaced(unwrapped(module))

    def _refuse_replaced(self, model: torch.nn.Module) -> None:
        number = replaced_parameters(model, self._alive(), has_gradients=True)
        if number > 0:
            error = not_trained(model, number)
            self.report(error)
            raise error

    def _alive(self) -> list[torch.optim.Optimizer]:
        return [o for o in (ref() for ref in self.optimizers) if o is not None]

    @staticmethod
    def _set(owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)

    def _steps_itself(self, module: Any) -> bool:
        """Whether a framework's own step is recorded in place of a torch optimizer's."""
        return is_engine(module) or (
            is_megatron(module) and bool(optimizers_of(module, self.megatron))
        )

    def _before_call(self, module: torch.nn.Module, inputs: Any = ((), {})) -> None:
        if self.is_done or self.has_error or id(module) in self._own:
            return
        if not torch.is_grad_enabled():
            return
        if self.hooks is not None:
            self._refuse_second(module)
            return
        optimizers = self._alive()
        if not optimizers:
            return
        if self._steps_itself(module):
            self._refuse_to_follow(module)
            self._begin(module, [])
            return
        held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        schedule = calling_schedule()
        called, module = module, module if schedule is None else Stages(schedule)
        model = unwrapped(module)
        own = {id(p) for _, p in named_parameters(model)}
        if not own & held:
            if called not in self._inside:
                self._not_held.add(called)
                self._inside.update(called.modules())
            return
        mine = [o for o in optimizers if _holds_any(o, own)]
        if self._has_come(module, mine, inputs):
            self._begin(module, mine)

    def _refuse_to_follow(self, module: torch.nn.Module) -> None:
        if self.course is not None:
            error = RecordError(
                "--resume-at must be given a script whose steps are those of torch.optim "
                f"optimizers, got {type(unwrapped(module)).__name__}, which a framework steps "
                "(DeepSpeed, Megatron-Core). Record both runs with isoshard.record."
            )
            self.report(error)
            raise error

    def _has_come(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], inputs: Any
    ) -> bool:
        """Whether recording begins with this call of the model. It may end the process instead."""
        if self.course is None:
            return True
        if self.config.no_dropout:
            switch_dropout_off(unwrapped(module))
        if not self.course.has_come(module, optimizers, inputs):
            return False
        rank, _ = world()
        logs = notes_folder(Path(self.config.directory))
        if self.config.end_at is not None:
            self.on_end()
            self.course.stop(logs, rank)
        self.course.leave(logs, rank)
        return True

    def _refuse_second(self, module: torch.nn.Module) -> None:
        """Everything that is trained must be inside of the recorded model when it is called."""
        assert self.hooks is not None
        optimizers = self._alive()
        held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        inside = set(self.hooks._names) - {id(p) for p in self.hooks.outside.values()}
        names = [n for n, p in named_parameters(module) if id(p) in held - inside]
        if not names:
            self._own.add(id(module))
            self._seen.append(module)  # so that no other one gets its id
            return
        own = {id(p): n for n, p in named_parameters(self.hooks.model)}
        joined = [own[id(p)] for _, p in named_parameters(module) if id(p) in own.keys() - inside]
        error = RecordError(
            f"One module must hold what is trained, got a call of {type(module).__name__} with "
            f"the parameter {names[0]} beside {type(self.hooks.model).__name__}. Put both into one "
            "module that the script calls, or record that one with isoshard.record."
        )
        if joined:
            error = joined_later(joined, self.recorder.step if self.recorder is not None else 0)
        self.report(error)
        raise error

    def _refuse_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that the recording does not know must not step before its end."""

        def refuse(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self.is_done:
                return
            if self.hooks is not None:
                self._refuse_replaced(self.hooks.model)
            held = [p for group in stepping.param_groups for p in group["params"]]
            known = self.hooks._names if self.hooks is not None else {}
            if all(id(p) in known for p in held):
                error = RecordError(
                    f"Optimizers must be built before the model is called, got "
                    f"{type(stepping).__name__} that was built later. Build it earlier, or record "
                    "a part of the training with isoshard.record."
                )
                self.report(error)
                raise error
            error = RecordError(
                "Every optimizer that steps must hold parameters of the recorded model, got "
                f"{type(stepping).__name__} with {len(held)} others "
                f"({', '.join(str(list(p.shape)) for p in held[:3])}). Build the optimizers before "
                "the model is called, over one module, or record with isoshard.record."
            )
            self.report(error)
            raise error

        optimizer.register_step_pre_hook(refuse)

    def _begin(self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.root = module
        self._own = {id(m) for m in module.modules()}
        model = unwrapped(module)
        if is_engine(module) or compiled_root(module) is not None or compiled_names(model):
            self._set(torch.nn.Module, "__call__", self._call)  # torch.compile would trace it
        if not self._steps_itself(module):
            for other in (ref() for ref in self.optimizers):
                if other is not None and all(other is not o for o in optimizers):
                    self._refuse_steps_of(other)
        try:
            self._start(module, optimizers)
        except IsoshardError as error:
            self.report(error)
            raise

    def _start(self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        config = self.config
        model = unwrapped(module)
        if config.no_dropout:
            switch_dropout_off(model)
        if config.generic_weights:
            self._move_generically(module)
        if config.perturb is not None:
            if is_engine(module):
                perturb_engine(module, config.perturb, config.tables)
            elif self._steps_itself(module):
                found = optimizers_of(module, self.megatron)
                perturb_megatron(module, found, config.perturb, config.tables)
            else:
                outside = outside_parameters(model, optimizers)
                perturb(model, config.perturb, outside, config.tables, on_ranks=config.follow)
        _, size = world()
        if config.mesh is not None and parse_mesh(config.mesh).size != size:
            raise RecordError(
                f"The judged run must have as many processes as its mesh {config.mesh}, got "
                f"{size} (torch.distributed's world size, or WORLD_SIZE). Give the launcher's "
                "number of processes and --mesh alike."
            )
        self.recorder = Recorder(
            config.directory,
            mesh=None if config.mesh is None else parse_mesh(config.mesh),
            subject=config.subject,
            case=config.case,
            options=with_preset(self.options, module),
            compare_with=config.compare_with,
            purpose="judged" if config.perturb is None else "response",
        )
        self.recorder.replay, self.recorder.labels = self._replay, self._labels
        self.recorder.functions = self._functions
        kwargs: dict[str, Any] = {
            "max_steps": config.steps,
            "on_last_step": self._on_last_step,
            "on_error": lambda error: self.report(error),
        }
        if config.model_config is not None:
            from ._ours import config_of

            text = json.dumps(config_of(unwrapped(module), optimizers), default=str)
            Path(config.model_config).write_text(text)
        if is_engine(module):
            self.hooks = EngineHooks(self.recorder, module, **kwargs)
        elif self._steps_itself(module):
            found = optimizers_of(module, self.megatron)
            self.hooks = MegatronHooks(self.recorder, module, found, **kwargs)
        else:
            hooks: Any = PipelineHooks if isinstance(module, Stages) else Hooks
            self.hooks = hooks(self.recorder, module, optimizers, **kwargs)

    def _move_generically(self, module: torch.nn.Module) -> None:
        config = self.config
        file = None if config.shapes is None else Path(config.shapes)
        is_reference = config.subject == "reference"
        move_recorded(
            module,
            has_copies=self._steps_itself(module),
            options=self.options,
            mesh=config.mesh,
            shapes=None if file is None or is_reference else read_shapes(file),
        )
        if file is not None and is_reference:
            write_shapes(unwrapped(module), with_preset(self.options, module), file)

    def _on_last_step(self) -> None:
        if self.is_done:  # the script has come to its end
            return
        self.is_done = True
        self._set(torch.nn.Module, "__call__", self._call)
        self.leave_notes()
        self._sealing = threading.Thread(target=self._seal, daemon=True)
        self._sealing.start()

    def _seal(self) -> None:
        """The script goes on meanwhile: other ranks may need this one to end their last step."""
        assert self.recorder is not None
        try:
            self.recorder.finish()
        except IsoshardError as error:
            self.report(error)
        if self.config.stop:
            self.on_end()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if self.has_error else 0)

    def finish(self) -> None:
        """At the end of the script: writes what there is, or says what was missing."""
        if self._sealing is not None:
            self._sealing.join()
        if self.is_done or self.has_error:
            return
        self.is_done = True
        self.leave_notes()
        rank, _ = world()
        if self.course is not None and self.hooks is None and self.optimizers:
            self.report(self.course.why_not(rank))
            return
        if self.hooks is None or self.recorder is None:
            self.report(
                f"Rank {rank} must call a module whose parameters an optimizer of torch.optim "
                f"holds, got {len(self.optimizers)} optimizers and no such call. Give the script's "
                "arguments so that it trains, or record with isoshard.record in the script."
            )
            return
        try:
            self.hooks.finish()
            if not self.recorder.steps:
                raise RecordError(
                    f"Rank {rank} must make at least one optimizer step, got none before the "
                    "script ended. Let the script train for a step, or record with "
                    "isoshard.record if its optimizer is not a torch.optim.Optimizer."
                )
            self.recorder.finish()
        except IsoshardError as error:
            self.report(error)

    def leave_notes(self) -> None:
        """Tells the driver what float64 changed in this process, besides the numbers."""
        if self.config.precision != "float64":
            return
        from . import _float64

        rank, _ = world()
        _float64.write_notes(notes_folder(Path(self.config.directory)), rank)

    def report(self, what: str | IsoshardError) -> None:
        """Leaves a message for the driver, and whether it is a finding."""
        self.has_error = True
        folder = error_folder(Path(self.config.directory))
        folder.mkdir(parents=True, exist_ok=True)
        rank, _ = world()
        ending = FINDING if isinstance(what, NotTrained) else ".txt"
        (folder / f"rank{rank:05d}{ending}").write_text(f"{what}\n")


def _enter(mode: Any) -> None:
    """Enters a mode for as long as the process runs."""
    mode.__enter__()


def _holds_any(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])


def _shrink_meshes() -> None:
    """In the single process of a reference, a DeviceMesh of any shape has one rank."""
    import torch.distributed.device_mesh as device_mesh

    original = device_mesh.init_device_mesh

    def init(device_type: str, mesh_shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        return original(device_type, (1,) * len(mesh_shape), *args, **kwargs)

    modules: list[Any] = [device_mesh, torch.distributed]
    modules.append(sys.modules.get("torch.distributed.tensor"))
    for module in modules:
        if getattr(module, "init_device_mesh", None) is original:
            module.init_device_mesh = init


def enter_precision(precision: str) -> None:
    """Turns this process into one of the precision. It must come before the script's first line."""
    if precision == "float64":
        from . import _float64

        _float64.enter()


def install_from_environment() -> AutoRecorder | None:
    """For processes that a launcher started: what the environment says."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    import atexit

    config = AutoConfig.from_text(text)
    enter_precision(config.precision)
    recorder = AutoRecorder(config)
    recorder.install()
    atexit.register(recorder.finish)
    _report_uncaught(recorder)
    return recorder


def _report_uncaught(recorder: AutoRecorder) -> None:
    """Report an uncaught exception of the script, since launchers may drop its exit code."""
    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        original(kind, error, trace)
        recorder.leave_notes()
        if not recorder.has_error and not (recorder.is_done and recorder.config.stop):
            rank, _ = world()
            recorder.report(
                f"The script must run without an error, got {kind.__name__} on rank {rank}: {error}"
            )

    sys.excepthook = hook


def run_script(script: str, arguments: list[str], is_module: bool) -> int:
    """Runs a script as `python script` would; returns its exit code."""
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
