"""Any sequence of work, deaths, lost messages, checkpoints and time on a whole graph: each group is closed once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_world import LEASE_S, REPLICAS, World

EDGES = ("prompts", "rollout", "score", "ref")
GROUPS = 10
HOSTS = [(stage, number) for stage, count in REPLICAS.items() for number in range(count)]


class FlowMachine(RuleBasedStateMachine):
    """Drives a `World`; whatever happened to it, a fair end closes all of its groups."""

    @initialize(
        max_staleness=st.integers(0, 2),
        max_bytes=st.sampled_from([25, 60, 1000]),
        filtered=st.sets(st.integers(0, GROUPS - 1), max_size=2),
        poison=st.sets(st.integers(0, GROUPS - 1), max_size=1),
    )
    def start(self, max_staleness: int, max_bytes: int, filtered: set[int], poison: set[int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(
            Path(self.folder.name),
            num_groups=GROUPS,
            max_staleness=max_staleness,
            max_bytes=max_bytes,
            filtered=filtered,
            poison=poison,
        )

    @rule(which=st.sampled_from(HOSTS))
    def work(self, which: tuple[str, int]) -> None:
        self.world.hosts[which[0]][which[1]].turn()
        self.world.pump()

    @rule(turns=st.integers(1, 6))
    def everybody_works(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule()
    def begin_step(self) -> None:
        self.world.begin_step()

    @precondition(lambda self: self.world.step)
    @rule()
    def end_step(self) -> None:
        self.world.end_step()

    @precondition(lambda self: not self.world.step)
    @rule()
    def save(self) -> None:
        self.world.save()

    @rule()
    def look(self) -> None:
        self.world.look()

    @rule(seconds=st.sampled_from([LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(which=st.sampled_from(HOSTS))
    def kill_host(self, which: tuple[str, int]) -> None:
        self.world.kill_host(self.world.hosts[which[0]][which[1]])

    @rule(producer=st.sampled_from(EDGES))
    def kill_edge(self, producer: str) -> None:
        self.world.kill_edge(self.world.edges[producer])

    @rule(producer=st.sampled_from(EDGES))
    def kill_edge_and_mend(self, producer: str) -> None:
        edge = self.world.edges[producer]
        self.world.kill_edge(edge)
        self.world.mend(edge)

    @rule()
    def kill_trainer(self) -> None:
        self.world.kill_trainer()

    @rule(producer=st.sampled_from(EDGES))
    def lose_messages(self, producer: str) -> None:
        """The edge is out of reach, and found to be so later."""
        edge = self.world.edges[producer]
        edge.deaf = True
        if edge not in self.world.to_mend:
            self.world.to_mend.append(edge)

    @precondition(lambda self: self.world.to_mend)
    @rule(data=st.data())
    def mend(self, data: st.DataObject) -> None:
        self.world.mend(self.world.to_mend[data.draw(st.integers(0, len(self.world.to_mend) - 1))])

    @invariant()
    def what_is_trained_is_trained_once_and_in_order(self) -> None:
        trained = [order for how, order in self.world.history if how == "trained"]
        assert trained == sorted(set(trained))

    @invariant()
    def the_ledger_has_just_what_was_closed(self) -> None:
        closed = [order for _, order in self.world.history]
        assert len(closed) == len(set(closed))
        assert {o for o in range(GROUPS) if o in self.world.ledger.closed} == set(closed)

    def teardown(self) -> None:
        """No group is lost, and nothing waits for ever."""
        world = self.world
        try:
            world.finish()
            assert sorted(order for _, order in world.history) == list(range(GROUPS))
        finally:
            world.close()
            self.folder.cleanup()


TestFlow = FlowMachine.TestCase
TestFlow.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    phases=set(Phase) - {Phase.explain},  # a run that waits for ever is slow to shrink as it is
    suppress_health_check=list(HealthCheck),
)
