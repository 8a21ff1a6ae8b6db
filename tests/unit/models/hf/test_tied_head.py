"""An output layer that is stored although the configuration ties it to the embedding."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.errors import ConfigError
from lockstep.models import load_config, load_hf, save_hf
from lockstep.models.hf import tied_head
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.stored_names import EMBED, HEAD
from lockstep.models.hf.tied_head import has_own_head
from lockstep.placement import make_mesh
from tests.golden.variants import VARIANTS, Variant


def written(variant: Variant | str, target: Path) -> Path:
    (VARIANTS[variant] if isinstance(variant, str) else variant).write(target)
    return target


def with_rows(rows: slice, change: float) -> Variant:
    def add(tensors: dict[str, Any]) -> dict[str, Any]:
        head = tensors[EMBED].copy()
        head[rows] += np.asarray(change, head.dtype)
        return {**tensors, HEAD: head}

    return Variant("llama_tied", tensors=add)


@pytest.mark.parametrize("row", [0, 55, 111])
def test_any_row_that_differs_is_seen_by_the_host_that_reads_it(
    row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_head, "_CHUNK_BYTES", 1000)  # a few rows
    place = written(with_rows(slice(row, row + 1), 1.0), tmp_path / "checkpoint")
    files = CheckpointFiles(place, tied=True)
    assert has_own_head(files)
    assert [has_own_head(files, part, 3) for part in range(3)] == [part == row * 3 // 112 for part in range(3)]


def test_a_copy_is_tied_and_so_is_the_one_of_the_two_that_is_stored(tmp_path: Path) -> None:
    assert not has_own_head(CheckpointFiles(written(with_rows(slice(0), 0.0), tmp_path / "copy"), tied=True))
    place = written("tied_with_head_alone", tmp_path / "alone")
    assert not has_own_head(CheckpointFiles(place, tied=True)) and load_config(place).tie_word_embeddings
    with pytest.raises(ConfigError, match=r"tensor model\.embed_tokens\.weight of shape .* is missing"):
        (place / "config.json").write_text(
            json.dumps({**json.loads((place / "config.json").read_text()), "tie_word_embeddings": False})
        )
        load_hf(place, make_mesh("1,1,1", jax.devices()[:1]))


def test_an_own_head_is_loaded_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, mesh = written("tied_with_head_of_other_last_rows", tmp_path / "checkpoint"), make_mesh("auto")
    config = load_config(place)
    assert not config.tie_word_embeddings and "they are not tied, as in transformers" in caplog.text
    model = load_hf(place, mesh)
    assert model.config == config and model.lm_head is not None
    save_hf(model, tmp_path / "out")
    tensors, saved = load_file(place / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in (EMBED, HEAD):
        np.testing.assert_array_equal(saved[name], tensors[name].astype(np.float32))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_configuration_that_ties_it_is_refused(tmp_path: Path) -> None:
    config = load_config(written("tied_with_head_alone", tmp_path / "alone"))
    place = written("tied_with_own_head", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"lm_head\.weight with other values than .* Set model\.tie_word_embeddings"):
        load_hf(place, make_mesh("1,1,1", jax.devices()[:1]), config=config)
