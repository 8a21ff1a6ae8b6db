"""Sums over all rows of a job, each host adding up those that it owns."""

import dataclasses
import json
from collections.abc import Iterable

from lockstep.hosts import Hosts
from lockstep.report.rows import SampleRow


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What remains of rows that are not gathered.

    Args:
        rows: answers.
        tokens: of all answers.
        finish: answers by how they ended.
        sums: of each metric.
        counts: answers that have the metric.
    """

    rows: int = 0
    tokens: int = 0
    finish: dict[str, int] = dataclasses.field(default_factory=dict)
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, lines: Iterable[bytes]) -> "Totals":
        """Count rows as they are in a file."""
        for line in lines:
            row = SampleRow.from_dict(json.loads(line))
            self.rows += 1
            self.tokens += row.num_tokens
            self.finish[row.finish_reason] = self.finish.get(row.finish_reason, 0) + 1
            for name, value in row.metrics.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        return self

    @property
    def means(self) -> dict[str, float]:
        """Mean of each metric over the answers that have it."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def add_up(hosts: Hosts, mine: Totals) -> Totals | None:
    """The sums of all hosts, on the leader; None elsewhere. Every host calls it alike."""
    posts = hosts.gather("totals", json.dumps(dataclasses.asdict(mine)).encode())
    if posts is None:
        return None
    every = Totals()
    for post in posts:
        part = Totals(**json.loads(post))
        every.rows += part.rows
        every.tokens += part.tokens
        for total, added in ((every.finish, part.finish), (every.counts, part.counts)):
            for name, count in added.items():
                total[name] = total.get(name, 0) + count
        for name, value in part.sums.items():
            every.sums[name] = every.sums.get(name, 0.0) + value
    return every
