"""The command line of the launcher."""

import argparse

import pytest

from lockstep.launch.options import (
    Parser,
    add_common_options,
    add_tpu_options,
    add_worker_options,
    parse_options,
    slice_counts,
)


class Everything:
    def add_options(self, parser):
        add_worker_options(parser)
        add_tpu_options(parser)


BACKENDS = dict.fromkeys(("local", "tpu-vm", "ssh"), Everything)


def parse(*words):
    return parse_options([*words, "--", "x", "--zone"], BACKENDS)


def test_the_options_of_the_shipped_configurations():
    options = parse("--tpu_name", "my-pod", "--tpu_type", "v5p-64", "--zone", "my-zone")
    assert (options.backend, options.tpu_name, options.tpu_type, options.zone) == (
        *("tpu-vm", "my-pod", "v5p-64"),
        "my-zone",
    )
    assert options.command == ["x", "--zone"]
    assert (options.foreground, options.retries, options.capacity_type, options.slices) == (True, 0, "on-demand", 1)
    assert options.require_process_count is None and options.dry_run is False and options.sync == []


def test_dashes_and_underscores_are_the_same():
    options = parse("--tpu-name=a_b", "--dry_run", "--no_foreground", "--require_process_count", "4", "--grace-s=3")
    assert (options.tpu_name, options.dry_run, options.foreground) == ("a_b", True, False)
    assert (options.require_process_count, options.grace_s) == (4, 3.0)


@pytest.mark.parametrize(
    ("words", "backend"), [((), "local"), (("--tpu-type", "v6e-8"), "tpu-vm"), (("--backend", "ssh"), "ssh")]
)
def test_the_backend_that_is_meant(words, backend):
    assert parse(*words).backend == backend


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--retries", "-1"), "--retries: -1 is too small; it must be at least 0"),
        (("--slices", "0"), "--slices: 0 is too small; it must be at least 1"),
        (("--slices", "0-2"), "--slices: 0 is too small; it must be at least 1"),
        (("--slices", "2-2"), "2-2 is not MIN-MAX with MIN below MAX; write 1-2, or 2 for always two"),
        (("--capacity_type", "free"), "invalid choice: 'free'"),
        (("--env", "A=1;touch x=2", "--env", "B;touch x=2"), "'B;touch x' is no name of a variable"),
        (("--nosuch",), "unrecognized arguments: --nosuch"),
        (("--backend", "moon"), "invalid choice: 'moon'"),
    ],
)
def test_wrong_options(capsys, words, text):
    with pytest.raises(SystemExit) as error:
        parse(*words)
    assert error.value.code == 2 and text in capsys.readouterr().err


def test_a_number_of_slices_is_one_or_a_range():
    assert [slice_counts(parse("--tpu_type", "v6e-8", "--slices", text)) for text in ("2", "1-2", "2-16")] == [
        (2, 2),
        (1, 2),
        (2, 16),
    ]


def test_a_backend_that_is_not_in_the_table_is_not_guessed(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--hosts", "a", "--", "x"], {"local": Everything()})
    assert "no backend 'ssh'; there is local" in capsys.readouterr().err


def test_help_has_groups_defaults_and_an_example():
    parser = Parser(allow_abbrev=False)
    add_common_options(parser, BACKENDS)
    add_worker_options(parser)
    assert isinstance(parser, argparse.ArgumentParser)
    shown = parser.format_help()
    assert "all backends:" in shown and "jobs on other machines:" in shown and "(default 0)" in shown
