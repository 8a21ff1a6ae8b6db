from pathlib import Path

from lockstep.training.checkpoints.save import Save
from tests.unit.training.checkpoints.test_checkpoint import metadata


def test_it_says_what_is_written_where_and_since_when_and_gives_its_arrays_away():
    save = Save(metadata(4), {"a": 1}, Path("runs/step-4"))
    assert str(save).startswith("the checkpoint of step 4, written since ") and str(save).endswith("to runs/step-4")
    assert save.take_arrays() == {"a": 1} and save.take_arrays() == {} and save.seconds >= 0
