"""The fenced blocks of the documentation: what each of them is, what stands around a program, and what is not run."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "infra", "benchmarks", "data") for page in (ROOT / folder).rglob("*.md")),
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page; ``number`` counts those of its language on the page, from 0."""

    page: str
    language: str
    number: int
    line: int
    text: str

    @property
    def name(self):
        return f"{self.page}:{self.language}:{self.number}"


def read_blocks(page, text):
    """Every fenced block of a page, those inside a list too."""
    counts, found = {}, []
    for match in re.finditer(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", text, re.DOTALL | re.MULTILINE):
        language = match[3].strip()
        number = counts[language] = counts.get(language, -1) + 1
        content = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page=page, language=language, number=number, line=line, text=content))
    return found


BLOCKS = [
    block
    for page in PAGES
    for block in read_blocks(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))
]

KINDS = {
    "python": "runs, after the set-up of its page in PROGRAMS; one process and one namespace for a page",
    "yaml": "is read by the class that it is of, see CONFIGURATIONS",
    "json": "is read by what reads such a file, see CONFIGURATIONS",
    "sh": "every line runs up to where its command would begin, a launch as a dry run, see BEGINS and NOT_READ",
    "text": "what a program prints, see SHOWN; or a drawing, see NOT_PRINTED",
}
"""Languages of blocks, and what is done with each. A block of no language, or of another one, is refused."""

TINY = """
import dataclasses, os, types
import jax, jax.numpy as jnp, numpy as np
import lockstep
from types import SimpleNamespace
from tests import tiny
from lockstep.placement import make_mesh
tokenizer = tiny.tokenizer()
mesh = make_mesh("auto")
def model_of(mesh):
    from lockstep.models import as_trainable
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=128)
    return as_trainable(config, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))
"""

PROGRAMS = {
    "docs/grpo.md": "",
    "README.md": TINY
    + """
import lockstep.levanter
import lockstep.tunix
from lockstep.report import NoopTracker
PROMPTS, eval_every, output_dir, steps = ["What is 12 plus 7?"], 10, None, 2
model, opt_state, batches = model_of(mesh), None, iter(range(10))
train_step = lambda model, opt_state, batch: (model, opt_state, 0.0)
hooks = []
trainer = SimpleNamespace(
    tracker=NoopTracker(),
    mp=SimpleNamespace(compute_dtype="float32"),
    add_hook=lambda fn, every=1: hooks.append(every),
    with_training_hooks=lambda hooks: None,
)
state = SimpleNamespace(model=model)
from levanter.distributed import DistributedConfig
trainer_config = SimpleNamespace(distributed=DistributedConfig(), train_batch_size=8, data_axis_size=1)
config = lockstep.InferenceEvalConfig(prompts=PROMPTS, max_new_tokens=4)
""",
    "docs/levanter.md": TINY
    + """
from levanter.distributed import DistributedConfig
trainer_config = SimpleNamespace(distributed=DistributedConfig(), train_batch_size=8, data_axis_size=1)
from levanter.main.train_lm import TrainLmConfig
from lockstep.report import NoopTracker
hooks = []
trainer = SimpleNamespace(
    tracker=NoopTracker(), mp=SimpleNamespace(compute_dtype="float32"), add_hook=lambda fn, every=1: hooks.append(every)
)
model = model_of(mesh)
state = SimpleNamespace(model=model)
""",
    "docs/tunix.md": TINY
    + """
from tunix.rl.rl_cluster import ClusterConfig
hooks, role_to_mesh, rollout_config, training_config = [], {}, None, None
trainer = SimpleNamespace(with_training_hooks=hooks.append)
""",
    "docs/your-trainer.md": TINY
    + """
from lockstep.models import DecoderWeights, LlamaConfig, view
class MyModel: ...
w, kv = jnp.ones((2, 4, 8, 2)), jnp.ones((2, 8, 4, 2))
gate_up, qkv = jnp.ones((8, 32)), jnp.ones((8, 48 * 128))
blocks = [SimpleNamespace(kernel=jnp.ones((8, 16))) for _ in range(2)]
import haliax as hax
from lockstep.models import as_trainable
CONFIG, params = tiny.CONFIG, tiny.placed_weights(mesh)
model = CONFIG, params
forward = jax.jit(lambda params, ids: as_trainable(tiny.CONFIG, params)(hax.named(ids, ("batch", "position"))).array)
""",
    "docs/engine.md": TINY
    + """
mesh = make_mesh("1,1,1", jax.devices()[:1])
model = tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size())
""",
    "docs/protocol.md": TINY
    + """
from lockstep.hosts import current, digest
hosts, model, free = current(), model_of(mesh), None
engine = lockstep.Engine(lockstep.EngineConfig(), mesh)
requests = [
    lockstep.Request(prompt_id=0, prompt_tokens=(1, 2), params=lockstep.SamplingParams(max_new_tokens=2))
]
""",
    "docs/checkpoints.md": TINY
    + """
import optax
from lockstep.models import LlamaLMHeadModel
from lockstep.training import CheckpointerConfig, RunRecord, Trainer, TrainerConfig, lm_loss, model_spec
import haliax as hax
model_config, tokenizer_size = tiny.CONFIG, tiny.vocab_size()
config = TrainerConfig(num_train_steps=1, train_batch_size=8, checkpointer=CheckpointerConfig(every=1))
optimizer, loss_fn, digest, rows = optax.sgd(0.1), lm_loss, "0", tiny.rows()
samples = lambda info: None
init = lambda key: LlamaLMHeadModel.init(hax.Axis("vocab", tokenizer_size), model_config, key=key)
""",
    "docs/data.md": "",
    "docs/extending.md": "",
    "docs/quickstart.md": "",
    "docs/testing.md": "",
}
"""What stands before the programs of a page, which the page does not show. The quickstart needs nothing.
tests/unit/testing/test_plugin.py runs the tests of docs/testing.md."""

SLOW = {
    "docs/your-trainer.md": "compiles forward passes",
    "README.md": "imports Levanter, which takes seconds",
    "docs/levanter.md": "imports Levanter's train_lm, which takes seconds",
    "docs/tunix.md": "imports Tunix, which takes seconds",
    "docs/engine.md": "compiles prefill and decode",
    "docs/protocol.md": "compiles prefill and decode",
    "docs/checkpoints.md": "compiles a train step, and saves",
    "docs/quickstart.md": "compiles a train step, prefill and decode",
}
"""Pages whose programs `make slow` runs, and why."""

AFTER = {
    "docs/grpo.md": """
from types import SimpleNamespace
row = SimpleNamespace(generated_text="a b", finish_reason="stop")
assert judge(row, SimpleNamespace(fields={"must_say": ["a", "c"]})) == 0.5
""",
    "README.md": "assert hooks[-1] == 100",
    "docs/levanter.md": "assert hooks[-1] == 100 and not Config().inference_eval.enabled",
    "docs/tunix.md": "from lockstep.tunix.hooks import SampleHooks\nassert isinstance(hooks[0], SampleHooks)",
    "docs/protocol.md": "assert len(completions) == 1 and prepared.shared == [False]",
    "docs/checkpoints.md": "assert state is None and 'step-1' in os.listdir(trainer.checkpoints)",
    "docs/engine.md": """
assert [(each.prompt_id, each.generation_id) for each in completions] == [(0, 0), (0, 1), (1, 0), (1, 1)]
assert all(each.tokens for each in completions) and engine.sizing.describe()
""",
    "docs/extending.md": "assert above_mean(jnp.array([[0.0, 2.0]]), jnp.array([0.5])).tolist() == [1.5]",
    "docs/data.md": "assert FORMAT.fields == ('question', 'answers')",
    "docs/quickstart.md": "assert (callback.rounds, callback.skipped_rounds) == (2, 0)",
}
"""What must be true after the programs of a page."""

CONFIGURATIONS = {
    "docs/data.md:json:0": "records",
    "docs/evaluation.md:yaml:1": "lm_eval",
    "docs/grpo.md:yaml:0": "train-grpo",
    "docs/grpo.md:yaml:1": "train-grpo",
    "docs/grpo.md:yaml:2": "train-grpo",
    "docs/sampler.md:yaml:0": "sample",
    "docs/training.md:yaml:1": "train-preference",
}
"""Blocks of YAML and JSON that are not of `train-lm`: the command that reads them, with what it requires beside, or a
reader of test_snippets.py."""

DATA = {"tokenizer": "data/demo/tokenizer", "data": {"train_urls": ["train.jsonl"]}}
REQUIRED = {
    "train-lm": {**DATA, "model": {"type": "llama"}},
    "train-preference": {**DATA, "model": {"type": "llama"}},
    "train-grpo": {**DATA, "initialize_from_hf": "model", "rewards": [{"type": "exact_match"}]},
    "sample": {},
}
"""What a command cannot do without, where a block does not show it."""

STANDS_FOR = {
    "FILE.yaml": "config/simpo_tiny.yaml",
    "CHECKPOINT": "runs/my-run",
    "RUN": "runs/my-run",
    "NAME": "my-job",
    "my-samples.yaml": "config/sampler/demo.yaml",
    "my-runs/grpo.yaml": "config/grpo_demo.yaml",
}
"""Words of a command line that its reader replaces."""

NOT_READ = {
    "gcloud": "Google's command; tests/unit/test_first_pod.py types those of that page against a fake",
    "hf": "Hugging Face's command, which downloads",
    "pip install huggingface_hub": "downloads",
    "mkdir": "typed by tests/unit/test_first_pod.py",
    "sed": "typed by tests/unit/test_first_pod.py",
    "grep": "typed by tests/unit/test_first_pod.py",
    "echo": "typed by tests/multiprocess/test_walks.py",
    "(umask": "typed by tests/unit/test_first_pod.py",
    ".venv/bin/pre-commit": "installs a hook of git",
    "python3.12 infra/launch.py --backend mig": "asks gcloud for the project; typed by tests/unit/test_first_pod.py",
}
"""Beginnings of lines that are only looked at by people here, and why."""

BEGINS = (
    *("main.runs._join", "main.prepare.make_plan", "main.prepare.examine", "main.check.check_command"),
    *("main.demo.write_demo", "main.results.watch", "main.commands.Command.workload"),
)
"""Functions at which a command, read and checked, begins what takes devices, a pod or minutes: not run here. For `make`
and `pip` the targets and extras are looked up, for other programs the options."""

VARIES = {
    "seconds": r"\b\d+(?:\.\d+)? (?:ms|µs|s)\b",
    "left": r"\d+:\d\d left|\bstarting$",
    "rate": r"(?:\d+\.\d+|–) steps/s",
    "step": r"(?<=^step )\d+(?=/)|(?<=\(last )\d+(?=:)",
    "reward": r"(?<=reward )0\.\d{3}\b|(?<=: )0\.\d{3}(?=\))",
    "a busy machine": r"^(?:ok|warning)(?= +(?:coordination|all-reduce))|, above \d+ ms",
}
"""All that may differ between an output that a page shows and what its program prints, beside the width of columns and
what has an ellipsis on the page. The display of progress prints at times, so its steps vary."""

SHOWN = {
    "README.md:text:0": ("tests/tpu_compile/test_planner.py", ()),
    "docs/doctor.md:text:0": ("tests/multiprocess/test_doctor.py", ("seconds", "a busy machine")),
    "docs/doctor.md:text:1": ("tests/multiprocess/test_doctor.py", ()),
    "docs/first-pod.md:text:0": ("tests/unit/test_first_pod.py", ()),
    "docs/first-pod.md:text:1": ("tests/unit/test_first_pod.py", ()),
    "docs/first-pod.md:text:2": ("tests/unit/test_first_pod.py", ()),
    "docs/grpo.md:text:0": ("tests/multiprocess/test_rl_demo.py", ("seconds", "left", "rate", "step", "reward")),
    "docs/health.md:text:0": ("tests/unit/report/test_alarm_log.py", ()),
    "docs/launch.md:text:0": ("tests/unit/test_snippets.py", ()),
    "docs/plan.md:text:0": ("tests/tpu_compile/test_planner.py", ()),
    "docs/plan.md:text:1": ("tests/tpu_compile/test_published.py", ()),
    "docs/testing.md:text:0": ("tests/unit/testing/test_plugin.py", ()),
    "docs/testing.md:text:1": ("tests/unit/testing/test_plugin.py", ()),
    "docs/testing.md:text:2": ("tests/unit/testing/test_plugin.py", ()),
}
"""Each block of output: the test that runs its command and compares, and what of VARIES varies in it."""

NOT_PRINTED = {
    "docs/architecture.md:text:0": "a drawing; tests/unit/test_request_path.py follows a request",
    "docs/architecture.md:text:1": "a formula; tests/oracle.py computes draws with it",
    "docs/adr/0003-decode-mesh-refines-training-mesh.md:text:0": "a drawing",
}
"""Blocks of text that no program prints."""


def named(name):
    """The block of a name."""
    return next(block for block in BLOCKS if block.name == name)


def commands(block):
    """The command lines of a block, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def commands_before(name):
    """The command lines that a page shows last before a block."""
    at = named(name)
    shown = [block for block in BLOCKS if (block.page, block.language) == (at.page, "sh") and block.line < at.line]
    return commands(shown[-1])


def lacking(name, output):
    """The first line of a block that an output does not have after those before it; None if it has all, in order."""
    patterns = [VARIES[what] for what in SHOWN[name][1]]

    def plain(text):
        for line in text.splitlines():
            line = re.sub(r"─+", "─", re.sub(r"\s+", " ", line)).strip()
            for pattern in patterns:
                line = re.sub(pattern, "<varies>", line)
            if line:
                yield line

    printed = list(plain(re.sub(r"(?m)^\[\d+\] ", "", output)))
    for line in plain(named(name).text):
        wanted = re.compile(".*".join(map(re.escape, line.split("…"))))
        at = next((number for number, each in enumerate(printed) if wanted.fullmatch(each)), None)
        if at is None:
            return line
        del printed[: at + 1]
    return None


@functools.cache
def texts_of_the_sources():
    """Every string of the package; what an f-string puts in is an ellipsis."""
    found = []
    for path in (ROOT / "src" / "lockstep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{\w*\}", "…", node.value))
    return found
