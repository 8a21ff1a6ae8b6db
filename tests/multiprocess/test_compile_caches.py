"""A compilation cache per machine: one process finds its programs there, the other compiles them; both go on."""

import logging
from pathlib import Path
from unittest import mock

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.errors import DisagreementError
from lockstep.models import load_hf
from lockstep.placement import make_mesh
from lockstep.placement.device import program
from tests import tiny
from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess

GOLDEN = Path(__file__).parents[1] / "golden"
OWN = "the processes have caches of their own"


class Cache:
    """JAX's compilation cache of this process in a directory, and how often something was found there."""

    def __init__(self):
        import jax

        self.hits = 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event, **_):
        self.hits += event == "/jax/compilation_cache/cache_hits"

    def move(self, directory):
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
        jax.clear_caches()
        self.hits = 0


def generate(hosts):
    """What a new engine compiles and answers."""
    mesh = make_mesh("auto")
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    engine = Engine(EngineConfig(page_size=8, max_seqs=4), mesh, ledger=hosts.ledger)
    completions = engine.generate(model, tiny.requests(temperature=0.8), hosts=hosts)
    digests = {name: one for each in engine.programs.values() for name, one in each.digests.items()}
    return {"tokens": [one.tokens for one in completions], "sizes": repr(engine.sizing.sizes), "digests": digests}


def body_caches(hosts, directory):
    cache, found = Cache(), {}
    for turn in ("first", "second"):
        # In the second turn process 0 finds what it wrote in the first, and process 1 nothing.
        cache.move(f"{directory}/{hosts.index}-{turn if hosts.index else 'warm'}")
        found[turn] = generate(hosts) | {"hits": cache.hits}
    return found | {"ledger": hosts.ledger.state}


@pytest.mark.slow
def test_one_process_with_a_warm_cache_and_one_with_none_generate_the_same(results):
    warm, cold = (result["caches"] for result in results)
    programs = len(warm["first"]["digests"]) // 3
    assert warm["first"]["hits"] == cold["first"]["hits"] == cold["second"]["hits"] == 0
    assert warm["second"]["hits"] >= programs - 1 >= 3  # all but what moves the weights, see below
    for turn in ("first", "second"):
        assert warm[turn]["tokens"] == cold[turn]["tokens"] == warm["first"]["tokens"]
        assert warm[turn]["sizes"] == cold[turn]["sizes"]
    assert warm["ledger"] == cold["ledger"]


def body_loads(hosts, directory):
    import jax
    import numpy as np

    cache, sums = Cache(), []
    for turn in ("first", "second"):
        cache.move(f"{directory}/{hosts.index}-{turn if hosts.index else 'warm'}")
        model = load_hf(str(GOLDEN / "llama3"), make_mesh("auto"), hosts=hosts)
        sums.append([float(np.asarray(jax.numpy.abs(leaf).sum())) for leaf in jax.tree.leaves(model)])
    return sums, cache.hits


def body(hosts, directory):
    return {"caches": body_caches(hosts, f"{directory}/caches"), "loads": body_loads(hosts, f"{directory}/loads")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_processes(body, args=(str(tmp_path_factory.mktemp("caches")),), timeout_s=300, own=OWN)


@pytest.mark.slow
def test_one_process_with_a_warm_cache_and_one_with_none_load_a_checkpoint(results):
    (warm, hits), (cold, no_hits) = (result["loads"] for result in results)
    assert hits > no_hits == 0
    assert warm[0] == warm[1] == cold[0] == cold[1]


def body_gathers(hosts, directory, layout):
    import jax

    Cache().move(directory)
    mesh = make_mesh("1,2,2")
    engine = Engine(EngineConfig(page_size=8, max_seqs=4, layout=layout), mesh, ledger=hosts.ledger)
    engine.generate((tiny.CONFIG, tiny.placed_weights(mesh)), tiny.requests(temperature=0.8), hosts=hosts)
    names = "jax_persistent_cache_min_compile_time_secs", "jax_compilation_cache_include_metadata_in_key"
    return [getattr(jax.config, name) for name in names]


@pytest.mark.nightly  # in make slow: the tests around it
@pytest.mark.parametrize(
    ("layout", "cached"), [({"tensor": 2}, {"new_cache", "prefill", "decode"}), ("training", set())]
)
def test_programs_whose_collectives_nothing_orders_are_never_cached(layout, cached, tmp_path):
    """A gather outside the loop over layers met one inside it in Gloo, in programs that were read from a cache."""
    assert run_processes(body_gathers, args=(str(tmp_path), layout), timeout_s=300, own=OWN) == [[0, False]] * 2
    entries = {path.name.partition("-")[0] for path in tmp_path.glob("jit_lockstep_*-cache")}
    assert entries == {f"jit_lockstep_{name}" for name in cached}


def body_other_text(hosts):
    """As if the compiler of process 1 had written its program down differently."""
    said, strict = [], ""
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("lockstep.hosts")
    log.addHandler(handler)
    text = program.without_source_locations
    with mock.patch.object(program, "without_source_locations", lambda hlo: text(hlo) + f"// {hosts.index}"):
        tokens = generate(hosts)["tokens"]
        hosts.debug = True
        try:
            generate(hosts)
        except DisagreementError as error:
            strict = str(error)
        hosts.debug = False
    log.removeHandler(handler)
    return {"tokens": tokens, "said": said, "strict": strict}


@pytest.mark.slow
def test_another_text_of_a_program_is_a_warning_and_an_error_in_debug_mode():
    leader, other = run_processes(body_other_text)
    assert leader["tokens"] == other["tokens"] and leader["tokens"]
    assert other["said"] == []
    for name in ("decode", "prefill"):
        assert any(text.startswith(f"{name}: optimised HLO (may differ): process 0: ") for text in leader["said"])
        assert f"'{name}: optimised HLO (may differ)'" in leader["strict"]
    assert leader["strict"] == other["strict"] and "StableHLO" not in leader["strict"]
