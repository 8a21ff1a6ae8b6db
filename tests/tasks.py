"""Three small tasks of lm-evaluation-harness, one of each kind of request, and a model's requests without hosts."""

import json
from pathlib import Path

QUESTIONS = [
    {"question": "What is 12 plus 7?", "right": "nineteen", "wrong": "five"},
    {"question": "What is 40 in words?", "right": "forty", "wrong": "four hundred"},
    {"question": "What is 3 plus 4?", "right": "seven", "wrong": "eight"},
]
WORDS = """\
task: own_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["zz", "<eos>"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """\
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT = """\
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""
NAMES = ["own_words", "own_choice", "own_text"]


def write_tasks(directory: Path) -> str:
    """Write the tasks and their data; the directory with them."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, text in (("words", WORDS), ("choice", CHOICE), ("text", TEXT)):
        (directory / f"{name}.yaml").write_text(text.format(data=data.resolve()))
    return str(directory)
