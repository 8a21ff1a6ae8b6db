"""``--dry-run`` for workers: commands to paste into a shell that do by hand what the launcher does."""

import argparse
import os
import re
import shlex

from lockstep.launch.backend import Transport, root_on_worker
from lockstep.launch.environment import JobEnvironment, job_variables
from lockstep.launch.sync import files_of, is_credential


def show_commands(
    options: argparse.Namespace,
    environment: JobEnvironment,
    name: str,
    created: list[str],
    transport: Transport,
    setup: str | None,
    setup_folder: str | None = None,
) -> None:
    """Print the commands that create workers, then those for each worker.

    Args:
        created: Shell commands that create the workers.
        setup: The script that sets a worker up; None: none.
        setup_folder: The directory that ``created`` fills with the script and the files that it needs; None: there
            are none.
    """
    count = len(transport.workers)
    left_out = [name for each in options.sync for name in files_of(each) if is_credential(name)]
    for command in created:
        print(command)
    for index, worker in enumerate(transport.workers):
        root = root_on_worker(name, index)
        print(f"\n# worker {index} of {count}, {worker.name}")

        def show(command: str, source: str = "", index: int = index) -> None:
            print(shlex.join(transport.argv(index, command)) + (f" {source}" if source else " < /dev/null"))

        if setup_folder is not None:
            there = f"mkdir -p {root}/setup && tar -xf - -C {root}/setup && cd {root}/setup && sh setup.sh"
            print(f"tar -cf - -C {shlex.quote(setup_folder)} . | {shlex.join(transport.argv(index, there))}")
        elif setup is not None:
            show(f"mkdir -p {root} && cd {root} && cat > setup.sh && sh setup.sh", f"<<'EOF_SETUP'\n{setup}\nEOF_SETUP")
        if options.sync:
            files = shlex.join(os.path.relpath(each) for each in options.sync)
            without = shlex.join(f"--exclude={name}" for name in (".git", *left_out))
            packed = f"tar {without} -czf - {files} | "
            print(packed + shlex.join(transport.argv(index, f"mkdir -p {root}/files && tar -xzf - -C {root}/files")))
        secret = sorted(environment.secret)
        if options.env_file:
            path = shlex.quote(str(options.env_file))
            show(f"umask 077; mkdir -p {root} && cat > {root}/secrets.env", f"< {path}")
        words = [
            f"{key}={value}"
            for key, value in {**worker.environment, **job_variables(count), **environment.public}.items()
        ]
        words += [f"{key}=<redacted>" for key in secret if key in dict(options.env)]
        cwd = _for_shell(options.workdir) if options.workdir else (f"{root}/files" if options.sync else "~")
        steps = [f"cd {cwd}"]
        if options.env_file:
            steps.append(f"set -a && . {root}/secrets.env && set +a")
        for each in reversed(worker.path):
            steps.append(f'PATH={_for_shell(each)}:"$PATH"')
        steps.append(shlex.join(["exec", "env", "PYTHONUNBUFFERED=1", *words, *options.command]))
        show(" && ".join(steps))
    print("\n# Each worker's last command is for a terminal of its own. The launcher starts it detached from the")
    print("# connection, follows its output, ends all when one fails, and keeps secrets in memory, in no file.")


def here_document(text: str) -> str:
    """A text as a command's standard input in a shell, which expands nothing in it.

    Args:
        text: The text, with a newline at its end.
    """
    end = "END_OF_FILE"
    while end in text:
        end += "_"
    return f"<< '{end}'\n{text}{end}"


def _for_shell(path: str) -> str:
    """A path on a worker as one word of its shell; a ``~`` at its beginning is the home directory."""
    home, slash, rest = path.partition("/")
    if re.fullmatch(r"~[A-Za-z0-9._-]*", home):
        return home + slash + (shlex.quote(rest) if rest else "")
    return shlex.quote(path)
