"""Digests of checkpoints: whatever a change reaches, they see; a bucket is asked a few hundred times at most."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lockstep.models import fingerprint
from lockstep.models.hf import fingerprints
from tests.unit.models.hf.test_load import GOLDEN

SHAPES = {
    "input_layernorm": (48,),
    "mlp.down_proj": (48, 300),
    "self_attn.q_proj": (48, 48),
    "self_attn.v_proj": (8, 48),
}


def write(directory: Path, layers: int) -> dict[str, tuple[int, int]]:
    """Write a sparse checkpoint of zeros in the order of names, as transformers does; the bytes of each tensor."""
    names = {f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in SHAPES.items()}
    names["model.embed_tokens.weight"] = (40_000, 48)
    head, end = {}, 0
    for name in sorted(names):
        start, end = end, end + 2 * math.prod(names[name])
        head[name] = {"dtype": "BF16", "shape": names[name], "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: tuple(8 + len(text) + place for place in head[name]["data_offsets"]) for name in head}


def change(directory: Path, places: dict[str, tuple[int, int]], ending: str) -> None:
    with open(directory / "model.safetensors", "rb+") as file:
        for name, (start, end) in places.items():
            if name.endswith(ending):
                file.seek(start)
                file.write(b"\1" * (end - start))


@pytest.mark.parametrize("layers", [24, 32, 80])
def test_an_adapter_that_is_merged_into_one_matrix_is_seen(tmp_path: Path, layers: int) -> None:
    places = write(tmp_path / "model", layers)
    seen = {fingerprint(str(tmp_path / "model"))}
    for name in (*SHAPES, "embed_tokens"):
        change(tmp_path / "model", places, f"{name}.weight")
        seen.add(fingerprint(str(tmp_path / "model")))
    assert len(seen) == 2 + len(SHAPES)


def test_a_change_of_any_one_layer_of_32_is_seen(tmp_path: Path) -> None:
    places = write(tmp_path / "model", 32)
    seen = {fingerprint(str(tmp_path / "model"))}
    for layer in range(32):
        change(tmp_path / "model", places, f"layers.{layer}.self_attn.v_proj.weight")
        seen.add(fingerprint(str(tmp_path / "model")))
    assert len(seen) == 33


def test_names_of_tensors_and_the_configuration_count_and_a_place_does_not(tmp_path: Path) -> None:
    first = fingerprint(str(GOLDEN / "llama3"))
    copy = Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "copy"))
    assert fingerprint(str(copy)) == first
    config, file = copy / "config.json", copy / "model.safetensors"
    text = config.read_text()
    config.write_text(text + " ")
    assert fingerprint(str(copy)) != first
    config.write_text(text)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"model.layers.0.self_attn.q_proj", b"model.layers.0.self_attn.o_proj", 1))
    assert file.read_bytes() != data and fingerprint(str(copy)) != first


def test_a_url_has_the_digest_of_its_directory_and_is_asked_for_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model", 80)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/model/", "/bucket/fingerprint/", recursive=True)
    asked, fetch = [], type(memory).cat_file

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path.endswith(".safetensors"):
            asked.append((end or 0) - (start or 0))
        return fetch(self, path, start, end, **options)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    assert fingerprint("memory://bucket/fingerprint") == fingerprint(str(tmp_path / "model"))
    assert len(asked) <= 2 + (1 + len(SHAPES)) * fingerprints._PIECES, "the length of the header, it, and pieces"
    assert sum(sorted(asked)[:-1]) < 1 << 20, "all but the header"
