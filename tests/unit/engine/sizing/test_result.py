"""The chosen sizes in words."""

import dataclasses
import json
from pathlib import Path

import pytest

from lockstep.engine.sizing.result import Sizing
from lockstep.errors import DisagreementError
from lockstep.hosts import Hosts
from lockstep.types import Drafts
from tests.multiprocess.harness import run_threads
from tests.unit.engine.models import request
from tests.unit.engine.sizing.made_up import ROOMY, choose, least_that_works


def test_reasons_and_words() -> None:
    requests = [request(i, 20, 12) for i in range(16)]
    got = choose(requests, ROOMY)
    assert {why for _, why in got.reasons.values()} == {"all requests fit"}
    capped = choose(requests, ROOMY, max_seqs=3, max_steps_per_launch=5)
    assert capped.reasons["max_seqs"] == (3, "cap given") and capped.reasons["max_steps_per_launch"] == (5, "cap given")
    assert capped.reasons["max_pages"][1] == "all requests fit"
    tight = choose(requests, least_that_works(requests) + 5000)
    assert tight.reasons["max_pages"][1] == "memory"
    text = tight.describe()
    for part in ("decode weights", "KV cache", "temporaries", "stay free", "max_pages", ": memory", "* ", "training:"):
        assert part in text, part
    assert choose([request(i, 2, 2) for i in range(300)], ROOMY, layout={"tensor": 1}).reasons["max_seqs"] == (
        256,
        "default",
    )


def test_headroom_is_what_the_compiler_leaves_once_it_has_spoken() -> None:
    got = choose([request(0, 20, 12)], 10**9, hbm_utilization=0.5)
    assert got.budget == 5 * 10**8 and got.headroom == 10**9 - got.predicted.total
    more = dataclasses.replace(got.predicted, temporaries=got.predicted.temporaries + 1000)
    compiled = dataclasses.replace(got, compiled=more)
    assert compiled.headroom == got.headroom - 1000
    assert "by the compiler" in compiled.describe() and "were predicted" in compiled.describe()
    assert "predicted: " in got.describe()


def test_prompts_at_a_time_bound_the_sequences() -> None:
    requests = [request(i, 5, 5, n_generations=2) for i in range(9)]
    got = choose(requests, ROOMY, layout={"tensor": 1}, max_prompts_per_batch=3)
    assert got.reasons["max_seqs"] == (6, "max_prompts_per_batch")
    assert got.reasons["max_prompts_per_batch"] == (3, "cap given")


def test_a_layout_that_does_not_fit_is_shown_with_what_it_needs() -> None:
    got = choose([request(0, 20, 12)], ROOMY)
    (*_, last) = got.considered
    changed = dataclasses.replace(got, considered=(dataclasses.replace(last, sizes=None, estimate=None),))
    assert changed.describe().endswith("per device") and "does not fit: one sequence needs" in changed.describe()


def test_hosts_agree_on_the_costs_that_choose_between_programs(tmp_path: Path) -> None:
    """A host with a stale calibration file would verify drafts where its peers decode."""

    def sized(flops: float, name: str) -> Sizing:
        file = tmp_path / name
        file.write_text(json.dumps({"lockstep_calibration": 1, "chip": "CPU", "measured": "never", "flops": flops}))
        requests = [dataclasses.replace(request(i, 20, 12), drafts=Drafts()) for i in range(4)]
        return choose(requests, ROOMY, layout={"tensor": 1}, calibration=str(file))

    one, same, other = sized(1e12, "a.json"), sized(1e12, "b.json"), sized(1e6, "c.json")
    assert one.sizes == other.sizes and one.verify_costs != other.verify_costs
    assert one.schedule == same.schedule

    def agree(hosts: Hosts, second: Sizing) -> None:
        with hosts.scope("generate") as scope, scope.run_on_all("prepare") as prepared:
            prepared.agree((second if hosts.index else one).schedule)

    run_threads(agree, 2, same)
    with pytest.raises(DisagreementError, match="schedule .costs by calibration."):
        run_threads(agree, 2, other)
