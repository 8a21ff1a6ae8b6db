"""Files of tensors, behind a URL too."""

from typing import Any

import fsspec
import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import load_config, load_hf
from lockstep.models.hf import parameter_read
from tests.unit.models.hf.test_load import GOLDEN, mesh_of


@pytest.mark.parametrize("shape", ["1,1,1", "1,4,1", "1,2,2"])
def test_a_url_is_read_in_ranges(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(GOLDEN / "mistral") + "/", "/bucket/mistral/", recursive=True)
    assert load_config("memory://bucket/mistral") == load_config(str(GOLDEN / "mistral"))
    monkeypatch.setattr(parameter_read, "CHUNK_BYTES", 1000)
    longest = []
    fetch, copy = type(memory).cat_file, type(memory).get_file

    def get_file(self: Any, path: str, *arguments: Any, **options: Any) -> None:
        assert path.endswith("config.json"), f"{path} was copied"
        copy(self, path, *arguments, **options)

    monkeypatch.setattr(type(memory), "get_file", get_file)

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path.endswith(".safetensors"):
            longest.append((end or 0) - (start or 0))
        return fetch(self, path, start, end, **options)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    devices = int(np.prod([int(size) for size in shape.split(",")]))
    ours = load_hf("memory://bucket/mistral", mesh_of(shape, devices))
    theirs = load_hf(str(GOLDEN / "mistral"), mesh_of(shape, devices))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    smallest = min(path.stat().st_size for path in (GOLDEN / "mistral").glob("*.safetensors"))
    assert 0 < max(longest) < smallest, "a piece at a time"
    with pytest.raises(ConfigError, match=r"there are no files config\.json at memory://bucket/nothing"):
        load_config("memory://bucket/nothing")
