"""Frames of zstandard as a stream."""

import io

import pytest
import zstandard

from lockstep.training.data.zstd_stream import ZstdStream


@pytest.mark.parametrize("n_bytes", [1, 7, 1 << 20])
def test_frames_may_be_empty_skipped_and_of_any_size(monkeypatch, n_bytes):
    """Whatever part of a frame is read at once."""
    monkeypatch.setattr(ZstdStream, "INPUT_BYTES", n_bytes)
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"
    frames = [zstandard.compress(data) for data in (b"te", b"", b"xt", b"another line\n" * 9000)]
    stream = io.BufferedReader(ZstdStream(io.BytesIO(skipped.join([b"", *frames, b""]))))
    assert stream.read() == b"text" + b"another line\n" * 9000
