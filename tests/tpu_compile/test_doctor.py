"""What doctor times on a TPU is what it says: the compiler leaves no loop empty and copies no matrix."""

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from lockstep.doctor import speed
from lockstep.doctor.layout_rounds import LENGTH, PROMPTS, make_tokenizer, shape_for
from lockstep.engine import Auditor, Engine, EngineConfig
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import padded_vocab_size
from lockstep.placement import data_shards, make_mesh, tensor_sizes
from lockstep.training import OptimizerConfig
from lockstep.types import Request, SamplingParams
from lockstep.xla import topology
from tests.tpu_compile.steps import lowered_step

pytestmark = pytest.mark.slow


@pytest.fixture
def pod():
    return make_mesh("1,4,2", topology("v5p-16").devices)


def test_matrices_are_read_and_multiplied_in_every_turn(pod):
    hosts, sizes = Hosts(MemoryClient.hub(1)[0]), speed.sizes_for("tpu")
    read, multiply = speed.build_loops(hosts, list(pod.devices.flat), sizes)
    matrix, product = sizes.read**2 * 2, sizes.product**2 * 2
    assert read.run.memory().argument_size_in_bytes > matrix > 100 * read.run.memory().temp_size_in_bytes
    assert multiply.run.memory().temp_size_in_bytes < 1.1 * product, "what goes from turn to turn, twice"
    for loop in (read, multiply):
        assert " while(" in loop.run.text() and " convolution(" in loop.run.text()


def test_collectives_stay_in_their_loops(pod):
    groups = speed.find_groups(pod)
    assert [(group.name, group.members, group.crosses_hosts) for group in groups] == [
        ("fsdp", 4, True),
        ("tp", 2, False),
        ("all devices", 8, True),
        ("the devices of a host", 4, False),
        ("one device of each host", 2, True),
    ]
    wanted = [(groups[0], kind, size) for kind in ("all-reduce", "all-gather") for size in (4096, 64 << 20)]
    for loop, (_, kind, _) in zip(speed.build_collectives(Hosts(MemoryClient.hub(1)[0]), wanted), wanted, strict=True):
        assert " while(" in loop.run.text() and f" {kind}" in loop.run.text()


@pytest.mark.nightly
def test_all_programs_of_the_self_test_compile():
    """Nobody else's configuration is as small as this model: heads of 128, two layers, rows of 64."""
    mesh, tokenizer = make_mesh("auto", topology("v5p-16").devices), make_tokenizer()
    vocab = padded_vocab_size(len(tokenizer), 1)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    state, step = lowered_step(shape_for(mesh), vocab, mesh, 2 * data_shards(mesh), length=LENGTH, optimizer=optimizer)
    step.compile()
    params = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, n_generations=2, seed=0)
    requests = [
        Request(prompt_id=i, prompt_tokens=tuple(tokenizer.encode(text)), params=params)
        for i, text in enumerate(PROMPTS)
    ]
    assert tensor_sizes(mesh) == [1, 2, 4, 8]
    for layout in ("auto", "training", {"tensor": 1}, {"tensor": 2}, {"tensor": 4}, {"tensor": 8}):
        engine = Engine(EngineConfig(layout=layout, dtype="bfloat16"), mesh, vocab_size=len(tokenizer))
        assert "decode" in str(sorted(engine.prepare(state.model, requests, free=90 << 30)))
    Auditor(mesh, vocab_size=len(tokenizer), dtype="bfloat16").prepare(state.model, requests)
