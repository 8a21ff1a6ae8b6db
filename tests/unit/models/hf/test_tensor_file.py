"""Files of tensors: headers, and ranges of rows."""

from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.errors import ConfigError
from lockstep.models.hf.tensor_file import TensorFile


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("[]", "its header is a JSON list, not an object"),
        ("[" * 60_000, "(nested too deeply|Expecting value)"),  # Python 3.14 reads to its end
        ('{"a": 1}', "what its header says of 'a' cannot be read"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', r"its shape is \[-1\]"),
        ('{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}', "its shape is"),
        (
            '{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
            "larger than any tensor",
        ),
        ('{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', "larger than any tensor"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: str, why: str) -> None:
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ConfigError, match=why):
        TensorFile(fsspec.filesystem("file"), str(tmp_path / "a"))


def test_rows_may_be_those_of_several_dimensions(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    save_file({"a": values}, tmp_path / "a")
    file = TensorFile(fsspec.filesystem("file"), str(tmp_path / "a"))
    assert (file.row_bytes("a"), file.row_bytes("a", (4,)), file.stored_dtype("a")) == (48, 16, "F32")
    np.testing.assert_array_equal(file.read("a", 1, 2), values[1:])
    np.testing.assert_array_equal(file.read("a", 2, 5, (4,)), values.reshape(6, 4)[2:5])
