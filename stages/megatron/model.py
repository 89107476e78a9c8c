"""Megatron's GPTModel as this project uses it: packed sequences in, log-probabilities of the wanted tokens out.

A rank holds one chunk of the model, or several where the layers are dealt out in turns (virtual pipeline).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.batch import MicroBatch
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.mcore import GPTModel, state
from rollstream.stages.megatron.output import ScoringLayer, Wanted
from rollstream.stages.megatron.rotary import cos_sin, frequencies_of
from rollstream.stages.megatron.router import routers_of, run_with
from rollstream.stages.megatron.settings import MegatronConfig
from rollstream.stages.megatron.transformer import block_spec, transformer_config

#: The vocabulary is padded to a multiple of this: the same size for every usual tensor-parallel size, so that
#: checkpoints of different layouts have tensors of one shape.
VOCAB_MULTIPLE = 128


class Model(GPTModel):
    """A chunk of the model. Its forward takes a MicroBatch; of the last chunk it gives [R, 2], log-probability and
    entropy at each of the R tokens in `batch.labels`; of another, hidden states for the next.

    The output layer sees only the positions that predict those tokens: of a prompt no logits are ever made.
    """

    def __init__(self, *args: Any, temperature: float, real_vocab_size: int, frequencies: Tensor, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._temperature, self._real_vocab_size = temperature, real_vocab_size
        self._frequencies = frequencies
        self._routers = routers_of(self)
        if self.post_process:
            ScoringLayer.take_over(self.output_layer)

    def forward(self, batch: MicroBatch) -> Tensor:  # type: ignore[override]
        if self.post_process:
            output: Any = self.output_layer
            output.wanted = Wanted(
                rows=batch.rows,
                labels=batch.labels,
                temperature=self._temperature,
                vocab_size=self._real_vocab_size,
            )
        out = run_with(batch.router, self._routers, lambda: self._run(batch))
        return out[0] if self.post_process else out

    def _run(self, batch: MicroBatch) -> Tensor:
        no_mask: Any = None  # packed attention is causal by itself
        batch.packed.rotary = cos_sin(batch.position_ids[0], self._frequencies)
        return super().forward(batch.input_ids, batch.position_ids, no_mask, packed_seq_params=batch.packed)

    def global_name(self, name: str) -> str:
        """The name of a parameter of this chunk, with the numbers that its layer and expert have in the whole model."""
        if not name.startswith("decoder.layers."):
            return name
        parts = name.split(".")
        layer: Any = self.decoder.layers[int(parts[2])]
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
        return ".".join(parts)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Vocabulary of the padded model: a multiple of `VOCAB_MULTIPLE`, and of `tp`."""
    multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp == 0 else VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def build(config: HFConfig, settings: MegatronConfig) -> list[Model]:
    """This rank's chunks, in the order of their layers, their weights still random; collective.

    Raises ValueError for a rotary embedding that `frequencies_of` refuses, and where Megatron refuses a setting.
    """
    transformer = transformer_config(config, settings)
    frequencies = frequencies_of(config)
    chunks: list[Model] = []
    for vp_stage in range(settings.layout.vpp) if settings.layout.vpp > 1 else [None]:
        model = Model(
            transformer,
            block_spec(config, transformer, vp_stage),
            vocab_size=padded_vocab_size(config.vocab_size, settings.layout.tp),
            max_sequence_length=config.max_positions,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="none",  # attention sees to it
            share_embeddings_and_output_weights=config.tied,
            vp_stage=vp_stage,
            temperature=settings.temperature,
            real_vocab_size=config.vocab_size,
            frequencies=frequencies,
        )
        chunks.append(model.to(cpu_platform.device()))
    return chunks
