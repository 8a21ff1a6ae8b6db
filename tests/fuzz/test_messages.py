"""What another process of the job or a worker may send: it is read, or refused by an error of ours."""

import contextlib
import dataclasses
import io
import time
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from lockstep.batch_inference.job_progress import Board, HostProgress
from lockstep.batch_inference.prompt_store import JobShape, PromptStore
from lockstep.batch_inference.row_files import RowIndex, agree_on_owners
from lockstep.batch_inference.summary import MemoryLog, Totals, add_up
from lockstep.callback.round import from_bytes
from lockstep.doctor import needs
from lockstep.doctor.finding import Finding, merge
from lockstep.exits import DONE, EXIT_CODES
from lockstep.hosts import Hosts, MemoryClient
from lockstep.hosts.exchange import (
    agree,
    all_min,
    broadcast_from_leader,
    digest_of,
    raise_if_different,
    reasons_to_stop,
)
from lockstep.hosts.heartbeat import describe_elsewhere, describe_missing, heartbeats
from lockstep.hosts.liveness import _names
from lockstep.hosts.peers import _summarize
from lockstep.hosts.phase import Ledger
from lockstep.json_text import from_peer
from lockstep.launch.connection import GREETING, Connection, DroppedError, answered
from lockstep.report import judge
from lockstep.types import Drafts, Request, SamplingParams
from tests.fuzz.hostile import documents, fuzz


class Forged(MemoryClient):
    """Process 0 of 2; whatever process 1 has posted is one message.

    Args:
        message: The message.
    """

    def __init__(self, message):
        (other, _) = MemoryClient.hub(2)
        super().__init__(0, 2, other._store)
        self.message = message

    def barrier(self, name, timeout_s):
        return None

    def fail_barrier(self, name):
        return None

    def get(self, key, timeout_s):
        return super().get(key, 0) if key.endswith("/0") else self.message

    def get_dir(self, prefix):
        return super().get_dir(prefix) | {f"{prefix}/1": self.message}


EXCHANGES = {
    "agree": (lambda channel: agree(channel, "a", {"b": "c"}, 1), [digest_of({"b": "c"})]),
    "differ": (lambda channel: raise_if_different(channel, "a", {"b": "c"}, 1), {"b": "c"}),
    "least": (lambda channel: all_min(channel, "a", 3, 1), 4),
    "stop": (lambda channel: reasons_to_stop(channel, "a", 1, None, "SIGTERM", 1), [None, "SIGTERM"]),
}


@fuzz(st.sampled_from(sorted(EXCHANGES)).flatmap(lambda name: st.tuples(st.just(name), documents(EXCHANGES[name][1]))))
def test_exchange(directory, example):
    name, message = example
    EXCHANGES[name][0](Hosts(Forged(message), 1)._channel)


SHARED = ([1, False], [["a"], "b"], {"a": [1]}, 3, True, "a", [1.5, 2.5])
OWN = ((1, False), (["a"], "b"), {"a": [1]}, 3, True, "a", [1.5, 2.5])
PHASE = st.integers(0, len(SHARED) - 1).flatmap(
    lambda place: st.tuples(st.just(OWN[place]), documents([None, SHARED[place], digest_of({"b": "c"}), None]))
)


@fuzz(PHASE)
def test_phase(directory, example):
    own, message = example
    with Hosts(Forged(message), 1).run_on_all("a") as phase:
        phase.agree({"b": "c"})
        phase.share(own)
    found = phase.shared[1]
    if isinstance(own, tuple):
        _, _ = found
    elif isinstance(own, int):
        min(found, own)
    else:
        assert found is None or isinstance(found, type(own))


COMBINED = {
    "agree": [[["d"], None]],
    "differ": {"b": "process 0: 'c'"},
    "least": 3,
    "stop": [[[None], None], [[None, "SIGTERM"], [1, 0]]],
}


@fuzz(
    st.sampled_from(sorted(COMBINED)).flatmap(
        lambda name: st.tuples(st.just(name), documents([None, COMBINED[name]], ["process 1", None]))
    )
)
def test_what_is_made_of_all_values(directory, example):
    """As the process with the service posts it, read by another one."""
    name, message = example
    client = Forged(message)
    client.index = client.task = 1
    EXCHANGES[name][0](Hosts(client, 1)._channel)


@fuzz(
    st.integers(0, len(SHARED) - 1).flatmap(
        lambda place: st.tuples(
            st.just(OWN[place]),
            documents(
                [None, [[[None], None], [[SHARED[place]], None], [[digest_of({"b": "c"})], None], [[None], None]]],
                [None, [[[None], None], ["iAQAAAAIAAAA=", None], [[digest_of({"b": "c"})], None], [[None], None]]],
            ),
        )
    )
)
def test_what_is_made_of_a_phase(directory, example):
    own, message = example
    client = Forged(message)
    client.index = client.task = 1
    with Hosts(client, 1).run_on_all("a") as phase:
        phase.agree({"b": "c"})
        phase.share(own)
    assert len(phase.shared) == 2
    if isinstance(own, tuple):
        assert all(len(each) == len(own) for each in phase.shared)


LEDGER = Ledger()
LEDGER.record("a", "b")
DIGEST = digest_of({"b": "c"})
STATES = documents([None, None, DIGEST, LEDGER.state], [None, None, DIGEST, "1 0"])


@fuzz(STATES, documents([[64, "h"]]), documents([[0, "a", "b"], [1, "c", "d"]]))
def test_launches(directory, message, hashes, entries):
    client = Forged(message)
    own, others = client.get_dir, {"es": hashes, "ch": entries}  # of "…, hashes" and "…, each"
    client.get_dir = lambda prefix: own(prefix) | {f"{prefix}/1": others.get(prefix[-2:], message)}
    hosts = Hosts(client, 1)
    hosts.ledger.record("a", "b")
    with hosts.launch_on_all("a") as found:
        found.agree({"b": "c"})


@fuzz(documents(["decode", 1.0, 2.0, "a", "b"]), documents(["failed: x", 85, 1], ["left", 1, 0]), documents(["a"]))
def test_signs_of_life(directory, heartbeat, announcement, news):
    peers = heartbeats(Forged(heartbeat))
    assert describe_missing(peers).isprintable() and describe_elsewhere(peers, "a").isprintable()
    reasons, code = _summarize([announcement])
    assert code in EXIT_CODES and code != DONE
    assert all(line.isprintable() for text in (*reasons, *_names(news)) for line in text.split("\n"))


@fuzz(st.sampled_from((b"+", b"-", b"")), documents({"a": 1}))
def test_broadcast(directory, word, text):
    client = Forged(b"\0\0\0\0" + word + text)
    client.index = client.task = 1
    client.get = lambda key, timeout_s: client.message
    found = broadcast_from_leader(Hosts(client, 1)._channel, "a", bytes, 1)
    from_peer(found, dict, "it")


REQUEST = dataclasses.asdict(
    Request(
        prompt_id=4,
        prompt_tokens=(5, 6),
        params=SamplingParams(max_new_tokens=1, logit_bias=((3, 1.5),), allowed_token_ids=(3, 4), stop=("x",)),
        drafts=Drafts(answers=((1, 2), ()), ngrams=True),
    )
)
PLAIN = {**REQUEST, "drafts": None}
LINE = {"text": "a", "messages": None, "answer": None, "fields": {}, "tokens": [1, 2]}
CHAT = {"text": None, "messages": [{"role": "user", "content": "a"}], "answer": "b", "fields": {"id": 7}, "tokens": [1]}


@fuzz(documents([[REQUEST, PLAIN], [PLAIN]], [[PLAIN], None]), documents(LINE, CHAT))
def test_prompts_of_the_leader(directory, requests, line):
    for request in from_bytes(requests).requests:
        hash(request.params), request.drafts and request.drafts.answer(0)
    store = PromptStore()
    store.append(line.replace(b"\n", b" ") + b"\n")
    assert store[0].prompt.shown


PROGRESS = dataclasses.asdict(HostProgress(rows=1, tokens=2, seconds=0.5))
TOTALS = dataclasses.asdict(Totals(rows=1, tokens=2, finish={"stop": 1}, sums={"a": 0.5}, counts={"a": 1}))
FINDING = dataclasses.asdict(Finding(name="a", outcome="ok", text="b"))


@fuzz(documents(PROGRESS), documents(TOTALS), documents({"peak": 3}), documents([FINDING]))
def test_what_the_leader_adds_up(directory, progress, totals, memory, findings):
    board = Board(Hosts(Forged(progress), 1), separate=True, rows=4, found=0, show=lambda job: None)
    board.job().metrics()
    head = b"\0\0\0\0"
    add_up(Hosts(Forged(head + totals), 1), Totals())
    MemoryLog(Hosts(Forged(head + memory), 1)).of_all("a")
    merge([from_peer(findings, list[Finding], "it")])


@fuzz(st.sampled_from((b"\0\0" * 8, b"\xff\xff\1\0" * 4, b"\2\0" * 8, b"\0" * 15)) | st.binary(max_size=20))
def test_rows_that_the_leader_gives_to_hosts(directory, owners):
    client = Forged(b"\0\0\0\0" + owners)
    client.index = client.task = 1
    client.get = lambda key, timeout_s: client.message
    index = RowIndex(JobShape(rounds=2, prompts=2, generations=2))
    assert set(agree_on_owners(Hosts(client, 1), index).tolist()) <= {-1, 0, 1}


RESULT = {"state": "ended", "code": 3, "ended": 1.5, "reason": "a"}
HEADS = (b"O 3\nabc", b"H\n", b"S\n", b"O\n", b"O -1\n", b"O 99999999\n", b"O " + b"9" * 5000, b"RR 3\n", b"\xff 1\n")
FRAMES = st.lists(st.sampled_from((*HEADS[:4], *HEADS)) | st.binary(max_size=8), max_size=4).map(b"".join)


@fuzz(FRAMES, documents(RESULT, {"error": "a"}), st.booleans())
def test_answer_of_a_worker(directory, frames, result, greets):
    data = (GREETING if greets else b"") + frames + b"R %d\n" % len(result) + result
    connection = Connection.__new__(Connection)
    connection._process = SimpleNamespace(stdout=io.BytesIO(data), wait=lambda: 0, returncode=0)
    connection._errors = io.BytesIO()
    with contextlib.suppress(DroppedError):
        for kind, piece in connection.frames():
            if kind == "R":
                found = answered(piece, "follow")
                assert "error" in found or found["state"] != "ended" or found["ended"] + found["code"] > -(2**64)


CHAT_REPLY = {"choices": [{"message": {"role": "assistant", "content": "Score: 3"}}]}
VIEWER = {"data": {"viewer": {"username": "a", "entity": "b"}}}


@fuzz(documents(CHAT_REPLY), documents(VIEWER))
def test_replies_of_servers(directory, verdict, viewer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "read_http", lambda request, timeout_s: verdict)
        patch.setattr(needs, "read_http", lambda request, timeout_s: viewer)
        patch.setenv("WANDB_API_KEY", "secret-key")
        assert needs.check_wandb({"mode": "online"}, 1).text
        judge.Judge(judge.JudgeConfig(base_url="http://localhost", model="a"))._reply("a", time.monotonic() + 5)
