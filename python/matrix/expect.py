# SPDX-License-Identifier: Apache-2.0
"""What each case is expected to do; all that is not named here is to conform.

A defect names its heading in docs/reference/found.md in front of the colon.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from .spec import Expected, Spec


def _defect(heading: str, words: str) -> Expected:
    return Expected("defect", f"{heading}: docs/reference/found.md", words)


def _refused(why: str, words: str) -> Expected:
    """`words` are the framework's: a case that hangs, or dies, is refused by nobody."""
    return Expected("refused", why, words)


_FUSED = "transformers: fused checkpoints"
_REDUCED = "transformers: gradients that no plan reduces"
_TWICE = "transformers: gradients reduced once for each micro-batch"
_TIED = "transformers: tied heads that are cut unevenly"
_COUNTED = "transformers: tokens that Trainer counts for gpt2"
_AUTOTP = "DeepSpeed: fused projections that AutoTP does not know"
_IN_PLACE = _refused("a view of a DTensor's local part is changed in place", "is a view and is")
_NO_KERNEL = _refused("torch's grouped product wants rows of 16 bytes", "multiple of 16 bytes")
_DRAWS = _refused("the forward pass draws random numbers", "draws others")
_MIXED_NORM = _refused("torch takes no norm over tensors and DTensors", "_foreach_norm")
_TWO_MESHES = _refused("torch adds no norms over two meshes", "aten.stack.default")
_TIED_HEAD = _refused("the plan has no tied head", "mixed torch.Tensor and DTensor")
_PLAN = _refused("AutoTP refuses plans with other styles", "the plan is rejected as a whole")
_NO_TE = _refused("experts need Transformer Engine's product", "te_general_gemm")

_SIZES = "size of tensor a"
_WHOLE_ADAPTERS = "PEFT makes adapters of whole size beside weights that are cut"

#: (pattern of ids, what is expected); the first that fits counts.
RULES: list[tuple[str, Expected]] = [
    # -- transformers' plans
    ("hf_tp/*/hrm_text/*", _defect(_FUSED, "first weight as read")),
    ("hf_tp/fsdp/olmo_hybrid/*", _defect(_FUSED, "first weight as read")),
    ("hf_tp/fsdp/apertus/dp2/*", Expected("conforms")),
    ("hf_tp/*/apertus/*", _defect(_REDUCED, "act_fn.alpha_p")),
    ("hf_tp/*/glm4_moe/*use_qk_norm=True", _defect(_REDUCED, "q_norm.weight")),
    ("hf_tp/*/phi/*qk_layernorm=True", _defect(_REDUCED, "q_layernorm.weight")),
    ("hf_tp/plain/qwen3*/*/mb2/*", _defect(_TWICE, "first gradient of")),
    ("hf_tp/plain/gemma3_text/*/mb2/*", _defect(_TWICE, "first gradient of")),
    ("hf_tp/plain/exaone4/*/mb2/*", _defect(_TWICE, "first gradient of")),
    ("hf_tp/fsdp/mixtral/*/odd", _NO_KERNEL),
    ("hf_tp/fsdp/*/dp3/*/tied/odd", _defect(_TIED, "first forward at lm_head (step 1)")),
    ("hf_tp/plain/doge/*", _refused("the mask has all heads, the ranks have a part", _SIZES)),
    ("hf_tp/plain/llama4_text/*", _IN_PLACE),
    ("hf_tp/experts/llama4_text/*", _refused("the model has no plan of experts", "`ep_plan`")),
    ("hf_tp/plain/olmo*clip_qkv=*", _IN_PLACE),
    ("hf_tp/plain/mimo_v2_flash/*", _refused("sliding layers have no head on a rank", _SIZES)),
    ("*/phimoe/*", _DRAWS),
    ("hf_tp/plain/internlm3/*_bias=True", _refused("the model refuses it", "qkv_bias")),
    ("hf_tp/plain/cohere/*use_qk_norm=True", _refused("norms of each head are not cut", _SIZES)),
    ("hf_tp/plain/laguna/*router_weight*", _refused("the model refuses it", "not yet supported")),
    ("hf_tp/plain/gpt_neox/*/tied/*", _TIED_HEAD),
    ("hf_tp/plain/gpt_oss/*/tied/*", _TIED_HEAD),
    ("hf_tp/plain/phi3/tp4/*/seed3", Expected("conforms")),
    ("hf_tp/plain/gpt_neox/tp4/*/seed3", Expected("conforms")),
    ("hf_tp/plain/*/tp4/*/seed3", _refused("fewer heads of keys than ranks", "is invalid for")),
    ("hf_tp/*mixtral/*/odd*", _NO_KERNEL),
    ("hf_tp/*qwen2_moe/*/odd*", _NO_KERNEL),
    ("hf_tp/*qwen2_moe/tp4/*", _NO_KERNEL),
    ("hf_tp/*gpt_oss/*/odd/*", _NO_KERNEL),
    ("fsdp2/*/qwen2_moe/*/odd", _NO_KERNEL),
    ("hf_tp/plain/mixtral/*/fp64/*", _refused("torch's grouped product has no fp64", "got Double")),
    ("hf_tp/plain/*/clip0.5", _MIXED_NORM),
    # -- PyTorch's own
    ("ddp/bf16_hook/*", Expected("documented", "bf16_compress_hook reduces in bf16", "gradient")),
    ("tp/loss_smooth/*", _refused("smoothing reads targets beside DTensors", "masked_fill_")),
    ("tp/plain/*/clip*", _TWO_MESHES),
    ("tp/loss/*/clip*", _TWO_MESHES),
    ("tp/uneven/*/clip*", _TWO_MESHES),
    ("tp/uneven_local/*", _refused("a local part does not say the uneven whole", "addmm")),
    # -- DeepSpeed
    (
        "zero/stage1/*round_robin_gradients=True",
        _refused("DeepSpeed's safe_get_full_grad raises there", "size of tensor"),
    ),
    ("autotp/*/persimmon/*", _defect(_AUTOTP, "query_key_value.weight: permuted")),
    ("autotp/*/apertus/*", _defect(_REDUCED, "act_fn.alpha_p")),
    ("autotp/*/gpt2/*", _refused("AutoTP does not take it", "AutoTP not supported")),
    ("autotp/stage0/mixtral/*/odd/*", _NO_KERNEL),
    ("autotp/*/codegen/*", _refused("too few heads for its fused type", "num_kv_heads")),
    ("autotp/*/falcon/*", _refused("a head of keys that all share is cut", "is invalid for")),
    ("autotp/*/bloom/*", _refused("ALiBi has all heads", "expanded size")),
    ("autotp/*/mpt/*", _refused("ALiBi has all heads", "size of tensor")),
    ("autotp/*/gpt_bigcode/*", _refused("one head of keys is cut", "size of tensor")),
    # -- Trainer and PEFT
    ("trainer/*/gpt2/*", _defect(_COUNTED, "first loss")),
    ("peft/loha_*", _DRAWS),
    ("peft/dora_tp/*", _refused("DoRA's norm adds a tensor to a DTensor", "mixed torch.Tensor")),
    ("peft/saved_tp/*", _refused("PEFT copies a DTensor's local part", "invalid python storage")),
    ("peft/ia3_tp/*", _refused(_WHOLE_ADAPTERS, _SIZES)),
    ("peft/vera_tp/*", _refused(_WHOLE_ADAPTERS, "size mismatch")),
    ("peft/oft_tp/*", _refused(_WHOLE_ADAPTERS, "size mismatch")),
    ("peft/*_tp/*", _refused(_WHOLE_ADAPTERS, "is invalid for")),
    # -- Megatron-Core
    ("megatron/*num_moe_experts=*", _NO_TE),
    ("megatron/*recompute_granularity=*", _refused("recomputation asks for CUDA", "CUDA")),
]
for _name in ("phi3", "mixtral", "qwen2_moe", "olmo2", "glm", "glm4", "deepseek_v2"):
    RULES.append((f"autotp/*/{_name}/*", _PLAN))


def expected_of(spec: Spec) -> Expected:
    """What is expected of a case."""
    for pattern, expected in RULES:
        if fnmatchcase(spec.id, pattern):
            return expected
    return Expected("conforms")
