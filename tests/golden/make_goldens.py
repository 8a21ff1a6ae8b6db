"""Makes the random Hugging Face checkpoints in this directory and their logits, with transformers and torch.

Needs a Python of its own, because the tests run without torch. Made with Python 3.11.2, torch 2.13.0, transformers
5.23.0, safetensors 0.8.0::

    python3.11 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch==2.13.0 transformers safetensors
    /tmp/goldens/bin/python tests/golden/make_goldens.py

Each family gets ``<family>/config.json``, bfloat16 weights (one file; mistral: several files with an index) and
``golden.npz``: ``input_ids`` int32 [2, 24] and ``logits`` float32 [2, 24, vocab], computed in float32 from the weights
as stored. Norms and biases are random too: at their usual ones and zeros a forgotten one would not show.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    # An original context of 64 puts the 8 waves of a 16-wide head into all three bands: kept, blended, slowed.
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama3": LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
    "llama_tied": LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that attention and MLP matter, norms around 1, biases around 0."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def main() -> None:
    """Writes every family; replaces what is there."""
    here = pathlib.Path(__file__).parent
    for seed, (family, config) in enumerate(FAMILIES.items()):
        target = here / family
        shutil.rmtree(target, ignore_errors=True)
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomise(model, generator)
        model.to(torch.bfloat16).save_pretrained(target, max_shard_size="40KB" if family == "mistral" else "1GB")
        (target / "generation_config.json").unlink(missing_ok=True)

        stored = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        input_ids = torch.randint(0, config.vocab_size, (2, 24), generator=generator)
        with torch.no_grad():
            logits = stored(input_ids).logits
        assert logits.dtype == torch.float32
        np.savez(target / "golden.npz", input_ids=input_ids.numpy().astype(np.int32), logits=logits.numpy())
        files = json.dumps({f.name: f.stat().st_size for f in sorted(target.iterdir())})
        print(f"{family}: logits std {logits.std():.3f}, {files}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
