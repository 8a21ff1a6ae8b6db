"""Prints how far transformers' logits of checkpoints are from those of the golden ones, as JSON by name.

With the Python of make_goldens.py: ``python read_saved.py DIRECTORY``, which has checkpoints by the names of its
families.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers


def main() -> None:
    goldens, gaps = pathlib.Path(__file__).parent, {}
    for saved in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            saved,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (saved, report)
        golden = np.load(goldens / saved.name / "golden.npz")
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(golden["input_ids"]).long()).logits.numpy()
        gaps[saved.name] = float(np.abs(logits - golden["logits"]).max())
    print(json.dumps(gaps))


if __name__ == "__main__":
    main()
