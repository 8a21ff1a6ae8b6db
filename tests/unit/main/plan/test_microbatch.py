import dataclasses

import pytest

from lockstep.main.plan import Infeasibility, microbatch
from lockstep.main.plan.infeasibility import InfeasibleError
from tests.unit.main.plan.test_train_step import workload_of


def workload(parallelism):
    found = workload_of()
    trainer = dataclasses.replace(found.training.trainer, per_device_parallelism=parallelism)
    return dataclasses.replace(found, training=dataclasses.replace(found.training, trainer=trainer))


def plan(parallelism, monkeypatch, key="trainer.per_device_parallelism", largest=2):
    asked = []

    def plan_step(workload, *rest):
        asked.append(workload.training.trainer.per_device_parallelism)
        if asked[-1] in (8, "auto"):
            raise InfeasibleError(Infeasibility(key=key, value=asked[-1], largest=largest, text="too many"))
        return "plan"

    monkeypatch.setattr(microbatch, "plan_step", plan_step)
    return microbatch.plan_largest_step(workload(parallelism), None, None, None, 0), asked


def test_auto_plans_with_the_largest_that_works(monkeypatch):
    assert plan("auto", monkeypatch) == ("plan", ["auto", 2])


@pytest.mark.parametrize(
    ("parallelism", "key", "largest"),
    [(8, "trainer.per_device_parallelism", 2), ("auto", "data.max_seq_len", 128)],
)
def test_a_number_that_was_given_and_other_reasons_stand(monkeypatch, parallelism, key, largest):
    with pytest.raises(InfeasibleError, match="too many"):
        plan(parallelism, monkeypatch, key, largest)
