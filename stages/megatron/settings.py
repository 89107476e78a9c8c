"""What every Megatron stage is told of its model. Loads no torch."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollstream.stages.base import Stage
from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.hf_config import has_weights
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.moe_settings import Moe
from rollstream.stages.names import DTYPES, known_names

#: What to compute twice, and the fields of Megatron's TransformerConfig that say so.
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
#: Fields of Megatron's TransformerConfig that something else decides, and what.
DECIDED_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), "layout"),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), "layout"),
    "virtual_pipeline_model_parallel_size": "layout",
    **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"), "layout"),
    **dict.fromkeys(("sequence_parallel", "context_parallel_size"), "layout"),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "dtype"),
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"), "the model's config.json"),
    **dict.fromkeys(("num_query_groups", "kv_channels", "layernorm_epsilon"), "the model's config.json"),
    **dict.fromkeys(("normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias"), "the model's config.json"),
    **dict.fromkeys(("gated_linear_unit", "activation_func", "num_moe_experts"), "the model's config.json"),
    **dict.fromkeys(("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"), "the model's config.json"),
    **dict.fromkeys(("perform_initialization", "calculate_per_token_loss", "variable_seq_lengths"), "rollstream"),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_token_dispatcher_type"), "moe"),
    **dict.fromkeys(("moe_router_load_balancing_type", "moe_router_dtype"), "rollstream"),
    **dict.fromkeys(("moe_enable_routing_replay", "moe_grouped_gemm"), "rollstream"),
    **dict.fromkeys(("batch_p2p_comm", "overlap_p2p_comm"), "layout"),
    **dict.fromkeys(("finalize_model_grads_func", "grad_scale_func"), "rollstream"),
}


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(Stage.Config):
    """Settings that the Megatron stages have in common."""

    #: Folder of the model to start from, in Hugging Face format.
    model: str
    #: Ranks of the stage, and how the model is cut between them.
    layout: Layout = field(default_factory=Layout)
    #: The rollout's temperature: logits are divided by it here too.
    temperature: float = 1.0
    #: Precision of weights and activations: float32, bfloat16 or float16. Log-probabilities are in float32 always.
    dtype: str = "float32"
    #: Tokens in one forward pass at most, prompts and the pack's padding included; a longer sample is an error.
    max_tokens_per_micro_batch: int = 16384
    #: Samples in one forward pass at most; None for as many as the tokens allow.
    micro_batch_size: int | None = None
    #: How experts are run and balanced; a dense model reads nothing of it.
    moe: Moe = field(default_factory=Moe)
    #: Begin with random weights of config.json's shape, the same in every layout: to try one without weights.
    random_weights: bool = False
    #: Fields of Megatron's TransformerConfig, given to it as they are.
    override_transformer_config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def transformer_fields(self) -> Mapping[str, Any]:
        """Fields of Megatron's TransformerConfig that the settings give it."""
        return self.override_transformer_config

    def model_faults(self) -> list[str]:
        """What is wrong with the model's folder and the layout."""
        faults = self.layout.faults(self.model)
        if not faults and hf_config.read(Path(self.model)).experts is not None:
            faults += self.moe.faults(self.layout)
        if not faults and not self.random_weights and not has_weights(Path(self.model)):
            faults.append(
                f"model folder {self.model!r} has neither model.safetensors nor model.safetensors.index.json; "
                "random_weights=True begins without"
            )
        return faults


def shared_rules(c: MegatronConfig) -> list[tuple[bool, str]]:
    """Every rule of the shared settings: whether it holds, and what to say where it does not."""
    return [
        (bool(c.model), "model must name a folder, got ''"),
        (0 < c.temperature < math.inf, f"temperature must be above 0, got {c.temperature}: give the rollout's"),
        (c.dtype in DTYPES, f"dtype must be one of the known, got {c.dtype!r}: {known_names(c.dtype, DTYPES)}"),
        (
            c.max_tokens_per_micro_batch >= c.layout.token_multiple,
            f"max_tokens_per_micro_batch must be at least {c.layout.token_multiple}, got "
            f"{c.max_tokens_per_micro_batch}",
        ),
        (
            c.micro_batch_size is None or c.micro_batch_size >= 1,
            f"micro_batch_size must be at least 1, got {c.micro_batch_size}: None for as many as the tokens allow",
        ),
        *((False, message) for message in _override_faults(c.override_transformer_config)),
    ]


def _override_faults(override: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    for name in override:
        if name not in known_transformer_fields():
            known = known_names(name, known_transformer_fields()).split("Known:")[0]
            faults.append(f"override_transformer_config: TransformerConfig has no field {name!r}. {known}".strip())
        elif name in DECIDED_ELSEWHERE:
            faults.append(f"override_transformer_config: {name} is decided by {DECIDED_ELSEWHERE[name]}: leave it out")
    return faults


@cache
def known_transformer_fields() -> frozenset[str]:
    """Names of the fields of the installed TransformerConfig, read from its source: importing it would load torch."""
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    names: set[str] = set()
    for part in ("core/model_parallel_config.py", "core/transformer/transformer_config.py"):
        path = next((Path(folder) / part for folder in folders if (Path(folder) / part).is_file()), None)
        if path is None:
            raise ImportError("megatron-core is not installed where Python looks: pip install megatron-core")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in ("ModelParallelConfig", "TransformerConfig"):
                fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
                names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return frozenset(names)
