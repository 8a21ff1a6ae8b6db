"""Seconds that decoding should take: what they grow with."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from lockstep.engine import EngineConfig
from lockstep.engine.config import Layout
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.cost_model import Estimate, _link, estimate, used_weights, verify_costs
from lockstep.engine.sizing.demand import Demand, desired_capacity
from lockstep.models import LlamaConfig, Variant, read_decoder
from lockstep.models.config import Numerics
from lockstep.placement import DecodeMesh
from lockstep.placement.device import Chip, Link
from tests.unit.engine.models import FAMILIES, LLAMA, in_bfloat16, mesh_of, model_on, request
from tests.unit.engine.models import SIZES as SIZES_OF_MODEL
from tests.unit.engine.sizing.made_up import models_on

LINK = Link(bandwidth=1e9, latency_s=1e-6)
CHIP = Chip(name="made up", memory=2**40, bandwidth=1e9, flops=1e12, link=LINK, network=LINK)
REQUESTS = [request(i, 20, 30) for i in range(8)]
SIZES = Capacity(
    replicas=1, sequences=1, slots=1, page_size=4, pages=9, pages_per_sequence=8, prefill_rows=1, steps=4, stop_ids=4
)


def found(layout: Layout, chip: Chip = CHIP, **options: object) -> Estimate:
    config = EngineConfig(**options)
    model = models_on(config)[layout]
    demand = Demand.of(REQUESTS, 16)
    return estimate(model, desired_capacity(config, model, demand), demand, chip)


def test_memory_and_compute_hide_behind_each_other_and_collectives_behind_neither() -> None:
    seconds = Estimate(reshard_s=100.0, memory_s=2.0, compute_s=3.0, collectives_s=0.5, steps=4.0, active=1.0)
    assert seconds.step_s == 3.5 and seconds.total_s == 100.0 + 4 * 3.5
    assert dataclasses.replace(seconds, memory_s=5.0).step_s == 5.5


def test_a_step_that_verifies_reads_once_and_computes_for_each_position() -> None:
    seconds = Estimate(
        reshard_s=100.0, memory_s=6.0, compute_s=1.0, collectives_s=1.0, moved_s=0.5, steps=4.0, active=1.0
    )
    assert seconds.verify_cost(1) == 1.0
    assert seconds.verify_cost(9) == (6.0 + 9 * 1.0 + 0.5 + 9 * 0.5) / 8.0
    assert verify_costs(dataclasses.replace(SIZES, draft_tokens=12), seconds) == {
        8: seconds.verify_cost(8),
        12: seconds.verify_cost(12),
    }
    assert verify_costs(SIZES, seconds) == {}


def test_what_moves_between_devices_grows_with_the_positions() -> None:
    assert found({"tensor": 1}).moved_s == 0.0 < found({"tensor": 2}).moved_s < found({"tensor": 2}).collectives_s


def test_twice_the_bandwidth_is_half_the_memory_time() -> None:
    fast = dataclasses.replace(CHIP, bandwidth=2 * CHIP.bandwidth)
    assert found({"tensor": 2}, fast).memory_s == pytest.approx(found({"tensor": 2}).memory_s / 2)


def test_devices_that_split_positions_read_less_and_exchange_more() -> None:
    """Each of two layers has two exchanges more: queries of four bytes, and what two devices found, in float32."""
    split, repeated = found({"tensor": 4, "context": 2}), found({"tensor": 4})
    kv = 2 * 2 * 8 * 4  # K and V of a head of 8 numbers in two layers
    read = 8 * Demand.of(REQUESTS, 16).context * kv / CHIP.bandwidth
    assert repeated.memory_s - split.memory_s == pytest.approx(4 * read / 2), "four devices share a memory"
    sent = 2 * 8 * 2 * (8 * 4 + 4 * 9) / 2 / LINK.bandwidth
    more = 2 * 2 * LINK.gather_s(_link(models_on(EngineConfig())[{"tensor": 4, "context": 2}].decode_mesh, CHIP, 2)[1])
    assert split.moved_s - repeated.moved_s == pytest.approx(sent)
    assert split.collectives_s - repeated.collectives_s == pytest.approx(sent + more)


def test_only_a_replica_of_several_devices_has_collectives_in_a_step() -> None:
    assert found({"tensor": 1}).collectives_s == 0.0 < found({"tensor": 2}).collectives_s


def test_the_training_layout_moves_nothing_once_and_gathers_in_every_step() -> None:
    training = found("training")
    assert training.reshard_s == 0.0 < found({"tensor": 1}).reshard_s
    assert training.collectives_s > 0.0


def test_few_slots_take_several_batches_of_steps() -> None:
    assert found({"tensor": 1}).steps == 30
    capped = found({"tensor": 1}, max_seqs=2)
    assert (capped.steps, capped.active) == (4 * 30, 2.0)


def test_devices_at_one_memory_share_its_bandwidth() -> None:
    # Four CPU devices of this process: one that decodes has the bandwidth that four would share.
    shared, alone = found({"tensor": 1}), found({"tensor": 1, "replicas": 1})
    assert alone.memory_s < shared.memory_s


def test_each_hop_of_a_replica_costs_in_every_collective_of_a_step() -> None:
    far = dataclasses.replace(CHIP, link=dataclasses.replace(LINK, hop_s=1e-3), network=LINK)
    more = found({"tensor": 2}, far).collectives_s - found({"tensor": 2}).collectives_s
    # Two all-reduces per layer and one for the embedding go there and back over the one hop, two gathers only there.
    reductions = 2 * LLAMA.num_layers + 1
    assert more == pytest.approx((2 * reductions + 2) * 1e-3)
    assert found({"tensor": 1}, far).collectives_s == 0.0


def test_a_replica_on_one_chip_exchanges_between_its_cores() -> None:
    """As on TPU7x, where two devices are one chip: a tensor group of two stays on it, one of four does not."""
    chip = dataclasses.replace(CHIP, core=Link(bandwidth=6e9, latency_s=1e-6))
    places = [SimpleNamespace(coords=(x, 0, 0), process_index=0) for x in range(2) for _ in range(2)]
    decode_mesh = Mock(DecodeMesh, mesh=SimpleNamespace(devices=np.array(places)))
    assert _link(decode_mesh, chip, 2) == (chip.core, 0) and _link(decode_mesh, chip, 4) == (LINK, 1)
    assert _link(decode_mesh, CHIP, 2) == (LINK, 0)


def test_moving_weights_takes_the_links_and_the_memory_on_both_sides() -> None:
    def reshard_s(**bandwidths: float) -> float:
        network = dataclasses.replace(LINK, bandwidth=bandwidths.get("link", 1e30), latency_s=0.0)
        chip = dataclasses.replace(CHIP, bandwidth=bandwidths.get("memory", 1e30), link=network, network=network)
        return found({"tensor": 1}, chip).reshard_s

    copied = models_on(EngineConfig())[{"tensor": 1}].copied_bytes
    assert reshard_s(link=1e9) == pytest.approx(copied * 3 / 4 / 1e9)
    assert reshard_s(memory=1e9) == pytest.approx(copied * 2 * 4 / 1e9), "read and written by four at one memory"
    assert reshard_s(link=1e9, memory=1e9) == pytest.approx(reshard_s(link=1e9) + reshard_s(memory=1e9))


@pytest.mark.parametrize(
    ("mesh", "slices", "stages_away", "options", "itemsize"),
    [
        ("pp=2,fsdp=2", 2, 1, {"dtype": "bfloat16"}, 2),
        ("pp=4", 2, 2, {}, 4),
        ("pp=2,fsdp=2", 2, 1, {"weight_dtype": "int8"}, 4),
        ("pp=2,fsdp=2", 1, 0, {}, 4),
    ],
)
def test_moving_weights_takes_the_layers_of_other_slices_over_the_network_between_them(
    monkeypatch: pytest.MonkeyPatch, mesh: str, slices: int, stages_away: int, options: dict[str, str], itemsize: int
) -> None:
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", str(slices))
    weights, engine = model_on(mesh, dataclasses.replace(LLAMA, num_layers=4)), EngineConfig(**options)
    model = DecodeModels(engine, *read_decoder(weights), mesh_of(mesh))[{"tensor": 1}]
    demand = Demand.of(REQUESTS, 16)

    def reshard_s(chip: Chip) -> float:
        return estimate(model, desired_capacity(engine, model, demand), demand, chip).reshard_s

    layers = 4 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24 + 2 * 16)
    slow, fast = (reshard_s(dataclasses.replace(CHIP, dcn=rate)) for rate in (1e3, 1e30))
    assert slow - fast == pytest.approx(stages_away * layers // 4 * itemsize / 1e3)
    published = dataclasses.replace(CHIP, dcn=CHIP.network.bandwidth)
    assert reshard_s(CHIP) == reshard_s(published), "as between hosts where no rate is known"


def bytes_read(config: LlamaConfig) -> float:
    """What a step reads of weights and K/V, on the four devices of one memory together."""
    engine = EngineConfig()
    model = DecodeModels(engine, *read_decoder(model_on("1,2,2", config)), mesh_of("1,2,2"))[{"tensor": 2}]
    demand = Demand.of(REQUESTS, 16)
    return estimate(model, desired_capacity(engine, model, demand), demand, CHIP).memory_s * CHIP.bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfOfMlp(LlamaConfig):
    """A model of whose MLPs a step reads a half."""

    def part_read(self, weight: str, tokens: float) -> float:
        return 0.5 if weight in ("gate", "up", "down") else super().part_read(weight, tokens)


def test_what_a_step_reads_is_asked_of_the_model() -> None:
    whole = bytes_read(LLAMA)
    mlps = 2 * 3 * 16 * 24 * 4  # of two layers, on each of two replicas
    assert whole - bytes_read(HalfOfMlp(**SIZES_OF_MODEL)) == pytest.approx(2 * mlps / 2)
    kv = 2 * 2 * 2 * 8 * 4  # of a position: K and V of two heads in two layers
    window = dataclasses.replace(LLAMA, variant=Variant(sliding_window=6))
    assert whole - bytes_read(window) == pytest.approx(len(REQUESTS) * (Demand.of(REQUESTS, 16).context - 6) * kv)


def test_the_busiest_device_has_more_whole_experts_to_read_and_multiply_than_it_has_parts() -> None:
    models = DecodeModels(EngineConfig(), *read_decoder(model_on("1,2,2", FAMILIES["experts"])), mesh_of("1,2,2"))
    whole, parts = (models[{"tensor": 2, "expert": size}] for size in (2, 1))
    assert used_weights(whole, 3.0) == used_weights(parts, 3.0), "CPU devices share memory and cores"
    whole, parts = (dataclasses.replace(each, device=Mock(jax.Device, platform="tpu")) for each in (whole, parts))
    experts = parts.config.experts
    assert experts is not None
    size = 2 * 3 * 3 * 16 * 12  # of both layers: half of six experts with three matrices
    (read, multiplied), (least, each) = used_weights(whole, 3.0), used_weights(parts, 3.0)
    reads, products = experts.unevenness(3, 2)
    assert read - least == pytest.approx((reads - 1) * experts.expected_hits(3) / 6 * 4 * size)
    assert multiplied - each == pytest.approx((products - 1) * 3 / 6 * size) and products > reads > 1


def test_exact_numerics_read_weights_again_for_each_16_rows_but_in_bfloat16_on_cpu() -> None:
    def seconds(numerics: Numerics, platform: str, slots: int) -> Estimate:
        given = model_on("1,1,1", dataclasses.replace(LLAMA, numerics=numerics))
        config, weights = read_decoder(in_bfloat16(given))
        model = DecodeModels(EngineConfig(), config, weights, mesh_of("1,1,1"))[{"tensor": 1}]
        sizes = dataclasses.replace(SIZES, sequences=slots, slots=slots, pages=999)
        model = dataclasses.replace(model, device=Mock(spec=jax.Device, platform=platform))
        return estimate(model, sizes, Demand.of(REQUESTS * 5, 16), CHIP)

    one, two, three = (seconds("exact", "tpu", slots).reread_s for slots in (16, 17, 40))
    assert one == 0 < two and three == 2 * two
    fast, tpu = seconds("fast", "tpu", 40), seconds("exact", "tpu", 40)
    assert tpu.memory_s - tpu.reread_s == pytest.approx(fast.memory_s)
    assert seconds("exact", "cpu", 40) == fast
