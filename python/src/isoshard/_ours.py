# SPDX-License-Identifier: Apache-2.0
"""`--reference ours`: the program isoshard trains the model, with code that no framework shares.

The script runs once in one process, which shows the weights, the samples and the settings. From
them `isoshard verify` makes a reference with its own model, backward pass and optimizer. What
either side does not record is left out, and named.
"""

from __future__ import annotations

import json
import math
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _environment, _program
from ._bundle import Entry
from ._safetensors import write_safetensors
from .errors import RunError, UsageError

#: Of an optimizer's settings, what the program's own optimizers have, and nothing else may say.
_USUAL = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_GIVEN = {"kind", "learning_rate", "weight_decay"}
_KINDS = ("sgd", "adamw")
_INPUTS = ("input_ids", "labels", "attention_mask")


def config_of(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """The config of a Hugging Face model that is trained as the program can.

    Raises:
        UsageError: there is none, or groups of parameters are stepped differently.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    kinds = [{k: str(v) for k, v in g.items() if k != "params"} for g in groups if g["params"]]
    if any(kind != kinds[0] for kind in kinds):
        raise UsageError(
            "--reference ours needs parameters that are all stepped alike, got "
            f"{len(kinds)} groups with other settings. Leave --reference out to use the script's "
            "single process."
        )
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise UsageError(
            f"--reference ours needs a model of Hugging Face transformers with its config, got "
            f"{type(model).__name__}. Leave --reference out: the script's own single process is "
            "the reference then."
        )
    content: dict[str, Any] = config.to_dict()
    return content


def make(single: Path, config: Path, target: Path) -> Path:
    """A reference of the program's own for what one process recorded.

    Args:
        single: the bundle of the script in one process.
        config: the model's config.json.
        target: where to put the reference; its name with .work is used on the way.

    Raises:
        UsageError: the program has no such training.
        RunError: it failed.
    """
    manifest = _bundle.read_manifest(single)
    work = target.with_name(target.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    steps = [
        {
            **_bundle.read_some_tensors(single, step, 0, "data_id/"),
            **_bundle.read_some_tensors(single, step, 0, "scalar/"),
        }
        for step in manifest["steps"]
    ]
    first = manifest["steps"][0]
    steps[0].update(_bundle.read_some_tensors(single, first, 0, "param/"))
    batch = _write_inputs(steps, json.loads(config.read_text()), work)
    words = [*_settings_words(manifest["settings"]["training"], steps), *batch]
    command = [
        str(_program.find_trainer()),
        "verify",
        "--subjects",
        "ddp",
        "--dp",
        "1",
        "--reference",
        "plain",
    ]
    command += ["--steps", str(len(steps)), "--dump", str(work / "runs"), *words]
    environment = _environment.without_options()
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = sorted((work / "runs").glob("reference_*/manifest.json"))
    if result.returncode != 0 or len(found) != 1:
        said = (result.stderr or result.stdout).strip().splitlines()[-5:]
        raise RunError(
            f"The program isoshard must train the script's model, got exit code "
            f"{result.returncode} of: {' '.join(command)}\n" + "\n".join(f"  {s}" for s in said)
        )
    _project(found[0].parent, single, target)
    return target


def _write_inputs(
    steps: Sequence[dict[str, torch.Tensor]], config: dict[str, Any], work: Path
) -> list[str]:
    """The model's folder and the samples of all steps; the words that give them."""
    model = work / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    weights = [
        (name.split("/")[1], tensor)
        for name, tensor in steps[0].items()
        if name.startswith("param/") and name.endswith("/0")
    ]
    write_safetensors(model / "model.safetensors", weights, {"format": "pt"})
    names = sorted(
        {n.split("/")[1] for tensors in steps for n in tensors if n.startswith("data_id/")}
    )
    masks = [t[n] for t in steps for n in t if n.startswith("data_id/attention_mask/")]
    unknown = [name for name in names if name not in _INPUTS]
    if "input_ids" not in names or unknown or any(not bool((m == 1).all()) for m in masks):
        raise UsageError(
            f"--reference ours needs a model that is called with input_ids, and maybe labels and "
            f"an attention_mask of ones, got {', '.join(names)}."
        )
    later = sorted({n for t in steps for n in t if n.startswith("data_id/") and n[-2:] != "/0"})
    if later:
        raise UsageError(
            "--reference ours needs steps of one call of the model, or of micro-batches with "
            f"samples of one length, got {later[0]} beside the first call. Leave --reference out "
            "to use the script's single process."
        )
    samples = {
        name: torch.cat([tensors[f"data_id/{name}/0"].to(torch.int64) for tensors in steps])
        for name in ("input_ids", "labels")
        if name in names
    }
    rows = {int(tensors["data_id/input_ids/0"].shape[0]) for tensors in steps}
    if len(rows) != 1 or samples["input_ids"].ndim != 2:
        raise UsageError(
            "--reference ours needs steps of as many samples each, and ids of shape [samples, "
            f"tokens], got {sorted(rows)} samples and shape {list(samples['input_ids'].shape)}."
        )
    write_safetensors(work / "batch.safetensors", list(samples.items()))
    length = str(samples["input_ids"].shape[1])
    sizes = ["--batch-size", str(rows.pop()), "--seq-length", length]
    return ["--model", str(model), "--batch", str(work / "batch.safetensors"), *sizes]


def _settings_words(
    training: dict[str, Any], steps: Sequence[dict[str, torch.Tensor]]
) -> list[str]:
    """The flags of an optimizer and of clipping."""
    optimizer = training.get("optimizer")
    if not isinstance(optimizer, dict) or optimizer.get("kind") not in _KINDS:
        raise UsageError(
            "--reference ours needs one torch.optim.SGD or AdamW with one group of parameters, "
            f"got {json.dumps(optimizer if optimizer else training.get('optimizers'))}."
        )
    for key, value in optimizer.items():
        usual = _USUAL.get(key, 0.0)
        if key not in _GIVEN and not (value is None or value is False or _same(value, usual)):
            raise UsageError(
                f"--reference ours needs the optimizer's {key} to be {usual:g}, got {value}: the "
                "program has no other. Leave --reference out to use the script's single process."
            )
    rates = {float(tensors["scalar/learning_rate/0"]) for tensors in steps}
    if len(rates) != 1:
        raise UsageError(
            f"--reference ours needs a constant learning rate, got {sorted(rates)}. Record one "
            "step (--steps 1)."
        )
    words = ["--optimizer", optimizer["kind"], "--learning-rate", repr(rates.pop())]
    words += ["--weight-decay", repr(float(optimizer.get("weight_decay", 0.0)))]
    words += ["--max-grad-norm", repr(float(training.get("max_grad_norm") or 0.0))]
    return [*words, "--dtype", str(training["dtype"])]


def _same(value: Any, usual: float) -> bool:
    return isinstance(value, (int, float)) and math.isclose(value, usual, rel_tol=1e-6)


def _project(ours: Path, single: Path, target: Path) -> None:
    """Writes what both recorded, with our values, and the script's settings."""
    theirs = _bundle.read_manifest(single)
    run = uuid.uuid4().hex[:16]
    left_out: dict[str, str] = {}
    kept: set[tuple[int, str, str, int]] = set()
    if target.exists():
        _bundle.remove_bundle(target)
    for step in theirs["steps"]:
        records = {_key(r): r for r in _bundle.read_records(ours, step, 0)["records"]}
        tensors = _bundle.read_tensors(ours, step, 0)
        entries = []
        for record in _bundle.read_records(single, step, 0)["records"]:
            key = _key(record)
            if key not in records:
                left_out[f"{key[0]}/{key[1]}"] = "the program isoshard does not record it"
                continue
            tensor = tensors[f"{key[0]}/{key[1]}/{key[2]}"]
            entries.append(Entry(dict(records[key]), tensor))
            kept.add((step, *key))
        _bundle.write_rank(target, run, 0, step, entries)
    responses = json.loads((ours / _bundle.RESPONSES).read_text())
    responses["responses"] = [
        r for r in responses["responses"] if (int(r["step"]), *_key(r)) in kept
    ]
    (target / _bundle.RESPONSES).write_text(json.dumps(responses))
    manifest = {
        **{key: value for key, value in theirs.items() if key not in ("files", "versions")},
        "run": run,
        "producer": _bundle.read_manifest(ours)["producer"],
        "subject": "isoshard's own model",
    }
    said = manifest.get("not_recorded", [])
    manifest["not_recorded"] = [*said, *({"pattern": p, "why": w} for p, w in left_out.items())]
    _bundle.seal(target, manifest)


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["kind"], record["name"], int(record.get("call", 0))
