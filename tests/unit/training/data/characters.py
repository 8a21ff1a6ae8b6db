"""A tokenizer whose tokens are characters, and files of records."""

import json


class Tokenizer:
    """Characters as tokens: BOS is 1, EOS is 2, a role is 3. It does not say which characters a token holds."""

    eos_token_id = 2
    chat_template = "characters"
    name_or_path = "./characters"  # no name that the hub could know
    init_kwargs = {}
    added_tokens_decoder = {}
    special_tokens_map = {}

    def get_vocab(self):
        return {chr(code): code for code in range(256)}

    def convert_ids_to_tokens(self, token):
        return chr(token)

    def encode(self, text, add_special_tokens=True):
        special = {"<": 1, ">": 2, "|": 3}
        return [1] * add_special_tokens + [special.get(c, ord(c)) for c in text]

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        turns = "".join(f"|{m['content']}" + (">" if m["role"] == "assistant" else "") for m in messages)
        return "<" + turns + ("|" if add_generation_prompt else "")


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return (str(path),)


def chars(text):
    return [ord(c) for c in text]


def columns(rows):
    """All rows of the only source, in the order of the files."""
    (cache,) = rows.caches
    return cache.take(range(len(cache)))


def preference(chosen, rejected, question="q"):
    prompt = {"role": "user", "content": question}
    return {
        "prompt": question,
        "chosen": [prompt, {"role": "assistant", "content": chosen}],
        "rejected": [prompt, {"role": "assistant", "content": rejected}],
    }
