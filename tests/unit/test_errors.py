"""What a caller may catch, and what is printed once for all processes."""

import argparse
import ast
import dataclasses
import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep import errors, training
from lockstep.main.commands import COMMANDS
from lockstep.main.help import add_keys
from tests.extras import NEEDS_CLIENTS
from tests.sources import all_sources

ROOT = Path(__file__).parents[2]
OTHERS = {
    *("activation_function", "chat_template", "do_sample", "eos_token_id", "sliding_attention", "text_only"),
    *("arc_easy", "device_put", "host_local", "jax_flash", "lockstep_calibration", "my_module", "my_rewards"),
    # keys of configurations and tokenizers of Hugging Face, and its function that merges adapters
    *("per_layer_config", "use_bidirectional_attention"),
    *("add_bos_token", "eos_token", "full_attention", "merge_and_unload", "num_local_experts", "quant_method"),
    *("is_causal", "mscale_all_dim", "num_attention_heads", "num_key_value_heads", "num_labels", "text_config"),
    *(
        "gelu_pytorch_tanh",
        "hidden_act",
        "hidden_activation",
        "clip_qkv",
        "no_rope_layers",
        "sliding_window_pattern",
        "use_bias",
        "use_sliding_window",
    ),
    *("group_limited_greedy", "scoring_func", "topk_method", "kw_only"),  # the last one is of dataclasses
    *(
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_type",
        "stop_strings",
        "tokenizer_config",
        "transformers_weights",
    ),
    "model.safetensors",
    *("filter_list", "remove_whitespace", "take_first"),  # lm-evaluation-harness's
    *("--constraint", "--local-dir", "--location", "--ntasks-per-node"),  # of pip, hf, gcloud, Slurm
    *("--key", "--tasks"),  # a stand-in; of `eval`, which makes a key of it
    *("trainer.mesh", "trainer.distributed.local_device_ids", "n_shared_experts"),  # Levanter's keys
}
"""Names in messages that are other programs', values of a key that is no `Literal`, or examples."""

EVERY = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_error_is_a_lockstep_error():
    assert len(EVERY) > 10 and all(issubclass(error, errors.LockstepError) for error in EVERY)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.PromptError, errors.CapacityError])
def test_what_a_user_gave_is_a_value_error(error):
    assert issubclass(error, ValueError)


def test_a_wait_that_ran_out_is_a_timeout_error():
    assert issubclass(errors.HostTimeoutError, TimeoutError)


def test_only_what_every_process_raises_with_one_text_is_printed_once():
    once = {error for error in EVERY if getattr(error, "on_every_process", False)}
    assert once == {errors.PeerError, errors.DisagreementError, errors.DivergenceError, errors.AlarmError}


def test_a_compiler_error_says_nothing_of_bytes_that_the_compiler_does_not_name():
    error = errors.HbmError("too large")
    assert (str(error), error.needed, error.limit) == ("too large", 0, 0)


MODULES = [
    importlib.import_module(each.name)
    for each in pkgutil.walk_packages(training.__path__, "lockstep.training.")
    if not each.name.endswith(".verifiers_episode")  # which needs an extra
]
FOUND = {each for module in MODULES for name, each in vars(module).items() if re.search("(Config|Reward)$", name)}
CONFIGS = [each for each in FOUND if dataclasses.is_dataclass(each) and each.__module__.startswith("lockstep.training")]
CHOICES = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}")
    for kind in sorted(CONFIGS, key=str)
    for field in dataclasses.fields(kind)
    if "Literal" in str(field.type) and not re.search(r"\bint\b", str(field.type))
]


def default_of(kind, field):
    """The default of a field, or something that has its type."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is not dataclasses.MISSING:
        return field.default
    hint = typing.get_type_hints(kind)[field.name]
    return object.__new__(hint) if dataclasses.is_dataclass(hint) else "a"


@pytest.mark.parametrize(("kind", "field"), CHOICES)
def test_a_configuration_refuses_what_is_no_choice_of_a_field(kind, field):
    config = object.__new__(kind)  # the check comes before all others, which need further fields
    values = {each.name: default_of(kind, each) for each in dataclasses.fields(kind)}
    vars(config).update(values | {field.name: "Other"})
    with pytest.raises(errors.ConfigError, match=rf"\b{field.name} is 'Other'; it must be one of \w+, .*\."):
        config.__post_init__()


def test_null_is_a_choice_where_it_is_named():
    training.TrainerConfig(dcn_reduce_dtype=None)
    assert len(CHOICES) > 30
    with pytest.raises(errors.ConfigError, match="loss is None; it must be a text"):
        training.GrpoConfig(loss=None)


def messages(nodes: Mapping[str, Sequence[ast.AST]]) -> Iterator[tuple[str, str]]:
    """Every text of an error or a warning, with its place; what is filled in is a NUL."""
    calls = {"ConfigError", "BadRow", "Finding", "error", "warn", "warning"}
    for path, of_file in nodes.items():
        for node in of_file:
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            if call is node and getattr(call.func, "attr", getattr(call.func, "id", "")) not in calls:
                continue
            for part in (each for given in (*call.args, *call.keywords) for each in ast.walk(given)):
                if isinstance(part, ast.JoinedStr):
                    text = "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in part.values)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    text = part.value
                else:
                    continue
                if " " in text:
                    yield f"{path}:{node.lineno}", text


def known_names(nodes: Mapping[str, Sequence[ast.AST]]) -> tuple[set[str], set[str], set[str]]:
    """Options, configuration keys with their dots, and single names: of keys, their values, and of the sources."""
    options, keys, names = set(), set(), set(OTHERS)
    for command in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
        add_keys(parser, command)
        for action in parser._actions:
            options |= set(action.option_strings)
            names |= set(action.choices or ())
            parts = action.option_strings[0].removeprefix("--").split(".") if action.option_strings else ()
            keys |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    for of_file in nodes.values():
        for node in of_file:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return (
        options | OTHERS,
        keys | {each for each in OTHERS if "." in each},
        names | {key.rpartition(".")[2] for key in keys},
    )


def is_importable(name: str) -> bool:
    module, found = name.split("."), None
    while module and found is None:
        try:
            found = importlib.import_module(".".join(module))
        except ImportError:
            module.pop()
    for part in name.split(".")[len(module) :]:
        found = getattr(found, part, None)
    return found is not None


def unknown_names(text: str, options: set[str], keys: set[str], names: set[str]) -> set[str]:
    """The names in a message that nothing has."""
    blocks, commands = {key.partition(".")[0] for key in keys if "." in key}, {each.name for each in COMMANDS}
    found = {each for each in re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*\w", text) if each not in options}
    dotted = re.findall(r"(?<![\w./:-])[a-z]\w*(?:\.[a-z]\w*)+", text)
    found |= {each for each in dotted if each.partition(".")[0] in blocks and each not in keys}
    found |= {each for each in re.findall(r"\blockstep(?:\.\w+)+", text) if not is_importable(each)}
    found |= set(re.findall(r"(?<![\w.\0/-])[a-z]+(?:_[a-z0-9]+)+(?![\w.]*[(])", text)) - names
    files = re.findall(r"(?:[\w-]+/)*[\w-]+\.md|(?:examples|config|scripts|infra|benchmarks)/[\w./-]+\w", text)
    found |= {each for each in files if not (ROOT / each).exists()}
    return found | {f"lockstep {each}" for each in re.findall(r"\blockstep ([a-z]+-[a-z]+)\b", text)} - {
        f"lockstep {each}" for each in commands
    }


@NEEDS_CLIENTS
def test_no_message_names_what_does_not_exist():
    nodes = {path: list(ast.walk(ast.parse(text))) for path, text in all_sources().items()}
    known, places = known_names(nodes), {text: place for place, text in messages(nodes)}
    assert len(places) > 1000
    unknown = {place: names for text, place in places.items() if (names := unknown_names(text, *known))}
    assert not unknown


@pytest.mark.parametrize(
    "text",
    [
        "Raise data.max_length.",
        "Use --sink to copy it.",
        "Call lockstep.models.view_of first.",
        "See own-trainer.md for it.",
        "Lower max_new_words to 3.",
        "Start lockstep train-ppo with it.",
        "Copy examples/our_loop.py and go on.",
    ],
)
def test_a_message_that_names_what_does_not_exist_is_found(text):
    known = {"--sync"}, {"data", "data.max_seq_len"}, {"max_new_tokens"}
    assert unknown_names(text, *known)
    assert not unknown_names("Set data.max_seq_len, or max_new_tokens, with --sync; docs/grpo.md says how.", *known)
