"""A reader is checked by all hosts of a sharded model together: the same verdict, and no launch but agreed ones."""

import pytest

from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess


def body_check(hosts):
    import dataclasses

    import haliax as hax
    import jax

    from lockstep.models import ReaderMismatchError, RotaryConfig, as_trainable, check_reader
    from lockstep.placement import make_mesh
    from tests import tiny
    from tests.multiprocess.launches import record_launches

    weights = tiny.placed_weights(make_mesh("auto"))

    @jax.jit
    def forward(weights, ids):
        return as_trainable(tiny.CONFIG, weights)(hax.named(ids, ("batch", "position"))).array

    with record_launches() as launches:
        found = check_reader((tiny.CONFIG, weights), lambda ids: forward(weights, ids), length=16, hosts=hosts)
        wrong = dataclasses.replace(tiny.CONFIG, rope=RotaryConfig(theta=500.0))
        try:
            check_reader((wrong, weights), lambda ids: forward(weights, ids), length=16, hosts=hosts)
            text = ""
        except ReaderMismatchError as error:
            text = str(error)
    agreed = ("jit(forward)", "jit(lockstep", "jit_lockstep")
    eager = [each for each in launches if not each.startswith(agreed)]
    return {"gap": found.gap, "text": text, "eager": eager, "launches": launches}


@pytest.mark.nightly  # in make slow: unit/models/test_check_reader.py
def test_hosts_come_to_one_verdict():
    one, other = run_processes(body_check)
    assert one == other
    assert one["gap"] < 1e-5 and one["eager"] == []
    assert "rope.theta is 500: it should be 10000" in one["text"]
