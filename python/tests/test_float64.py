# SPDX-License-Identifier: Apache-2.0
"""The float64 mode in one process: names, tables, strays, casts, draws, what is switched off.

Each case runs in a forked process of its own, because the mode cannot be left. `without` names the
parts of the mode that a control leaves out; the claim must then be false.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

_START = """
import sys
import torch
from isoshard import _float64
from isoshard._float64 import _draws, _imports, _kernels, _notes, _readers, _strays
from isoshard._float64 import _switched_off, _tables, _tags

def real(tensor):  # what no mode has touched
    with torch._C.DisableTorchFunction():
        return str(tensor.dtype)
"""


def said(tmp_path: Path, before: str, after: str, without: str = "") -> dict[str, Any]:
    """Runs lines before and after the mode begins; returns what they put into `out`.

    A process in which lines fail returns the name of the error.
    """
    answer = tmp_path / "answer.json"
    pid = os.fork()
    if pid == 0:
        out: dict[str, Any] = {}
        try:
            os.chdir(tmp_path)
            names: dict[str, Any] = {"out": out}
            exec(_START, names)
            for part in without.split():
                module, _, function = part.partition(".")
                setattr(names[module], function, lambda: None)
            exec(before, names)
            exec("_float64.enter()", names)
            exec(after, names)
        except BaseException as error:
            traceback.print_exc()
            out = {"error": type(error).__name__}
        answer.write_text(json.dumps(out))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("name", ["float32", "float", "bfloat16", "float16", "half"])
def test_1_names_are_float64_in_comparisons_tables_and_tensors(tmp_path: Path, name: str) -> None:
    out = said(
        tmp_path,
        "table = {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}",
        f"n = torch.{name}\n"
        "out['equal'] = [n == torch.float64, n != torch.float64, hash(n) == hash(torch.float64)]\n"
        "out['made'] = real(torch.empty(2, dtype=n))\n"
        "out['rows'] = len(table)\n"
        "out['found'] = table[torch.empty(2).dtype]\n"
        "import pickle\n"
        "out['pickled'] = pickle.loads(pickle.dumps(n)) is n",
    )
    assert out == {
        "equal": [True, False, True],
        "made": "torch.float64",
        "rows": 3,
        "found": 8,
        "pickled": True,
    }


def test_1_torch_save_and_load_work_because_tables_are_built_before(tmp_path: Path) -> None:
    after = (
        "torch.save({'w': torch.ones(3), 'i': torch.ones(2, dtype=torch.int32)}, 'y.pt')\n"
        "out['dtypes'] = [real(t) for t in torch.load('y.pt').values()]\n"
        "allowed = torch._weights_only_unpickler._get_allowed_globals()\n"
        "out['allowed'] = 'torch.bfloat16' in allowed\n"
        "out['rows'] = len(torch.storage._dtype_to_storage_type_map()) > 10"
    )
    fresh = (
        "torch.storage._dtype_to_storage_type_map.cache_clear()\n"
        "torch.storage._storage_type_to_dtype_map.cache_clear()\n"
        "import torch._weights_only_unpickler\n"
        "torch._weights_only_unpickler._get_allowed_globals.cache_clear()"
    )
    right = {"dtypes": ["torch.float64", "torch.int32"], "allowed": True, "rows": True}
    assert said(tmp_path, fresh, after) == right
    assert said(tmp_path, fresh, after, "_imports.load_owners_of_tables") != right


_TWO_ROWS = {
    "a display": "{torch.float32: 4, torch.bfloat16: 2}",
    "a display with float64": "{torch.float32: 4, torch.float64: 8}",
    "a comprehension": "{getattr(torch, n): n for n in ('float16', 'float32')}",
    "pairs": "dict([(torch.float32, 4), (torch.half, 2)])",
    "assignments": "{}\nT[torch.float32] = 4\nT[torch.float16] = 2",
    "a set": "{torch.float32, torch.bfloat16}",
    "another row": "{torch.float32: 4}\nr = T[torch.bfloat16]",
    "a cache": "functools.cache(lambda d: str(d))\nT(torch.float32)\nT(torch.half)",
}


@pytest.mark.parametrize("table", _TWO_ROWS.values(), ids=_TWO_ROWS)
def test_1_where_two_dtypes_are_one_key_is_named(tmp_path: Path, table: str) -> None:
    (tmp_path / "sizes.py").write_text(f"import functools, torch\n\nT = {table}\n")
    before = "sys.path.insert(0, '.')"
    after = (
        "torch.ones(1, dtype=torch.bfloat16)\n"
        "import sizes\n"
        "out['notes'] = [n for n in _notes.notes() if 'sizes.py:' in n]"
    )
    notes = said(tmp_path, before, after)["notes"]
    assert len(notes) == 1 and notes[0].count("torch.") == 2
    assert said(tmp_path, before, after, "_tables.install") == {"notes": []}


def test_1_tables_keep_their_rows_where_nothing_has_16_bits(tmp_path: Path) -> None:
    after = (
        "T = {torch.float32: 4, torch.bfloat16: 2}\n"
        "D = dict([(torch.half, 2), (torch.float32, 4)])\n"
        "x = torch.empty(1)\n"
        "out['rows'] = [T[x.dtype], T[torch.bfloat16], D[torch.float], D[torch.half]]\n"
        "out['notes'] = _notes.notes()"
    )
    right = {"rows": [4, 2, 4, 2], "notes": []}
    assert said(tmp_path, "", after) == right
    assert said(tmp_path, "", f"torch.ones(1).bfloat16()\n{after}")["rows"] != right["rows"]


def test_7_dtypes_of_settings_are_told_apart(tmp_path: Path) -> None:
    """Not float32 and the others, once a tensor has 16 bits: C++ code may have made another one."""
    compare = (
        "[torch.half == torch.bfloat16, torch.float != torch.half, torch.half != torch.float64,\n"
        " torch.bfloat16 in (torch.half, torch.float), torch.cfloat == torch.chalf]\n"
    )
    apart = [False, True, False, False, True]
    together = [False, False, False, True, True]
    coarse = {
        "a factory": "torch.ones(1, dtype=torch.bfloat16)",
        "a cast": "torch.ones(1).half()",
        "a draw": "torch.randn(1, dtype=torch.half)",
        "the default": "torch.set_default_dtype(torch.half)",
        "autocast": "torch.autocast('cpu', torch.bfloat16)",
    }
    for lines in coarse.values():
        after = f"out['before'] = {compare}{lines}\nout['after'] = {compare}"
        assert said(tmp_path, "", after) == {"before": apart, "after": together}, lines
    for lines in ("torch.ones(1, dtype=torch.float64)", "torch.ones(1).double()"):
        assert said(tmp_path, "", f"{lines}\nout['after'] = {compare}") == {"after": apart}, lines


def test_1_one_key_and_branches_are_not_named(tmp_path: Path) -> None:
    after = (
        "T = {torch.bfloat16: 2, torch.int32: 4}\n"
        "x = torch.ones(2, dtype=torch.bfloat16)\n"
        "T[x.dtype], T.get(torch.bfloat16), x.dtype in (torch.half, torch.float)\n"
        "torch.half == torch.float, {x.dtype: 1, torch.bfloat16: 2, torch.int8: 3}\n"
        "out['notes'] = _notes.notes()"
    )
    assert said(tmp_path, "", after) == {"notes": []}


def test_1_a_library_that_is_imported_later_sees_the_real_names(tmp_path: Path) -> None:
    """A stand-in for a package of the environment: its table keeps a row for each dtype."""
    (tmp_path / "library.py").write_text("import torch\nT = {torch.float32: 4, torch.half: 2}\n")
    before = f"sys.path.insert(0, '.')\n_imports._LIBRARIES += ({str(tmp_path)!r},)"
    after = (
        "torch.ones(1).half()\n"
        "import library\n"
        "out['rows'], out['notes'] = len(library.T), _notes.notes()"
    )
    assert said(tmp_path, before, after) == {"rows": 2, "notes": []}
    assert said(tmp_path, before, after, "_imports.install")["rows"] == 1


def test_1_modules_that_were_looked_through_before_a_fork_get_names_and_readers(
    tmp_path: Path,
) -> None:
    out = said(
        tmp_path,
        "import types\n"
        "early, late = types.ModuleType('early'), types.ModuleType('late')\n"
        "sys.modules['early'] = early\n"
        "early.float32, early.load, early.half = torch.float32, torch.load, torch.half\n"
        "_float64.look_ahead()\n"
        "sys.modules['late'] = late\n"
        "late.float32, late.load, early.half = torch.float32, torch.load, 'replaced'",
        "out['names'] = [m.float32 is torch.float32 for m in (early, late)]\n"
        "out['wide'] = real(torch.empty(1, dtype=early.float32))\n"
        "out['readers'] = [hasattr(m.load, '_isoshard_reads') for m in (early, late)]\n"
        "out['replaced'] = early.half",
    )
    assert out == {
        "names": [True, True],
        "wide": "torch.float64",
        "readers": [True, True],
        "replaced": "replaced",
    }


def test_2_readers_use_the_real_names_and_widen(tmp_path: Path) -> None:
    before = "torch.save({'w': torch.full((3,), 0.1), 'b': torch.ones(2).bfloat16()}, 'x.pt')"
    after = (
        "read = torch.load('x.pt')\n"
        "out['dtypes'] = [real(t) for t in read.values()]\n"
        "out['value'] = read['w'][0].item()"
    )
    assert said(tmp_path, before, after) == {
        "dtypes": ["torch.float64", "torch.float64"],
        "value": 0.10000000149011612,  # the float32 of the file
    }
    narrow = said(tmp_path, before, after, "_readers.install")
    assert narrow.get("dtypes") != ["torch.float64"] * 2


def test_6_what_is_read_in_16_bits_rounds_nothing(tmp_path: Path) -> None:
    """The self-check has the tolerances of 16 bits only where the program rounds to them."""
    before = "torch.save({'b': torch.ones(2).bfloat16()}, 'x.pt')"
    notes = (
        "_notes.write_notes(__import__('pathlib').Path('.'), 0)\n"
        "out['coarsest'] = _notes.read_notes(__import__('pathlib').Path('.'))[1]\n"
        "out['equal'] = torch.float == torch.half"
    )
    read = "read = torch.load('x.pt')['b'].float()\n"
    assert said(tmp_path, before, read + notes) == {"coarsest": None, "equal": True}
    cast = read + "read.bfloat16()\n"
    assert said(tmp_path, before, cast + notes) == {"coarsest": "bf16", "equal": True}


def test_2_pickles_are_read_with_the_real_names(tmp_path: Path) -> None:
    before = (
        "import pickle\n"
        "kept = pickle.dumps([torch.full((3,), 0.1), torch.nn.Parameter(torch.ones(2).half())])"
    )
    after = (
        "read = pickle.loads(kept)\n"
        "out['dtypes'] = [real(t) for t in read]\n"
        "out['values'] = [read[0][2].item(), read[1].sum().item()]\n"
        "out['again'] = pickle.loads(pickle.dumps(torch.full((3,), 0.1) / 3))[0].item() * 3"
    )
    right = {
        "dtypes": ["torch.float64"] * 2,
        "values": [0.10000000149011612, 2.0],
        "again": 0.1,
    }
    assert said(tmp_path, before, after) == right
    assert said(tmp_path, before, after, "_readers.install") != right


def test_2_safetensors_are_read_and_written_with_their_own_dtypes(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    before = (
        "import types\n"
        "from safetensors.torch import load_file, save_file\n"
        "save_file({'w': torch.full((3,), 0.1), 'b': torch.ones(2).bfloat16()}, 'x.safetensors')\n"
        "sys.modules['library'] = types.ModuleType('library')\n"
        "sys.modules['library'].load = load_file"
    )
    after = (
        "from library import load\n"
        "from safetensors import safe_open\n"
        "from safetensors.torch import load_file, save_file\n"
        "read = load('x.safetensors')\n"
        "with safe_open('x.safetensors', framework='pt') as f:\n"
        "    read |= {'own': f.get_tensor('w'), 'part': f.get_slice('w')[1:]}\n"
        "out['dtypes'] = sorted({real(t) for t in read.values()})\n"
        "out['value'] = read['part'][0].item()\n"
        "save_file({'w': torch.full((3,), 0.1)}, 'y.safetensors')\n"
        "out['written'] = load_file('y.safetensors')['w'][0].item()"
    )
    right = {"dtypes": ["torch.float64"], "value": 0.10000000149011612, "written": 0.1}
    assert said(tmp_path, before, after) == right
    assert said(tmp_path, before, after, "_readers.install") != right


def test_2_a_checkpoint_of_torch_distributed_is_read(tmp_path: Path) -> None:
    before = (
        "import torch.distributed.checkpoint as dcp\n"
        "dcp.save({'w': torch.full((3,), 0.1)}, checkpoint_id='narrow', no_dist=True)"
    )
    after = (
        "read = {'w': torch.zeros(3)}\n"
        "dcp.load(read, checkpoint_id='narrow', no_dist=True)\n"
        "dcp.save({'w': torch.full((3,), 0.1)}, checkpoint_id='wide', no_dist=True)\n"
        "again = {'w': torch.zeros(3)}\n"
        "dcp.load(again, checkpoint_id='wide', no_dist=True)\n"
        "out['values'] = [read['w'][0].item(), again['w'][0].item()]"
    )
    assert said(tmp_path, before, after) == {"values": [0.10000000149011612, 0.1]}


def test_2_modules_that_a_reader_returns_are_wide_inside_of_dtensors(tmp_path: Path) -> None:
    before = (
        "import torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Replicate, distribute_tensor\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "mesh = init_device_mesh('cpu', (1,))\n"
        "m = torch.nn.Linear(2, 2)\n"
        "whole = distribute_tensor(m.weight.detach(), mesh, [Replicate()])\n"
        "m.weight = torch.nn.Parameter(whole)"
    )
    after = (
        "_readers._reader(lambda: m)()\n"
        "out['dtypes'] = [real(m.weight), real(m.weight.to_local()), real(m.bias)]\n"
        "out['is_parameter'] = isinstance(m.weight, torch.nn.Parameter)"
    )
    assert said(tmp_path, before, after) == {"dtypes": ["torch.float64"] * 3, "is_parameter": True}


def test_3_narrow_tensors_are_widened_in_all_arguments(tmp_path: Path) -> None:
    """As keywords, in lists, and where they are parts of narrow ones."""
    before = (
        "old, other = torch.full((2, 2, 2), 0.1)\n"
        "row = other[0]\n"
        "w = torch.ones(2).requires_grad_()"
    )
    after = (
        "wide = torch.ones(2, 2)\n"
        "made = [torch.matmul(wide, other=old), torch.cat([wide, row[None]]), wide @ row,\n"
        "        torch.nn.functional.linear(wide, weight=w[None])]\n"
        "out['dtypes'] = sorted({real(t) for t in made})\n"
        "row.add_(1)\n"
        "wide[0] = row\n"
        "out['values'] = [round(other[0, 0].item(), 6), round(wide[0, 0].item(), 6)]"
    )
    right = {"dtypes": ["torch.float64"], "values": [1.1, 1.1]}
    assert said(tmp_path, before, after) == right


def test_3_threads_widen_too_and_read_at_the_same_time(tmp_path: Path) -> None:
    """As pipelines and loaders of checkpoints have them."""
    pytest.importorskip("safetensors")
    before = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from safetensors.torch import save_file\n"
        "save_file({str(i): torch.full((3,), 0.1) for i in range(40)}, 'x.safetensors')\n"
        "old = torch.ones(2)"
    )
    after = (
        "from safetensors import safe_open\n"
        "def read(i):\n"
        "    part = file.get_slice(str(i))[:2]\n"
        "    return [real(part), real(part.to(torch.bfloat16) + old), real(torch.ones(1))]\n"
        "with safe_open('x.safetensors', framework='pt') as file, ThreadPoolExecutor(4) as pool:\n"
        "    found = list(pool.map(read, range(40)))\n"
        "out['dtypes'] = sorted({dtype for three in found for dtype in three})"
    )
    assert said(tmp_path, before, after) == {"dtypes": ["torch.float64"]}


def test_3_stray_tensors_are_widened(tmp_path: Path) -> None:
    before = "import numpy\nold = torch.ones(2)\nnarrow = torch.float32"
    after = (
        "a = numpy.ones(2, numpy.float32)\n"
        "made = [torch.from_numpy(a), torch.tensor(a), torch.as_tensor(a), old + 1,\n"
        "        torch.ones(2).type(torch.HalfTensor), torch.FloatTensor([1.0]),\n"
        "        torch.ones(2).to(narrow), torch.ones(2, dtype=narrow), torch.ones(2).half(),\n"
        "        torch.ones(2) @ old]\n"
        "out['dtypes'] = sorted({real(t) for t in made})\n"
        "out['types'] = [torch.ones(2).type(), torch.ones(2).bfloat16().type()]"
    )
    assert said(tmp_path, before, after) == {
        "dtypes": ["torch.float64"],
        "types": ["torch.FloatTensor", "torch.BFloat16Tensor"],
    }
    without = said(tmp_path, before, after, "_strays.install")
    assert without.get("dtypes") != ["torch.float64"]


def test_3_a_cast_makes_a_copy_where_it_would_natively(tmp_path: Path) -> None:
    out = said(
        tmp_path,
        "",
        "x = torch.zeros(2)\ny = x.bfloat16()\ny += 1\nout['x'] = x.tolist()\n"
        "out['same'] = [x.float() is x, y.float() is y, y.bfloat16() is y]\n"
        "z = torch.zeros(2, dtype=torch.bfloat16)\n"
        "out['like'] = [x.to(z) is x, x.type_as(z) is x, x.to(torch.ones(2)) is x]",
    )
    assert out == {
        "x": [0.0, 0.0],
        "same": [True, False, True],
        "like": [False, False, True],
    }


def test_3_hooks_and_backward_passes_in_python_compute_in_float64(tmp_path: Path) -> None:
    after = (
        "class Third(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return (gradient / 3).float()\n"
        "x = torch.ones(1, requires_grad=True)\n"
        "x.register_hook(lambda gradient: (gradient * 3).bfloat16() / 3)\n"
        "Third.apply(x).sum().backward()\n"
        "out['values'] = [x.grad.item(), torch.autograd.grad(Third.apply(x).sum(), x)[0].item()]\n"
        "torch.autograd.backward(Third.apply(x).sum())\n"
        "out['sum'] = x.grad.item()"
    )
    third = 1 / 3
    assert said(tmp_path, "", after) == {"values": [third, third], "sum": 2 * third}
    without = said(tmp_path, "", after, "_strays._install_in_backward")
    assert without.get("values") != [third, third]


def test_4_compile_is_the_identity(tmp_path: Path) -> None:
    after = (
        "m = torch.nn.Linear(2, 2)\nout['same'] = torch.compile(m) is m\n"
        "@torch.compile(fullgraph=True)\n"
        "def double(x):\n    return 2 * x\n"
        "out['value'] = double(torch.ones(1)).item()\n"
        "out['notes'] = len(_notes.notes())"
    )
    assert said(tmp_path, "", after) == {"same": True, "value": 2.0, "notes": 1}


def test_4_what_was_compiled_before_is_not_compiled_any_more(tmp_path: Path) -> None:
    before = (
        "import torch._dynamo\n"
        "calls = []\n"
        "def backend(graph, inputs):\n"
        "    calls.append(len(inputs))\n"
        "    return graph.forward\n"
        "double = torch.compile(lambda x: 2 * x, backend=backend)"
    )
    after = "out['value'] = double(torch.ones(1)).item()\nout['calls'] = len(calls)"
    assert said(tmp_path, before, after) == {"value": 2.0, "calls": 0}
    alone = "_strays.install"  # Dynamo compiles nothing while a mode of functions is on
    assert said(tmp_path, before, after, alone) == {"value": 2.0, "calls": 0}
    assert said(tmp_path, before, after, f"{alone} _switched_off.install")["calls"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_5_random_numbers_are_those_of_the_dtype_that_was_asked_for(
    tmp_path: Path, dtype: str
) -> None:
    draws = (
        f"d = torch.{dtype}\n"
        "torch.manual_seed(0)\n"
        "m = torch.nn.Linear(7, 20, dtype=d)\n"
        "torch.nn.init.kaiming_normal_(m.weight)\n"
        "drawn = [m.weight, m.bias, torch.randn(20, dtype=d), torch.rand(20, dtype=d),\n"
        "         torch.randn_like(m.bias), torch.empty(20, dtype=d).uniform_(-1, 1),\n"
        "         torch.empty(20, dtype=d).normal_(0, 2)]\n"
        "w = torch.zeros(40, 30, dtype=d)\n"
        "drawn += [w[:, 3:20].normal_(), w.t().uniform_(), torch.nn.init.trunc_normal_(w)]\n"
        "torch.set_default_dtype(d)\n"
        "drawn += [torch.nn.Linear(3, 20).weight, torch.randn(20)]\n"
        "torch.set_default_dtype(torch.float32)\n"
        "drawn = [t.detach().double() for t in drawn]\n"
    )
    before = draws + "native = drawn\n"
    after = draws + "out['equal'] = all(map(torch.equal, drawn, native))"
    assert said(tmp_path, before, after) == {"equal": True}
    if dtype != "float64":
        assert said(tmp_path, before, after, "_draws.install") == {"equal": False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_5_a_dtype_that_is_asked_of_a_tensor_draws_as_natively(tmp_path: Path, dtype: str) -> None:
    draws = (
        "torch.manual_seed(0)\n"
        f"w = torch.nn.Linear(3, 20, dtype=torch.{dtype}).weight\n"
        "computed = torch.nn.functional.gelu(w) + 1\n"
        "drawn = [torch.randn(20, dtype=w.dtype), torch.rand(20, dtype=computed.dtype),\n"
        "         torch.randn_like(computed), torch.empty(20, dtype=w.dtype).normal_()]\n"
        "drawn = [t.detach().double() for t in drawn]\n"
    )
    before = draws + "native = drawn\n"
    after = draws + "out['equal'] = [torch.equal(a, b) for a, b in zip(drawn, native)]"
    assert said(tmp_path, before, after) == {"equal": [True] * 4}
    without = after.replace("torch.manual", "_strays._GET_DTYPE = None\ntorch.manual", 1)
    assert said(tmp_path, before, without)["equal"] != [True] * 4


@pytest.mark.parametrize(
    "made",
    [
        "torch.nn.Linear(3, 20).to(torch.float32).weight",
        "torch.nn.Linear(3, 20).to(torch.ones(1, dtype=torch.bfloat16)).weight",
        "torch.empty(20, dtype=torch.promote_types(torch.float16, torch.bfloat16))",
        "torch.empty(20, dtype=torch.result_type(torch.ones(1, dtype=torch.bfloat16), 1.5))",
    ],
)
def test_5_a_dtype_that_torch_computes_is_the_one_that_was_asked_for(
    tmp_path: Path, made: str
) -> None:
    draw = (
        "torch.manual_seed(0)\n"
        f"w = {made}.data\n"
        "drawn = torch.nn.init.trunc_normal_(w.float(), std=0.02).double()\n"
        "w.normal_()\n"
    )
    before = draw + "native = w.double()\n"
    after = draw + "out['equal'] = torch.equal(w.double(), native)"
    assert said(tmp_path, before, after) == {"equal": True}
    without = "_strays._parsing = lambda f: f\n_strays._OF_DTYPES_ALONE = ()\n"
    assert said(tmp_path, before + without, after) == {"equal": False}


def test_9_autocast_and_scaler_are_switched_off_with_notes(tmp_path: Path) -> None:
    after = (
        "m = torch.nn.Linear(2, 2)\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    out['dtype'] = real(m(torch.ones(1, 2)))\n"
        "out['enabled'] = torch.amp.GradScaler('cpu').is_enabled()\n"
        "out['notes'] = len(_notes.notes())"
    )
    right = {"dtype": "torch.float64", "enabled": False, "notes": 2}
    assert said(tmp_path, "", after) == right
    assert said(tmp_path, "", after, "_switched_off.install") != right


def test_9_what_the_script_switches_off_itself_has_no_note(tmp_path: Path) -> None:
    after = (
        "with torch.autocast('cpu', torch.bfloat16, False), torch.autocast('cpu', enabled=False):\n"
        "    torch.amp.GradScaler('cpu', enabled=False)\n"
        "_notes.write_notes(__import__('pathlib').Path('.'), 0)\n"
        "out['notes'], out['coarsest'] = _notes.read_notes(__import__('pathlib').Path('.'))"
    )
    assert said(tmp_path, "", after) == {"notes": [], "coarsest": None}


def test_9_the_operation_that_has_no_double_is_remembered(tmp_path: Path) -> None:
    after = (
        "from pathlib import Path\n"
        "try:\n"
        "    torch.quantize_per_tensor(torch.ones(3), 0.05, 0, torch.qint8)\n"
        "except RuntimeError as error:\n"
        "    out['error'] = str(error).splitlines()[0]\n"
        "_notes.write_notes(Path('.'), 0)\n"
        "out['failed'] = _notes.read_failed(Path('.'))"
    )
    out = said(tmp_path, "", after)
    assert "quantize_per_tensor" in out["failed"] and out["error"] in out["failed"]
    assert said(tmp_path, "", after, "_strays.install").get("failed", "") == ""


def test_9_grouped_products_have_a_kernel(tmp_path: Path) -> None:
    """All four shapes, and the gradients, are those of the kernel for float32."""
    lines = (
        "torch.manual_seed(0)\n"
        "rows, more = torch.randn(12, 8, requires_grad=True), torch.randn(3, 4, 8)\n"
        "weights, columns = torch.randn(3, 8, 16, requires_grad=True), torch.randn(8, 12)\n"
        "offs = torch.tensor([4, 4, 12], dtype=torch.int32)\n"
        "made = [torch._grouped_mm(rows, weights, offs=offs), torch._grouped_mm(more, weights),\n"
        "        torch._grouped_mm(more, columns, offs=offs),\n"
        "        torch._grouped_mm(rows.t(), columns.t(), offs=offs)]\n"
        "made += torch.autograd.grad(made[0].square().sum(), [rows, weights])\n"
        "made = [t.detach().double() for t in made]\n"
    )
    after = lines + (
        "out['dtypes'] = sorted({real(t) for t in made})\n"
        "out['near'] = [torch.allclose(a, b, atol=1e-4) for a, b in zip(made, native)]"
    )
    right = {"dtypes": ["torch.float64"], "near": [True] * 6}
    assert said(tmp_path, lines + "native = made", after) == right
    assert "error" in said(tmp_path, lines + "native = made", after, "_kernels.install")


def test_5_weights_that_are_cast_are_those_of_the_native_run(tmp_path: Path) -> None:
    """Until an optimizer is built. Later casts, and those of a graph, round nothing."""
    cast = (
        "torch.manual_seed(0)\n"
        "m = torch.nn.Linear(8, 8).bfloat16()\n"
        "kept = m.weight.detach().float()\n"
        "w = torch.full((2,), 0.1)\n"
    )
    after = cast + (
        "out['equal'] = torch.equal(kept, native.double())\n"
        "in_graph = (w.requires_grad_() * 1).bfloat16()\n"
        "torch.optim.SGD([w], lr=0.1)\n"
        "later = w.detach().bfloat16()\n"
        "out['kept'] = [torch.equal(in_graph, w), torch.equal(later, w)]"
    )
    right = {"equal": True, "kept": [True, True]}
    assert said(tmp_path, cast + "native = kept", after) == right
    without = after.replace("torch.manual", "_strays._is_preparing = False\ntorch.manual", 1)
    assert said(tmp_path, cast + "native = kept", without) == {**right, "equal": False}
