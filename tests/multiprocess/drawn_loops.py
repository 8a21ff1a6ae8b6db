"""Training loops drawn by a seed: meshes, placements, dtypes, layers in lists or stacked, frozen parts, settings.

The same seed draws the same loop on every process. `run_loop` runs it without a callback and with one.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.round import read_round_prompts
from lockstep.hosts import Hosts
from lockstep.models import LlamaConfig, from_names
from lockstep.report import read_jsonl
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.oracle import assert_same_tokens, oracle_completions

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=3)
STEPS = 4
SAMPLING = InferenceEvalConfig(
    prompts=["one", "What is 12 plus 7?"], eval_every=2, max_new_tokens=6, temperature=0.0, keep_tokens=True,
    on_error="raise", timeout_s=120,
)  # fmt: skip

SETTINGS = {
    "none": contextlib.nullcontext,
    "transfer_guard": lambda: jax.transfer_guard_host_to_device("disallow"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no NaN": lambda: jax.debug_nans(True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop.

    Args:
        layers: ``listed``, or the axis of stacked arrays that is the layer.
        frozen: The numbers of the layers that are not trained; those of stacked arrays all are.
        wide: Whether numbers have 64 bits by default.
    """

    mesh: Mesh
    frozen_mesh: Mesh
    layers: str | int
    frozen: tuple[int, ...]
    frozen_dtype: Any
    frozen_whole: bool
    setting: str
    pins_results: bool
    wide: bool
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> "Loop":
        """The loop of a seed."""
        rng = np.random.default_rng(seed)
        devices = np.array(jax.devices())
        if rng.integers(2):
            devices = rng.permutation(devices)
        count = len(devices)
        shapes = [(count,), (1, count), (count, 1), *([(2, count // 2), (count // 2, 2)] if count > 2 else [])]
        names = [("fsdp", "tp"), ("b", "a")][rng.integers(2)]

        def mesh() -> Mesh:
            shape = shapes[rng.integers(len(shapes))]
            return Mesh(devices.reshape(shape), names[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))

        first = mesh()
        layers = ["listed", "listed", 0, 1][rng.integers(4)]
        frozen = tuple(np.flatnonzero(rng.integers(0, 2, CONFIG.num_layers)).tolist()) if layers == "listed" else ()
        return cls(
            mesh=first,
            frozen_mesh=mesh() if rng.integers(2) else first,
            layers=layers,
            frozen=frozen,
            frozen_dtype=[jnp.float32, jnp.bfloat16][rng.integers(2)],
            frozen_whole=bool(rng.integers(2)),
            setting=list(SETTINGS)[rng.integers(len(SETTINGS))],
            pins_results=bool(rng.integers(2)),
            wide=bool(rng.integers(2)),  # drawn last: what is added here leaves the other draws of a seed
            seed=seed,
        )

    def __str__(self) -> str:
        def text(mesh: Mesh) -> str:
            return f"{dict(mesh.shape)} of {[device.id for device in mesh.devices.flat]}"

        return (
            f"seed {self.seed}: mesh {text(self.mesh)}, layers {self.layers}, frozen {self.frozen} "
            f"{jnp.dtype(self.frozen_dtype).name} on {text(self.frozen_mesh)}{' whole' * self.frozen_whole}, "
            f"{self.setting}{', 64 bits' * self.wide}, "
            f"{'pinned' if self.pins_results else 'free'} results"
        )

    def params(self) -> dict[str, Any]:
        """Parameters in the form and in the placement of the loop."""
        rng = np.random.default_rng(self.seed + 1)
        host = tiny.numpy_weights(CONFIG, vocab=tiny.vocab_size())

        def placed(array: np.ndarray, mesh: Mesh, *, whole: bool = False) -> jax.Array:
            spec, left = list[Any](), [] if whole else [name for name in mesh.axis_names if rng.integers(3)]
            for size in array.shape:
                fitting = [name for name in left if size % mesh.shape[name] == 0]
                taken = fitting[:1] if fitting and rng.integers(2) else []
                left = [name for name in left if name not in taken]
                spec.append(taken[0] if taken else None)
            where = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.make_array_from_callback(
                array.shape, where, lambda index: np.ascontiguousarray(array[index]), dtype=array.dtype
            )

        params: dict[str, Any] = {
            name: placed(getattr(host, name), self.mesh) for name in ("embed", "final_norm", "lm_head")
        }
        stacked = {name: array for name, array in vars(host.layers).items() if array is not None}
        if self.layers != "listed":
            moved = {name: np.moveaxis(array, 0, self.layers) for name, array in stacked.items()}
            return params | {"layers": {name: placed(array, self.mesh) for name, array in moved.items()}}
        specs = rng.bit_generator.state  # the layers of a loop are placed by one rule, but for the frozen ones
        layers = {}
        for number in range(CONFIG.num_layers):
            rng.bit_generator.state = specs
            frozen = number in self.frozen
            mesh, dtype = (self.frozen_mesh, self.frozen_dtype) if frozen else (self.mesh, jnp.float32)
            layers[str(number)] = {
                name: placed(array[number].astype(dtype), mesh, whole=frozen and self.frozen_whole)
                for name, array in stacked.items()
            }
        return params | {"layers": layers}

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of the loop's process."""
        with SETTINGS[self.setting](), jax.enable_x64(self.wide):
            yield

    def trained(self, params: dict[str, Any]) -> dict[str, Any]:
        """The part that is trained."""
        if self.layers != "listed":
            return params
        return params | {"layers": {n: layer for n, layer in params["layers"].items() if int(n) not in self.frozen}}

    def joined(self, params: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
        """All parameters, of which some were trained."""
        return trained | {"layers": params["layers"] | trained["layers"]}

    def reader(self) -> Any:
        """The reader of the parameters."""
        names = {name: f"layers.{{}}.{name}" for name, a in vars(tiny.numpy_weights().layers).items() if a is not None}
        if self.layers == 0:
            names = {name: f"layers.{name}" for name in names}
        elif self.layers == 1:
            shapes = {name: getattr(tiny.numpy_weights().layers, name).ndim for name in names}
            axes = {name: [f"axis{i}" for i in range(1, ndim)] for name, ndim in shapes.items()}
            names = {
                name: (f"layers.{name}", f"{a[0]} {' '.join(['layer', *a[1:]])} -> {' '.join(['layer', *a])}")
                for name, a in axes.items()
            }
        return from_names({"embed": "embed", "final_norm": "final_norm", "lm_head": "lm_head"} | names)


def run_loop(hosts: Hosts, seed: int, directory: str) -> dict[str, Any]:
    """`train` the loop of a seed."""
    callback = SampleCallback(SAMPLING, tiny.tokenizer(), dtype="float32", output_dir=directory, hosts=hosts)
    return train(Loop.drawn(seed), callback, directory)


def train(loop: Loop, callback: SampleCallback, directory: str) -> dict[str, Any]:
    """Train without and with a callback, and compare each round with the model's own forward pass."""
    config: LlamaConfig = CONFIG
    read, traces = loop.reader(), []

    def loss_fn(trained: dict[str, Any]) -> jax.Array:
        parts = [jnp.mean(jnp.sin(3 * leaf.astype(jnp.float32)) ** 2) for leaf in jax.tree.leaves(trained)]
        return jnp.sum(jnp.stack(parts))

    def train_step(trained: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
        traces.append(1)
        loss, gradients = jax.value_and_grad(loss_fn)(trained)
        return jax.tree.map(lambda p, g: p - jnp.float32(0.3) * g, trained, gradients), loss

    def trained_with(callback: SampleCallback | None) -> tuple[list[str], list[Any]]:
        params, losses, rounds = loop.params(), [], []
        trained = loop.trained(params)
        places = jax.tree.map(lambda leaf: leaf.sharding, trained)
        step = jax.jit(train_step, donate_argnums=0, **({"out_shardings": (places, None)} if loop.pins_results else {}))
        with loop.settings():
            if callback is not None:
                callback.check((config, read(params)))
            for number in range(1, STEPS + 1):
                trained, loss = step(trained)
                losses.append(float(loss.addressable_data(0)).hex())
                model = loop.joined(params, trained)
                if callback is not None:
                    callback(SimpleNamespace(step=number, model=(config, read(model))))
                elif number % SAMPLING.eval_every == 0:
                    rounds.append(jax.tree.map(lambda a: multihost_utils.process_allgather(a, tiled=True), model))
        return losses, rounds

    before, snapshots = trained_with(None)
    once = len(traces)
    after, _ = trained_with(callback)
    callback.finish()
    assert len(traces) == once, f"{loop}: the train step was traced again"
    ties = 0
    if jax.process_index() == 0:
        requests = read_round_prompts(SAMPLING, tiny.tokenizer()).requests
        rows = read_jsonl(f"{directory}/samples.jsonl")
        for number, snapshot in enumerate(snapshots):
            weights = plain_weights(loop, snapshot)
            expected = oracle_completions((config, weights), requests, vocab_size=len(tiny.tokenizer()))
            answers = [row for row in rows if row["step"] == (number + 1) * SAMPLING.eval_every]
            ties += assert_same_tokens(expected, [completion_of(row) for row in answers])
    return {"loop": str(loop), "before": before, "after": after, "rounds": callback.rounds, "ties": ties}


def plain_weights(loop: Loop, params: dict[str, Any]) -> Any:
    """The decoder's weights as NumPy arrays in float32, by the form of the loop alone, without the reader."""
    plain = tiny.numpy_weights(CONFIG, vocab=tiny.vocab_size())
    layers = params["layers"]
    names = [name for name, array in vars(plain.layers).items() if array is not None]
    if loop.layers == "listed":
        stacked = {
            n: np.stack([np.asarray(layers[str(i)][n], np.float32) for i in range(CONFIG.num_layers)]) for n in names
        }
    else:
        stacked = {n: np.ascontiguousarray(np.moveaxis(np.asarray(layers[n]), loop.layers, 0)) for n in names}
    outer = {name: np.asarray(params[name]) for name in ("embed", "final_norm", "lm_head")}
    return dataclasses.replace(plain, layers=dataclasses.replace(plain.layers, **stacked), **outer)


def completion_of(row: dict[str, Any]) -> Completion:
    """The completion that a row of ``samples.jsonl`` was made of."""
    return Completion(
        prompt_id=row["prompt_id"],
        generation_id=row["generation_id"],
        tokens=tuple(row["token_ids"]),
        logprobs=tuple(row["logprobs"]),
        finish_reason=FinishReason(row["finish_reason"]),
    )
