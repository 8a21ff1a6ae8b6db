"""A trace of some steps, read as TensorBoard's plugin reads it."""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lockstep.errors import ConfigError
from lockstep.training import CheckpointerConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss
from lockstep.training.loop.profiler import Profiler, ProfilerConfig
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import losses, rows


def steps_of(file):
    """The numbers of the steps that a trace has, and the names of what ran in it."""
    found, names = set(), set()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                names.add(event.name)
                if event.name == "train":
                    found |= {int(value) for name, value in event.stats if name == "step_num"}
    return found, names


def test_the_trace_has_the_steps_that_were_asked_for_and_training_is_as_without_it(tmp_path):
    config = TrainerConfig(
        num_train_steps=4,
        train_batch_size=8,
        log_dir=str(tmp_path),
        run_id="run",
        profiler=ProfilerConfig(start_step=1, num_steps=2),
    )
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    trainer = Trainer(config, optimizer.build(4), lm_loss, schedule=optimizer.schedule(4))
    found = []
    trainer.add_hook(lambda info: found.append(info.loss))
    trainer.train(trainer.init_model(Bigrams.init), rows())
    (file,) = (tmp_path / "run" / "profiler" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert str(file.relative_to(file.parents[1])) == "steps-2-3/process-000.xplane.pb"
    assert [each.name for each in (tmp_path / "run" / "profiler").iterdir()] == ["plugins"]
    steps, names = steps_of(file)
    assert steps == {1, 2}
    assert any("lockstep_train_step" in name for name in names), "what the devices did is in the trace"
    assert found == losses()[0]


def test_processes_that_the_job_does_not_have_are_refused_before_it_trains(tmp_path):
    values = {"num_train_steps": 30, "train_batch_size": 8, "log_dir": str(tmp_path), "run_id": "run"}
    config = TrainerConfig(profiler=ProfilerConfig(processes=(0, 3, 8)), **values)
    with pytest.raises(ConfigError, match=r"processes names 3, 8, but the job has 1 process, 0 to 0\. Leave them out"):
        Trainer(config, OptimizerConfig().build(4), lm_loss)
    for processes, count in (((0, 3), 4), (None, 1)):
        ProfilerConfig(processes=processes).check_processes(SimpleNamespace(count=count), pytest.fail)


def test_a_job_that_has_lost_processes_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    values = {"num_train_steps": 30, "train_batch_size": 8, "log_dir": str(tmp_path), "run_id": "run"}
    values["checkpointer"] = CheckpointerConfig()
    again = TrainerConfig(profiler=ProfilerConfig(processes=(0, 3)), **values)
    optimizer = OptimizerConfig(warmup=0).build(1)

    def started():
        caplog.clear()
        Trainer(again, optimizer, lm_loss)
        (line,) = caplog.messages
        return line

    with pytest.raises(ConfigError, match="Leave them out"):  # it has saved nothing yet
        Trainer(again, optimizer, lm_loss)
    with monkeypatch.context() as patch:
        patch.setenv("LOCKSTEP_RESTARTS", "1")
        assert started() == (
            "trainer.profiler.processes names 3, but the job has 1 process, 0 to 0. It goes on with fewer than it had: "
            "those that are there trace."
        )
    before = Trainer(TrainerConfig(**values | {"num_train_steps": 1}), optimizer, lm_loss)
    before.train(before.init_model(Bigrams.init), rows())
    assert "names 3, but the job has 1 process" in started()


def test_other_processes_trace_nothing(tmp_path):
    profiler = Profiler(ProfilerConfig(start_step=0, processes=(1, 2)), tmp_path / "trace", 0)
    with profiler.step(0):
        assert not profiler._tracing
    profiler.close()
    assert not (tmp_path / "trace").exists()


def test_a_profiler_that_cannot_start_is_told_of_and_training_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(directory):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    profiler = Profiler(ProfilerConfig(start_step=0, processes=None), Path(tmp_path), 3)
    for step in range(3):
        with profiler.step(step):
            pass
    profiler.close()
    assert caplog.text.count("goes on without a trace: Only one profile") == 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"start_step": -1}, "profiler.start_step is -1; it must be at least 0"),
        ({"num_steps": 0}, "profiler.num_steps is 0; it must be at least 1"),
        ({"processes": ()}, r"profiler.processes is \[\]"),
        ({"start_step": 8, "num_steps": 3}, "asks for steps 8 to 10, but trainer.num_train_steps is 10"),
    ],
)
def test_values_out_of_range(values, text):
    with pytest.raises(ConfigError, match=text):
        TrainerConfig(num_train_steps=10, profiler=ProfilerConfig(**values))


def test_a_trace_needs_a_place():
    config = TrainerConfig(num_train_steps=30, profiler=ProfilerConfig())
    with pytest.raises(ConfigError, match=r"neither run_dir nor trainer\.run_id.*trainer\.profiler"):
        Trainer(config, OptimizerConfig().build(30), lm_loss)
