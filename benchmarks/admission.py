"""What the length of decode launches costs while sequences wait: 1,000 mixed requests on a device that only counts.

    python -m benchmarks.admission [--json PATH]

A launch costs ``launch`` steps besides its own, and a prefill
launch of 512 tokens ``prefill`` steps. Answers are as long as they may be (``stops`` 0), or their lengths are
distributed exponentially with the mean ``stops``. Printed: steps that sampled a token, as a part of all steps × slots.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.sizes import sized
from benchmarks.workers import write_json
from lockstep.engine.schedule.batch import num_decode_steps

LIMIT, REQUESTS = 64, sized(1000, 20)
type Policy = Callable[[list[int], bool, float], int]
"""Takes what the active sequences have left, whether others wait, and the share of tokens that stopped an answer."""


def floor(least: int) -> Policy:
    """Ends with the shortest sequence while others wait, but not before ``least`` steps."""
    return lambda left, waiting, _: min(LIMIT, max(left), max(least, min(left)) if waiting else LIMIT)


def expected(left: list[int], waiting: bool, stop_rate: float) -> int:
    """What the scheduler does."""
    return num_decode_steps(np.array(left), LIMIT, waiting=waiting, stop_rate=stop_rate)


def share(policy: Policy, slots: int, launch: float, prefill: float, stops: int) -> float:
    """The useful part of the device's time."""
    rng = random.Random(0)
    waiting = []
    for _ in range(REQUESTS):
        pages, most = -(-rng.randint(16, 512) // 16), rng.randint(16, 256)
        waiting.append((pages, most, min(most, int(rng.expovariate(1 / stops)) + 1) if stops else most))
    total, spent, active = sum(true for _, _, true in waiting), 0.0, []
    stopped, sampled = 0, 0
    while waiting or active:
        new = [waiting.pop() for _ in range(min(len(waiting), slots - len(active)))]
        spent += prefill * -(-sum(pages for pages, _, _ in new) // 32)
        active += [(most, true) for _, most, true in new]
        rate = (stopped + 1) / (sampled + LIMIT) if stops else 0.0
        steps = policy([most for most, _ in active], bool(waiting), rate)
        spent += launch + steps
        sampled += sum(min(steps, true) for _, true in active)
        stopped += sum(true <= steps and true < most for most, true in active)
        active = [(most - steps, true - steps) for most, true in active if true > steps]
    return total / (slots * spent)


def main() -> None:
    """Simulate, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the shares to this file")
    options = parser.parse_args()
    policies = {f"floor {least}": floor(least) for least in (1, 8, 16, 32, 64)}
    policies["num_decode_steps"] = expected
    rows = {}
    for slots in (8, 64, 256):
        for launch, prefill in ((0.5, 1), (2, 4), (6, 8)):
            for stops in (0, 20, 100, 1000):
                shares = {name: share(policy, slots, launch, prefill, stops) for name, policy in policies.items()}
                case = f"slots {slots}, launch {launch}, prefill {prefill}, stops {stops}"
                print(f"{case}:", ", ".join(f"{name} {value:.3f}" for name, value in shares.items()))
                rows[case] = shares
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
