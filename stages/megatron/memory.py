"""Memory of the Megatron stages, from config.json and their settings. Loads no torch.

Weights, gradients and optimizer state are counted; activations and logits are estimates, of a pack as long as
`max_tokens_per_micro_batch` allows. What CUDA, NCCL and the allocator take beside is not in them. On an H200, with
nothing recomputed and nothing published, training 0.5 B parameters took 41 GB at most where they say 54, and 3 B 112 GB
where they say 132: compiled kernels keep less for the backward pass than is counted here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.memory import Memory

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate
    from rollstream.stages.logprob import RefLogprob
    from rollstream.stages.megatron.settings import MegatronConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Logits of a chunk at most on a GPU, as `output.py` cuts them.
MAX_LOGITS = 1 << 29
#: What leaves the device with each kind of `offload`.
OFFLOADED = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Count:
    """Parameters of the rank that holds most. Experts are apart: their optimizer state is dealt to fewer ranks."""

    experts: int
    others: int

    @property
    def all(self) -> int:
        return self.experts + self.others


def num_parameters(config: HFConfig, layout: Layout) -> int:
    """Of the rank that holds most: matrices are cut `tp` ways, norms are not."""
    return _whole_model(config, layout).all


def trained_parameters(config: HFConfig, layout: Layout, lora: Lora | None) -> Count:
    """Of the rank that holds most: all, or those of the adapters."""
    return _whole_model(config, layout) if lora is None else _adapters(config, layout, lora)


def trainer_memory(settings: ActorUpdate.Config) -> Memory:
    """Weights in their dtype, gradients in float32 (Megatron's gradient buffer), Adam's two moments and, below float32,
    main weights in float32. Moments and main weights are dealt to the ranks that hold the same parameters (Rajbhandari
    et al. 2020, ZeRO stage 1): `dp` ranks, or for experts, which are spread over `tp * dp`, what `ep * etp` leaves.
    With one rank the weights are there once more, for those that read them on its GPU."""
    config, layout = hf_config.read(Path(settings.model)), settings.layout
    trained = trained_parameters(config, layout, settings.lora)
    adapters = 0 if settings.lora is None else trained.all
    copies = layout.tp * layout.dp // (layout.ep * layout.expert_tp)
    per_parameter = 8 if settings.dtype == "float32" else 12
    parts = {
        "weights": (num_parameters(config, layout) + adapters) * BYTES[settings.dtype],
        "gradients": 4 * trained.all,
        "optimizer": math.ceil(per_parameter * (trained.others / layout.dp + trained.experts / copies)),
        "activations": activation_bytes(config, settings, recompute=settings.recompute),
        "logits": logits_bytes(config, settings),
    }
    if layout.size == 1:
        parts["published"] = num_parameters(config, layout) * BYTES[settings.dtype]
    missing = tuple(kind for kind in OFFLOADED if kind not in settings.offload)
    return Memory(
        parts=parts,
        freed={"activations", "logits", *(OFFLOADED[kind] for kind in settings.offload)},
        could_free=f"offload={tuple(OFFLOADED)}" if missing else "",
    )


def reference_memory(settings: RefLogprob.Config) -> Memory:
    """Weights, and the activations of one layer, for nothing is kept for a backward pass."""
    config, layout = hf_config.read(Path(settings.model)), settings.layout
    weights = num_parameters(config, layout) * BYTES[settings.dtype]
    activations = activation_bytes(config, settings, recompute="none") // _most_layers(config, layout)
    return Memory(parts={"weights": weights, "activations": activations, "logits": logits_bytes(config, settings)})


def activation_bytes(config: HFConfig, settings: MegatronConfig, *, recompute: str) -> int:
    """Of the longest pack, in all layers of the fullest rank, after Korthikanti et al. 2022, with gated linear units
    and an attention that keeps no scores. A pipeline's first rank has `pp` packs under way."""
    layout, size = settings.layout, BYTES[settings.dtype]
    heads = config.num_heads + config.num_kv_heads
    ffn = config.ffn_size if config.experts is None else config.experts.top_k * config.experts.ffn_size
    cut = config.head_size * (3 * heads + config.num_kv_heads) + 4 * ffn
    whole = 6 * config.hidden_size
    per_layer = cut // layout.tp + (whole // layout.tp if layout.sp else whole)
    layers = _most_layers(config, layout) * layout.pp
    tokens = settings.max_tokens_per_micro_batch
    if recompute == "full":
        return tokens * size * (layers * config.hidden_size + per_layer)
    return tokens * size * layers * per_layer


def logits_bytes(config: HFConfig, settings: MegatronConfig) -> int:
    """Of the largest chunk of logits, and as much for its gradient."""
    logits = settings.max_tokens_per_micro_batch * config.vocab_size // settings.layout.tp
    return 2 * BYTES[settings.dtype] * min(logits, MAX_LOGITS)


def _most_layers(config: HFConfig, layout: Layout) -> int:
    fixed = [n for n in (layout.first_layers, layout.last_layers) if n is not None]
    ranks = layout.pp - len(fixed)
    inner = math.ceil((config.num_layers - sum(fixed)) / ranks) if ranks else 0
    return max([inner, *fixed])


def _whole_model(config: HFConfig, layout: Layout) -> Count:
    layers, embedding = _most_layers(config, layout), config.vocab_size * config.hidden_size // layout.tp
    experts, others = _layer_parameters(config, layout)
    ends = config.hidden_size + embedding * (1 if config.tied or layout.pp > 1 else 2)
    return Count(layers * experts, layers * others + ends)


def _layer_parameters(config: HFConfig, layout: Layout) -> tuple[int, int]:
    """Of its experts, and all else."""
    h, s = config.hidden_size, config.head_size
    queries, keys = config.num_heads * s, config.num_kv_heads * s
    attention = h * (2 * queries + 2 * keys) + (queries + 2 * keys if config.qkv_bias else 0)
    norms = 2 * h + (2 * s if config.qk_norm else 0)
    if config.experts is None:
        return 0, (attention + 3 * h * config.ffn_size) // layout.tp + norms
    experts = config.experts.num * 3 * h * config.experts.ffn_size
    router = config.experts.num * h
    return experts // (layout.ep * layout.expert_tp), attention // layout.tp + router + norms


def _adapters(config: HFConfig, layout: Layout, lora: Lora) -> Count:
    """Rank times the sum of both sides of each linear that is adapted. One side of two is cut; both are counted."""
    h, s, layers = config.hidden_size, config.head_size, _most_layers(config, layout)
    queries, keys = config.num_heads * s, config.num_kv_heads * s
    attention = {"q_proj": h + queries, "k_proj": h + keys, "v_proj": h + keys, "o_proj": queries + h}
    feed_forward = sum(target not in attention for target in lora.targets)
    in_attention = sum(size for target, size in attention.items() if target in lora.targets)
    if config.experts is None:
        return Count(0, layers * lora.rank * (in_attention + feed_forward * (h + config.ffn_size)))
    experts = config.experts.num // layout.ep * feed_forward * (h + config.experts.ffn_size)
    return Count(layers * lora.rank * experts, layers * lora.rank * in_attention)
