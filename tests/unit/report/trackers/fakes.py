"""Stand-ins for what trackers are given."""

from tests.unit.report import made_up


class FakeRun:
    """Drops what comes for a step that it has passed, as W&B does."""

    disabled = False

    def __init__(self, *, id="fake", project="mine", entity="us", offline=False, resumed=None):
        """resumed: the run that this one goes on from."""
        self.id, self.project, self.entity, self.offline = id, project, entity, offline
        self.resumed = resumed is not None
        self.summary = dict(resumed.summary) if resumed else {}
        self.step = 0
        self.logged = []
        self.axes = []
        self.alerts = []
        self.finished = 0

    def alert(self, title, text, level):
        self.alerts.append((title, text, level))

    def log(self, values, *, step=None, commit=None):
        assert step is not None or commit is False, "W&B would open a new entry"
        if step is None or step >= self.step:
            self.step = max(self.step, step or 0)
            self.logged.append((self.step, values))
            self.summary |= values

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def finish(self):
        self.finished += 1


def row(step, text, **metrics):
    return made_up.row(text, step=step, metrics=metrics)
