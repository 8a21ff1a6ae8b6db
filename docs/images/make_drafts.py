"""Draws drafts.svg, the picture of docs/speed.md.

It needs nothing but Python. The picture has a background of its own and follows the reader's light or dark theme::

    python docs/images/make_drafts.py
"""

from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de; }
  text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .small { font-size: 12px; }
  .muted { fill: #59636e; }
  .mid { text-anchor: middle; }
  .known { fill: #eaeef2; stroke: #afb8c1; }
  .draft { fill: #ddf4ff; stroke: #54aeff; stroke-dasharray: 4 3; }
  .right { fill: #dafbe1; stroke: #4ac26b; }
  .wrong { fill: #ffebe9; stroke: #ff8182; }
  .unseen { fill: #f6f8fa; stroke: #afb8c1; stroke-dasharray: 4 3; }
  .line { stroke: #59636e; fill: none; stroke-width: 1.4; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d; }
    text { fill: #e6edf3; }
    .muted { fill: #9198a1; }
    .known { fill: #212830; stroke: #3d444d; }
    .draft { fill: #0c2d4d; stroke: #1f6feb; }
    .right { fill: #0f3d20; stroke: #2ea043; }
    .wrong { fill: #4b1113; stroke: #f85149; }
    .unseen { fill: #151b23; stroke: #3d444d; }
    .line { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
"""
WIDTH, HEIGHT = 860, 372
LEFT, CELL, GAP, TALL = 150, 78, 6, 30
INPUTS = ["The", "sky", "is", "blue", "and", "the", "sea", "is"]
SAMPLED = ["sky", "is", "blue", "today", "", "", "", ""]


def cell(column: int, top: int, word: str, kind: str) -> str:
    """A box with a word."""
    x = LEFT + column * (CELL + GAP)
    box = f'<rect class="{kind}" x="{x}" y="{top}" width="{CELL}" height="{TALL}" rx="5"/>'
    return box + (f'<text class="mid" x="{x + CELL / 2}" y="{top + 20}">{word}</text>' if word else "")


def label(top: int, *lines: str) -> str:
    """The name of a row, on its left."""
    return "".join(
        f'<text class="{"" if number == 0 else "small muted"}" x="20" y="{top + 14 + 16 * number}">{line}</text>'
        for number, line in enumerate(lines)
    )


def arrow(column: int, top: int, bottom: int, shift: float = 0) -> str:
    """An arrow down; ``shift`` columns to the right at its end."""
    x = LEFT + column * (CELL + GAP) + CELL / 2
    end = x + shift * (CELL + GAP)
    head = f"M{end - 4},{bottom - 7} L{end},{bottom} L{end + 4},{bottom - 7} Z"
    return f'<path class="line" d="M{x},{top} L{end},{bottom - 6}"/><path class="head" d="{head}"/>'


def picture() -> str:
    """The whole picture."""
    parts = [f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>']
    parts.append('<text class="title" x="20" y="30">One step: eight positions, the weights are read once</text>')
    parts.append(label(52, "inputs", "last token, then", "its draft"))
    parts += [cell(at, 56, word, "known" if at == 0 else "draft") for at, word in enumerate(INPUTS)]
    parts += [arrow(at, 88, 118) for at in range(8)]
    middle, width = LEFT, 8 * CELL + 7 * GAP
    parts.append(f'<rect class="known" x="{middle}" y="120" width="{width}" height="34" rx="5"/>')
    words = "the model, and at each position the draw of (seed, prompt, generation, position, token)"
    parts.append(f'<text class="mid" x="{middle + width / 2}" y="142">{words}</text>')
    parts += [arrow(at, 154, 184) for at in range(8)]
    parts.append(label(184, "sampled", "what decode would", "sample there"))
    kinds = ["right", "right", "right", "wrong", *["unseen"] * 4]
    parts += [cell(at, 186, word, kind) for at, (word, kind) in enumerate(zip(SAMPLED, kinds, strict=True))]
    signs = ["= sky", "= is", "= blue", "≠ and"]
    for at, sign in enumerate(signs):
        x = LEFT + at * (CELL + GAP) + CELL / 2
        parts.append(f'<text class="mid small muted" x="{x}" y="232">{sign}</text>')
    x = LEFT + 4 * (CELL + GAP)
    parts.append(f'<text class="small muted" x="{x}" y="232">after a wrong draft: not looked at</text>')
    parts.append(label(256, "answer", "four tokens more"))
    parts += [cell(at, 256, word, "right") for at, word in enumerate(SAMPLED[:4])]
    parts.append(label(316, "next step", "goes on from there"))
    following = ((4, "today", "known"), (5, "the", "draft"), (6, "sea", "draft"))
    parts += [cell(at, 316, word, kind) for at, word, kind in following]
    parts.append(arrow(3, 288, 314, 1))
    overwrites = "over the K/V of the wrong draft"
    parts.append(f'<text class="small muted" x="{LEFT + 110}" y="336">{overwrites}</text>')
    body = "\n".join(parts)
    title = "A step that verifies a draft"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{title}">\n<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (HERE / "drafts.svg").write_text(picture(), encoding="utf-8")
