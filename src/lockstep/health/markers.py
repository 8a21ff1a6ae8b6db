"""Markers that chat templates put around turns and reasoning, of any family, where an answer should have none."""

import re
from collections.abc import Collection
from typing import Final

from lockstep.text import CHANNEL, THINKING

PAIRS: Final = (
    *THINKING,
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|start_think|>", "<|end_think|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|think_start|>", "<|think_end|>"),
)
"""The markers of reasoning: those that split an answer, and others that models are taught."""

_TURNS: Final = re.compile(
    r"<\|\w{1,40}\|>"  # ChatML, Llama 3 and 4, Phi, gpt-oss, Command, Granite, Kimi, GLM
    r"|<｜[^｜<>\s]{1,40}｜>"  # DeepSeek
    r"|\[/?INST\]|<</?SYS>>|\[/?SYSTEM_PROMPT\]"  # Llama 2, Mistral
    r"|</?(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"  # Gemma
    r"|<seed:(?:bos|eos|pad)>|\[gMASK\]|<sop>"  # Seed, GLM
)
_PARTS: Final = re.compile("tool|python_tag|function|call|action|response|_box|cot_budget", re.IGNORECASE)
_CHANNELS: Final = re.compile(r"<\|channel\|>(?:(?P<channel>[^<]*)(?P<next><\|(?:message|constrain)\|>)?)?")
_PAIRED: Final = re.compile("|".join(re.escape(marker) for pair in PAIRS for marker in pair))
_OPENING: Final = frozenset(begin for begin, _ in PAIRS)
_CLOSING: Final = {end: begin for begin, end in PAIRS}
_CHANNEL_NAMES: Final = ("analysis", "commentary", "final")


def is_part_marker(marker: str) -> bool:
    """Whether a marker is one of reasoning, or of other parts that some family's answers have: calls of tools, Command
    A's responses, GLM's boxes, Seed's budgets.
    """
    return marker in _OPENING or marker in _CLOSING or _PARTS.search(marker) is not None


def turn_markers(text: str, parts: Collection[str] = ()) -> list[str]:
    """The markers of turns in a text, in its order.

    Args:
        text: An answer.
        parts: The markers that the answer's own family has in its answers, such as those of gpt-oss.
    """
    return [marker for marker in _TURNS.findall(text) if marker not in parts and not is_part_marker(marker)]


def unbalanced_marker(
    text: str, *, prompt: str = "", prompt_end: str = "", ended: bool, parts: Collection[str] = ()
) -> str | None:
    """The first marker of reasoning that has no partner, or that is not the family's.

    Args:
        text: An answer.
        prompt: The prompt's text; a pair that it names is asked for.
        prompt_end: The end of the prompt's text, markers included, which may open the reasoning.
        ended: Whether the model ended the answer itself; one that was cut may be within its reasoning.
        parts: The markers that are tokens of the model's tokenizer.
    """
    before = prompt_end.rstrip()
    opened = next((begin for begin, _ in PAIRS if before.endswith(begin)), None)
    own = _OPENING.intersection(parts)
    for match in _PAIRED.finditer(text):
        marker = match[0]
        pair = _CLOSING.get(marker, marker)
        stranger = bool(own) and pair not in own and pair not in prompt and opened != pair
        if stranger or (marker in _OPENING) == (opened is not None) or (opened is not None and opened != pair):
            return marker
        opened = marker if marker in _OPENING else None
    if opened is not None and ended:
        return opened
    return _unbalanced_channel(text, ended) if CHANNEL in parts and CHANNEL in text else None


def _unbalanced_channel(text: str, ended: bool) -> str | None:
    """The marker of a channel that no message follows, or that has another name than gpt-oss knows."""
    for match in _CHANNELS.finditer(text):
        name = (match["channel"] or "").split(maxsplit=1)[:1]
        unfinished = match.end() == len(text) and not ended
        if not unfinished and (match["next"] is None or not name or name[0] not in _CHANNEL_NAMES):
            return CHANNEL
    return None
