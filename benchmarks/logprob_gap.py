"""How far log-probabilities are from the training forward's in bfloat16: by rounding, and where the engine is wrong.

    python -m benchmarks.logprob_gap [--run DIR] [--json PATH]

The demo's model is trained first, as in `make demo` but without samples (two minutes), unless ``--run`` has it. Then,
on four CPU devices, 288 answers to the demo's questions:

- in each layout: `logprob_gap` and `logprob_noise`, the largest and the mean, as `audit: true` logs them;
- the training forward itself, over other splits of the batch and of the weights: how far two of them are apart, and
  each from the same in float32;
- engines that are wrong in one thing: how many times the noise the gap is.

The weights depend on the machine a little, and with them all these numbers.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import engine_errors
from benchmarks.sizes import sized
from benchmarks.workers import run_command, write_json
from lockstep.engine import Auditor, AuditResult, Engine, EngineConfig
from lockstep.models import load_hf, read_decoder
from lockstep.placement import COMPUTE_AXES, make_mesh
from lockstep.text import encode, load_tokenizer, read_prompts
from lockstep.types import Completion, Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
CONFIG, PROMPTS = ROOT / "config" / "demo.yaml", ROOT / "data" / "demo" / "prompts.jsonl"
STEPS, STALE = sized(600, 4), sized(590, 2)
"""Training steps, and those of the stale weights."""
NEW_TOKENS, SAMPLES, LENGTH = 12, sized(8, 1), 32
LAYOUTS: tuple[Any, ...] = ("training", {"tensor": 1}, {"tensor": 2}, {"tensor": 4})
ENGINE = EngineConfig(dtype="bfloat16", page_size=8)


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to compute the training forward of all answers.

    Args:
        mesh: The shape of the mesh.
        rows: The number of answers in a forward pass.
    """

    mesh: str
    rows: int

    def __str__(self) -> str:
        return f"{self.rows} answers at a time on mesh {self.mesh}"


SPLITS = (Split("1,1,1", 1), Split("1,1,1", 288), Split("1,4,1", 4), Split("1,4,1", 288), Split("1,2,2", 4))


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the run directory of an earlier call; else it is trained anew")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        run = arguments.run
        if run is None:
            run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "demo"
            train(run)
        measured = Measured(run)
        figures = {"layouts": measured.layouts(), "splits": measured.splits(), "errors": measured.errors()}
    if arguments.json:
        write_json(arguments.json, figures)
    return 0


def train(run: Path) -> None:
    """Train the demo's model on four devices and save it at the end and ten steps before.

    Args:
        run: The run directory.
    """
    command = [sys.executable, str(ROOT / "infra" / "launch.py"), "--backend", "local", "--processes", "1"]
    command += ["--devices_per_process", "4", "--", "lockstep", "train-lm", "--config_path", str(CONFIG)]
    command += [
        "--trainer.log_dir",
        str(run.parent),
        "--trainer.run_id",
        run.name,
        "--trainer.tracker",
        "{type: jsonl}",
    ]
    command += ["--trainer.num_train_steps", str(STEPS), "--inference_eval.enabled", "false"]
    command += ["--hf_save_steps", str(STALE)]
    run_command(command)


class Measured:
    """The demo's model, its questions, and the answers of an engine without an error.

    Args:
        run: The run directory of the training.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.mesh = run, make_mesh("1,4,1")
        self.model = self.load("checkpoint", self.mesh)
        tokenizer = load_tokenizer(str(run / "checkpoint"))
        prompts = encode(tokenizer, read_prompts(str(PROMPTS)))
        greedy = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
        sampled = dataclasses.replace(greedy, temperature=0.8, n_generations=SAMPLES)
        self.requests = [
            Request(prompt_id=number + len(prompts) * group, prompt_tokens=tokens, params=params)
            for group, params in enumerate((greedy, sampled))
            for number, tokens in enumerate(prompts)
        ]
        self._auditor = Auditor(self.mesh, dtype=ENGINE.dtype)

    def load(self, name: str, mesh: Mesh) -> Any:
        """Load a checkpoint of the run.

        Args:
            name: The directory below that of the run.
            mesh: The mesh to place it on.
        """
        return read_decoder(load_hf(self.run / name, mesh))

    def layouts(self) -> list[dict[str, Any]]:
        """Measure an engine without an error in each layout."""
        rows = []
        for layout in LAYOUTS:
            answers = self._answers(self.model, layout)
            rows.append(self._row("layout", str(layout), answers))
            rows[-1] |= {"answers": len(answers), "tokens": sum(len(answer.tokens) for answer in answers)}
        return rows

    def splits(self) -> list[dict[str, Any]]:
        """Measure how far the training forwards of the same answers are apart, over splits of the batch."""
        answers = self._answers(self.model, "training")
        forwards = {str(split): self._forward(split, answers, jnp.bfloat16) for split in SPLITS}
        forwards["float32"] = self._forward(SPLITS[0], answers, jnp.float32)
        rows = []
        for number, (one, ours) in enumerate(forwards.items()):
            for other, theirs in list(forwards.items())[number + 1 :]:
                apart = np.abs(ours - theirs)
                rows.append({"one": one, "other": other, "gap": float(apart.max()), "gap_mean": float(apart.mean())})
                print(f"training forwards of {one} and {other}: {apart.max():.4f} apart, mean {apart.mean():.6f}")
        return rows

    def errors(self) -> list[dict[str, Any]]:
        """Measure engines that are wrong in one thing, against the model as it is."""
        stale = f"checkpoint-step-{STALE}"
        models: dict[str, Callable[[], Any]] = {
            "rope base 500000, not 10000": lambda: engine_errors.other_rope_base(500000.0)(self.model),
            "rope base 20000, not 10000": lambda: engine_errors.other_rope_base(20000.0)(self.model),
            "heads rotated as pairs of neighbours": lambda: engine_errors.interleaved_rope(self.model),
            "scale of the first attn_norm left out": lambda: engine_errors.scale_left_out("attn_norm", 0)(self.model),
            "scale of the last mlp_norm left out": lambda: engine_errors.scale_left_out("mlp_norm", 1)(self.model),
            "scale of final_norm left out": lambda: engine_errors.scale_left_out("final_norm")(self.model),
            f"weights {STEPS - STALE} steps old": lambda: self.load(stale, self.mesh),
            "norm epsilon 1e-6, not 1e-5": lambda: engine_errors.other_norm_epsilon(1e-6)(self.model),
        }
        rows = [self._row("error", name, self._answers(model(), "training")) for name, model in models.items()]
        with engine_errors.pages_of_others():
            answers = self._answers(self.model, "training")
        rows.append(self._row("error", "first page of another sequence in decode", answers))
        for weight_dtype in ("int8", "fp8"):
            answers = self._answers(self.model, "training", weight_dtype=weight_dtype)
            rows.append(self._row("error", f"weights in {weight_dtype}", answers))
        return rows

    def _answers(self, model: Any, layout: Any, **options: Any) -> list[Completion]:
        engine = Engine(dataclasses.replace(ENGINE, layout=layout, **options), self.mesh)
        return engine.generate(model, self.requests)

    def _row(self, kind: str, name: str, answers: Sequence[Completion]) -> dict[str, Any]:
        self._auditor.prepare(self.model, self.requests)
        found: AuditResult = self._auditor.run(self.model, self.requests, answers)
        assert found.logprob_noise is not None and found.logprob_noise_mean is not None
        largest = found.logprob_gap / found.logprob_noise
        mean = found.logprob_gap_mean / found.logprob_noise_mean
        print(
            f"{kind} {name}: gap {found.logprob_gap:.4f}, {largest:.2f} times the noise of {found.logprob_noise:.4f}; "
            f"means {found.logprob_gap_mean:.6f}, {mean:.2f} times {found.logprob_noise_mean:.6f}",
            flush=True,
        )
        return {kind: name, **found.scalars(), "gap_over_noise": largest, "mean_gap_over_mean_noise": mean}

    def _forward(self, split: Split, answers: Sequence[Completion], dtype: Any) -> np.ndarray:
        """Log-probabilities of all sampled tokens, by the model's own forward pass; parameters are of bfloat16."""
        mesh = make_mesh(split.mesh, jax.devices()[: int(np.prod([int(size) for size in split.mesh.split(",")]))])
        prompts = {request.prompt_id: request.prompt_tokens for request in self.requests}
        ids = np.zeros((len(answers), LENGTH), np.int32)
        sampled = np.zeros((len(answers), LENGTH - 1), bool)
        for row, answer in enumerate(answers):
            prompt = prompts[answer.prompt_id]
            known = (*prompt, *answer.tokens)
            ids[row, : len(known)] = known
            sampled[row, len(prompt) - 1 : len(known) - 1] = True

        def logprobs(model: Any, ids: jax.Array) -> jax.Array:
            model = jax.tree.map(lambda leaf: jax.lax.reduce_precision(leaf, 8, 7).astype(dtype), model)
            with hax.axis_mapping(COMPUTE_AXES):
                logits = model(hax.named(ids[:, :-1], ("batch", "position"))).array
            return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids[:, 1:, None], axis=-1)[..., 0]

        with jax.set_mesh(mesh):
            model, program = load_hf(self.run / "checkpoint", mesh), jax.jit(logprobs)
            rows = NamedSharding(mesh, PartitionSpec(COMPUTE_AXES["batch"]))
            parts = [ids[first : first + split.rows] for first in range(0, len(ids), split.rows)]
            found = [np.asarray(program(model, jax.device_put(part, rows))) for part in parts]
        return np.concatenate(found)[sampled]


if __name__ == "__main__":
    sys.exit(main())
