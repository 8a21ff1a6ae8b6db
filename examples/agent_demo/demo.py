"""``make agent-demo``: over two turns a small model learns to call a calculator and to use its result, from rewards.

    python examples/agent_demo/demo.py [--directory runs/agent-demo] [--steps N]

First it is a language model of chats (`chats`) that show the format: whether the calculator is called, what it says,
and which of the numbers so far is the answer are drawn at random, and in one of four calls the numbers too. So about
one conversation in eight ends well by chance. Then GRPO rewards answers that are right, and nothing else. No sum is
asked twice: the reward of a step is that of questions that the model has never seen. It ends with 1 where the reward
has not risen from `LOW` to `HIGH`.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import fmean

from lockstep.launch import main as launch
from lockstep.printable import print_lines
from lockstep.report import conversation_text, find_run, make_report, page_path, read_jsonl

HERE = Path(__file__).parent
LOW, HIGH = 0.2, 0.8  # the mean reward of the first steps at most, and of the last ones at least
FIRST, LAST = 3, 10  # steps
LARGEST = 31  # the largest number of a sum
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "{% endif %}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def question(first, second):
    """The question for a sum."""
    return f"What is {first} + {second}?"


def chats(count, draw):
    """Yield chats with or without a call, whose answers are right by chance alone."""
    for _ in range(count):
        numbers = [draw.randint(0, LARGEST), draw.randint(0, LARGEST)]
        messages = [{"role": "system", "content": "tools: calculator"}]
        messages += [{"role": "user", "content": question(*numbers)}]
        if draw.random() < 0.5:
            first, second = numbers if draw.random() < 0.75 else (draw.randint(0, LARGEST), draw.randint(0, LARGEST))
            result = draw.randint(0, 2 * LARGEST)
            messages += [{"role": "assistant", "content": f"{CALL}{first} + {second}{CALL_END}"}]
            messages += [{"role": "tool", "content": str(result)}]
            numbers.append(result)
        yield [*messages, {"role": "assistant", "content": f"It is {draw.choice(numbers)}."}]


def write_tokenizer(texts, directory):
    """Write a byte-pair encoding for `AutoTokenizer`, in which a number is a token, and so is either end of a call."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    words = [CALL, CALL_END, *map(str, range(2 * LARGEST + 1))]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_data(directory):
    """Write chats, sums and the tokenizer; the same every time."""
    draw = random.Random(0)
    shown = list(chats(24000, draw))
    texts = [message["content"] for messages in shown for message in messages]
    write_tokenizer(texts, directory / "tokenizer")
    sums = [(first, second) for first in range(LARGEST + 1) for second in range(LARGEST + 1)]
    draw.shuffle(sums)
    asked = [{"question": question(*numbers), "answer": f"#### {sum(numbers)}"} for numbers in sums]
    for name, rows in (("chats", [{"messages": messages} for messages in shown]), ("sums", asked)):
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train(command, directory, name, data, steps, *words):
    """Run a command of lockstep on two processes with one device each; its exit code."""
    line = ["--backend", "local", "--processes", 2, "--devices_per_process", 1, "--", "lockstep", command]
    line += ["--config_path", HERE / f"{name}.yaml", "--tokenizer", directory / "tokenizer"]
    line += ["--data.train_urls", json.dumps([str(directory / data)])]
    line += ["--trainer.log_dir", directory, "--trainer.run_id", name]
    line += [] if steps is None else ["--trainer.num_train_steps", steps]
    return launch([str(word) for word in (*line, *words)])


def closing(run):
    """Print a conversation before and one after, and the rewards; whether they have risen."""
    rows = read_jsonl(run / "rollouts.jsonl")
    steps = [row["step"] for row in rows]
    for when, step, rank in (("before", min(steps), "worst"), ("after", max(steps), "best")):
        row = next(row for row in rows if (row["step"], row["rank"]) == (step, rank))
        print(f"\n{when}: one of the {rank} conversations of step {step}, reward {row['reward']:g}")
        print_lines(row["prompt"], conversation_text(row["turns"]))
    rewards = [record["reward/mean"] for record in read_jsonl(run / "metrics.jsonl") if "reward/mean" in record]
    before, after = fmean(rewards[:FIRST]), fmean(rewards[-LAST:])
    risen = before <= LOW and after >= HIGH
    print(f"\nagent-demo: mean reward {before:.2f} in the first {FIRST} steps, {after:.2f} in the last {LAST}")
    if not risen:
        print(f"agent-demo: expected at most {LOW} and then at least {HIGH}")
    return risen


def main():
    """Write the data, train twice, and tell what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/agent-demo"), help="an empty or new directory")
    parser.add_argument("--chat_steps", type=int, help="steps of the language model (default: as chats.yaml says)")
    parser.add_argument("--steps", type=int, help="steps of GRPO (default: as agent.yaml says)")
    options = parser.parse_args()
    directory = options.directory
    write_data(directory)
    print("agent-demo, 1 of 2: a language model of chats in which calls and answers are drawn at random")
    if code := train("train-lm", directory, "chats", "chats.jsonl", options.chat_steps):
        return code
    print("agent-demo, 2 of 2: it goes on with rewards alone, (last 10: ...) is their trend")
    first = ["--initialize_from_hf", directory / "chats" / "checkpoint"]
    if code := train("train-grpo", directory, "agent", "sums.jsonl", options.steps, *first):
        return code
    risen = closing(directory / "agent")
    run = find_run(directory / "agent")
    make_report([run], page_path([run]))
    return 0 if risen else 1


if __name__ == "__main__":
    sys.exit(main())
