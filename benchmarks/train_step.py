"""Training side by side: ``lockstep train-lm`` and Levanter's ``train_lm``, the same model, mesh, batch and data.

    python -m benchmarks.train_step [--quick] [--json PATH]

Both are the real commands: tokenizer, token cache, data loading, trainer, step log. Each runs in processes of its own,
in turn, again and again, with the same optimizer, in float32, without a compile cache. A ratio is ours over Levanter's,
of medians over all turns. Tokens per second are from one completed step to the next, without the first. The time to the
first step is from the start of the process to the end of that step, with a token cache from an earlier run. Memory is
the peak of the resident memory of all processes of a job, less what they had when all was imported: also what one of
the two imports only when it is needed. Before that, both start from the same checkpoint, which shows that their losses
are equal.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizes import sized
from benchmarks.workers import report, run_workers, write_json

# Nothing else is imported here: a contestant's start is timed with the imports that it needs, and no others.

ROOT = Path(__file__).resolve().parents[1]
CONTESTANTS = ("levanter", "ours")
VOCAB, ROWS, LENGTH = sized(32000, 512), 8, sized(256, 32)
SHAPE = {
    "max_seq_len": LENGTH, "num_heads": 8, "num_kv_heads": 4,
    "hidden_dim": sized(512, 64), "intermediate_dim": sized(1376, 128),
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4}
EXPERT_DIM = 256
"""The experts of ``--experts``, a Qwen3 with experts in place of MLPs."""
OPTIMIZER = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "warmup": 0.0, "lr_schedule": "constant"}
GOALS = {"tokens": (">=", 1.0), "first_step": ("<=", 1.0), "memory": ("<=", 1.0)}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a job runs.

    Args:
        suffix: What the names of its rows end with.
        processes: The number of processes.
        devices: The number of CPU devices of each.
    """

    suffix: str
    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} process{'es' if self.processes > 1 else ''} × {self.devices} devices"


PLACES = (Place("", 1, 1), Place("_4", 1, 4), Place("_2x2", 2, 2))


@dataclasses.dataclass(frozen=True)
class Run:
    """What one job took.

    Args:
        first_step_s: Seconds from the start of the process to the end of the first step.
        from_trainer_s: The same from where the trainer is made.
        compile_s: Seconds of tracing, lowering and compiling, of all programs up to the end of the run.
        steps_s: Seconds from each completed step to the next.
        losses: The loss of each step.
        imported_bytes: Resident memory of all processes when all is imported.
        peak_bytes: The peak of it up to the last step.
        temporaries_bytes: Memory per device that the compiled train step needs beside its arguments and results.
    """

    first_step_s: float
    from_trainer_s: float
    compile_s: float
    steps_s: Sequence[float]
    losses: Sequence[float]
    imported_bytes: int
    peak_bytes: int
    temporaries_bytes: int

    @classmethod
    def of(cls, processes: Sequence[Mapping[str, Any]]) -> "Run":
        """Sum up what the processes of a job said: times and losses of the first one, memory of all."""
        first = min(processes, key=lambda each: each["process"])
        done = first["steps_done"]
        return cls(
            first_step_s=done[0],
            from_trainer_s=done[0] - first["trainer_made"],
            compile_s=first["compile_s"],
            steps_s=[after - before for before, after in zip(done[:-1], done[1:], strict=True)],
            losses=first["losses"],
            imported_bytes=sum(each["imported_bytes"] for each in processes),
            peak_bytes=sum(each["peak_bytes"] for each in processes),
            temporaries_bytes=max(each["temporaries_bytes"] for each in processes),
        )


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one device and one turn, under 3 minutes")
    parser.add_argument("--turns", type=int, default=3, help="how often each contestant runs in each place")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--experts", action="store_true", help="Qwen3 with experts in place of the Llama")
    parser.add_argument("--place", choices=[place.suffix or "_1" for place in PLACES], action="append")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--same_weights", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    places = [place for place in PLACES if not options.place or (place.suffix or "_1") in options.place]
    if options.quick:
        places, options.turns = places[:1], 1
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        figures = measure(options, places, Path(name))
    show(figures, places)
    if options.json:
        write_json(options.json, figures)
    return 0


def measure(options: argparse.Namespace, places: Sequence[Place], directory: Path) -> dict[str, Any]:
    """Run all contestants in all places, in turn; every key of the JSON."""
    write_data(directory, options)
    figures: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "steps": options.steps, "layers": options.layers}
    # These find no token cache yet, and write down what they import: all that are timed find both.
    for name in CONTESTANTS:
        launch(name, PLACES[0], argparse.Namespace(**vars(options) | {"steps": 1}), directory)
    few = argparse.Namespace(**vars(options) | {"steps": min(4, options.steps)})
    same = [launch(name, PLACES[0], few, directory, same_weights=True).losses for name in CONTESTANTS]
    figures["same_weights_losses"] = dict(zip(CONTESTANTS, same, strict=True))
    figures["same_weights_losses_differ"] = max(abs(a / b - 1) for a, b in zip(*same, strict=True))
    print(f"from the same weights: losses {figures['same_weights_losses']}", file=sys.stderr, flush=True)
    runs: dict[tuple[Place, str], list[Run]] = {}
    for turn in range(options.turns):
        for place in places:
            # The first to run is another one in each turn.
            for name in CONTESTANTS if turn % 2 else CONTESTANTS[::-1]:
                runs.setdefault((place, name), []).append(launch(name, place, options, directory))
                print_run(name, place, runs[place, name][-1])
    for place in places:
        ours, levanter = (runs[place, name] for name in ("ours", "levanter"))
        figures |= {name + place.suffix: value for name, value in compare(ours, levanter).items()}
    return figures


def compare(ours: Sequence[Run], levanter: Sequence[Run]) -> dict[str, Any]:
    """Ratios of ours over Levanter's, and what they are made of."""
    found: dict[str, Any] = {}
    for name, runs in (("ours", ours), ("levanter", levanter)):
        median = statistics.median
        found[f"{name}_tokens_per_s"] = ROWS * LENGTH / median(each for run in runs for each in run.steps_s)
        found[f"{name}_first_step_s"] = median(run.first_step_s for run in runs)
        found[f"{name}_first_step_from_trainer_s"] = median(run.from_trainer_s for run in runs)
        found[f"{name}_compile_s"] = median(run.compile_s for run in runs)
        found[f"{name}_memory_bytes"] = median(run.peak_bytes - run.imported_bytes for run in runs)
        found[f"{name}_memory_with_imports_bytes"] = median(run.peak_bytes for run in runs)
        found[f"{name}_program_temporaries_bytes"] = median(run.temporaries_bytes for run in runs)
        found[f"{name}_losses"] = list(runs[0].losses)
        found[f"{name}_runs"] = [dataclasses.asdict(run) for run in runs]

    def ratio(name: str) -> float:
        return float(found[f"ours_{name}"] / found[f"levanter_{name}"])

    return {
        "tokens_vs_levanter": ratio("tokens_per_s"),
        "first_step_vs_levanter": ratio("first_step_s"),
        "first_step_from_trainer_vs_levanter": ratio("first_step_from_trainer_s"),
        "memory_vs_levanter": ratio("memory_bytes"),
        "memory_with_imports_vs_levanter": ratio("memory_with_imports_bytes"),
        **found,
    }


def launch(name: str, place: Place, options: argparse.Namespace, directory: Path, *, same_weights: bool = False) -> Run:
    """One run of one contestant, from weights that it draws itself, or from those that are the same for both."""
    arguments = ["--worker", name, "--directory", str(directory)]
    arguments += ["--steps", str(options.steps), "--layers", str(options.layers)]
    arguments += ["--same_weights"] if same_weights else []
    arguments += ["--experts"] if options.experts else []
    environment = {"JAX_ENABLE_COMPILATION_CACHE": sized("false", "true"), "WANDB_MODE": "disabled"}
    found = run_workers(
        "benchmarks.train_step",
        *arguments,
        processes=place.processes,
        devices=place.devices,
        environment=environment,
    )
    return Run.of(found)


def write_data(directory: Path, options: argparse.Namespace) -> None:
    """A tokenizer of words, one document per row of a batch, its end of text included, and a checkpoint to start from.

    Words are drawn as in a text, the n-th as often as 1/n of the first, so that the loss has something to fall to.
    """
    import haliax as hax
    import jax
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lockstep.models import Experts, LlamaConfig, LlamaLMHeadModel, Qwen3MoeConfig, save_hf

    rows = ROWS * options.steps
    vocabulary = {"<eos>": 0} | {f"w{number}": number for number in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    often = 1.0 / np.arange(1, VOCAB)
    drawn = np.random.default_rng(0).choice(np.arange(1, VOCAB), (rows, LENGTH - 1), p=often / often.sum())
    lines = (json.dumps({"text": " ".join(f"w{word}" for word in row)}) for row in drawn)
    (directory / "train.jsonl").write_text("\n".join(lines) + "\n")
    config = LlamaConfig(**SHAPE, num_layers=options.layers)
    if options.experts:
        experts = Experts(**EXPERTS, intermediate_dim=EXPERT_DIM)
        config = Qwen3MoeConfig(**SHAPE, num_layers=options.layers, experts=experts)
    model = LlamaLMHeadModel.init(hax.Axis("vocab", VOCAB), config, key=jax.random.key(0))
    save_hf(model, directory / "start", tokenizer=fast)


def work(options: argparse.Namespace) -> None:
    """One process of a job: train, and print what it took."""
    record = Record(options.directory / f"{options.worker}-modules.json")
    (train_ours if options.worker == "ours" else train_levanter)(options, record)
    record.keep_modules()
    report(record.figures)


class Record:
    """What a process takes down of its own training; seconds are from the start of the process.

    Args:
        modules: The file of the modules that a run imports, which the first run writes and the others import at once.
    """

    def __init__(self, modules: Path) -> None:
        self._modules = modules
        started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
        self._offset = time.clock_gettime(time.CLOCK_BOOTTIME) - started - time.perf_counter()
        self.figures: dict[str, Any] = {"steps_done": [], "losses": [], "compile_s": 0.0, "programs_s": {}}

    def watch(self, trainer: type[Any]) -> None:
        """Have everything taken down from here on, where all is imported.

        Args:
            trainer: The class of the trainer, Levanter's or ours: both have ``add_hook`` and ``train``.
        """
        import jax

        for name in json.loads(self._modules.read_text()) if self._modules.exists() else ():
            with contextlib.suppress(Exception):  # some can be imported by their packages alone, and have been then
                importlib.import_module(name)
        make, train = trainer.__init__, trainer.train

        def init(trainer: Any, *args: Any, **options: Any) -> None:
            self.figures["trainer_made"] = self._now()
            make(trainer, *args, **options)

        def train_and_record(trainer: Any, *args: Any, **options: Any) -> Any:
            trainer.add_hook(self._step)
            return train(trainer, *args, **options)

        trainer.__init__, trainer.train = init, train_and_record
        jax.monitoring.register_event_duration_secs_listener(self._event)
        self.figures["imported_bytes"] = _status("VmRSS")
        self.figures["imported_s"] = self._now()

    def keep_modules(self) -> None:
        """Write down what the run has imported, in that order."""
        if not self._modules.exists():
            self._modules.write_text(json.dumps(list(sys.modules)))

    def _step(self, info: Any) -> None:
        import jax

        figures = self.figures
        if info.step < len(figures["losses"]):
            return  # a hook is called once more at the end
        figures["steps_done"].append(self._now())
        figures["losses"].append(float(info.loss))
        figures["peak_bytes"], figures["process"] = _status("VmHWM"), jax.process_index()
        if info.step == 0:
            programs = jax.local_devices()[0].client.live_executables()
            memory = [program.get_compiled_memory_stats().temp_size_in_bytes for program in programs]
            figures["temporaries_bytes"] = max(memory, default=0)  # no other program has as much

    def _event(self, name: str, seconds: float, **about: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            self.figures["compile_s"] += seconds
            key = f"{about.get('fun_name')} {name.rpartition('/')[2]}"
            self.figures["programs_s"][key] = self.figures["programs_s"].get(key, 0.0) + seconds

    def _now(self) -> float:
        return time.perf_counter() + self._offset


def train_ours(options: argparse.Namespace, record: Record) -> None:
    """``lockstep train-lm``."""
    from lockstep.hosts import run_main
    from lockstep.main import cli, runs  # noqa: F401  (the command is imported when it is called)
    from lockstep.training import Trainer

    record.watch(Trainer)
    directory = options.directory
    config = {
        "model": {**SHAPE, "num_layers": options.layers},
        "tokenizer": str(directory / "start"),
        "data": {
            "train_urls": [str(directory / "train.jsonl")],
            "cache_dir": str(directory / "ours"),
            "shuffle": False,
        },
        "optimizer": OPTIMIZER,
        "trainer": {"num_train_steps": options.steps, "train_batch_size": ROWS, "log_dir": str(directory / "runs")},
    }
    if options.experts:
        config["model"] |= {"type": "qwen3_moe", "experts": EXPERTS | {"intermediate_dim": EXPERT_DIM}}
    if options.same_weights:
        del config["model"]
        config["initialize_from_hf"] = str(directory / "start")
    path = directory / f"ours-{os.getpid()}.json"
    path.write_text(json.dumps(config))
    run_main(lambda: cli.run(["train-lm", "--config_path", str(path)]))


def train_levanter(options: argparse.Namespace, record: Record) -> None:
    """Levanter's ``train_lm``."""
    import jmp
    from levanter.checkpoint import CheckpointerConfig
    from levanter.data.text.datasets import DatasetComponent, LmDataConfig, UrlDatasetSourceConfig
    from levanter.distributed import DistributedConfig
    from levanter.main import train_lm
    from levanter.models.llama import LlamaConfig
    from levanter.models.qwen3_moe import Qwen3MoeConfig
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    record.watch(Trainer)
    directory, start = options.directory, str(options.directory / "start")
    model: LlamaConfig = LlamaConfig(**SHAPE, num_layers=options.layers, tokenizer=start, reference_checkpoint=start)
    if options.experts:
        model = Qwen3MoeConfig(
            **SHAPE, **EXPERTS, moe_intermediate_dim=EXPERT_DIM, head_dim=None, num_layers=options.layers,
            rope=model.rope, tokenizer=start, reference_checkpoint=start,
        )  # fmt: skip
    several = int(os.environ["LOCKSTEP_NUM_PROCESSES"]) > 1
    distributed = DistributedConfig(
        coordinator_address=os.environ["LOCKSTEP_COORDINATOR_ADDRESS"] if several else None,
        num_processes=int(os.environ["LOCKSTEP_NUM_PROCESSES"]) if several else None,
        process_id=int(os.environ["LOCKSTEP_PROCESS_ID"]) if several else None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        train_lm.main(
            train_lm.TrainLmConfig(
                data=LmDataConfig(
                    tokenizer=str(directory / "start"),
                    cache_dir=str(directory / "levanter"),
                    shuffle=False,
                    mixture_block_size=ROWS,  # within a block its order is random
                    components={
                        "text": DatasetComponent(
                            source=UrlDatasetSourceConfig(train_urls=[str(directory / "train.jsonl")])
                        )
                    },
                ),
                model=model,
                initialize_from_hf=start if options.same_weights else False,
                optimizer=AdamConfig(**OPTIMIZER),
                trainer=TrainerConfig(
                    id="bench",
                    num_train_steps=options.steps,
                    train_batch_size=ROWS,
                    tracker=NoopConfig(),
                    log_dir=Path(scratch),
                    checkpointer=CheckpointerConfig(base_path=scratch, save_interval=None, keep=None),
                    log_jaxprs=False,
                    log_xla_hlo=False,
                    require_accelerator=False,
                    distributed=distributed,
                    mp=jmp.get_policy("f32"),
                ),
            )
        )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def print_run(name: str, place: Place, run: Run) -> None:
    """One line for a run, and its losses."""
    print(
        f"{place}: {name}: {ROWS * LENGTH / statistics.median(run.steps_s):,.0f} tokens/s, first step after "
        f"{run.first_step_s:.1f} s ({run.from_trainer_s:.1f} s from the trainer, {run.compile_s:.1f} s compiling), "
        f"{(run.peak_bytes - run.imported_bytes) / 2**20:,.0f} MiB beside {run.imported_bytes / 2**20:,.0f} MiB of "
        f"imports; losses {', '.join(f'{loss:.5f}' for loss in run.losses)}",
        file=sys.stderr,
        flush=True,
    )


def show(figures: Mapping[str, Any], places: Sequence[Place]) -> None:
    """The rows of the goal table."""
    for place in places:
        for name, (sign, goal) in GOALS.items():
            value = figures[f"{name}_vs_levanter{place.suffix}"]
            met = value >= goal if sign == ">=" else value <= goal
            print(f"{name}_vs_levanter{place.suffix}: {value:.3f} (goal {sign} {goal}: {'met' if met else 'not met'})")


if __name__ == "__main__":
    sys.exit(main())
