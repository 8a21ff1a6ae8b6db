import ast
import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import transformers
from huggingface_hub.errors import HfHubHTTPError

from lockstep import storage
from lockstep.batch_inference import EvalConfig
from lockstep.batch_inference.config import SampleConfig
from lockstep.errors import ConfigError
from lockstep.text import (
    StopFinder,
    check_vocab,
    decode,
    fetch_tokenizer,
    load_tokenizer,
    loading,
    special_tokens,
    stop_ids,
    token_count,
    token_texts,
    tokenizer_digest,
    write_tokenizer,
)
from lockstep.text.stop import AnswerDecoder
from lockstep.training import ExportConfig, TrainLmConfig
from tests import made_tokenizers
from tests.sources import sources

DEMO_TOKENIZER = Path(__file__).parents[3] / "data" / "demo" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_TOKENIZER)


def test_loads_a_directory_and_decodes_what_it_encodes(tokenizer):
    ids = tokenizer.encode("What is 12 plus 3?")
    assert ids[0] == tokenizer.bos_token_id
    assert decode(tokenizer, ids) == "What is 12 plus 3?"
    assert decode(tokenizer, [*ids, tokenizer.eos_token_id]) == "What is 12 plus 3?"


def changed(tmp_path, change):
    """The demo's tokenizer with another tokenizer.json."""
    shutil.copytree(DEMO_TOKENIZER, tmp_path / "changed")
    file = tmp_path / "changed" / "tokenizer.json"
    parts = json.loads(file.read_text())
    change(parts)
    file.write_text(json.dumps(parts))
    return load_tokenizer(tmp_path / "changed")


def test_the_digest_is_of_the_whole_backend_not_of_the_vocabulary_alone(tokenizer, tmp_path):
    other = changed(tmp_path, lambda parts: parts.update(normalizer={"type": "Lowercase"}))
    assert other.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)


def test_the_digest_is_of_the_chat_template_and_the_special_tokens_too():
    first, other, third = (load_tokenizer(DEMO_TOKENIZER) for _ in range(3))
    other.chat_template = "{{ messages }}"
    third.pad_token = third.eos_token
    assert len({tokenizer_digest(one) for one in (first, other, third)}) == 3


def test_the_digest_depends_neither_on_the_place_nor_on_the_last_call(tokenizer, tmp_path):
    before = tokenizer_digest(tokenizer)
    other = changed(tmp_path, lambda parts: None)
    assert tokenizer_digest(other) == before
    other(["one", "one two three"], truncation=True, max_length=2)
    assert tokenizer_digest(other) == before


def test_the_digest_of_a_slow_tokenizer_is_of_vocabulary_and_arguments(tmp_path):
    from transformers import ByT5Tokenizer

    plain, more = ByT5Tokenizer(), ByT5Tokenizer(extra_ids=7)
    assert not hasattr(plain, "backend_tokenizer")
    assert tokenizer_digest(plain) == tokenizer_digest(ByT5Tokenizer()) != tokenizer_digest(more)
    places = [tmp_path / name for name in ("one", "other")]
    for place in places:
        plain.save_pretrained(place)
    assert len({tokenizer_digest(load_tokenizer(place)) for place in places}) == 1


def test_a_missing_directory_says_what_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"looked for the directory '.*/nothing/here/either'.*working directory"):
        load_tokenizer(tmp_path / "nothing" / "here" / "either")
    with pytest.raises(ConfigError, match="tokenizer is empty"):
        load_tokenizer("")
    with pytest.raises(ConfigError, match="not have the form of a Hugging Face hub name"):
        load_tokenizer("a/b/c")


def test_a_directory_without_tokenizer_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds none of tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not JSON: .* Save it again\."):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="could not be read as a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.fixture
def with_code(tmp_path):
    """A tokenizer with Python code of its own, and the file that the code makes."""
    place, made = tmp_path / "with_code", tmp_path / "made"
    shutil.copytree(DEMO_TOKENIZER, place)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass Mine(PreTrainedTokenizerFast):\n    pass\n"
    (place / "mine.py").write_text(f"open({str(made)!r}, 'w').close()\n{code}")
    return str(place), made


def test_every_command_asks_for_its_key_before_a_tokenizer_runs_code():
    calls = [
        (Path(name).name, ast.unparse(node))
        for name, text in sources("load_tokenizer").items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "load_tokenizer"
    ]
    assert len(calls) >= 7 and all("trust" in call for _, call in calls), calls
    # What several hosts run gets what the leader fetched.
    assert all(
        "fetched" in call for file, call in calls if file in ("run.py", "config.py", "evaluation.py", "export.py")
    ), calls
    for config in (SampleConfig, EvalConfig, ExportConfig, TrainLmConfig):
        assert {each.name: each.default for each in dataclasses.fields(config)}["trust_remote_code"] is None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_code_of_a_tokenizer_is_run_where_it_is_named_alone(with_code, scheme, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    place, made = scheme + with_code[0], with_code[1]
    if not scheme:  # without its code, the files at a URL are not even a tokenizer with code
        with pytest.raises(ConfigError, match="brings Python code of its own, which is not run.* --trust_remote_code"):
            load_tokenizer(place)
    with pytest.raises(ConfigError, match="trust_remote_code is 'another', and the tokenizer is"):
        load_tokenizer(place, "another")
    assert not made.exists()
    assert type(load_tokenizer(place, place)).__name__ == "Mine" and made.exists()


def test_code_is_never_sent_to_other_processes_and_never_taken_from_them(with_code, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    place, made = "file://" + with_code[0], with_code[1]
    assert fetch_tokenizer(place, place) == b"", "each host fetches it"
    archive = zipfile.ZipFile(io.BytesIO(fetch_tokenizer(place)))
    assert not [name for name in archive.namelist() if name.endswith(".py")]
    forged = io.BytesIO()
    with zipfile.ZipFile(forged, "w") as files:
        for name in archive.namelist():
            files.writestr(name, archive.read(name))
        code = Path(with_code[0], "mine.py").read_text(encoding="utf-8")
        files.writestr("mine.py", f"open({str(tmp_path / 'forged')!r}, 'w')\n{code}")
    with pytest.raises(ConfigError, match="brings Python code of its own, which is not run"):
        load_tokenizer(place, fetched=forged.getvalue())
    assert type(load_tokenizer(place, place, forged.getvalue())).__name__ == "Mine"
    assert made.exists() and not (tmp_path / "forged").exists()


@pytest.mark.parametrize("given", ["org/model", "org/model@main", "org/model@abc123", "org/model@"])
def test_code_from_the_hub_is_run_at_one_commit(given):
    with pytest.raises(ConfigError, match="run at one commit, .* --trust_remote_code org/model@COMMIT with the 40"):
        load_tokenizer("org/model", given)
    with pytest.raises(ConfigError, match="the tokenizer is 'org/other'"):
        load_tokenizer("org/other", f"org/model@{'a' * 40}")
    assert fetch_tokenizer("org/model", f"org/model@{'a' * 40}") == b""


def test_the_commit_reaches_transformers(monkeypatch):
    asked = {}

    class Auto:
        @staticmethod
        def from_pretrained(place, **options):
            asked.update(options, place=place)
            return SimpleNamespace()

    monkeypatch.setattr("lockstep.text.loading._transformers", lambda: SimpleNamespace(AutoTokenizer=Auto))
    load_tokenizer("org/model", f"org/model@{'a' * 40}", fetched=b"forged")
    pinned = {"revision": "a" * 40, "code_revision": "a" * 40, "trust_remote_code": True, "place": "org/model"}
    assert asked == pinned


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / ".netrc"
    file.write_text("machine\nexample\npassword\nhunter2\n")
    return file


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["vocab_file", "vocab", "tokenizer_file", "fast_tokenizer_files", "cache_dir"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_tokenizer_names_no_file_elsewhere(tmp_path, secret, file, key, scheme):
    """``vocab_file: ~/.netrc`` came out as the tokens of answers."""
    place = tmp_path / "bert"
    place.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one"]
    (place / "vocab.txt").write_text("\n".join(vocabulary))
    # Too few files for a tokenizer but for the vocabulary that it names.
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    settings = {"tokenizer_class": "BertTokenizer", key: [str(secret)] if key.endswith("files") else str(secret)}
    (place / file).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"{key} in .*{file} names '.*netrc', which is not the name of"):
        load_tokenizer(f"{scheme}{place}")


def test_names_beside_a_tokenizer_and_those_that_nothing_opens_pass(tmp_path):
    place = tmp_path / "tokenizer"
    shutil.copytree(DEMO_TOKENIZER, place)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_file": None, "special_tokens_map_file": "/home/them/.cache/special_tokens_map.json"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(place)("one").input_ids == load_tokenizer(DEMO_TOKENIZER)("one").input_ids


def test_every_argument_of_transformers_that_names_a_file_is_known():
    folder = Path(transformers.__file__).parent
    names = set()
    for path in folder.rglob("tokenization_*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES = (\{[^}]*\})", path.read_text(encoding="utf-8")):
            names |= set(re.findall(r'"(\w+)":', found))
    assert {"vocab_file", "tokenizer_file", "merges_file"} <= names
    assert not [name for name in names if not loading._NAMES_FILES.search(name)]


@pytest.mark.slow
def test_an_unknown_hub_name_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "from lockstep.text import load_tokenizer\n"
        "try: load_tokenizer('no-such-organisation/no-such-model')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("ConfigError tokenizer 'no-such-organisation/no-such-model' is neither a local")


def test_vocabulary_must_fit_the_model(tokenizer):
    size = len(tokenizer)
    assert token_count(tokenizer) == size
    check_vocab(tokenizer, size)
    check_vocab(tokenizer, size + 64)
    with pytest.raises(ConfigError, match=rf"largest token id is {size - 1} .* has {size - 1} entries .* least {size}"):
        check_vocab(tokenizer, size - 1)


def test_stop_ids_are_eos_end_of_turn_and_those_of_the_generation_config(tokenizer, tmp_path):
    assert stop_ids(tokenizer) == (tokenizer.eos_token_id,)
    copy = tmp_path / "tokenizer"
    shutil.copytree(DEMO_TOKENIZER, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    other = load_tokenizer(copy)
    other.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    assert stop_ids(other) == (2, 4, other.convert_tokens_to_ids("<|eot_id|>"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert 3 in stop_ids(load_tokenizer(copy))
    for wrong in ("[", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}', '{"eos_token_id": {}}'):
        (copy / "generation_config.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"generation_config\.json .*Mend it"):
            stop_ids(load_tokenizer(copy))


def test_a_message_that_ends_is_no_answer_that_ends_where_the_family_tells_them_apart():
    """gpt-oss ends each message of a turn with `<|end|>`, the last one with `<|return|>`."""
    other = load_tokenizer(DEMO_TOKENIZER)
    other.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    assert other.convert_tokens_to_ids("<|end|>") in stop_ids(other), "as Phi-3 and Phi-4 end a turn"
    other.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|return|>"], "eos_token": "<|return|>"})
    assert stop_ids(other) == (other.convert_tokens_to_ids("<|return|>"),)


def test_written_files_say_where_answers_end(tmp_path):
    copy = tmp_path / "tokenizer"
    shutil.copytree(DEMO_TOKENIZER, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    before = load_tokenizer(copy)
    (tmp_path / "written").mkdir()
    write_tokenizer(before, tmp_path / "written")
    assert stop_ids(load_tokenizer(tmp_path / "written")) == stop_ids(before) and {2, 4} < {*stop_ids(before), -1}
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "written").eos_token_id == list(stop_ids(before))


@pytest.mark.slow
def test_the_generation_config_of_a_hub_name_is_that_of_the_hubs_cache(tokenizer, tmp_path):
    for name in ("listed", "none", "unknown"):
        repo = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(DEMO_TOKENIZER, repo / "snapshots" / "abc")
        (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("abc")
        if name == "listed":
            (repo / "snapshots" / "abc" / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
        if name == "none":  # what the hub's client leaves there when the hub says that there is no such file
            (repo / ".no_exist" / "abc").mkdir(parents=True)
            (repo / ".no_exist" / "abc" / "generation_config.json").touch()
    code = "from lockstep.text import load_tokenizer, stop_ids\n"
    code += "print([stop_ids(load_tokenizer(f'org/{name}')) for name in ('listed', 'none', 'unknown', 'unknown')])"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("HF_HUB_CACHE", "HF_TOKEN")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    own = (tokenizer.eos_token_id,)
    assert run.stdout == f"{[tuple(sorted({4, 2, *own})), own, own, own]}\n"
    (warning,) = run.stderr.splitlines()
    assert warning.startswith("generation_config.json of the tokenizer 'org/unknown' is neither in the cache")


@pytest.mark.slow
def test_transformers_is_imported_on_first_use_and_says_nothing_at_the_terminal():
    code = (
        "import sys; from lockstep.text import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"load_tokenizer({str(DEMO_TOKENIZER)!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_each_token_has_the_text_that_it_adds(tokenizer):
    text = "What is 5 plus 5? née 😀 日本"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens) and "".join(texts) == decode(tokenizer, tokens)
    smile = next(n for n, each in enumerate(texts) if "😀" in each)
    assert texts[smile - 1] == "" and "\ufffd" not in "".join(texts)
    assert "".join(token_texts(tokenizer, tokens[: smile + 1])).endswith("😀")


def test_bytes_that_are_no_character_are_shown_and_special_tokens_are_not(tokenizer):
    (first,) = [n for n in range(256) if decode(tokenizer, [n]) == "\ufffd"][:1]
    tokens = [first] * 9 + [tokenizer.eos_token_id]
    texts = token_texts(tokenizer, tokens)
    assert texts[-1] == "" or texts[-1] == "\ufffd"
    assert "".join(texts).count("\ufffd") == decode(tokenizer, tokens).count("\ufffd") == 9
    assert token_texts(tokenizer, []) == []


def test_code_beside_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    """Without a word from us, transformers asks at the terminal whether to run it."""
    made = tmp_path / "made"
    (tmp_path / "tokenizer.json").write_text("{}")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(made)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="could not be read as a tokenizer"):
        load_tokenizer(tmp_path)
    assert not made.exists()


def test_a_tokenizer_that_another_host_fetched_is_the_same(tokenizer, tmp_path):
    copy = tmp_path / "tokenizer"
    shutil.copytree(DEMO_TOKENIZER, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    (copy / "model.safetensors").write_bytes(bytes(1 << 20))
    (copy / "mine.py").write_text("")
    url = f"file://{copy}"
    fetched = fetch_tokenizer(url)
    assert set(zipfile.ZipFile(io.BytesIO(fetched)).namelist()) == {
        each.name for each in copy.iterdir() if each.suffix not in (".safetensors", ".py")
    }
    shutil.rmtree(copy)  # nothing more is asked for
    there = load_tokenizer(url, fetched=fetched)
    assert tokenizer_digest(there) == tokenizer_digest(tokenizer) and there.name_or_path == url
    assert stop_ids(there) == tuple(sorted({4, 2, tokenizer.eos_token_id}))
    assert fetch_tokenizer(DEMO_TOKENIZER) == b"", "a directory is each host's own"


def test_what_another_host_sends_stays_in_its_directory_or_is_refused(tmp_path):
    escaping = io.BytesIO()
    with zipfile.ZipFile(escaping, "w") as archive:
        archive.writestr(f"../{tmp_path.name}/made", "x")
    for data in (b"nonsense", fetch_tokenizer(f"file://{DEMO_TOKENIZER}")[:-9], escaping.getvalue()):
        with pytest.raises(ConfigError, match="what process 0 fetched of the tokenizer 'org/name'"):
            load_tokenizer("org/name", fetched=data)
    assert not list(tmp_path.iterdir())


def test_the_hub_is_asked_by_one_host_and_waited_for(tokenizer, tmp_path, monkeypatch, caplog):
    asked, slept, now = [], [], [0.0]
    shutil.copytree(DEMO_TOKENIZER, tmp_path / "hub")
    (tmp_path / "hub" / "generation_config.json").write_text("{}")
    refusals = [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=41'}, {}]

    def download(name, **patterns):
        asked.append(name)
        if len(asked) <= len(refusals):
            reply = httpx.Response(429, headers=refusals[len(asked) - 1], request=httpx.Request("GET", "http://hub"))
            raise HfHubHTTPError("too many", response=reply)
        return str(tmp_path / "hub")

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # `stop_ids` asks for the generation config
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, strftime=time.strftime))
    fetched = fetch_tokenizer("org/name")
    assert asked == ["org/name"] * 4 and slept == [8.0, 42.0, 20.0]
    assert "too many requests (429) while reading the tokenizer 'org/name': waiting 8 s" in caplog.text
    there = load_tokenizer("org/name", fetched=fetched)
    assert len(asked) == 4 and tokenizer_digest(there) == tokenizer_digest(tokenizer)
    assert stop_ids(there) == (tokenizer.eos_token_id,) and there.name_or_path == "org/name"

    asked.clear()
    refusals[:] = [{"Retry-After": "250"}] * 9
    with pytest.raises(
        ConfigError, match=r"\(429\) while reading the tokenizer 'org/name': 251 s more .* at most 600 s.*HF_TOKEN"
    ):
        fetch_tokenizer("org/name")
    assert len(asked) == 3, "twice 251 s were waited"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_an_answers_text_goes_on_from_its_prompts(kind, tmp_path):
    made = made_tokenizers.sentencepiece() if kind == "sentencepiece" else made_tokenizers.byte_level(begin="<s>")
    loaded = load_tokenizer(made_tokenizers.write(tmp_path / "made", made, {"bos_token": "<s>"}))
    texts = ["def add(a, b):\n", "    return a + b", " and", "and", "\n\n", "😀", " é", "In 2023", "", " "]
    for prompt, answer in itertools.product(texts, texts):
        before = made.encode(prompt).ids
        tokens = made.encode(answer, add_special_tokens=False).ids
        expected = made.decode([*before, *tokens])[len(made.decode(before)) :]
        assert decode(loaded, tokens, before) == expected, (prompt, answer)
        assert "".join(token_texts(loaded, tokens, before)) == expected
    assert decode(loaded, made.encode(" and", add_special_tokens=False).ids[-1:], made.encode("a").ids) == " and"


def test_the_markers_of_gpt_oss_are_part_of_an_answer_and_others_ends_are_not(tmp_path):
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    made = made_tokenizers.byte_level(*names)
    loaded = load_tokenizer(made_tokenizers.write(tmp_path / "oss", made, {"eos_token": "<|return|>"}))
    text = "<|channel|>analysis<|message|>add a<|end|><|start|>assistant<|channel|>final<|message|>b"
    tokens = loaded.encode(text + "<|return|>")
    assert decode(loaded, tokens) == text and "".join(token_texts(loaded, tokens)) == text
    assert special_tokens(loaded).keys() == {"<|return|>"}
    assert StopFinder(loaded)(tokens, 0, ["<|end|>"]) == tokens.index(made.token_to_id("<|end|>")) + 1
    _, end = AnswerDecoder(loaded)([], loaded.encode("a<|start|>assistant"), ())
    assert end.endswith("<|start|>assistant")

    phi = load_tokenizer(
        made_tokenizers.write(tmp_path / "phi", made_tokenizers.byte_level("<|end|>", "<|start|>"), {})
    )
    assert decode(phi, phi.encode("add<|end|>")) == "add" and "<|end|>" in special_tokens(phi)
    thinking = made_tokenizers.byte_level("[THINK]", "[/THINK]", "</s>")
    magistral = load_tokenizer(made_tokenizers.write(tmp_path / "magistral", thinking, {"eos_token": "</s>"}))
    assert decode(magistral, magistral.encode("[THINK]a[/THINK]b</s>")) == "[THINK]a[/THINK]b"
