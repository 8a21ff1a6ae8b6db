"""A process that renders chat templates, which are programs of whoever made the tokenizer, with limits of its own.

`lockstep.text.template` starts it as a script. Requests are pickles, replies JSON, each after its length in 8 bytes. It
reads no message of anybody else's.
"""

import datetime
import functools
import json
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks what an assistant wrote; its text is as without."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """A template in the environment of transformers, on whose names templates rely.

    https://huggingface.co/docs/transformers/chat_templating_writing
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def render(source: str, variables: Mapping[str, Any], date: str) -> str:
    """The text of a template.

    Args:
        date: The date of ``strftime_now``, such as ``2026-11-28``; empty for today.

    Raises:
        Exception: Whatever the template raises.
    """
    fixed = {"strftime_now": datetime.date.fromisoformat(date).strftime} if date else {}
    return _compiled(source).render(**variables, **fixed)


def _reply(request: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = render(request["source"], request["variables"], request["date"])
        if len(text) > request["characters"]:
            return {"error": f"its text has {len(text):,} characters; at most {request['characters']:,} are possible"}
        return {"text": text}
    except MemoryError:
        return {"error": f"it needs more than {request['memory']:,} bytes of memory"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    while head := requests.read(8):
        request = pickle.loads(requests.read(struct.unpack("<Q", head)[0]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_AS, request["memory"])
        # Where the process that asks is killed, nobody else ends this one.
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + request["seconds"]) + 2)
        _send(replies, _reply(request))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _send(replies: BinaryIO, reply: Mapping[str, str]) -> None:
    data = json.dumps(reply).encode()
    replies.write(struct.pack("<Q", len(data)) + data)
    replies.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the process that asks decides
    _send(sys.stdout.buffer, {"text": "ready"})
    _serve(sys.stdin.buffer, sys.stdout.buffer)
