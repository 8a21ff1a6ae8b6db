"""Files of measured numbers: what they change, and what is said of those that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.placement.device import calibrated, chip_named, save_calibration

V5P, H100 = chip_named("TPU v5p", "tpu"), chip_named("NVIDIA H100", "gpu")
HEAD = {"lockstep_calibration": 1, "chip": "TPU v5p", "measured": "2026-11-22 on a v5p-16"}


def written(folder: Path, content: Any) -> str:
    path = folder / "measured.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_measured_numbers_take_the_place_of_published_ones(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD | {"bandwidth": 2.5e12, "link": {"latency_s": 4e-6, "hop_s": 2e-6}})
    chip = calibrated(V5P, path)
    assert (chip.bandwidth, chip.flops, chip.memory) == (2.5e12, V5P.flops, V5P.memory)
    assert (chip.link.bandwidth, chip.link.latency_s, chip.link.hop_s) == (V5P.link.bandwidth, 4e-6, 2e-6)
    assert chip.network == chip.link, "one interconnect joins all chips of a slice"
    assert chip.source.startswith(
        f"measured 2026-11-22 on a v5p-16 ({path}); what is not in that file: published: memory:"
    )


def test_without_a_file_the_published_numbers_count() -> None:
    assert calibrated(V5P, None) is V5P


def test_link_and_network_are_apart_where_they_are_two(tmp_path: Path) -> None:
    chip = calibrated(H100, written(tmp_path, HEAD | {"chip": "H100", "link": {"bandwidth": 4e11}}))
    assert chip.link.bandwidth == 4e11 and chip.network == H100.network


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", r"measured\.json is not JSON: .* Write it again"),
        ([], "is a JSON list, not an object"),
        (HEAD | {"lockstep_calibration": 2}, "has lockstep_calibration 2; this version reads 1"),
        (HEAD | {"hops": 3}, "has 'hops', which is not known. It may have lockstep_calibration, chip, .* or network"),
        (HEAD | {"link": {"latency_us": 3}}, "link has 'latency_us', which is not known. It may have bandwidth, "),
        (HEAD | {"link": 3}, "link is 3; it must be an object with bandwidth, latency_s or hop_s"),
        (HEAD | {"bandwidth": 0}, "bandwidth is 0; it must be a number of more than 0"),
        (HEAD | {"flops": True}, "flops is True; it must be a number of more than 0"),
        (HEAD | {"link": {"hop_s": -1}}, "link.hop_s is -1; it must be a number of at least 0"),
        (HEAD | {"link": {"latency_s": "4 us"}}, "link.latency_s is '4 us'; it must be a number of at least 0"),
        (HEAD | {"measured": None}, "has measured None; it must be a text. Say when and on what"),
        (HEAD | {"chip": "TPU v9"}, "has chip 'TPU v9'; it must be one of CPU, H100, .*TPU v6e"),
        (HEAD | {"chip": "TPU v6e"}, "was measured on TPU v6e, and the devices are TPU v5p. Give a file"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        calibrated(V5P, written(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: .*Give a file that every host has"):
        calibrated(V5P, str(tmp_path / "nowhere.json"))


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "v5p.json")
    save_calibration(path, chip="TPU v5p", measured="today", bandwidth=2e12, link={"hop_s": 3e-6})
    save_calibration(path, chip="TPU v5p", measured="today", bandwidth=2.1e12, link={"hop_s": 3e-6})
    chip = calibrated(V5P, path)
    assert (chip.bandwidth, chip.link.hop_s) == (2.1e12, 3e-6)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["v5p.json"]


def test_what_cannot_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flops is nan; it must be a number of more than 0"):
        save_calibration(tmp_path / "v5p.json", chip="TPU v5p", measured="today", flops=float("nan"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/v5p\.json cannot be written: .* Choose another file"):
        save_calibration(tmp_path / "file" / "v5p.json", chip="TPU v5p", measured="today")
