"""`numerics: exact` on several processes: bits of log-probabilities are those of one, and those of the trainer."""

import dataclasses

import pytest

from lockstep.errors import PeerError
from tests import rollouts as runs
from tests import tiny
from tests.exact import bits_of, completed, model_of, trainer_bits
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launcher import OPTIMISED
from tests.unit.engine.models import FAMILIES

pytestmark = pytest.mark.multiprocess

CASES = [
    (2, "llama", "bfloat16", "1,2,2", {"layout": {"tensor": 4}}),
    (2, "olmo", "float32", "2,1,2", {"layout": {"tensor": 2}, "max_seqs": 3}),
    (2, "gemma3", "bfloat16", "4,1,1", {"layout": "training", "page_size": 4}),
    (4, "llama", "bfloat16", "2,2,2", {"layout": {"tensor": 8}}),
    (4, "qwen3", "bfloat16", "1,4,2", {"layout": {"tensor": 4}, "max_seqs": 3}),
    (4, "apertus", "bfloat16", "4,1,2", {"layout": "training", "page_size": 4}),
]
"""Processes, family, type, mesh and engine: tensor groups over processes and within, the training layout."""
EXACTLY = ("logprob_gap", "ratio_gap")


def body_bits(hosts, family, dtype, mesh, engine):
    """The bits of engine and trainer; on one device without a layout."""
    if hosts.count == 1:
        mesh, engine = "1,1,1", {}
    model = model_of(mesh, dtype, dataclasses.replace(FAMILIES[family], numerics="exact", num_heads=8))
    answers = completed(mesh, model, hosts=hosts, **engine)
    return bits_of(answers), trainer_bits(mesh, model, answers)


def body_grpo(hosts, mesh, steps):
    """What each update measures, the first of its rollout, in hexadecimal; ratios are to what the engine said."""
    tracker = runs.Recorder()
    made = runs.make(
        mesh,
        steps,
        hosts,
        tracker=tracker,
        run={"rollout": {"temperature": 0.7}},
        loss={"use_rollout_logprobs": True, "kl_coefficient": 0.1},
        model=dataclasses.replace(tiny.CONFIG, numerics="exact"),
        mp="c=bfloat16,p=f32",
        per_device_parallelism=2,
    )
    spy = runs.train(*made)
    values = [tracker.scalars[step] for step in range(1, steps + 1)] if hosts.is_leader else []
    return {
        "gaps": [[each[f"train/{name}"].hex() for name in EXACTLY] for each in values],
        "kl": [each["train/kl"].hex() for each in values],
        "losses": [float(loss).hex() for loss in spy.losses],
    }


@pytest.mark.nightly  # in make slow: engine and trainer in the updates below
@pytest.mark.parametrize(("processes", "family", "dtype", "mesh", "engine"), CASES)
def test_processes_have_the_bits_of_one_and_of_the_trainer(processes, family, dtype, mesh, engine):
    """As users compile: with the flags of `make test` one number of the trainer's had another last bit."""
    args = (family, dtype, mesh, engine)
    ((wanted, _),) = run_processes(body_bits, processes=1, devices=1, args=args, env=OPTIMISED, timeout_s=400)
    results = run_processes(body_bits, processes=processes, devices=2, args=args, env=OPTIMISED, timeout_s=800)
    assert results == [[wanted, wanted]] * processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "steps", "env"),
    [
        ("1,2,2", 3, None),
        pytest.param("2,1,2", 20, OPTIMISED, marks=pytest.mark.nightly),
    ],
)
def test_every_first_update_on_two_processes_has_ratio_one(mesh, steps, env):
    """No bit between engine and trainer after any step; before the first, none to the reference."""
    leader, other = run_processes(body_grpo, processes=2, devices=2, args=(mesh, steps), env=env, timeout_s=500)
    zero = (0.0).hex()
    assert leader["gaps"] == [[zero] * len(EXACTLY)] * steps
    assert leader["kl"][0] == zero and leader["kl"].count(zero) == 1, "the policy learns"
    assert leader["losses"] == other["losses"] and len(set(leader["losses"])) == steps


def body_refused(hosts):
    """What the engine says, or the bits of engine and trainer where it says nothing."""
    model = model_of("1,2,2", "bfloat16")
    try:
        answers = completed("1,2,2", model, hosts=hosts, layout={"tensor": 2})
    except PeerError as error:
        return str(error)
    return bits_of(answers), trainer_bits("1,2,2", model, answers)


@pytest.mark.nightly  # in make slow: tests/unit/engine/decoder/test_exact_proof.py
def test_a_flag_with_which_products_are_not_exact_is_refused_on_every_host():
    """Seen with jaxlib 0.11.1 on an AMD EPYC; where another machine refuses nothing, it has to be exact."""
    flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    results = run_processes(body_refused, processes=2, devices=2, env=flags, timeout_s=500)
    assert results[0] == results[1]
    if isinstance(results[0], str):
        assert "numerics is exact, and here it is not: a product of" in results[0]
        assert "2 of 2 processes failed at" in results[0]
    else:
        engine, trainer = results[0]
        assert engine == trainer
