"""Makes the random Hugging Face checkpoints in this directory and their logits, with transformers and torch.

Needs a Python of its own, because the tests run without torch. Made with Python 3.11.2, torch 2.13.0, transformers
5.23.0, safetensors 0.8.0::

    python3.11 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch==2.13.0 transformers safetensors
    /tmp/goldens/bin/python tests/golden/make_goldens.py

The families from gemma2 on are of transformers 5.24.0, those with experts up to deepseek_v3_lite of torch 2.14.1 and
transformers 5.12.1 (whose deepseek_v2 leaves out the factor of scores of YaRN);
families named after the command are made alone; ``variants`` makes ``variants.npz``, the logits of `variants.py` (torch
2.13.0, transformers 5.12.1, ml_dtypes 0.5; ``yarn_in_layers_with_a_window`` of 5.24.0). From gemma2 on their
``golden.npz`` also has ``generated`` int32 [2, 20], the tokens of greedy decoding with transformers' cache.

A family is what its ``<family>/config.json`` says: numbers differ where one could be taken for another, most are odd or
twice a prime, windows are shorter than the text, no factor is a power of two, a layer of each kind is there. It gets
bfloat16 weights (one file; mistral: several files with an index) and
``golden.npz``: ``input_ids`` int32 [2, 24] and ``logits`` float32 [2, 24, vocab], computed in float32 from the weights
as stored. Norms and biases are random too: at their usual ones and zeros a forgotten one would not show.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers
from variants import POSITIONS, VARIANTS

NAMES = (
    "llama3 llama_tied mistral qwen2 qwen3 gemma2 gemma3 olmo2 phi3 mixtral qwen3_moe qwen3_moe_mixed "
    "qwen2_moe gpt_oss glm4 glm4_moe cohere2 qwen3_next deepseek_v3 deepseek_v3_lite qwen3_5 qwen3_5_moe "
    "deepseek_v2 deepseek_v2_lite olmo3 gemma granite smollm3 seed_oss ernie4_5 exaone4 glm4_moe_lite "
    "ministral3 olmoe minimax_m2 hunyuan_v1_dense hunyuan_v1_moe mistral4 arcee gemma4 gemma4_moe"
).split()
"""In this order: the seed of a family is its place, so that a new one comes last."""


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that attention and MLP matter, norms around 1, biases around 0."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            gemma = "Gemma" in type(model).__name__
            delta = type(model).__name__.startswith(("Qwen3Next", "Qwen3_5"))
            plain = not name.endswith("linear_attn.norm.weight") and "Gemma4" not in type(model).__name__
            centred = (gemma or delta) and plain
            tied = gemma or type(model).__name__.startswith(("Cohere", "Granite", "SmolLM3", "Ernie"))
            if name == "model.norm.weight" and tied:
                parameter.copy_(8 + 3 * noise)
            elif name == "model.embed_tokens.weight" and tied:
                # Small, for it is the output layer too: each token would otherwise be followed by itself.
                parameter.copy_(noise * 0.2 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.copy_((0 if centred else 1) + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 1)  # memories of a few positions and of many
            elif name.endswith("conv1d.weight"):
                parameter.copy_(noise)
            elif name.endswith("gate_up_proj") and "GptOss" in type(model).__name__:
                parameter.copy_(noise * 6 / parameter.shape[-1] ** 0.5)  # beyond the clamps
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def write_variants(here: pathlib.Path) -> None:
    """Writes the logits of each variant at some positions of its family's text, bit for bit what loading it gives."""
    logits = {}
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            variant.write(target := pathlib.Path(directory) / "checkpoint")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                target, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()
        input_ids = torch.from_numpy(np.load(here / variant.family / "golden.npz")["input_ids"]).long()
        with torch.no_grad():
            logits[name] = model(input_ids).logits[:, POSITIONS].numpy()
        usual = np.load(here / variant.family / "golden.npz")["logits"][:, POSITIONS]
        print(f"{name}: {np.abs(logits[name] - usual).max():.4f} from {variant.family}")
    np.savez_compressed(here / "variants.npz", **logits)


def main() -> None:
    """Writes every family, or those named; replaces what is there."""
    here = pathlib.Path(__file__).parent
    if sys.argv[1:] == ["variants"]:
        return write_variants(here)
    families = sys.argv[1:] or NAMES
    for seed, family in enumerate(NAMES):
        if family not in families:
            continue
        target = here / family
        config = transformers.AutoConfig.from_pretrained(target)
        shutil.rmtree(target)
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(transformers, config.architectures[0])
        model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
        randomise(model, generator)
        model.to(torch.bfloat16).save_pretrained(target, max_shard_size="40KB" if family == "mistral" else "1GB")
        (target / "generation_config.json").unlink(missing_ok=True)

        stored = kind.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        input_ids = torch.randint(0, config.vocab_size, (2, 24), generator=generator)
        with torch.no_grad():
            logits = stored(input_ids).logits
        assert logits.dtype == torch.float32
        arrays = {"input_ids": input_ids.numpy().astype(np.int32), "logits": logits.numpy()}
        if config.vocab_size == 118:  # from gemma2 on
            stored.generation_config.eos_token_id = None
            mask = torch.ones_like(input_ids)
            rest = stored.generate(input_ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, 24:]
            arrays["generated"] = rest.numpy().astype(np.int32)
        np.savez(target / "golden.npz", **arrays)
        files = json.dumps({f.name: f.stat().st_size for f in sorted(target.iterdir())})
        print(f"{family}: logits std {logits.std():.3f}, {files}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
