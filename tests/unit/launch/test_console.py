"""The launcher's own lines."""

from lockstep.launch.console import Console


def test_what_the_launcher_says_of_a_worker_moves_no_terminal_and_has_no_credentials(capsys):
    Console().say("worker a: gone \x1b[2J\x07 at s3://key:hush@bucket/a?sig=hush\nagain")
    assert capsys.readouterr().err == "launch: worker a: gone \\x1b[2J\\x07 at s3://bucket/a?…\nlaunch: again\n"
