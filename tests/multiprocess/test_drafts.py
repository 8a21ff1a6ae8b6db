"""Drafts among hosts: nobody is told what was accepted, and all launch the same programs and make the same tokens."""

import dataclasses

import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.engine import Engine, EngineConfig
from lockstep.errors import DisagreementError
from lockstep.placement import make_mesh
from lockstep.types import Drafts
from tests import tiny
from tests.multiprocess.harness import run_processes


def wrong_at(tokens, place):
    return (*tokens[:place], 63, *tokens[place + 1 :])


def body(hosts):
    mesh = make_mesh("1,2,2")
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    plain = tiny.requests(temperature=0.8, n_generations=2, lengths=(1, 17, 40))
    plain = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_new_tokens=24)) for r in plain]
    engine = Engine(EngineConfig(layout={"tensor": 2}, page_size=8, max_seqs=4), mesh)
    straight = engine.generate(model, plain, hosts=hosts)
    answers = {}
    for completion in straight:
        answers.setdefault(completion.prompt_id, []).append(wrong_at(completion.tokens, 3 * completion.prompt_id))
    drafted = [dataclasses.replace(r, drafts=Drafts(answers=tuple(answers[r.prompt_id]), ngrams=True)) for r in plain]
    verified = engine.generate(model, drafted, hosts=hosts)
    if hosts.index:  # a host with a draft of its own would choose other programs
        drafted[0] = dataclasses.replace(drafted[0], drafts=Drafts())
    try:
        engine.generate(model, drafted, hosts=hosts)
        refused = ""
    except DisagreementError as error:
        refused = str(error)

    config = InferenceEvalConfig(
        prompts=["one", "What is 2 plus 3?"], max_new_tokens=24, eval_every=1, on_error="raise", drafts="last_round"
    )
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    weights = tiny.placed_weights(mesh, vocab=tiny.vocab_size())
    launches = []
    for step in (1, 2):
        before = len(hosts.ledger.launches)
        callback(tiny.Info(step, (tiny.CONFIG, weights)))
        launches.append(hosts.ledger.launches[before:])
    return {
        "plain": [c.tokens for c in straight],
        "verified": [c.tokens for c in verified],
        "refused": refused,
        "engine": engine.ledger.launches,
        "rounds": callback.rounds,
        "launches": launches,
    }


@pytest.mark.nightly  # in make slow: unit/engine/decoder/test_decode.py
def test_two_processes():
    one, other = run_processes(body, processes=2, timeout_s=240)
    assert one == other
    assert one["verified"] == one["plain"]
    assert any(name.startswith("verify_") for name in one["engine"])
    assert "requests" in one["refused"]
    assert one["rounds"] == 2
    first, second = one["launches"]
    assert not any(name.startswith("verify_") for name in first), "there is no earlier answer yet"
    assert any(name.startswith("verify_") for name in second) and second.count("decode") <= first.count("decode")
