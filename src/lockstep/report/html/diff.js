// Differences between two texts, word by word (Myers 1986, "An O(ND) difference algorithm and its variations").

const MAX_EDITS = 1200; // more than that between two texts, and the middle is shown as replaced
const MAX_WORDS = 100000;

// White space, one character of a script without spaces, a word, or a sign.
const WORD = new RegExp(
  "\\s+|[\\p{sc=Han}\\p{sc=Hiragana}\\p{sc=Katakana}\\p{sc=Thai}]" +
    "|[[\\p{L}\\p{N}\\p{M}_]--[\\p{sc=Han}\\p{sc=Hiragana}\\p{sc=Katakana}\\p{sc=Thai}]]+|.",
  "gsv",
);

/**
 * What to remove from a text and what to add to get another.
 * Returns `parts` in order, of kind "same", "removed" or "added", and `coarse`: whether the texts differ too much to be
 * compared word by word, so that all between their common ends counts as replaced.
 */
function difference(before, after) {
  if (before === after) return { parts: before ? [{ kind: "same", text: before }] : [], coarse: false };
  const old = before.match(WORD) ?? [];
  const now = after.match(WORD) ?? [];
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old.at(-1 - end) === now.at(-1 - end)) end += 1;
  const left = old.slice(start, old.length - end);
  const right = now.slice(start, now.length - end);
  const middle = left.length + right.length > MAX_WORDS ? null : edits(left, right);
  const parts = [];
  add(parts, "same", old.slice(0, start).join(""));
  if (middle === null) {
    add(parts, "removed", left.join(""));
    add(parts, "added", right.join(""));
  } else {
    for (const [kind, word] of tidy(middle)) add(parts, kind, word);
  }
  add(parts, "same", old.slice(old.length - end).join(""));
  return { parts: grouped(parts), coarse: middle === null };
}

/** The shortest list of edits; null where it is longer than MAX_EDITS. */
function edits(left, right) {
  const size = Math.min(MAX_EDITS, left.length + right.length);
  const furthest = new Int32Array(2 * size + 3); // by diagonal, how far into `left` some edits lead
  const history = [];
  for (let edit = 0; edit <= size; edit += 1) {
    history.push(furthest.slice(size - edit, size + edit + 3));
    for (let diagonal = -edit; diagonal <= edit; diagonal += 2) {
      const at = size + 1 + diagonal;
      const down = diagonal === -edit || (diagonal !== edit && furthest[at - 1] < furthest[at + 1]);
      let x = down ? furthest[at + 1] : furthest[at - 1] + 1;
      while (x < left.length && x - diagonal < right.length && left[x] === right[x - diagonal]) x += 1;
      furthest[at] = x;
      if (x >= left.length && x - diagonal >= right.length) return traced(left, right, history);
    }
  }
  return null;
}

/** Walk back from the ends of both texts, through what was furthest before each edit. */
function traced(left, right, history) {
  const found = [];
  let x = left.length;
  let y = right.length;
  for (let edit = history.length - 1; edit >= 0; edit -= 1) {
    const at = (diagonal) => history[edit][edit + 1 + diagonal];
    const diagonal = x - y;
    const down = diagonal === -edit || (diagonal !== edit && at(diagonal - 1) < at(diagonal + 1));
    const fromX = at(down ? diagonal + 1 : diagonal - 1);
    const fromY = fromX - (down ? diagonal + 1 : diagonal - 1);
    while (x > fromX && y > fromY && x > 0 && y > 0) {
      x -= 1;
      y -= 1;
      found.push(["same", left[x]]);
    }
    if (edit === 0) break;
    if (down) {
      y -= 1;
      found.push(["added", right[y]]);
    } else {
      x -= 1;
      found.push(["removed", left[x]]);
    }
  }
  return found.reverse();
}

/** White space alone between two changes is a part of them: whole phrases are easier to read than words in turn. */
function tidy(list) {
  const found = [];
  list.forEach(([kind, word], place) => {
    const between = list[place - 1] && list[place + 1] && list[place - 1][0] !== "same" && list[place + 1][0] !== "same";
    if (kind === "same" && between && /^\s+$/.test(word)) found.push(["removed", word], ["added", word]);
    else found.push([kind, word]);
  });
  return found;
}

function add(parts, kind, text) {
  if (!text) return;
  if (parts.at(-1)?.kind === kind) parts.at(-1).text += text;
  else parts.push({ kind, text });
}

/** Between two stretches that stay, first all that is removed, then all that is added. */
function grouped(parts) {
  const found = [];
  let removed = "";
  let added = "";
  const flush = () => {
    add(found, "removed", removed);
    add(found, "added", added);
    removed = added = "";
  };
  for (const { kind, text } of parts) {
    if (kind === "removed") removed += text;
    else if (kind === "added") added += text;
    else {
      flush();
      add(found, "same", text);
    }
  }
  flush();
  return found;
}

/** Append the difference of two texts to an element; whether it is a coarse one. */
function addDifference(element, before, after) {
  const { parts, coarse } = difference(before, after);
  const tags = { same: "span", removed: "del", added: "ins" };
  for (const { kind, text } of parts) element.append(addText(h(tags[kind]), text));
  return coarse;
}
