"""Connections to an attempt that drop."""

from tests.clock import until
from tests.unit.launch.test_attempt import FAST, logs, script


def test_a_connection_that_drops_loses_no_line_repeats_none_and_runs_nothing_twice(cloud):
    """One answer is cut off at a byte in the middle of it, then the host is away for a while."""
    hosts = cloud.add("a", "b")
    text = """echo ran >> ~/ran; i=0
    while [ $i -lt 300 ]; do
        echo line $i; i=$((i+1)); sleep .004
        [ $i = 100 ] && until [ -e ~/go ]; do sleep .02; done
    done; exit 0"""
    process = cloud.start("--hosts", hosts, *FAST, *script(text))
    # The first connection only looks; that of the command comes after it.
    until(lambda: len(cloud.calls("a")) == 2)
    cloud.set("a", "down")
    until(lambda: "cannot be reached" in (cloud.jobs / "job" / "launcher.log").read_text())
    cloud.set("a", "drop", 1001)
    cloud.unset("a", "down")
    for name in "ab":
        (cloud.hosts_directory / name / "go").touch()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert not (cloud.hosts_directory / "a.drop").exists() and len(cloud.calls("a")) >= 4
    assert "worker a cannot be reached, trying again" in errors and "worker a is reached again" in errors
    wanted = [f"line {i}" for i in range(300)]
    for index, name in enumerate("ab"):
        shown = [line for line in output.splitlines() if line.startswith(f"[{index}]")]
        assert shown == [f"[{index}] {line}" for line in wanted]
        assert logs(cloud)[index].splitlines() == wanted
        assert (cloud.hosts_directory / name / "ran").read_text() == "ran\n"
