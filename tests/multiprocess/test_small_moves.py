"""Norms that a train step returned elsewhere, on two hosts: both launch the same move, and compile nothing else."""

import pytest

from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess


def body_moved_norms(hosts):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import lockstep
    from lockstep.placement import make_mesh, place
    from tests import tiny
    from tests.multiprocess.launches import record_launches

    mesh = make_mesh("auto")
    split = tiny.placed_weights(mesh)

    def whole(path, leaf):
        if "norm" not in path[-1].name:
            return leaf
        (host,) = [a for p, a in jax.tree_util.tree_leaves_with_path(tiny.numpy_weights()) if p == path]
        return place(np.asarray(host), NamedSharding(mesh, PartitionSpec()))

    models = [jax.tree_util.tree_map_with_path(whole, split), split, split]
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh)
    seen, asked = [], tiny.requests(lengths=(5, 17))
    for model in models:
        with record_launches() as launches:
            answers = engine.generate((tiny.CONFIG, model), asked, hosts=hosts)
        eager = [each for each in launches if "lockstep" not in each]
        seen.append(([list(each.tokens) for each in answers], len(engine.compilations), eager))
    return {
        "tokens": [tokens for tokens, *_ in seen],
        "compiled": [count for _, count, _ in seen],
        "eager": [eager for *_, eager in seen],
        "moves": engine.ledger.launches.count("move_small_weights"),
        "last": engine.compilations[-1].name,
    }


@pytest.mark.slow
def test_norms_are_moved_back_by_one_agreed_program():
    one, other = run_processes(body_moved_norms)
    assert one == other
    first, second, third = one["tokens"]
    assert first == second == third and any(first)
    before, *after = one["compiled"]
    assert after == [before + 1] * 2 and one["last"] == "move_small_weights" and one["moves"] == 2
    assert one["eager"] == [[], [], []], "nothing is launched but agreed programs"
