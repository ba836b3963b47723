"""Routes in force: how long their sums take against what the links say, and which routes to take when links change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from engine.route_choice import SIZE_CLASSES, Choice, choose, plan_id, size_class
from engine.routes import replay
from engine.topology import Edge, Links

HYSTERESIS = 0.05
"""Share of its time that another route must save to be taken."""
SLOW_RATIO = 1.5
"""Time over its usual from which a step's sums, or a message, count as slow."""
PATIENCE = 2
"""Slow steps in a row after which the links in use are suspected."""
USUAL_STEPS = 3
"""Steps after a choice whose median time is the usual one."""


@dataclass
class Watch:
    """How long the sums of one size class take, relative to what their route should take."""

    observed: float = 0.0
    """Seconds of this step so far."""
    expected: float = 0.0
    """The same by the links."""
    usual: list[float] = field(default_factory=list)
    """Ratios of the first steps."""
    num_slow: int = 0
    """Slow steps in a row."""

    def take_ratio(self) -> float:
        """Observed over expected of the step that ends; infinite without sums."""
        ratio = self.observed / self.expected if self.expected else math.inf
        self.observed = self.expected = 0.0
        return ratio

    def is_slow(self, ratio: float) -> bool:
        """Heed the step's ratio. Whether it has been high for long enough."""
        if math.isinf(ratio):
            return False
        if len(self.usual) < USUAL_STEPS:
            self.usual.append(ratio)
            return False
        self.num_slow = self.num_slow + 1 if ratio > SLOW_RATIO * median(self.usual) else 0
        return self.num_slow >= PATIENCE


class RoutePlan:
    """A route for each size class.

    Args:
        links: Between the ranks, as far as known.
        choices: The routes; None to choose.
    """

    def __init__(self, links: Links, choices: Sequence[Choice] | None = None) -> None:
        self.links = links
        self.choices = tuple(choices or (choose(links, num_bytes) for num_bytes in SIZE_CLASSES))
        self._watches = [Watch() for _ in self.choices]
        self._known: dict[int, float] = {}

    @cached_property
    def id(self) -> str:
        """Names what it does."""
        return plan_id(self.choices)

    def expected_seconds(self, num_bytes: int) -> float:
        """What a sum should take."""
        if num_bytes not in self._known:
            route = self.choices[size_class(num_bytes)].route
            self._known[num_bytes] = float(replay(route, self.links, num_bytes)[0])
        return self._known[num_bytes]

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Note what a sum took."""
        watch = self._watches[size_class(num_bytes)]
        watch.observed += seconds
        watch.expected += self.expected_seconds(num_bytes)

    def end_step(self) -> list[float]:
        """The step's observed over expected seconds by size class; infinite without sums."""
        return [watch.take_ratio() for watch in self._watches]

    def suspected(self, ratios: Sequence[float]) -> list[Edge]:
        """The links of routes that have been slow for some steps.

        Args:
            ratios: Of the step that ended, by size class.
        """
        slow = [choice for choice, watch, ratio in zip(self.choices, self._watches, ratios, strict=True)
                if watch.is_slow(ratio)]  # fmt: skip
        return sorted({edge for choice in slow for edge in choice.route.edges})

    def slowdown(self, figures: Mapping[Edge, tuple[float, float]]) -> tuple[Edge, float]:
        """The link whose messages take the most different time with other figures, and its new time over the old.

        Args:
            figures: Latency and bandwidth by link.
        """
        size = SIZE_CLASSES[1]
        new, old = self.links.updated(figures).seconds(size), self.links.seconds(size)
        edge = max(figures, key=lambda edge: abs(math.log(new[edge] / old[edge])))
        return edge, float(new[edge] / old[edge])

    def kept(self, links: Links) -> RoutePlan:
        """The same routes over other links."""
        return RoutePlan(links, [Choice(one.num_bytes, one.route, one.seconds_over(links)) for one in self.choices])

    def revised(self, links: Links) -> RoutePlan:
        """The best routes over other links; those of now where nothing is enough better."""
        choices = []
        for now in self.kept(links).choices:
            other = choose(links, now.num_bytes)
            choices.append(other if other.seconds < (1 - HYSTERESIS) * now.seconds else now)
        return RoutePlan(links, choices)

    def changes(self, other: RoutePlan) -> str:
        """What another plan does differently, in words; empty for nothing."""
        return ", ".join(
            f"{int(new.num_bytes) // 2**10} KiB {old.route.kind} to {new.route.kind}"
            for old, new in zip(self.choices, other.choices, strict=True)
            if new.route != old.route
        )
