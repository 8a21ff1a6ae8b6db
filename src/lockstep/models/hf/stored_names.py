"""The names under which checkpoints store a tensor: the usual one, and those that transformers 5 reads as well."""

import dataclasses
import re
from collections.abc import Iterator

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The tensors of the embedding and of the output layer."""
_BASE = "model."
_OF_TEXT = ("model.language_model.", "language_model.model.")  # the second is that of Gemma 3 and Mistral Small
_HEAD_OF_TEXT = ("language_model.",)
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
_WHOLE = ("down_proj", "w2")


@dataclasses.dataclass(frozen=True)
class StoredName:
    """A stored tensor, or the part of it that is one expert's."""

    name: str
    expert: int | None = None
    half: int | None = None
    """0 for the upper half of the expert's rows, 1 for the lower; None for all."""

    def rows(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the first row, of all experts' rows one after the other, and the shape of the part.

        Args:
            shape: The shape of the stored tensor; of experts ``[expert, output, input]``.
        """
        if self.expert is None:
            return 0, shape
        _, rows, columns = shape
        parts = 1 if self.half is None else 2
        return self.expert * rows + (self.half or 0) * (rows // parts), (rows // parts, columns)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of a shape has such a part."""
        return self.expert is None or (len(shape) == 3 and self.expert < shape[0] and not shape[1] % 2)


def stored_names(name: str, *, tied: bool = False) -> Iterator[StoredName]:
    """Yield the names under which a tensor may be stored, the usual one first.

    Without the prefix of the base model, with one more, or with that of a language model beside a vision tower;
    Mixtral's experts in ``mlp``; the experts of a layer in ``gate_up_proj`` and ``down_proj``. Source:
    ``transformers/conversion_mapping.py`` and ``core_model_loading.py``.

    Args:
        tied: Whether the output layer is the embedding, so that either has both.
    """
    for usual in (name, HEAD) if tied and name == EMBED else (name,):
        for module in dict.fromkeys((usual, usual.replace(".block_sparse_moe.", ".mlp."))):
            bare = module.removeprefix(_BASE)
            of_text = _OF_TEXT if module != bare else _HEAD_OF_TEXT if bare == HEAD else ()
            for place in dict.fromkeys((module, bare, _BASE + module, *(prefix + bare for prefix in of_text))):
                yield StoredName(place)
                if match := _EXPERT.fullmatch(place):
                    experts, expert, part = match["experts"], int(match["expert"]), match["part"]
                    if part in _HALVES:
                        yield StoredName(f"{experts}.gate_up_proj", expert, _HALVES[part])
                    elif part in _WHOLE:
                        yield StoredName(f"{experts}.down_proj", expert)
