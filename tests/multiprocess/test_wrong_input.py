"""Wrong input: on every process an error that says what was given, the limit and the fix, before any device work."""

import dataclasses

import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from tests import tiny
from tests.multiprocess.harness import run_command, run_processes
from tests.multiprocess.launches import record_launches

LONG = "What is 12 plus 7? " * 8
GOOD = {"prompts": ["one"], "max_new_tokens": 4}


def config_of(case, index):
    """The configuration of a case on one process."""
    return {
        "empty prompt list": {"prompts": []},
        "empty prompt": {"prompts": ["one", "  "]},
        "too long prompt": {"prompts": [LONG], "max_seq_len": 32},
        "longer than the model": {"prompts": [LONG * 4]},
        "no new tokens": {"max_new_tokens": 0},
        "no page": {"page_size": 0},
        "no generations": {"n_generations": 0},
        "negative temperature": {"temperature": -1.0},
        "no multihost": {"allow_multihost": False},
        "layout of a typo": {"layout": "tensro"},
        "layout that does not divide": {"layout": {"tensor": 3}},
        "too few pages": {"page_size": 4, "max_pages": 2, "max_new_tokens": 40},
        "missing prompt file": {"prompts": "no/such/prompts.jsonl"},
        "missing metric": {"metrics": ["no_such_module:score"]},
        "prompts differ": {"prompts": [["one"], ["two"]][index]},
        "configurations differ": {"max_new_tokens": 4 + index},
    }[case]


EXPECTED = {
    "empty prompt list": ["0 prompts|no prompts", "at least 1", "Add one"],
    "empty prompt": ["prompts[1]", "empty", "Remove it or give it text"],
    "too long prompt": ["prompt 0 has", "max_seq_len is 32", "Shorten the prompt to 28"],
    "longer than the model": ["prompt 0 has", "the model allows 64", "Shorten the prompt"],
    "no new tokens": ["max_new_tokens is 0", "at least 1", "Set max_new_tokens"],
    "no page": ["page_size is 0", "at least 1", "Set a larger number, or null"],
    "no generations": ["n_generations is 0", "at least 1", "Set n_generations"],
    "negative temperature": ["temperature is -1.0", "at least 0", "Use 0"],
    "no multihost": ["allow_multihost is false", "2 processes", "Set it to true"],
    "layout of a typo": ["'tensro'", "auto, training", "Use auto"],
    "layout that does not divide": ["{tensor: 3}", "4 devices", "[1, 2, 4]"],
    "too few pages": ["pages of 4 tokens", "has 1", "Raise max_pages to at least"],
    "missing prompt file": ["no/such/prompts.jsonl", "does not exist", "Fix the path"],
    "missing metric": ["no_such_module", "could not be imported", "PYTHONPATH"],
    "prompts differ": ["configuration", "process 0", "process 1", "Every process must be started with the same"],
    "configurations differ": ["configuration", "process 0", "process 1", "Every process must be started with the same"],
}


def body_mistakes(hosts, cases):
    trainer = tiny.make_trainer("auto", 1, hosts)
    model = tiny.init_model(trainer)
    texts = {}
    with record_launches() as launches:
        for case in cases:
            try:
                config = InferenceEvalConfig(**GOOD | config_of(case, hosts.index))
                SampleCallback(config, tiny.tokenizer(), hosts=hosts).check(model)
            except Exception as error:
                texts[case] = f"{type(error).__name__}: {error}"
    return {"texts": texts, "launches": launches}


def body_tokenizers(hosts):
    """A round on hosts whose tokenizers differ."""
    tokenizer = tiny.tokenizer()
    if hosts.index == 1:
        tokenizer.add_tokens(["<only here>"])
    trainer = tiny.make_trainer("auto", 1, hosts)
    model = tiny.init_model(trainer)
    try:
        SampleCallback(InferenceEvalConfig(**GOOD, on_error="raise"), tokenizer, hosts=hosts)(tiny.Info(100, model))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def body_requests(hosts):
    from lockstep.engine import Engine, EngineConfig
    from lockstep.placement import make_mesh

    mesh = make_mesh("auto")
    requests = [dataclasses.replace(r, prompt_tokens=(1 + hosts.index, 2)) for r in tiny.requests(lengths=(2,))]
    with record_launches() as launches:
        try:
            Engine(EngineConfig(), mesh).generate((tiny.CONFIG, tiny.placed_weights(mesh)), requests, hosts=hosts)
        except Exception as error:
            assert launches == []
            return f"{type(error).__name__}: {error}"


def body(hosts, cases):
    return {
        "mistakes": body_mistakes(hosts, cases),
        "tokenizers": body_tokenizers(hosts),
        "requests": body_requests(hosts),
    }


@pytest.fixture(scope="module")
def results():
    """What each process said of everything below."""
    return run_processes(body, timeout_s=240, args=(list(EXPECTED),))


def test_every_mistake_is_named_everywhere_before_any_device_work(results):
    for case, parts in EXPECTED.items():
        texts = [result["mistakes"]["texts"].get(case) for result in results]
        assert None not in texts, f"{case}: {texts}"
        assert len(set(texts)) == 1, f"{case}: {texts}"
        for part in parts:
            assert any(each in texts[0] for each in part.split("|")), f"{case}: {part!r} is not in {texts[0]!r}"
    assert [result["mistakes"]["launches"] for result in results] == [[], []]


def test_different_tokens_than_the_leaders_are_found(results):
    """A round on hosts whose tokenizers differ is refused before it starts."""
    texts = {result["tokenizers"] for result in results}
    assert len(texts) == 1
    (text,) = texts
    assert "tokenizer" in text and "DisagreementError" in text


def test_requests_that_differ_are_found_by_the_engine(results):
    texts = {result["requests"] for result in results}
    assert len(texts) == 1
    (text,) = texts
    assert "DisagreementError" in text and "requests" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(["--inference_eval.page_sise", "8"], ["page_sise", "page_size"], marks=pytest.mark.slow),
        pytest.param(
            ["--model", "null", "--initialize_from_hf", "tests/golden/llama3"],
            ["tokenizer and model vocabulary do not match", "largest token id", "Use the tokenizer"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["unknown key", "tokenizer of another model"],
)
def test_command_line_mistakes_end_every_process_and_are_said_once(arguments, parts, tmp_path):
    command = ["lockstep", "train-lm", "--config_path", "config/demo.yaml", "--trainer.log_dir", str(tmp_path)]
    run = run_command([*command, *arguments], timeout_s=120)
    assert run.code != 0
    errors = [line for line in run.output.splitlines() if "error: " in line]
    assert len(errors) == 1, run.output
    for part in parts:
        assert part in errors[0], f"{part!r} is not in {errors[0]!r}"
    assert "Traceback" not in run.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_for_debugging_every_process_shows_its_stack(tmp_path):
    command = ["lockstep", "train-lm", "--debug", "--config_path", "config/demo.yaml"]
    run = run_command([*command, "--trainer.log_dir", str(tmp_path), "--tokenizer", "./data/none"], timeout_s=120)
    assert run.code == 1, run.output
    assert all("Traceback" in log and "lockstep.errors.PeerError" in log for log in run.logs), run.output
