"""Makes ``trl_losses.npz``: losses of sampled answers, and their gradients, as TRL's trainers compute them.

Needs a Python of its own, because the tests run without torch. Made with Python 3.11.2, torch 2.14.1, trl 1.16.0::

    python3.11 -m venv /tmp/trl && /tmp/trl/bin/pip install torch trl==1.16.0
    /tmp/trl/bin/python tests/golden/make_trl_losses.py

``<case>/loss`` and ``<case>/gradient`` float32 ``[row, target]`` are those of the log-probabilities, of the inputs
``logprobs``, ``old_logprobs``, ``reference_logprobs``, ``drawn_logprobs``, ``mask`` and ``advantage``.
Those of pairs, ``pairs/<case>/…`` with gradients ``[pair, 2]``, are of ``pairs/policy``, sums of log-probabilities of
the chosen and the rejected response, and ``pairs/length``, their tokens. In a case that ends with ``_smoothed`` a
tenth of the labels are wrong. Cases with an entropy bonus have gradients ``[row, target, vocab]``, of
``entropy/logits``. ``rloo_kl_in_reward/advantages`` are of the rewards ``advantage``, in groups of three.
``kto/…`` has inputs of its own, see `kto_arrays`, and ``renewal/…``, see `renewal_arrays`.
"""

import inspect
import pathlib
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

ROWS, TARGETS, VOCAB = 6, 9, 11
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.3},
    "grpo_dual_clip": {"loss_type": "grpo", "delta": 1.5},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.07},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},  # TRL's is the bound itself
    "rloo": {"trainer": RLOOTrainer},
    "dapo_entropy": {"loss_type": "dapo", "entropy_coef": 0.4},
    "cispo_entropy": {"loss_type": "cispo", "epsilon_high": 1.28, "entropy_coef": 0.4},
    **{
        f"importance_{mode}": {"loss_type": "grpo", "importance": mode}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}
CAP = 1.3  # of the importance weights


def importance(mode: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """As `GRPOTrainer._generate_and_score_completions` computes it from its options, with a lower bound of 0."""
    difference = (inputs["old_logprobs"] - inputs["drawn_logprobs"]) * inputs["mask"]
    level, _, above = mode.partition("_")
    ratio = torch.exp(difference.sum(-1, keepdim=True) if level == "sequence" else difference)
    return ratio.clamp(max=CAP) if above == "truncate" else ratio.masked_fill(ratio > CAP, 0.0)


def case_of(case: dict[str, Any], inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    settings = CLIP | {"beta": 0.0, "delta": None, "importance_sampling_level": "token", "loss_type": None} | case
    mask = inputs["mask"].float()
    if bonus := case.get("entropy_coef", 0.0):
        leaf = inputs["entropy/logits"].clone().requires_grad_()
        logprobs, entropies = selective_log_softmax(leaf, inputs["entropy/tokens"]), entropy_from_logits(leaf)
    else:
        leaf = logprobs = inputs["logprobs"].clone().requires_grad_()
        entropies = torch.zeros_like(logprobs)
    same = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        sync_gradients=True,
    )
    trainer = SimpleNamespace(
        **{name: settings[name] for name in (*CLIP, "beta", "importance_sampling_level", "loss_type")},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        args=SimpleNamespace(delta=settings["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=same, model=SimpleNamespace(training=True), max_completion_length=TARGETS,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        _entropy_bonus_enabled=bool(bonus), entropy_coef=bonus, use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1, _metrics=defaultdict(lambda: defaultdict(list)),
        use_vllm="importance" in case, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    batch = {
        "prompt_ids": torch.zeros(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, TARGETS),
        "completion_mask": mask,
        "advantages": inputs["advantage"],
        "old_per_token_logps": inputs["old_logprobs"],
        "old_logps": (inputs["old_logprobs"] * mask).sum(1),
        "ref_per_token_logps": inputs["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if "importance" in case:
        batch["importance_sampling_ratio"] = importance(case["importance"], inputs)
    loss = settings.get("trainer", GRPOTrainer)._compute_loss(trainer, None, batch)
    loss.backward()
    return loss.detach(), leaf.grad


def advantages_with_divergence(inputs: dict[str, torch.Tensor], beta: float, size: int) -> torch.Tensor:
    """By the lines of `RLOOTrainer._generate_and_score_completions` from the divergence to the advantages."""
    source = inspect.getsource(RLOOTrainer._generate_and_score_completions)
    begin, end = source.index("        # Include the KL penalty"), source.index("        # Normalize advantages over")
    names = {
        "self": SimpleNamespace(beta=beta), "torch": torch, "gather": lambda x: x, "nanstd": lambda x, dim: x.std(dim),
        "num_generations": size, "rewards": inputs["advantage"].clone(), "completion_mask": inputs["mask"].float(),
        "old_per_token_logps": inputs["old_logprobs"], "ref_per_token_logps": inputs["reference_logprobs"],
    }  # fmt: skip
    exec(textwrap.dedent(source[begin:end]), names)
    advantages: torch.Tensor = names["advantages"]
    return advantages


def pair_case(name: str, policy: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of pairs, as `CPOTrainer.get_batch_loss_metrics` and ORPO's add the cross entropy, but by pair."""
    policy = policy.clone().requires_grad_()
    kind, _, smoothed = name.partition("_")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), beta=0.5, alpha=0.0, simpo_gamma=0.25, cpo_alpha=0.7,
        loss_type="simpo" if kind == "simpo" else "sigmoid", label_smoothing=0.1 if smoothed else 0.0,
    )  # fmt: skip
    mean = policy / length
    scores = policy if kind == "cpo" else mean
    if kind == "orpo":
        losses = -mean[:, 0] - ORPOTrainer.odds_ratio_loss(trainer, mean[:, 0], mean[:, 1])[0]
    else:
        losses = CPOTrainer.cpo_loss(trainer, scores[:, 0], scores[:, 1])[0] - trainer.cpo_alpha * mean[:, 0]
    losses.sum().backward()
    return losses.detach(), policy.grad


def kto_arrays() -> dict[str, np.ndarray]:
    """KTO's inputs, loss, gradient and reference point, and rows with the mismatched pairs that are made of them."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return -torch.rand(*shape, generator=generator) * 3

    mask = torch.rand(ROWS, TARGETS, generator=generator) < 0.7
    label = torch.tensor([True, False, False, True, True, False])
    leaf, kl_policy = random(ROWS, TARGETS).requires_grad_(), random(ROWS, TARGETS)
    reference, kl_reference = random(ROWS), random(ROWS) - 20
    shape = (ROWS, TARGETS + 1)

    def model(input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        logprobs = kl_policy if input_ids.any() else torch.where(mask, leaf, 0.0)
        return SimpleNamespace(log_probs=logprobs, entropy=torch.zeros_like(leaf), mean_logits=torch.zeros_like(leaf))

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x), model=SimpleNamespace(training=True),
        calculate_KL=True, aux_loss_enabled=False, precompute_ref_logps=True, loss_type="kto", beta=0.4,
        desirable_weight=1.2, undesirable_weight=0.7, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": torch.ones(shape),
        "completion_mask": torch.cat([torch.zeros(ROWS, 1), mask], 1), "label": label,
        "KL_input_ids": torch.ones(shape, dtype=torch.int64), "KL_attention_mask": torch.ones(shape),
        "KL_completion_mask": torch.ones(shape), "ref_logps": reference, "ref_KL_logps": kl_reference,
    }  # fmt: skip
    loss = KTOTrainer._compute_loss(trainer, model, batch, return_outputs=False)
    loss.backward()
    print(f"kto: {loss:.6f}, reference point {trainer._metrics['train']['kl'][0]:.6f}")

    sizes = torch.randint(1, 9, (ROWS, 2), generator=generator).tolist()
    ids = [[torch.randint(1, VOCAB, (size,), generator=generator).tolist() for size in pair] for pair in sizes]
    completions = [completion for _, completion in ids]
    examples = [
        {"prompt_ids": prompt, "completion_ids": completion, "KL_completion_ids": other, "label": True}
        for (prompt, completion), other in zip(ids, [completions[-1], *completions[:-1]], strict=True)
    ]
    rows = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=12, pad_to_multiple_of=12)(examples)
    return {
        "logprobs": leaf.detach().numpy(), "mask": mask.numpy(), "label": label.numpy(),
        "reference": reference.numpy(), "kl_reference": kl_reference.numpy(), "kl_policy": kl_policy.sum(1).numpy(),
        "loss": loss.detach().numpy(), "gradient": leaf.grad.numpy(),
        "point": np.float32(trainer._metrics["train"]["kl"][0]),
        "rows/tokens": rows["input_ids"].numpy(), "rows/loss_mask": rows["completion_mask"].numpy().astype(bool),
        "rows/mismatched_tokens": rows["KL_input_ids"].numpy(),
        "rows/mismatched_mask": rows["KL_completion_mask"].numpy().astype(bool),
    }  # fmt: skip


def renewal_arrays() -> dict[str, np.ndarray]:
    """Parameters after each of five steps, and of the reference that TRL renews with 0.6 of them every two steps."""
    models = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    model, reference = (torch.nn.ParameterList([models[0].clone()]) for _ in range(2))
    references = [models[0].clone()]
    for step in range(1, len(models)):
        model[0].data.copy_(models[step])
        if step % 2 == 0:
            SyncRefModelCallback._sync_target_model(model, reference, 0.6)
        references.append(reference[0].detach().clone())
    return {"models": models.numpy(), "references": torch.stack(references).numpy()}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(ROWS, TARGETS, generator=generator) * 3

    def near(width: float) -> torch.Tensor:
        return logprobs + width * torch.randn(ROWS, TARGETS, generator=generator)

    inputs = {
        "logprobs": logprobs, "old_logprobs": near(0.3), "reference_logprobs": near(0.5), "drawn_logprobs": near(0.3),
        "mask": torch.rand(ROWS, TARGETS, generator=generator) < 0.7,
        "advantage": torch.randn(ROWS, generator=generator),
    }  # fmt: skip
    others = torch.Generator().manual_seed(1)
    inputs["entropy/logits"] = 2 * torch.randn(ROWS, TARGETS, VOCAB, generator=others)
    inputs["entropy/tokens"] = torch.randint(0, VOCAB, (ROWS, TARGETS), generator=others)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    arrays["entropy/mean"] = entropy_from_logits(inputs["entropy/logits"])[inputs["mask"]].mean().numpy()
    for name, case in CASES.items():
        loss, gradient = case_of(case, inputs)
        arrays |= {f"{name}/loss": loss.numpy(), f"{name}/gradient": gradient.numpy()}
        print(f"{name}: {loss:.6f}")
    length = torch.randint(2, 12, (ROWS, 2), generator=generator)
    policy = -torch.rand(ROWS, 2, generator=generator) * 2 * length
    arrays |= {"pairs/policy": policy.numpy(), "pairs/length": length.numpy()}
    for name in ("cpo", "cpo_smoothed", "simpo", "simpo_smoothed", "orpo"):
        losses, gradient = pair_case(name, policy, length)
        arrays |= {f"pairs/{name}/loss": losses.numpy(), f"pairs/{name}/gradient": gradient.numpy()}
        print(f"{name}: {losses.mean():.6f}")
    arrays["rloo_kl_in_reward/advantages"] = advantages_with_divergence(inputs, beta=0.3, size=3).numpy()
    arrays |= {f"kto/{name}": value for name, value in kto_arrays().items()}
    arrays |= {f"renewal/{name}": value for name, value in renewal_arrays().items()}
    np.savez_compressed(pathlib.Path(__file__).parent / "trl_losses.npz", **arrays)


main()
