"""Makes ``reward_model/``: a tiny Qwen2 classifier with one label, and the scores that transformers gives to rows.

Needs a Python of its own, because the tests run without torch. Made with Python 3.11.2, torch 2.14.1, transformers
5.24.0::

    python3.11 -m venv /tmp/trl && /tmp/trl/bin/pip install torch transformers
    /tmp/trl/bin/python tests/golden/make_reward_model.py

``scores.npz`` has ``tokens`` int64 ``[row, position]``, padded with 0 behind ``lengths``, and ``scores`` ``[row]``.
"""

import pathlib

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

ROWS, LENGTH, VOCAB = 5, 12, 512


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    lengths = torch.tensor([12, 3, 7, 1, 9])
    tokens = torch.randint(1, VOCAB, (ROWS, LENGTH))
    inside = torch.arange(LENGTH) < lengths[:, None]
    tokens = torch.where(inside, tokens, 0)
    with torch.no_grad():
        scores = model(input_ids=tokens, attention_mask=inside.long()).logits[:, 0]
    path = pathlib.Path(__file__).parent / "reward_model"
    model.save_pretrained(path)
    np.savez_compressed(path / "scores.npz", tokens=tokens.numpy(), lengths=lengths.numpy(), scores=scores.numpy())
    print(scores.tolist())


main()
