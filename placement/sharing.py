"""Who is on which GPU, what that takes of its memory by estimate, and whether they share it side by side or by turns.

    side by side    everything at once; generation may overlap training
    by turns        the engine rests while the update stage works, and the other way round: nothing overlaps

Chosen by the estimate where the placement does not say. Only what is counted well (weights, gradients, optimizer state,
an engine's own share) can refuse a plan; activations and the like are told, and decide between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.placement.placement import Plan, Sharing
from rollstream.stages.errors import PlacementError
from rollstream.stages.memory import Memory

#: Of a device's memory, what stages may take together: CUDA's contexts and the allocators want the rest.
USABLE = 0.95
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One process on a device; of the two turns, `turn` is the one that it works in: 0 generation, 1 training, None
    both."""

    stage: str
    rank: int
    memory: Memory
    turn: int | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of a bundle and who is on it."""

    bundle: int
    index: int
    nbytes: int
    tenants: tuple[Tenant, ...]

    def total(self, turn: int | None, *, rough: bool = True) -> int:
        """Bytes of all in one of the turns, or of all at once."""
        resting = [turn is not None and t.turn is not None and t.turn != turn for t in self.tenants]
        return sum(t.memory.total(resting=r, rough=rough) for t, r in zip(self.tenants, resting, strict=True))

    def fits(self, *, turns: bool, rough: bool = True) -> bool:
        wanted = max(self.total(0, rough=rough), self.total(1, rough=rough)) if turns else self.total(None, rough=rough)
        return wanted <= USABLE * self.nbytes

    def table(self, *, turns: bool) -> str:
        """A line for each part of each tenant's, and the sums."""
        lines = [f"  bundle {self.bundle}, GPU {self.index} of {self.nbytes / GB:.1f} GB"]
        for tenant in self.tenants:
            large = {name: size for name, size in tenant.memory.parts.items() if size >= 0.05 * GB}
            parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in large.items())
            lines.append(f"    {tenant.stage}[{tenant.rank}] {tenant.memory.total() / GB:.1f} GB: {parts or 'little'}")
        sums = f"side by side, {self.total(None) / GB:.1f} GB at once"
        if turns:
            sums = f"by turns, {self.total(0) / GB:.1f} GB to generate, {self.total(1) / GB:.1f} GB to train"
        lines.append(f"    {sums} (estimates)")
        if not self.fits(turns=turns):
            lines.append(
                f"    more than the {USABLE * self.nbytes / GB:.1f} GB that there are to use: activations may not fit; "
                "lower max_tokens_per_micro_batch, or recompute='full'"
            )
        return "\n".join(lines)


def devices_of(plan: Plan, memories: Mapping[str, Memory], turns: Mapping[str, int], device_bytes: int) -> list[Device]:
    """The GPUs of a plan. Where several share one, in the order in which Ray packs them."""
    found: dict[tuple[int, int], list[Tenant]] = {}
    filled: dict[int, float] = {}
    for stage, seats in plan.seats.items():
        for rank, seat in enumerate(seats):
            if not seat.gpus:
                continue
            start = filled.get(seat.bundle, 0.0)
            if seat.gpus < 1 and start % 1 + seat.gpus > 1.0001:
                start = float(int(start) + 1)
            filled[seat.bundle] = start + seat.gpus
            for index in range(int(start + 1e-6), max(int(start + 1e-6) + 1, int(start + seat.gpus))):
                if stage in memories:
                    tenant = Tenant(stage=stage, rank=rank, memory=memories[stage], turn=turns.get(stage))
                    found.setdefault((seat.bundle, index), []).append(tenant)
    return [
        Device(bundle=bundle, index=index, nbytes=device_bytes, tenants=tuple(tenants))
        for (bundle, index), tenants in sorted(found.items())
    ]


def choose(devices: Sequence[Device], wanted: Sharing, *, max_staleness: int) -> bool:
    """Whether the stages take turns. Raises PlacementError with a table where what is wanted can't be."""
    side_by_side = all(d.fits(turns=False) for d in devices)
    may_turn = max_staleness == 0 and any(t.memory.freed for d in devices for t in d.tenants if t.turn == 0)
    if wanted == "turns" and not may_turn:
        raise PlacementError(
            "sharing='turns' needs max_staleness=0 and an engine that can rest, got "
            f"max_staleness={max_staleness}. {_ways_out(devices, max_staleness)}"
        )
    turns = wanted == "turns" or (wanted == "auto" and not side_by_side and may_turn)
    tight = [d for d in devices if not d.fits(turns=turns, rough=False)]
    if tight:
        tables = "\n".join(d.table(turns=turns) for d in tight)
        raise PlacementError(f"there is not room for all on one GPU:\n{tables}\n{_ways_out(tight, max_staleness)}")
    return turns


def _ways_out(devices: Sequence[Device], max_staleness: int) -> str:
    ways = {f"{t.stage}: {t.memory.could_free}" for d in devices for t in d.tenants if t.memory.could_free}
    if max_staleness:
        ways.add("max_staleness=0")
    turn = f"To take turns set {'; '.join(sorted(ways))}. Else" if ways else "To have room,"
    return (
        f"{turn} lower the rollout's gpu_memory_utilization, spread the update over more GPUs (layout), or give stages "
        "GPUs of their own (Placement.fixed)"
    )


def shared(
    plan: Plan,
    memories: Mapping[str, Memory],
    turns: Mapping[str, int],
    *,
    device_bytes: int,
    wanted: Sharing,
    max_staleness: int,
) -> Plan:
    """The plan with the choice and what led to it. Raises PlacementError as `choose` does."""
    devices = devices_of(plan, memories, turns, device_bytes)
    chosen = choose(devices, wanted, max_staleness=max_staleness)
    text = "\n".join(device.table(turns=chosen) for device in devices)
    return dataclasses.replace(plan, turns=chosen, memory=text)
