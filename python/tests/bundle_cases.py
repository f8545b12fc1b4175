# SPDX-License-Identifier: Apache-2.0
"""What fixtures/frameworks holds of each framework: an example made smaller, and its faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from live_runs import DDP_SUMS, Edit, Fault, before, fault


@dataclass(frozen=True)
class Case:
    """An example, how it is called, and the bugs that are planted in it, by name."""

    script: str
    mesh: str
    ranks: int
    faults: dict[str, Fault]
    words: str = ""
    edits: tuple[Edit, ...] = ()
    helpers: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    steps: int = 1


_STEP = "    optimizer.step()"
_TINY: dict[str, tuple[Edit, ...]] = {
    "tiny.py": (
        (
            '"hidden_size": 64, "intermediate_size": 128',
            '"hidden_size": 8, "intermediate_size": 12',
        ),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1'),
        ("LENGTH, VOCABULARY = 32, 251", "LENGTH, VOCABULARY = 4, 17"),
    )
}
_EVEN = ("vocab_size=252", "vocab_size=18")
_MEGATRON = {
    "megatron_tiny.py": (
        ("(steps, 8, LENGTH", "(steps, 4, LENGTH"),
        ("LENGTH, VOCABULARY = 32, 256", "LENGTH, VOCABULARY = 4, 16"),
        ('"num_layers": 2, "hidden_size": 64', '"num_layers": 1, "hidden_size": 8'),
        ('"ffn_hidden_size": 96', '"ffn_hidden_size": 12'),
    )
}
_SGD = ("AdamW", "SGD")
_NARROW: tuple[Edit, ...] = (("50", "20"), ("16", "8"), ("32", "12"), (", 12), gen", ", 4), gen"))
_AUTOCAST: Edit = (
    "    nn.functional.cross_entropy(model(ids)",
    '    with torch.autocast("cpu", torch.bfloat16, enabled=True):\n'
    "        logits = model(ids)\n"
    "    nn.functional.cross_entropy(logits.float()",
)
_FSDP2: tuple[Edit, ...] = (
    ("(20, 2, 40,", "(8, 2, 12,"),
    ("range(2)", "range(1)"),
    ("Embedding(50, 20)", "Embedding(20, 8)"),
    ("Linear(20, 50)", "Linear(8, 20)"),
    ("(0, 50, (5, 6, 12)", "(0, 20, (5, 12, 3)"),
)
_ROWS_NOT_ADDED = (
    "RowwiseParallel._prepare_output_fn = staticmethod(\n"
    "    lambda layouts, use_local, module, outputs, mesh: outputs.to_local()\n)"
)
_SUM_FOR_AVERAGE = (
    "from torch.distributed.fsdp._fully_shard import _fsdp_collectives as c\n"
    "SUM = dist.ReduceOp.SUM\n"
    "c._get_gradient_divide_factors = lambda *a, **k: (None, None, SUM, SUM)"
)

CASES = {
    "ddp": Case(
        "ddp.py",
        "dp=2",
        2,
        {
            "not_reduced": fault("nn.parallel.DistributedDataParallel(Mlp())", "Mlp()", ""),
            "sum_for_average": before(
                "    nn.utils.clip",
                "    [p.grad.mul_(world_size) for p in model.parameters()]",
                "",
            ),
        },
        edits=_NARROW,
    ),
    "ddp_autocast": Case(
        "ddp.py",
        "dp=2",
        2,
        {"autocast_on_one_rank": fault("enabled=True", "enabled=rank == 0", "")},
        edits=(*_NARROW, _SGD, _AUTOCAST),
    ),
    "fsdp2": Case(
        "fsdp2.py",
        "dp=3",
        3,
        {
            "sum_for_average": before("dist.init_process_group", _SUM_FOR_AVERAGE, ""),
            "stale_shard": before(
                "optimizer =",
                "if rank == 1:\n"
                "    with torch.no_grad():\n"
                "        model[1].linear1.weight.to_local().mul_(1.01)",
                "",
            ),
        },
        edits=_FSDP2,
    ),
    "hsdp": Case(
        "fsdp2.py",
        "dp_replicate=2,dp_shard=2",
        4,
        {
            "replicas_apart": before("for layer in model:", 'mesh = mesh["dp_shard"]', ""),
        },
        edits=(
            *_FSDP2,
            _SGD,
            (
                '(world_size,), mesh_dim_names=("dp",)',
                '((world_size + 1) // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard")',
            ),
        ),
    ),
    "dtensor_tp": Case(
        "tensor_parallel.py",
        "tp=2",
        2,
        {"rows_not_added": before("dist.init_process_group", _ROWS_NOT_ADDED, "")},
        words="--tp 2",
        edits=(
            *_NARROW,
            _SGD,
            ('for layer in model:\n    fully_shard(layer, mesh=mesh["dp"])\n', ""),
        ),
    ),
    "sequence_parallel": Case(
        "sequence_parallel.py",
        "tp=2",
        2,
        {
            "norm_beside_the_mesh": before(
                "fully_shard(tp.", 'del plan["2.0"]  # its weight is a plain tensor', ""
            ),
            "norm_counted_twice": before(
                _STEP, '    model[3].weight.grad.mul_(mesh["tp"].size())', ""
            ),
        },
        edits=(
            *_NARROW,
            _SGD,
            ("Shard(1), use_local_output=False)", "Shard(1), output_layouts=Replicate())"),
            ("with tp.loss_parallel():", "if True:"),
            (
                'fully_shard(tp.parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])',
                'fully_shard(tp.parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])'
                ' if False else tp.parallelize_module(model, mesh["tp"], plan)',
            ),
        ),
    ),
    "loss_parallel": Case(
        "sequence_parallel.py",
        "dp=2,tp=2",
        4,
        {
            "softmax_over_a_part": before(
                "dist.init_process_group",
                "from torch.distributed.tensor.parallel import loss as custom\n"
                "custom.funcol.all_reduce = lambda tensor, *args, **kwargs: tensor",
                "",
            ),
        },
        edits=(*_NARROW, _SGD),
    ),
    "fsdp2_tp": Case(
        "tensor_parallel.py",
        "dp=2,tp=2",
        4,
        {
            "rows_not_added": before("dist.init_process_group", _ROWS_NOT_ADDED, ""),
        },
        words="--tp 2",
        edits=(*_NARROW, _SGD),
    ),
    "pipelining": Case(
        "pipeline.py",
        "pp=2",
        2,
        {
            "not_divided": before(
                "loss_fn =",
                "if stage.is_first:\n    stage.scale_grads = lambda factor: None",
                "",
            ),
            "received_in_another_order": before(
                "loss_fn =",
                "received = stage._retrieve_recv_activations\n"
                "def flipped(chunk):\n"
                "    tensors = received(chunk)\n"
                "    for tensor in tensors:\n"
                "        tensor.data = tensor.data.flip(0)\n"
                "    return tensors\n"
                "if stage.is_last and not stage.is_first:\n"
                "    stage._retrieve_recv_activations = flipped",
                "",
            ),
        },
        edits=(
            _SGD,
            ("(16, 2, 32,", "(8, 2, 12,"),
            ("range(4)", "range(2)"),
            ("Embedding(50, 16)", "Embedding(20, 8)"),
            ("Linear(16, 50)", "Linear(8, 20)"),
            ("(0, 50, (5, 8, 12)", "(0, 20, (5, 8, 3)"),
        ),
    ),
    "context_parallel": Case(
        "context_parallel.py",
        "cp=2",
        2,
        {
            "keys_in_another_order": fault("< torch.cat(order)", "< torch.arange(12)", ""),
            "gradients_apart": fault(
                "model = nn.parallel.DistributedDataParallel(model)", "pass", ""
            ),
        },
        edits=(_SGD, ("50", "30"), ("16", "8"), ("(5, 8, 12)", "(5, 2, 12)")),
    ),
    "deepspeed_zero1": Case(
        "deepspeed_zero.py",
        "dp=2",
        2,
        {
            "clipped_to_a_third_of_the_norm": before(
                "for batch in", "engine.optimizer.clip_grad = 0.5 / 3", ""
            ),
        },
        words="--zero 1",
        helpers=_TINY,
    ),
    "deepspeed_zero3": Case(
        "deepspeed_zero.py",
        "dp=2",
        2,
        {
            "sum_for_average": before(
                "for batch in",
                "engine.optimizer._gradient_averaging_world_size = lambda *_: 1",
                "",
            ),
        },
        words="--zero 3",
        edits=(
            (
                'stage3_param_persistence_threshold": 1000',
                'stage3_param_persistence_threshold": 100',
            ),
        ),
        helpers=_TINY,
    ),
    "deepspeed_autotp": Case(
        "deepspeed_autotp.py",
        "tp=2",
        2,
        {
            "norms_counted_twice": before(
                "    engine.step()",
                "    for name, parameter in model.named_parameters():\n"
                "        if 'norm' in name and engine.is_gradient_accumulation_boundary():\n"
                "            parameter.grad.mul_(tp)",
                "",
            ),
        },
        words="--tp 2",
        edits=(_EVEN,),
        helpers=_TINY,
    ),
    "megatron_core": Case(
        "megatron_gpt.py",
        "dp=2,tp=2",
        4,
        {
            "norms_not_added": before(
                "model = distributed",
                "for parameter in model.parameters():\n    parameter.sequence_parallel = False",
                "",
            ),
        },
        words="2 zero sp",
        helpers=_MEGATRON,
    ),
    "hf_tp_plan": Case(
        "hf_tp_plan.py",
        "tp=2",
        2,
        {
            "rows_not_added": before(
                "with tempfile",
                "from transformers.distributed.tensor_parallel import RowwiseParallel\n"
                "RowwiseParallel.transform_output_post_forward = (\n"
                "    lambda self, module, output, mesh: output.to_local()\n"
                ")",
                "",
            ),
        },
        words="--model qwen2",
        edits=(_EVEN, _SGD),
        helpers=_TINY,
    ),
    "hf_trainer": Case(
        "hf_trainer.py",
        "dp=2",
        2,
        {
            "sum_for_average": before("Trainer(model", DDP_SUMS, ""),
        },
        edits=(("    disable_tqdm", '    optim="sgd",\n    disable_tqdm'),),
        helpers=_TINY,
    ),
    "accelerate": Case(
        "accelerate_loop.py",
        "dp=2",
        2,
        {
            "first_micro_batch_lost": before(
                "        loss = model", "        model.zero_grad()", ""
            ),
        },
        edits=(_SGD,),
        helpers=_TINY,
    ),
    "peft_lora": Case(
        "peft_lora.py",
        "dp=2",
        2,
        {
            "adapters_not_reduced": fault("model = DistributedDataParallel(model)", "pass", ""),
        },
        words="--wrap ddp",
        helpers=_TINY,
        steps=2,
    ),
    "torchtitan": Case(
        "torchtitan_llama.py",
        "dp=2,tp=2",
        4,
        {
            "rotated_by_another_position": before(
                "optimizer =",
                "if dp * tp > 1:\n    model.freqs_cis = model.freqs_cis.roll(1, 0)",
                "",
            ),
        },
        edits=(
            _SGD,
            (
                '"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64',
                '"dim": 16, "n_layers": 1, "n_heads": 4, "vocab_size": 32',
            ),
            ("(0, 64, (5, 8, 16)", "(0, 32, (5, 4, 8)"),
            (
                "seq_len, config.training.mixed_precision_param = 16",
                "seq_len, config.training.mixed_precision_param = 8",
            ),
            ("max_seq_len=16", "max_seq_len=8"),
        ),
        options=("--loss", "sum", "--grad-scale", "1"),
    ),
    "torch_compile": Case(
        "fsdp2.py",
        "dp=2",
        2,
        {
            "another_constant": before(
                "mesh = init", "if world_size > 1:\n    layers[0].norm1.eps = 1e-3", ""
            ),
        },
        edits=(
            *_FSDP2,
            _SGD,
            (
                "model = nn.Sequential",
                'layers[0].compile(backend="aot_eager")\nmodel = nn.Sequential',
            ),
        ),
    ),
}
