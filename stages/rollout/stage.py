"""The rollout stage: draws samples from each prompt and records how likely each token was."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstream.stages.base import RolloutStage, Stage, World
from rollstream.stages.errors import check_rules
from rollstream.stages.memory import Memory
from rollstream.stages.names import DTYPES, known_names
from rollstream.stages.rollout import vllm_settings
from rollstream.stages.rollout.embedded_memory import embedded_memory
from rollstream.stages.rollout.engine import Engine, Request, Rests, Sample, Sampling
from rollstream.stages.rollout.engines import ENGINES, make_engine
from rollstream.stages.rollout.episodes import EpisodeLimits, Episodes
from rollstream.stages.rollout.function import Function, Tool, ship
from rollstream.stages.rollout.model_limits import ModelLimits
from rollstream.stages.rollout.rows import rollout_rows
from rollstream.stages.rollout.vllm_settings import WEIGHT_UPDATES
from rollstream.stages.schema import Prompted, Rollouts
from rollstream.stages.shared_weights import SharedWeights


class Rollout(RolloutStage[Prompted, Rollouts]):
    """Draws `n` samples from each prompt with the weights that were loaded last.

        rollouts = Rollout(Rollout.Config(model="models/tiny", max_tokens=64))(prompts)

    Metrics: `rollout/response_tokens` tokens of a response that the policy sampled; `rollout/truncated` share that ran
    out of tokens; `rollout/empty` share whose text is blank; `rollout/tokens_per_s` of one replica while it generates;
    with a function, also those of `Episodes`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Stage.Config):
        """What is drawn, how, and by which engine."""

        #: Folder of the model and its tokenizer, in Hugging Face format.
        model: str
        #: Samples drawn from each prompt.
        n: int = 8
        #: Logits are divided by it; 0 takes the likeliest token, which is for evaluation, not for training.
        temperature: float = 1.0
        #: Draw from the fewest tokens whose probabilities reach this sum; 1 draws from all.
        top_p: float = 1.0
        #: Draw from this many likeliest tokens; None draws from all.
        top_k: int | None = None
        #: Tokens of a response at most, the stop token counted.
        max_tokens: int
        #: Tokens that end a response, besides the model's own end-of-sequence tokens.
        stop_token_ids: tuple[int, ...] = ()
        #: Prompts that are generated from at once, by each replica; None: 16 with transformers, 128 with vllm.
        groups_in_flight: int | None = None
        #: With a sample's id, fixes the random numbers of the sample; None leaves them to the engine, which is faster
        #: with vllm on a GPU.
        seed: int | None = 0
        #: What generates: "transformers", a batch at a time, or "vllm".
        engine: str = "transformers"
        #: Number format of the weights: "float32" or "bfloat16".
        dtype: str = "float32"
        #: vllm: further settings of its AsyncEngineArgs, such as {"tensor_parallel_size": 2}.
        engine_args: Mapping[str, Any] = field(default_factory=lambda: {})
        #: How new weights come in: "between" requests, once all have ended; or during them, which takes vllm: "resume"
        #: cuts them off and goes on with their past computed again, "recompute" does so without cutting them off,
        #: "keep" goes on with the past (KV cache) of the old weights. Each token's version is recorded. None: "between"
        #: with transformers, "resume" with vllm.
        weight_updates: str | None = None
        #: vllm: some tensors of each version are held against their checksums where they arrive.
        check_weights: bool = False
        #: vllm: a core that gives no answer for so long is ended, and the stage's process started again.
        engine_timeout_s: float = 60.0
        #: Makes a sample in several turns, with tools: `async def rollout(engine, prompt, tools) -> Trajectory` or
        #: "pkg.mod:fn", see `stages/rollout/function.py`; `max_tokens` is then for all turns and what is said between
        #: them. None: a response is one turn.
        function: Function | str | None = None
        #: What the function may call, by name; `async` or not.
        tools: Mapping[str, Tool] = field(default_factory=lambda: {})
        #: Turns of a sample at most.
        max_turns: int = 8
        #: Tokens of one turn at most; None: as many as the response may still have.
        max_turn_tokens: int | None = None
        #: The function, its tools too, may take so long between two turns, or the run ends.
        turn_timeout_s: float = 60.0

        def __post_init__(self) -> None:
            rules = [
                (self.n >= 1, f"n must be at least 1, got {self.n}"),
                (self.temperature >= 0, f"temperature must be 0 or above, got {self.temperature}"),
                (
                    self.temperature != 0 or self.n == 1,
                    f"n must be 1 at temperature 0, where all samples of a prompt are equal, got {self.n}",
                ),
                (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}"),
                (
                    self.top_k is None or self.top_k >= 1,
                    f"top_k must be at least 1, got {self.top_k}: leave it None to draw from all tokens",
                ),
                (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
                (
                    min(self.stop_token_ids, default=0) >= 0,
                    f"stop_token_ids must be 0 or above, got {self.stop_token_ids}",
                ),
                (
                    self.groups_in_flight is None or self.groups_in_flight >= 1,
                    f"groups_in_flight must be at least 1, got {self.groups_in_flight}",
                ),
                (self.engine_timeout_s > 0, f"engine_timeout_s must be above 0, got {self.engine_timeout_s}"),
                (
                    self.weight_updates in (None, *WEIGHT_UPDATES),
                    f"weight_updates is not known, got {self.weight_updates!r}: "
                    + known_names(str(self.weight_updates), WEIGHT_UPDATES),
                ),
                (
                    self.engine == "vllm" or self.weight_updates in (None, "between"),
                    f"weight_updates={self.weight_updates!r} needs engine='vllm': transformers takes weights between "
                    "its batches",
                ),
                (
                    self.engine == "vllm" or not self.engine_args,
                    f"engine_args={dict(self.engine_args)} are vLLM's: set engine='vllm', or leave them out",
                ),
                (
                    self.engine == "vllm" or not self.check_weights,
                    "check_weights needs engine='vllm': transformers takes the arrays as they are",
                ),
                (
                    self.engine in ENGINES,
                    f"engine is not known, got {self.engine!r}: " + known_names(self.engine, ENGINES),
                ),
                (
                    self.function is not None or not self.tools,
                    f"tools {', '.join(map(str, self.tools))} are called by a rollout function: set function, or leave "
                    "them out",
                ),
                (self.max_turns >= 1, f"max_turns must be at least 1, got {self.max_turns}"),
                (
                    self.max_turn_tokens is None or self.max_turn_tokens >= 1,
                    f"max_turn_tokens must be at least 1, got {self.max_turn_tokens}",
                ),
                (self.turn_timeout_s > 0, f"turn_timeout_s must be above 0, got {self.turn_timeout_s}"),
                (self.dtype in DTYPES, f"dtype is not known, got {self.dtype!r}: " + known_names(self.dtype, DTYPES)),
            ]
            check_rules(rules)

    config: Config

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        self._function = None if config.function is None else ship(config.function, config.tools)
        self._engine: Engine | None = None
        self._episodes: Episodes | None = None
        self._tokenizer: Any = None
        self._prompts: dict[str, pa.RecordBatch] = {}  # under way, by group
        self._busy_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """The function and its tools travel as bytes alone, for their modules may be missing where the stage goes."""
        if self._function is None:
            return dict(self.__dict__)
        return {**self.__dict__, "config": dataclasses.replace(self.config, function=self._function.name, tools={})}

    def settings(self) -> dict[str, Any]:
        given = super().settings()
        return (
            given
            if self._function is None
            else given | {"function": self._function.name, "tools": self._function.tools}
        )

    @property
    def groups_in_flight(self) -> int:
        return self.config.groups_in_flight or (128 if self.continuous else 16)

    @property
    def continuous(self) -> bool:
        return self.config.engine == "vllm"

    @property
    def updates_in_flight(self) -> bool:
        return self.continuous and self.config.weight_updates != "between"

    def faults(self) -> list[str]:
        """Whether the folder holds a model and a tokenizer, and whether the settings fit the model."""
        folder = Path(self.config.model)
        if not (folder / "config.json").is_file():
            return [f"model must be a folder with a config.json, got {self.config.model!r}"]
        faults: list[str] = []
        if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
            faults.append(f"the model folder {self.config.model!r} must hold a tokenizer; save it there")
        settings = json.loads((folder / "config.json").read_text())
        vocabulary, context = settings.get("vocab_size"), settings.get("max_position_embeddings")
        too_high = [i for i in self.config.stop_token_ids if vocabulary is not None and i >= vocabulary]
        if too_high:
            faults.append(f"stop_token_ids must be below the model's {vocabulary} tokens, got {too_high}")
        if context is not None and self.config.max_tokens >= context:
            faults.append(
                f"max_tokens must be below the model's context of {context} tokens, got {self.config.max_tokens}"
            )
        if self.config.engine == "vllm":
            faults += vllm_settings.faults(self.config.model, self.config.engine_args, self._sampling())
        return faults

    @property
    def devices_per_rank(self) -> int:
        return vllm_settings.num_devices(self.config.engine_args) if self.config.engine == "vllm" else 1

    def memory(self, device_bytes: int) -> Memory | None:
        if self.config.engine == "vllm":
            return vllm_settings.memory(self.config.engine_args, device_bytes)
        return embedded_memory(self.config, self.groups_in_flight)

    def rest(self) -> None:
        if isinstance(self._engine, Rests):
            self._engine.rest()

    def setup(self, world: World) -> None:
        import torch
        from transformers import AutoTokenizer

        if world.threads:
            torch.set_num_threads(world.threads)
        self._tokenizer = AutoTokenizer.from_pretrained(self.config.model, local_files_only=True)
        self._engine = make_engine(self.config, self._sampling(), stage=self.name)
        if self._function is not None:
            self._episodes = self._make_episodes(*self._function.load())

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        if self._engine is not None:
            self._engine.close()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        self.engine.load_weights(version, tensors)
        if self._episodes is not None:
            self._episodes.version = version

    @property
    def reads_shared_weights(self) -> bool:
        return self.config.engine == "vllm" and not self.config.check_weights

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        engine: Any = self.engine
        if not engine.load_shared_weights(weights):
            return False
        if self._episodes is not None:
            self._episodes.version = weights.version
        return True

    def submit(self, group: pa.RecordBatch) -> None:
        group_id = group.column("group_id")[0].as_py()
        assert group_id not in self._prompts, "group ids must differ"
        request = Request(
            request_id=group_id,
            prompt_ids=group.column("prompt_ids")[0].as_py(),
            sample_ids=self._sample_ids(group_id),
            sampling=self._sampling(),
        )
        if self._episodes is None:
            self.engine.submit(request)
        else:
            self._episodes.submit(request, group)
        self._prompts[group_id] = group

    def finished(self, timeout_s: float) -> pa.RecordBatch | None:
        begun_s = time.perf_counter()
        done = (self._episodes or self.engine).finished(timeout_s)
        self._busy_s += time.perf_counter() - begun_s
        if done is None:
            return None
        group_id, samples = done
        texts = self._decode(samples)
        self._measure(samples, texts)
        return rollout_rows(self._prompts.pop(group_id), self._sample_ids(group_id), samples, texts)

    @property
    def engine(self) -> Engine:
        """What `setup` made."""
        assert self._engine is not None, "setup comes first"
        return self._engine

    def _sampling(self) -> Sampling:
        c = self.config
        return Sampling(
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            max_tokens=c.max_tokens,
            stop_token_ids=c.stop_token_ids,
            seed=c.seed,
        )

    def _sample_ids(self, group_id: str) -> list[str]:
        return [f"{group_id}.{i}" for i in range(self.config.n)]

    def _make_episodes(self, function: Function, tools: Mapping[str, Tool]) -> Episodes:
        from transformers import AutoTokenizer

        c, longest = self.config, self.config.engine_args.get("max_model_len")
        return Episodes(
            self.engine,
            function,
            tools,
            tokenizer=AutoTokenizer.from_pretrained(c.model, local_files_only=True),  # fast ones bear one thread each
            model_limits=ModelLimits.of(c.model, context=longest if isinstance(longest, int) and longest > 0 else None),
            limits=EpisodeLimits(
                max_turns=c.max_turns, max_turn_tokens=c.max_turn_tokens, turn_timeout_s=c.turn_timeout_s
            ),
            stage=self.name,
            metrics=self.metrics,
        )

    def _decode(self, samples: Sequence[Sample]) -> list[str]:
        ids = [s.response_ids.tolist() for s in samples]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _measure(self, samples: Sequence[Sample], texts: Sequence[str]) -> None:
        num_tokens = int(sum(s.mask.sum() for s in samples))
        num_samples = len(samples)
        self.metrics.add("rollout/response_tokens", num_tokens, num_samples)
        self.metrics.add("rollout/truncated", sum(s.finish_reason == "length" for s in samples), num_samples)
        self.metrics.add("rollout/empty", sum(not t.strip() for t in texts), num_samples)
        self.metrics.add("rollout/tokens_per_s", num_tokens, self._busy_s)
        self._busy_s = 0.0
