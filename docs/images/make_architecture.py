"""Draws round.svg and packages.svg, the two pictures of docs/architecture.md.

It needs nothing but Python. Each picture has a background of its own and follows the reader's light or dark theme::

    python docs/images/make_architecture.py
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent

STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de; }
  text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .small { font-size: 12px; }
  .muted { fill: #59636e; }
  .mid { text-anchor: middle; }
  .end { text-anchor: end; }
  .host { fill: #ddf4ff; stroke: #54aeff; }
  .wait { fill: #f6f8fa; stroke: #afb8c1; stroke-dasharray: 4 3; }
  .device { fill: #dafbe1; stroke: #4ac26b; }
  .guarded { fill: #fff8c5; stroke: #d4a72c; }
  .train { fill: #eaeef2; stroke: #afb8c1; }
  .line { stroke: #59636e; fill: none; stroke-width: 1.4; }
  .head { fill: #59636e; }
  .exchange { stroke: #bf3989; stroke-width: 2.5; }
  .knob { fill: #bf3989; }
  .word { fill: #bf3989; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d; }
    text { fill: #e6edf3; }
    .muted { fill: #9198a1; }
    .host { fill: #0c2d4d; stroke: #1f6feb; }
    .wait { fill: #151b23; stroke: #3d444d; }
    .device { fill: #0f3d20; stroke: #2ea043; }
    .guarded { fill: #3d2e00; stroke: #9e6a03; }
    .train { fill: #212830; stroke: #3d444d; }
    .line { stroke: #9198a1; }
    .head { fill: #9198a1; }
    .exchange { stroke: #db61a2; }
    .knob, .word { fill: #db61a2; }
  }
"""

PACKAGES = {
    "main": (0, 440, "the lockstep command"),
    "testing": (0, 980, "tests in several processes"),
    "plan": (1, 116, "a configuration on a TPU slice"),
    "doctor": (1, 332, "checks of machine, job, pod"),
    "batch_inference": (1, 548, "lockstep sample, lockstep eval"),
    "configuration": (1, 764, "YAML, keys, decoding"),
    "check": (1, 980, "what each process launches"),
    "xla": (2, 116, "programs' text, TPU compiler"),
    "training": (2, 332, "trainer, data, objectives"),
    "levanter": (2, 548, "a hook for Levanter's trainer"),
    "tunix": (2, 764, "hooks and rollout for Tunix"),
    "launch": (2, 980, "a job on every machine"),
    "callback": (3, 480, "SampleCallback and the round"),
    "callback.evaluation": (4, 870, "tasks of lm-evaluation-harness"),
    "report": (4, 300, "rows, metrics, trackers"),
    "text": (5, 216, "tokenizer, prompts"),
    "health": (5, 420, "answers that went wrong"),
    "engine": (5, 640, "sizing, programs, launches"),
    "engine.schedule": (6, 420, "slots, pages, batches"),
    "models": (6, 640, "families, readers, HF files"),
    "models.attention": (6, 860, "paged attention"),
    "placement": (7, 640, "meshes, resharding"),
    "placement.device": (8, 740, "programs, memory, chips"),
    "hosts": (9, 560, "everything between processes"),
}
"""Package: row from the top, middle of the box, what is in it."""

ARROWS = (
    ("main", "plan"),
    ("main", "doctor"),
    ("main", "configuration"),
    ("main", "check"),
    ("main", "batch_inference"),
    ("testing", "check"),
    ("check", "launch"),
    ("levanter", "callback"),
    ("tunix", "callback"),
    ("plan", "training"),
    ("plan", "xla"),
    ("doctor", "training"),
    ("training", "callback"),
    ("callback", "report"),
    ("callback", "callback.evaluation"),
    ("callback.evaluation", "text"),
    ("callback.evaluation", "engine"),
    ("batch_inference", "training"),
    ("report", "engine"),
    ("report", "text"),
    ("report", "health"),
    ("engine", "engine.schedule"),
    ("engine", "models"),
    ("engine", "models.attention"),
    ("models", "placement"),
    ("placement", "placement.device"),
    ("models.attention", "placement.device"),
    ("placement.device", "hosts"),
)
"""Importer and imported; what follows from two arrows is not drawn. tests/unit/test_layout.py fails on any other."""

NOT_DRAWN = (
    ("__main__", "main"),
    ("testing", "hosts"),
    ("models", "models.attention"),
    ("models", "text"),
    ("health", "text"),
    ("plan", "batch_inference"),
    ("xla", "launch"),
    ("xla", "placement.device"),
)
"""Further ones, between boxes of one row or far from each other."""


def box(x: float, y: float, width: float, height: float, kind: str, lines: Sequence[str], notes: str = "small") -> str:
    """A rounded box around ``x`` with a first line in bold and further ones below it."""
    parts = [f'<rect class="{kind}" x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>']
    top = y + height / 2 - 8.5 * (len(lines) - 1) + 5
    for number, line in enumerate(lines):
        style = "title mid" if number == 0 else f"{notes} mid muted"
        parts.append(f'<text class="{style}" x="{x:g}" y="{top + 17 * number:g}">{line}</text>')
    return "\n".join(parts)


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
        f'rx="8"/>\n{body}\n</svg>\n'
    )


def packages() -> str:
    """The package graph: arrows point at what a package may import."""
    wide, high, step, top = 196, 46, 82, 24
    parts = []
    for importer, imported in ARROWS:
        (row, x, _), (row_below, x_below, _) = PACKAGES[importer], PACKAGES[imported]
        y, y_below = top + row * step + high, top + row_below * step
        # An arrow leaves and arrives somewhat towards its other end.
        lean = max(-70.0, min(70.0, (x_below - x) / 4))
        a, b = x + lean, x_below - lean
        middle = (y + y_below) / 2
        parts.append(
            f'<path class="line" d="M{a:g} {y:g} C{a:g} {middle:g} {b:g} {middle:g} {b:g} {y_below - 7:g}"/>'
            f'<path class="head" d="M{b - 4.5:g} {y_below - 9:g} h9 l-4.5 9 z"/>'
        )
    for name, (row, x, what) in PACKAGES.items():
        kind = dict.fromkeys(("text", "health", "report", "engine.schedule", "launch"), "wait").get(name, "host")
        parts.append(box(x, top + row * step, wide, high, kind, [name, what]))
    bottom = top + 10 * step - 8
    parts.append(box(560, bottom, 560, high, "train", ["types, errors, units, exits", "used by every package"]))
    note = "An arrow points at what a package may import, and so at all below that. Dashed: no jax inside."
    parts.append(f'<text class="small mid muted" x="560" y="{bottom + high + 26}">{note}</text>')
    return picture(1120, bottom + high + 44, "Packages of lockstep, and who may import whom", parts)


STEPS = (
    ("begin", "step, settings", 100),
    ("prompts", "token ids", 116),
    ("measure", "free memory", 96),
    ("prepare", "sizes, compile", 104),
    ("generate", "launch, fetch, schedule, again", 304),
)
"""Phase of a round, what happens in it, width."""


def a_round() -> str:
    """A round of samples on all hosts, from left to right."""
    left, top, high = 150, 92, 52
    lanes = {"process 0 (leader)": top, "other processes": top + 84, "all devices": top + 168}
    parts = [
        f'<text class="title end" x="{left - 14}" y="{y + high / 2 + 5}">{name.split(" (")[0]}</text>'
        for name, y in lanes.items()
    ]
    leader, others, devices = lanes.values()
    parts.append(f'<text class="small end muted" x="{left - 14}" y="{leader + high / 2 + 22}">(leader)</text>')
    x = float(left)
    bars: list[tuple[float, str]] = []
    edges: dict[str, tuple[float, float]] = {}
    for name, what, width in STEPS:
        middle = x + width / 2
        edges[name] = (x, x + width)
        own = "read prompts" if name == "prompts" else name
        if name == "generate":
            parts.append(box(middle, leader, width, high, "host", [own, what]))
            parts.append(box(middle, others, width, high, "host", [own, "same scheduler, same batches"]))
        else:
            parts.append(box(middle, leader, width, high, "host", [own, what]))
            waits = name == "prompts"
            shown = ["receive", what] if waits else [own, what]
            parts.append(box(middle, others, width, high, "wait" if waits else "host", shown))
        x += width + 26
        bars.append((x - 13, name))
    start, stop = edges["generate"]
    inner = ("reshard", "prefill", "decode", "decode")
    each = (stop - start) / len(inner)
    for number, program in enumerate(inner):
        parts.append(box(start + each * (number + 0.5), devices, each - 6, high, "device", [program]))
    parts.append(box(left + (start - left - 26) / 2, devices, start - left - 26, high, "train", ["idle"]))
    after = x + 68
    parts.append(box(after, leader, 136, high, "guarded", ["report", "text, rows, tracker"]))
    parts.append(box(after, others, 136, high, "train", ["train"]))
    parts.append(box(after, devices, 136, high, "train", ["train step"]))
    parts.append(box(after + 151, leader, 150, high, "train", ["train"]))
    parts.append(box(after + 151, others, 150, high, "train", ["…"]))
    parts.append(box(after + 151, devices, 150, high, "train", ["…"]))
    carried = {
        "begin": ("1", "agree on facts"),
        "prompts": ("2", "broadcast"),
        "measure": ("3", "least memory"),
        "prepare": ("4", "agree on programs"),
        "generate": ("5 + 6", "launches, tokens; end"),
    }
    bottom = devices + high + 22
    for at, name in bars:
        number, words = carried[name]
        parts.append(f'<path class="exchange" d="M{at:g} {leader - 12} V{bottom}"/>')
        parts.append(f'<circle class="knob" cx="{at:g}" cy="{leader - 12}" r="4"/>')
        parts.append(f'<text class="word mid" x="{at:g}" y="{bottom + 18}">{number}</text>')
        for line, word in enumerate(words.split("; ")):
            parts.append(f'<text class="small mid" x="{at:g}" y="{bottom + 35 + 15 * line}">{word}</text>')
    zones = (
        (left, start - 26, "nothing is launched"),
        (start, stop, "device programs, agreed on"),
        (after - 68, after + 68, "a launch raises"),
    )
    for a, b, words in zones:
        parts.append(f'<path class="line" d="M{a:g} 52 v-8 H{b:g} v8"/>')
        parts.append(f'<text class="small mid muted" x="{(a + b) / 2:g}" y="34">{words}</text>')
    note = "Vertical lines: processes wait for each other here, and learn how the step ended on all of them."
    parts.append(f'<text class="small muted" x="{left}" y="{bottom + 78}">{note}</text>')
    return picture(int(after + 151 + 75 + 24), bottom + 96, "A round of samples on all hosts", parts)


PICTURES = {"round.svg": a_round, "packages.svg": packages}


def main() -> None:
    """Write both pictures beside this script."""
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
        print(f"wrote {HERE / name}")


if __name__ == "__main__":
    main()
