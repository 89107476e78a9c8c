"""One life of a run's actors: from their start, fresh or from a checkpoint, to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollstream.graphs.crew import Crew
from rollstream.graphs.edge_actor import EdgeSettings
from rollstream.graphs.evaluations import Evaluations
from rollstream.graphs.feed import Feed
from rollstream.graphs.flow import EDGE_S, Flow
from rollstream.graphs.graph import Graph
from rollstream.graphs.item import Left
from rollstream.graphs.joiner import Joiner
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.options import RunOptions
from rollstream.graphs.stats import EdgeStats, Evaluated
from rollstream.graphs.supervisor import Supervisor
from rollstream.graphs.wait import ask
from rollstream.graphs.watch import Watch
from rollstream.placement import Placement, Plan


class Attempt:
    """Actors, the flow between them, and who watches over both. `on_left` is told of each group that leaves the graph
    untrained, once; `on_evaluated` of what each evaluation found."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        placement: Placement,
        options: RunOptions,
        edges: Sequence[EdgeSettings],
        ledger: Ledger,
        watch: Watch,
        on_left: Callable[[Left], None],
        on_evaluated: Callable[[Evaluated], None],
    ):
        self.ledger = ledger
        self._watch, self._on_left = watch, on_left
        self.crew = Crew.start(graph, plan, placement, edges)
        self.flow = Flow(self.crew, ledger)
        self._supervisor = Supervisor(
            self.crew,
            self.flow,
            max_restarts=options.max_restarts,
            tell=watch.message,
            restarted=watch.restarted,
        )
        self.evaluations = Evaluations(
            graph.evaluations,
            self.crew.evaluators,
            self.crew.store,
            max_restarts=options.max_restarts,
            done=on_evaluated,
            tell=watch.message,
        )
        update = graph.update
        inputs = [self.crew.edges[producer] for producer in graph.inputs_of(update.name).values()]
        self.joiner = Joiner(update.name, inputs, at_most=update.groups_per_step, ledger=ledger)
        self.feed = Feed(update, self.joiner, self.crew.updaters)

    def start(self, checkpoint: Path | None, step: int, version: int, below: int) -> None:
        """Loads the stages, then the checkpoint of `step` if there is one, and lets groups of orders below `below`
        flow."""
        self.crew.set_up()
        if checkpoint is not None:
            self.crew.load(checkpoint)
        self.publish(version, step)
        self.evaluations.begin(step, version)
        self.evaluations.look()
        self.flow.admit(below)
        self.flow.begin(version)
        self._watch.follow(self.crew, self._on_edge)

    def look(self, version: int, *, update_is_free: bool = True) -> None:
        """Replaces what has died, shows what goes on, and takes note of groups that left. Raises ProcessDied where
        only the last checkpoint helps, StalledError past the stall limit; an evaluation's error only between two steps,
        for it must not cost the one that goes on."""
        self._supervisor.look(version)
        if self._supervisor.must_publish and update_is_free:
            self.crew.rest()
            self._publish(version, arrays=True)  # an evaluation may wait for them
            self.crew.wake()
        if update_is_free:
            self.evaluations.look()
        self._watch.look()

    def settle(self) -> None:
        """Takes note of the groups that left last, once no more will come."""
        for edge in self.crew.edges.values():
            self._on_edge(ask(edge.stats.remote, "an edge", timeout_s=EDGE_S))

    def publish(self, version: int, step: int) -> None:
        """Sends the weights that `step` made to the store."""
        self._publish(version, arrays=self.evaluations.are_due(step))

    def _publish(self, version: int, *, arrays: bool) -> None:
        self.crew.publish(version, arrays=arrays)
        self._supervisor.must_publish = False

    def trained(self, orders: Sequence[int]) -> None:
        """These groups are in the ledger as trained."""
        self.flow.retire(orders)
        self._supervisor.step_done()

    def stop(self) -> None:
        """Ends all actors."""
        self.evaluations.end()
        self.crew.stop()
        self._supervisor.stop()

    def _on_edge(self, stats: EdgeStats) -> None:
        self._supervisor.note(stats)
        for left in stats.left:
            if self.joiner.keeps(left.order):
                continue  # its holder died, but not before it was done
            if left.order not in self.ledger.closed:
                self.ledger.leave(left)
                self._on_left(left)
            self.flow.retire([left.order])
