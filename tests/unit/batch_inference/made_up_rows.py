"""Rows of a small job, written by hand."""

from lockstep.batch_inference.prompt_store import JobShape
from lockstep.batch_inference.row_files import RowFile, RowIndex, host_file

SHAPE = JobShape(rounds=2, prompts=5, generations=2)


def row(number, text="tëxt"):
    unit, generation = divmod(number, SHAPE.generations)
    round_, prompt = divmod(unit, SHAPE.prompts)
    return {
        "round": round_,
        "prompt_id": prompt,
        "generation_id": generation,
        "prompt": f"prompt {prompt}",
        "generated_text": f"{text} {number}",
        "num_tokens": number,
        "finish_reason": "stop",
        "length": float(number),
    }


def write(directory, host, numbers, **values):
    index = RowIndex(SHAPE)
    RowFile(host_file(directory, host), index).append([row(number, **values) for number in numbers])
    return index
