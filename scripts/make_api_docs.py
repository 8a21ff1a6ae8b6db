"""The page of the Python API, from the docstrings of the public names; scripts/docs_site.py puts it into the site.

`SECTIONS` says which names are public. The examples are those of the docstrings; tests/unit/test_docs.py runs them
after `SETUP`.
"""

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from lockstep.configuration import field_texts

SETUP = """\
import haliax as hax
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformers import AutoTokenizer

import lockstep
from lockstep.models import LlamaConfig, LlamaLMHeadModel

hosts = lockstep.start()
tokenizer = AutoTokenizer.from_pretrained("data/demo/tokenizer")
axis_types = (AxisType.Auto,) * 3
mesh = jax.make_mesh((1, jax.device_count(), 1), ("dp", "fsdp", "tp"), axis_types=axis_types)

small = LlamaConfig(
    max_seq_len=64, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2
)
Vocab = hax.Axis("vocab", len(tokenizer))
make = jax.jit(
    lambda key: LlamaLMHeadModel.init(Vocab, small, key=key),
    out_shardings=NamedSharding(mesh, PartitionSpec()),
)
model = make(jax.random.key(0))
"""

SECTIONS = {
    "Samples in a training loop": (
        "[your-trainer.md](your-trainer.md) has the whole.",
        ("lockstep.SampleCallback", "lockstep.InferenceEvalConfig"),
    ),
    "In a Levanter run": (
        "Needs the extra `levanter` ([levanter.md](levanter.md)); `trainer` and `state` are those of the script.",
        ("lockstep.levanter.start", "lockstep.levanter.sample_callback", "lockstep.levanter.LevanterTracker"),
    ),
    "In a Tunix run": (
        "Needs the extra `tunix` ([tunix.md](tunix.md)); `trainer` is that of the script.",
        ("lockstep.tunix.sample_hooks", "lockstep.tunix.Rollout"),
    ),
    "The engine": (
        "Token ids in, token ids out, on every host ([engine.md](engine.md)).",
        tuple(
            f"lockstep.{name}"
            for name in ("Engine", "EngineConfig", "Request", "SamplingParams", "Completion", "FinishReason",
                         "StopFinder", "audit")
        ) + ("lockstep.engine.Session", "lockstep.engine.Observer", "lockstep.engine.Gate"),
    ),
    "Hosts": (
        "The processes of a job ([protocol.md](protocol.md)).",
        (*(f"lockstep.{name}" for name in ("start", "run_main", "Hosts", "DistributedConfig", "leader_only")),
         "lockstep.hosts.current", "lockstep.hosts.MemoryClient", "lockstep.hosts.TlsConfig"),
    ),
    "Models and readers": (
        "What the decoder reads, and how a model of another library is given to it "
        "([your-trainer.md](your-trainer.md#the-model)).",
        tuple(
            f"lockstep.models.{name}"
            for name in ("LlamaConfig", "MistralConfig", "MixtralConfig", "Qwen2Config", "Qwen2MoeConfig",
                         "Qwen3Config", "Qwen3MoeConfig", "GptOssConfig", "Experts", "Latent", "LinearAttention",
                         "RotaryConfig", "Llama3Scaling", "YarnScaling", "Variant", "LlamaLMHeadModel",
                         "DecoderWeights", "LayerWeights", "register_reader",
                         "read_decoder", "from_names", "LoraNames", "view", "merge_lora", "LazyWeight",
                         "named_parameters", "check_all_read", "check_reader", "ReaderCheck", "ReaderMismatchError",
                         "UnreadableModelError", "UnreadParameterError", "load_hf", "save_hf")
        ) + ("lockstep.placement.mesh_of",),
    ),
    "Training": (
        "The loop of the training commands, for a program of your own ([training.md](training.md), "
        "[checkpoints.md](checkpoints.md#in-a-program-of-your-own)).",
        tuple(
            f"lockstep.training.{name}"
            for name in ("Trainer", "TrainerConfig", "OptimizerConfig", "TokenizedRows", "StepInfo", "lm_loss",
                         "PreferenceObjective", "PairLosses", "PolicyLoss", "DataFormat", "RewardConfig",
                         "Environment", "Reply",
                         "model_spec", "save_tokenizer")
        ),
    ),
    "Rows, metrics, trackers": (
        "What the leader makes of answers ([extending.md](extending.md#a-metric)).",
        ("lockstep.report.Row", "lockstep.text.Prompt", "lockstep.report.Tracker", "lockstep.report.TrackerConfig",
         "lockstep.report.JsonlTracker",
         "lockstep.report.WandbTracker", "lockstep.health.Alarm", "lockstep.health.Share"),
    ),
    "Tests of multi-host code": (
        "In several processes with CPU devices ([testing.md](testing.md)); `lockstep check` looks at a whole script.",
        (*(f"lockstep.testing.{name}" for name in ("run_processes", "configure", "PoolSettings",
                                                   "assert_same_launches", "assert_no_retrace", "assert_nothing_left")),
         "lockstep.check.record_launches"),
    ),
    "Errors": (
        "Every text says what was given, the limit and the fix ([troubleshooting.md](troubleshooting.md#errors)).",
        ("lockstep.LockstepError",
         *(f"lockstep.errors.{name}" for name in (
             "ConfigError", "PromptError", "CapacityError", "CompilerError", "HbmError", "VmemError", "HostError",
             "HostTimeoutError", "DisagreementError", "PeerError", "DivergenceError", "AlarmError",
             "LaunchMismatchError"))),
    ),
}  # fmt: skip
"""Heading, what stands below it, and the public names in the order of the page."""

IN_CONFIGURATION = (
    "lockstep.InferenceEvalConfig",
    "lockstep.EngineConfig",
    "lockstep.DistributedConfig",
    "lockstep.training.TrainerConfig",
    "lockstep.training.OptimizerConfig",
    *(f"lockstep.models.{name}" for name in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config")),
    *(f"lockstep.models.{name}" for name in ("MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "GptOssConfig")),
    "lockstep.models.Experts",
    "lockstep.models.LinearAttention",
    "lockstep.models.Latent",
)
"""Dataclasses whose fields are keys of YAML files, and on the page of the configuration."""

HEAD = f"""\
# Python API

Made from the docstrings by `scripts/make_api_docs.py`. A test runs every example. They come after these lines, and a
comment `# →` says what an expression gives:

```python
{SETUP}```

A name that is not here is not for users, and may change with any version. Every name is imported when it is first used:
`import lockstep` loads neither JAX nor the engine.
"""


def public_names() -> list[str]:
    """Every public name, in the order of the page."""
    return [name for _, names in SECTIONS.values() for name in names]


def find(name: str) -> Any:
    """The object of a public name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def examples(name: str) -> list[doctest.Example]:
    """The examples in the docstring of a public name."""
    return doctest.DocTestParser().get_examples(inspect.getdoc(find(name)) or "", name)


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, (text, names) in SECTIONS.items():
        parts.append(f"## {heading}\n\n{text}\n")
        parts += [_entry(name) for name in names]
    return "\n".join(parts)


def _entry(name: str) -> str:
    found = find(name)
    parts = [f"### `{name}`\n"]
    signature = _signature(found)
    if name in IN_CONFIGURATION:
        parts.append("Its fields are the keys of [configuration.md](configuration.md), all by keyword.\n")
    else:
        parts.append(f"```py\n{signature}\n```\n")
    parts.append(_docstring(inspect.getdoc(found) or ""))
    if inspect.isclass(found):
        if name not in IN_CONFIGURATION and "Args:" not in (inspect.getdoc(found) or ""):
            parts.append(_fields(found))
        parts.append(_members(found))
    parts.append(_example(name))
    return "\n".join(part for part in parts if part)


def _definition(found: Any) -> ast.ClassDef | ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node


def _signature(found: Any) -> str:
    """How it is called, as the source has it."""
    node = _definition(found)
    if isinstance(node, ast.FunctionDef):
        returns = "" if node.returns is None else f" -> {ast.unparse(node.returns).strip("'")}"
        return _wrapped(node.name, _arguments(node), returns)
    bases = [ast.unparse(base) for base in node.bases]
    if issubclass(found, BaseException):
        return f"class {node.name}({', '.join(bases)})"
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        return _wrapped(node.name, _arguments(init)[1:], "")
    if dataclasses.is_dataclass(found):
        return _wrapped(node.name, list(_field_arguments(found)), "")
    return f"class {node.name}" + (f"({', '.join(bases)})" if bases else "")


def _field_arguments(cls: type[Any]) -> Iterator[str]:
    """The fields as arguments; where each has a text of its own, which `_fields` lists, an ellipsis."""
    if cls.__dataclass_params__.kw_only:  # type: ignore[attr-defined]
        yield "*"
    if set(field_texts(cls)) and "Args:" not in (inspect.getdoc(cls) or ""):
        yield "…"
        return
    kinds = {
        ast.unparse(each.target): ast.unparse(each.annotation)
        for parent in reversed(cls.__mro__)
        if dataclasses.is_dataclass(parent)
        for each in _definition(parent).body
        if isinstance(each, ast.AnnAssign)
    }
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        if field.default_factory is not dataclasses.MISSING:
            default = " = …"
        yield f"{field.name}: {kinds[field.name]}{default}"


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Each argument with its type and default, and the stars between them."""
    text, arguments, depth = ast.unparse(node.args), [""], 0
    for character in text:
        depth += {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    quoted = re.compile(r"^(\*{0,2}\w+: )'([^']+)'")
    spaced = re.compile(r"^(\*{0,2}\w+: .*?[^=])=(?!=)([^=].*)$")
    return [spaced.sub(r"\1 = \2", quoted.sub(r"\1\2", each.strip())) for each in arguments if each]


def _wrapped(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in arguments), f"){returns}"])


def _docstring(text: str) -> str:
    """A docstring as Markdown, without its example."""
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"(Args|Returns|Raises|Example|Examples):", line):
            section = heading[1]
            if not section.startswith("Example"):
                lines += [f"**{ {'Args': 'Arguments'}.get(section, section) }**", ""]
        elif section.startswith("Example"):
            continue
        elif section in ("Args", "Raises") and (entry := re.fullmatch(r" {4}(\*{0,2}[\w.]+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.strip():
            lines.append(("  " if section in ("Args", "Raises") else "") + line.strip())
        else:
            lines.append(line)
    return _markdown("\n".join(lines)).strip() + "\n"


def _fields(cls: type[Any]) -> str:
    """A list of the fields that have a text, with their defaults."""
    if not dataclasses.is_dataclass(cls):
        return ""
    texts = field_texts(cls)
    lines = []
    for field in dataclasses.fields(cls):
        if field.name in texts:
            default = "" if field.default is dataclasses.MISSING else f" (`{field.default!r}`)"
            lines.append(f"- `{field.name}`{default}: {_markdown(texts[field.name])}")
    return "**Fields**, with their defaults\n\n" + "\n".join(lines) + "\n" if lines else ""


def _members(cls: type[Any]) -> str:
    """A list of the public methods and properties of a class, each with its first sentence."""
    node = _definition(cls)
    assert isinstance(node, ast.ClassDef)
    lines = []
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or (each.name.startswith("_") and each.name != "__call__"):
            continue
        kinds = [ast.unparse(decorator) for decorator in each.decorator_list]
        if any(kind.endswith((".setter", "overload")) for kind in kinds):
            continue
        text = " ".join((ast.get_docstring(each) or "").partition("\n\n")[0].split())
        shown = each.name
        if "property" not in kinds:
            names = [re.split(r"[:= ]", argument)[0] for argument in _arguments(each)]
            shown += f"({', '.join(name for name in names if name not in ('self', 'cls'))})"
        lines.append(f"- `{shown}`" + (f": {_markdown(text)}" if text else ""))
    return "**Members**\n\n" + "\n".join(lines) + "\n" if lines else ""


def _example(name: str) -> str:
    """The example of a name as code to copy; what an expression gives is a comment."""
    lines = []
    for example in examples(name):
        lines += example.source.rstrip().splitlines()
        lines += [f"# → {line}" for line in example.want.rstrip().splitlines()]
        if example.exc_msg is not None:
            lines = [line for line in lines if line not in ("# → Traceback (most recent call last):", "# →     ...")]
    return "**Example**\n\n```python\n" + "\n".join(lines) + "\n```\n" if lines else ""


def _markdown(text: str) -> str:
    """Double backticks as single ones, and addresses as links."""
    return re.sub(r"(?<![<(])https?://[^\s,;)]+[^\s,;).]", lambda address: f"<{address[0]}>", text.replace("``", "`"))
