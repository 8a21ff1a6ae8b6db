"""What the length of decode launches costs while sequences wait: 1,000 mixed requests on a device that only counts.

Run it as ``.venv/bin/python benchmarks/admission.py``. A launch costs ``launch`` steps besides its own, and a prefill
launch of 512 tokens ``prefill`` steps. Printed: steps that sampled a token, as a part of all steps times slots.
"""

import random
from collections.abc import Callable

from lockstep.schedule.planning import num_decode_steps

LIMIT = 64
type Policy = Callable[[list[int], bool, bool], int]


def floor(least: int) -> Policy:
    """Ends with the shortest sequence while others wait, but not before ``least`` steps."""
    return lambda left, waiting, _: min(LIMIT, max(left), max(least, min(left)) if waiting else LIMIT)


def share(policy: Policy, slots: int, launch: float, prefill: float, stops: bool) -> float:
    """The useful part of the device's time."""
    rng = random.Random(0)
    waiting = []
    for _ in range(1000):
        pages, most = -(-rng.randint(16, 512) // 16), rng.randint(16, 256)
        waiting.append((pages, most, min(most, int(rng.expovariate(2 / most)) + 1) if stops else most))
    total, spent, active = sum(true for _, _, true in waiting), 0.0, []
    while waiting or active:
        new = [waiting.pop() for _ in range(min(len(waiting), slots - len(active)))]
        spent += prefill * -(-sum(pages for pages, _, _ in new) // 32)
        active += [(most, true) for _, most, true in new]
        steps = policy([most for most, _ in active], bool(waiting), stops)
        spent += launch + steps
        active = [(most - steps, true - steps) for most, true in active if true > steps]
    return total / (slots * spent)


if __name__ == "__main__":
    policies = {f"floor {least}": floor(least) for least in (1, 8, 16, 32, 64)}
    policies["num_decode_steps"] = lambda left, waiting, stop: num_decode_steps(
        left, LIMIT, waiting=waiting, may_stop=stop
    )
    for slots in (8, 64, 256):
        for launch, prefill in ((0.5, 1), (2, 4), (6, 8)):
            for stops in (False, True):
                shares = (f"{name} {share(each, slots, launch, prefill, stops):.3f}" for name, each in policies.items())
                print(f"slots {slots}, launch {launch}, prefill {prefill}, stops {stops}:", ", ".join(shares))
