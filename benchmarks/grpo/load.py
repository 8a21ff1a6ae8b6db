"""What every contestant trains: a random Llama, questions, a reward. No JAX here: it is read in two environments."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

ROPE_THETA = 1e6
"""Tunix's Llama has no other."""
NORM_EPS = 1e-5
SPECIAL = ("<pad>", "<bos>", "<eos>")
QUESTIONS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoLoad:
    """A model and what a step has to do; no answer ends before its last token.

    Args:
        hidden: The width of the model.
        mlp: The width of the MLP.
        layers: The number of layers.
        heads: The number of query heads.
        kv_heads: The number of key/value heads.
        vocab: The number of token ids.
        prompts: The number of prompts per step.
        group: The number of answers to each prompt.
        prompt_tokens: The tokens of each prompt.
        new_tokens: The tokens of each answer.
        learning_rate: The learning rate of Adam.
    """

    hidden: int = 256
    mlp: int = 704
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 64
    learning_rate: float = 3e-3

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads

    @property
    def answers(self) -> int:
        """Answers per step."""
        return self.prompts * self.group

    @property
    def row(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + self.new_tokens

    def weights(self) -> dict[str, np.ndarray]:
        """The first weights by the names that lockstep's decoder has for them, with its axes."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32) * 0.05

        group = self.heads // self.kv_heads
        return {
            "embed": normal(self.vocab, self.hidden),
            "attn_norm": np.ones((self.layers, self.hidden), np.float32),
            "q": normal(self.layers, self.hidden, self.kv_heads, group, self.head),
            "k": normal(self.layers, self.hidden, self.kv_heads, self.head),
            "v": normal(self.layers, self.hidden, self.kv_heads, self.head),
            "o": normal(self.layers, self.kv_heads, group, self.head, self.hidden),
            "mlp_norm": np.ones((self.layers, self.hidden), np.float32),
            "gate": normal(self.layers, self.hidden, self.mlp),
            "up": normal(self.layers, self.hidden, self.mlp),
            "down": normal(self.layers, self.mlp, self.hidden),
            "final_norm": np.ones(self.hidden, np.float32),
            "lm_head": normal(self.hidden, self.vocab),
        }

    def words(self) -> list[str]:
        """The text of each token id; a quarter of them begin with a."""
        names = [f"{'abcd'[number % 4]}{number}" for number in range(len(SPECIAL), self.vocab)]
        return [*SPECIAL, *names]

    def texts(self) -> list[str]:
        """The questions, each of `prompt_tokens` tokens with the one that the tokenizer puts before them."""
        words, rng = self.words(), np.random.default_rng(1)
        drawn = rng.integers(len(SPECIAL), self.vocab, (QUESTIONS, self.prompt_tokens - 1))
        return [" ".join(words[number] for number in numbers) for numbers in drawn]

    def fixed_rows(self) -> np.ndarray:
        """Rows of tokens whose log-probabilities under the first weights all contestants must agree on."""
        return np.random.default_rng(2).integers(len(SPECIAL), self.vocab, (4, self.row)).astype(np.int32)


LOADS = {
    "full": GrpoLoad(),
    "quick": GrpoLoad(hidden=128, mlp=352, layers=2, heads=4, kv_heads=2, vocab=2048, prompts=2, new_tokens=32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateLoad:
    """An update of answers whose lengths are drawn between two numbers, as GSM8K's are.

    Args:
        model: The model, and the tokens of a row.
        answers: The number of answers.
        rows_at_a_time: The rows of a device's microbatch.
    """

    model: GrpoLoad
    answers: int = 64
    rows_at_a_time: int = 1
    shortest_prompt: int = 60
    longest_prompt: int = 250
    shortest_answer: int = 50
    longest_answer: int = 400


_ROW = {"prompt_tokens": 512, "new_tokens": 512}
UPDATES = {
    "measured": UpdateLoad(model=dataclasses.replace(LOADS["quick"], **_ROW)),
    "smallest": UpdateLoad(
        model=dataclasses.replace(LOADS["quick"], layers=1, prompt_tokens=32, new_tokens=32),
        answers=16, shortest_prompt=2, longest_prompt=12, shortest_answer=2, longest_answer=20,
    ),
}  # fmt: skip
"""Loads of `benchmarks.grpo.update`, with rows of 1,024 tokens and of 64."""


def reward(row: Any, prompt: Any = None) -> float:
    """The share of an answer's words that begin with a; ours."""
    return share(row.generated_text)


def share(text: str) -> float:
    """The share of a text's words that begin with a."""
    words = text.split()
    return sum(word.startswith("a") for word in words) / max(len(words), 1)


def save_tokenizer(load: GrpoLoad, directory: Path) -> None:
    """Write a tokenizer of whole words, which begins each text with ``<bos>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(load.words())}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
