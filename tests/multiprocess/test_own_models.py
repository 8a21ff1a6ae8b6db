"""A model that each process has for itself is refused by check: by leaf, device and process, with what mends it."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.errors import PeerError
from lockstep.placement import make_mesh
from tests import tiny
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches

pytestmark = pytest.mark.multiprocess


def own_models():
    """For each mistake the weights of this process."""
    local = jax.local_devices()
    mesh = Mesh(np.array(local), ("data",), axis_types=(AxisType.Auto,))
    first = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    host = tiny.numpy_weights(vocab=tiny.vocab_size())
    whole = tiny.placed_weights(make_mesh("auto"), vocab=tiny.vocab_size())

    def placed(mesh):
        return jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec())), host)

    def on_first(array):
        """Only the processes of the mesh have a part of it."""
        where = NamedSharding(first, PartitionSpec())
        shards = [jax.device_put(array, device) for device in where.addressable_devices]
        return jax.make_array_from_single_device_arrays(array.shape, where, shards, dtype=array.dtype)

    yield "a device of each process", jax.tree.map(lambda array: jax.device_put(array, local[0]), host)
    yield "a mesh of each process", placed(mesh)
    yield "the devices of process 0", jax.tree.map(on_first, host)
    yield "NumPy", host
    norm = jax.device_put(host.final_norm, local[0])
    yield "one norm", dataclasses.replace(whole, final_norm=norm)


def body(hosts):
    config = InferenceEvalConfig(prompts=["one"], max_new_tokens=4, on_error="raise", timeout_s=60)
    texts = {}
    with record_launches() as launches:
        for name, weights in own_models():
            callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
            launches.clear()
            for call in (callback.check, lambda model, callback=callback: callback(tiny.Info(100, model))):
                with pytest.raises(PeerError) as caught:
                    call((tiny.CONFIG, weights))
                texts.setdefault(name, []).append(str(caught.value))
            assert launches == [], name
    return texts


def body_order(hosts):
    """What check and the round say of a norm on the devices in another order, and on some of every process."""
    config = InferenceEvalConfig(prompts=["one"], max_new_tokens=4, on_error="raise", timeout_s=60)
    mesh, spec = make_mesh("auto"), PartitionSpec("fsdp")
    weights = tiny.placed_weights(mesh, vocab=tiny.vocab_size())
    host = tiny.numpy_weights(vocab=tiny.vocab_size()).final_norm
    callback, texts = SampleCallback(config, tiny.tokenizer(), hosts=hosts), []
    for devices in (mesh.devices[:, ::-1], mesh.devices[:, ::2]):
        norm_mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        norm = jax.make_array_from_callback(host.shape, NamedSharding(norm_mesh, spec), lambda index: host[index])
        for call in (callback.check, lambda model: callback(tiny.Info(100, model))):
            with pytest.raises(PeerError) as caught:
                call((tiny.CONFIG, dataclasses.replace(weights, final_norm=norm)))
            texts.append(str(caught.value))
        callback.last_step = None
        if norm.sharding.device_set == set(mesh.devices.flat):  # what the text says
            moved = jax.device_put(norm, jax.sharding.NamedSharding(mesh, spec))
            callback.check((tiny.CONFIG, dataclasses.replace(weights, final_norm=moved)))
    return texts


def test_a_weight_on_devices_in_another_order_or_on_some_is_refused_by_check_and_by_the_round():
    texts, other = run_processes(body_order, timeout_s=240)
    assert texts == other
    whole = "which is 4 devices (cpu:0, cpu:1 of process 0, cpu:2048, cpu:2049 of process 1). "
    order = "4 devices (cpu:2049, cpu:2048 of process 1, cpu:1, cpu:0 of process 0)"
    some = "2 devices (cpu:0 of process 0, cpu:2048 of process 1)"
    for text in texts[:2]:
        assert f"the weight final_norm is placed on {order} as " in text, text
        assert whole + "Place it there: jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))." in text, text
    for text in texts[2:]:
        assert f"the weight final_norm is placed on {some} as " in text, text
        assert whole + "Make the whole model there: jax.jit(init, out_shardings=" in text, text


def test_a_model_that_is_not_on_every_process_is_refused_by_check_and_by_the_round():
    texts, other = run_processes(body, timeout_s=240)
    assert texts == other
    for name, said in texts.items():
        for text in said:
            if name == "NumPy":
                assert "the weight embed is a ndarray in the memory of the host, on no device" in text
                continue
            weight = "final_norm" if name == "one norm" else "embed"
            processes = {"the devices of process 0": ["0"]}.get(name, ["0", "1"])
            for process in processes:
                assert f"process {process}: ConfigError: the weight {weight} is on " in text or len(processes) == 1, (
                    text
                )
                assert f" of process {process}, and this job samples on process 0, 1: every process must" in text, text
            assert "jax.jit(init, out_shardings=jax.sharding.NamedSharding(lockstep.placement.make_mesh()," in text
