"""How many ranks a Megatron stage has, and whether a model can be cut that way. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollstream.stages.errors import check_rules
from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.hf_config import HFConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks of one stage: `dp` copies of the model, each in `pp` runs of layers, each of these in `tp` pieces.

    Rank r holds piece r % tp of copy r // tp % dp in run r // (tp * dp). Experts may be spread otherwise: over the
    tp * dp ranks of a run, in `ep` parts of `etp` pieces.

    >>> Layout(tp=2, pp=2, dp=3).size
    12
    """

    #: Tensor-parallel size: ranks that share each layer.
    tp: int = 1
    #: Pipeline-parallel size: ranks that the layers are spread over.
    pp: int = 1
    #: Runs of layers on each pipeline rank (virtual pipeline size); more of them leave less waiting, and send more.
    vpp: int = 1
    #: Data-parallel size: shares that a batch is cut into.
    dp: int = 1
    #: Sequence parallel: norms and what lies between the layers' parts are split by tokens over the `tp` ranks.
    sp: bool = False
    #: Expert-parallel size: parts that the experts of a layer are dealt to.
    ep: int = 1
    #: Tensor-parallel size of each expert; None for `tp`.
    etp: int | None = None
    #: Layers of the first pipeline rank, where they are not as many as the others'.
    first_layers: int | None = None
    #: Layers of the last pipeline rank, likewise.
    last_layers: int | None = None

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp, "ep": self.ep, "etp": self.expert_tp}
        sizes |= {n: v for n in ("first_layers", "last_layers") if (v := getattr(self, n)) is not None}
        check_rules([(value >= 1, f"{name} must be at least 1, got {value}") for name, value in sizes.items()])
        uneven = self.first_layers is not None or self.last_layers is not None
        rules = [
            (not self.sp or self.tp > 1, f"sp=True needs tp above 1, got tp={self.tp}"),
            (self.vpp == 1 or self.pp > 1, f"vpp={self.vpp} needs pp above 1, got pp={self.pp}"),
            (not uneven or self.pp > 1, f"first_layers and last_layers need pp above 1, got pp={self.pp}"),
            (
                self.tp * self.dp % (self.ep * self.expert_tp) == 0,
                f"ep={self.ep} times etp={self.expert_tp} must divide tp={self.tp} times dp={self.dp}: experts are "
                "spread over the ranks that hold the same layers",
            ),
        ]
        check_rules(rules)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def token_multiple(self) -> int:
        """A pack must have a multiple of so many tokens."""
        return self.tp if self.sp else 1

    @property
    def micro_batch_multiple(self) -> int:
        """An optimizer step must have a multiple of so many micro-batches."""
        return self.pp if self.vpp > 1 else 1

    def share_of(self, rank: int) -> int:
        """The data-parallel index of a rank."""
        return rank // self.tp % self.dp

    def faults(self, folder: str | Path) -> list[str]:
        """Why the model in `folder` cannot be run in this layout: one sentence each. Reads only config.json."""
        try:
            config = hf_config.read(Path(folder))
        except ValueError as error:
            return [str(error)]
        return [*self._tensor_faults(config), *self._pipeline_faults(config), *self._expert_faults(config)]

    def _tensor_faults(self, config: HFConfig) -> Iterator[str]:
        """The vocabulary is not among them: it is padded."""
        cut = {"attention heads": config.num_heads, "key/value heads": config.num_kv_heads}
        if config.experts is None:
            cut["feed-forward size"] = config.ffn_size
        broken = [f"{count} {what}" for what, count in cut.items() if count % self.tp]
        if broken:
            yield (
                f"tp={self.tp} must divide {' and '.join(broken)} of {str(config.folder)!r}; "
                f"valid: tp={_valid(lambda tp: not any(c % tp for c in cut.values()), config.num_kv_heads)}"
            )

    def _pipeline_faults(self, config: HFConfig) -> Iterator[str]:
        fixed = [n for n in (self.first_layers, self.last_layers) if n is not None]
        left, ranks = config.num_layers - sum(fixed), self.pp - len(fixed)
        whose = f"of {config.num_layers} layers of {str(config.folder)!r}"
        uneven = f", first_layers={self.first_layers} and last_layers={self.last_layers}" if fixed else ""
        if left < ranks * self.vpp or (ranks == 0 and left):
            yield (
                f"pp={self.pp}, vpp={self.vpp}{uneven} leave {left} {whose} for {ranks} ranks with {self.vpp} runs of "
                "layers each: every run needs a layer, and every layer a rank; lower pp or vpp"
            )
        elif ranks and left % (ranks * self.vpp):
            valid = _valid(lambda pp: config.num_layers % (pp * self.vpp) == 0, config.num_layers // self.vpp)
            yield (
                f"pp={self.pp} with vpp={self.vpp}{uneven} must divide {left} {whose}; valid: pp={valid} with "
                f"vpp={self.vpp}, or give first_layers or last_layers"
            )
        elif broken := [n for n in fixed if n % self.vpp]:
            yield f"vpp={self.vpp} must divide first_layers and last_layers, got {' and '.join(map(str, broken))}"

    def _expert_faults(self, config: HFConfig) -> Iterator[str]:
        experts, model = config.experts, repr(str(config.folder))
        if experts is None:
            if self.ep > 1 or self.etp is not None:
                yield f"ep={self.ep} and etp={self.etp} are for models with experts; {model} has none"
            return
        if experts.num % self.ep:
            valid = _valid(lambda ep: experts.num % ep == 0, experts.num)
            yield f"ep={self.ep} must divide {experts.num} experts of {model}; valid: ep={valid}"
        if experts.ffn_size % self.expert_tp:
            yield f"etp={self.expert_tp} must divide {experts.ffn_size}, the feed-forward size of an expert of {model}"
        if self.tp > 1 and not self.sp:
            yield f"tp={self.tp} with experts needs sp=True: {model} has {experts.num} experts"


def _valid(holds: Callable[[int], bool], largest: int) -> str:
    return ", ".join(str(size) for size in range(1, largest + 1) if holds(size))
