"""Programs that the launcher runs: what is made of their ends, whichever they are."""

import sys

import pytest

from lockstep.exits import NOT_FOUND, REFUSED, UNREACHABLE
from lockstep.launch import kubectl, slurm
from lockstep.launch.tool import Cause, Tool, ToolError

TOOL = Tool(
    missing=Cause(summary="{program} was not found", advice="Install it", code=NOT_FOUND),
    causes=(
        Cause(name="quota", pattern="over the quota", summary="{zone} is full", advice="Take less than in {zone}"),
        Cause(name="away", pattern="did not answer|away", summary="nobody is there", advice="Wait", code=UNREACHABLE),
    ),
    unknown=Cause(name="unknown", summary="it failed", advice="Look"),
)


def run(program, **options):
    return TOOL.run([sys.executable, "-c", program], {"zone": "here"}, **options)


def test_what_it_reads_and_prints():
    assert run("print(input() * 2)", stdin="ab") == "abab\n"
    assert run("import sys; print(repr(sys.stdin.read()))") == "''\n", "it waits for no answer"


@pytest.mark.parametrize(
    ("program", "name", "code", "text"),
    [
        ("exit('over\\n the quota')", "quota", REFUSED, r"here is full\.\n  \$ .*\n  over\n   the quota\nTake .*e\."),
        ("print('it is away'); exit(3)", "away", UNREACHABLE, r"nobody is there\.\n  \$ .*\n  it is away\nWait\."),
        ("exit('{zone}')", "unknown", REFUSED, r"it failed\.\n  \$ .*\n  {zone}\nLook\."),
        ("print('\\n'.join('ab' * 20)); exit(1)", "unknown", REFUSED, r"it failed\.\n  \$ .*\n(  [ab]\n){12}Look\."),
    ],
    ids=["lines", "stdout", "braces", "last lines"],
)  # fmt: skip
def test_a_failure_says_why_the_command_what_was_printed_and_what_to_try(program, name, code, text):
    with pytest.raises(ToolError, match=f"(?s)^{text}$") as caught:
        run(program)
    assert (caught.value.cause.name, caught.value.code, caught.value.cause.passes) == (name, code, code == UNREACHABLE)


def test_one_that_is_not_there_and_one_that_does_not_answer():
    with pytest.raises(
        ToolError, match=r"^no-such-program was not found\.\n  \$ no-such-program a\nInstall it\.$"
    ) as caught:
        TOOL.run(["no-such-program", "a"])
    assert caught.value.code == NOT_FOUND
    with pytest.raises(ToolError, match=r"did not answer within 0\.2 s\nWait") as caught:
        run("import time; time.sleep(60)", limit_s=0.2)
    assert caught.value.code == UNREACHABLE


@pytest.mark.parametrize(
    ("tool", "text", "code", "advice"),
    [
        (kubectl.TOOL, "executable gke-gcloud-auth-plugin not found", REFUSED, "install gke-gcloud-auth-plugin"),
        (kubectl.TOOL, "error: You must be logged in to the server (Unauthorized)", REFUSED, "gcloud auth login"),
        (kubectl.TOOL, "The connection to the server h was refused - the right port?", UNREACHABLE, "upgraded"),
        (kubectl.TOOL, "Error from server (ServiceUnavailable): it is away", UNREACHABLE, "upgraded"),
        (kubectl.TOOL, "Unable to connect to the server: dial tcp: i/o timeout", UNREACHABLE, "Is the cluster there"),
        (kubectl.TOOL, "(NotFound): namespaces x not found", REFUSED, "kubectl create namespace NAME"),
        (kubectl.TOOL, "(Forbidden): jobsets is forbidden: User cannot", REFUSED, "Your account may not"),
        (kubectl.TOOL, "something new", REFUSED, "kubectl get failed.\n  $ kubectl get\n  something new"),
        (slurm.TOOL, "Invalid account or account/partition combination", REFUSED, "choose one with --account"),
        (slurm.TOOL, "Requested node configuration is not available", REFUSED, "fewer --nodes"),
        (slurm.TOOL, "QOSMaxNodePerUserLimit", REFUSED, "Your quota does not allow it"),
    ],
)
def test_what_a_program_of_a_cluster_says_has_a_code_and_advice(tool, text, code, advice):
    error = tool.error(["kubectl", "get"], text, {"verb": "get"})
    assert error.code == code and advice in str(error)
