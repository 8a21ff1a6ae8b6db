"""The parts of an answer: what a model thinks before it, by the markers of its chat template, and the answer itself."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Final

THINKING: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""The markers of reasoning in the templates of Qwen, DeepSeek and others; of Magistral, Seed-OSS, Kimi, Command A."""
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HARMONY: Final = ("<|start|>", CHANNEL, "<|constrain|>", MESSAGE, "<|end|>")
"""The markers of gpt-oss, whose answer is a turn of several messages, each in a channel
(https://github.com/openai/harmony).
"""
MARKERS: Final = (*(marker for pair in THINKING for marker in pair), *HARMONY)
"""The markers that stay in the text of an answer also where they are special tokens."""
_MESSAGE: Final = re.compile(
    r"(?:(?:<\|start\|>|\A)(?P<role>[^<]*))?(?:<\|channel\|>(?P<channel>\w*)(?P<rest>[^<]*)"
    r"(?:<\|constrain\|>[^<]*)?)?<\|message\|>(?P<body>.*?)(?=<\|(?:start|channel|end|return|call)\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
FINAL: Final = "final"
"""The channel of gpt-oss that has the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelMessage:
    """A message of gpt-oss.

    Args:
        channel: Its channel; None where its header names none.
        recipient: The tool that it is sent to, such as ``functions.add``; None for none.
        end: The place in the text at which it ends.
    """

    channel: str | None
    recipient: str | None
    body: str
    end: int


def channel_messages(text: str) -> Iterator[ChannelMessage]:
    """Yield the messages of a turn of gpt-oss, the first of which may lack the beginning of its header."""
    for match in _MESSAGE.finditer(text):
        recipient = _RECIPIENT.search(f"{match['role'] or ''} {match['rest'] or ''}")
        yield ChannelMessage(
            channel=match["channel"],
            recipient=recipient and recipient[1],
            body=match["body"],
            end=match.end(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its parts.

    Args:
        text: All that the model wrote, markers included.
        reasoning: What it wrote before its final answer, such as between ``<think>`` and ``</think>``, or in gpt-oss's
            channels but ``final``; None where its text has no such part.
        content: The final answer; all of the text where it has no other part, nothing where the model did not get
            there.
    """

    text: str
    reasoning: str | None = None
    content: str


def split_answer(text: str, prompt_end: str = "") -> Answer:
    """The parts of an answer.

    Args:
        text: What the model wrote, with the markers of its template.
        prompt_end: The end of the prompt's text, markers included, which may open the reasoning (DeepSeek R1).

    Example:
        >>> lockstep.text.split_answer("<think>12 + 7 = 19.</think>It is 19.").content
        'It is 19.'
    """
    if MESSAGE in text or CHANNEL in text or _open_channel(prompt_end):
        return _split_channels(text, _open_channel(prompt_end))
    for begin, end in THINKING:
        opened = prompt_end.rstrip().endswith(begin)
        thought, closed, rest = text.rpartition(end)
        unfinished = rest.lstrip().startswith(begin)
        if not (closed or opened or unfinished):
            continue
        if not closed or unfinished:
            return Answer(text=text, reasoning=text.replace(begin, "").replace(end, "").strip(), content="")
        return Answer(text=text, reasoning=thought.replace(begin, "").replace(end, "").strip(), content=rest.strip())
    return Answer(text=text, content=text)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string in it."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _open_channel(prompt_end: str) -> str | None:
    """The channel of the message that a prompt ends in the middle of; None where it does not."""
    messages = list(channel_messages(prompt_end))
    return messages[-1].channel or "" if messages and messages[-1].end == len(prompt_end) else None


def _split_channels(text: str, opened: str | None) -> Answer:
    """The messages of a turn: the last one in the channel ``final`` is the answer, all others are reasoning."""
    whole = text if opened is None else f"{CHANNEL}{opened}{MESSAGE}{text}"
    messages = [(message.channel, message.body) for message in channel_messages(whole)]
    finals = [body for channel, body in messages if channel == FINAL]
    thoughts = [body.strip() for channel, body in messages if channel != FINAL]
    reasoning = "\n".join(body for body in [*thoughts, *finals[:-1]] if body)
    return Answer(text=text, reasoning=reasoning or None, content=finals[-1] if finals else "")
