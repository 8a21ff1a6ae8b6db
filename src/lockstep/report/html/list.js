// The list of prompts: which are shown, in which order, and what an item shows.

const ITEM_HEIGHT = 86;
const PREVIEW = 240; // characters of a text in the list
const SPARK = { width: 84, height: 26 };

/** The rows of a prompt at a step, one per run and generation that has one. */
function rowsAt(prompt, step) {
  const found = [];
  for (const run of runs) {
    for (const generation of run.answers[prompt].keys()) {
      const row = run.rowAt(prompt, generation, step);
      if (row >= 0) found.push({ run, row, generation });
    }
  }
  return found;
}

/** A prompt's rows at the current step, each with what it is compared with. */
function comparisons(prompt, step) {
  return rowsAt(prompt, step).map(({ run, row, generation }) => ({
    run,
    row,
    base: comparedWith(run, row, prompt, generation, state.base, step),
  }));
}

/** Whether an answer is not what it is compared with. Nothing changes at a step at which the prompt was not asked. */
function changed({ run, row, base }, step) {
  if (!base || (state.base === "previous" && run.when[row] !== step)) return false;
  return run.text(row) !== base.run.text(base.row);
}

/** How much a column's mean over a prompt's generations is above that of what they are compared with. */
function gain(found, name, step) {
  const pairs = found.filter(({ run, row, base }) => base && (state.base !== "previous" || run.when[row] === step));
  const now = mean(pairs.map(({ run, row }) => run.value(name, row)));
  const before = mean(pairs.map(({ base }) => base.run.value(name, base.row)));
  return now === null || before === null ? null : now - before;
}

function meanValue(prompt, name, step) {
  return mean(rowsAt(prompt, step).map(({ run, row }) => run.value(name, row)));
}

/** Whether two runs say different things to a prompt. */
function runsDiffer(prompt, step) {
  const [first, second] = runs;
  return allGenerations(prompt).some((generation) => {
    const [a, b] = [first.rowAt(prompt, generation, step), second.rowAt(prompt, generation, step)];
    return a >= 0 && b >= 0 && first.text(a) !== second.text(b);
  });
}

/** The filters: what the menu says, and which prompts pass. */
function filters() {
  const metric = currentMetric();
  const since = `since ${baseText()}`;
  const all = {
    all: ["All prompts", () => true],
    asked: [`Asked at this ${data.axis}`, (prompt, step) => rowsAt(prompt, step).some(({ run, row }) => run.when[row] === step)],
    changed: [`Changed ${since}`, (prompt, step) => comparisons(prompt, step).some((each) => changed(each, step))],
    same: [`Unchanged ${since}`, (prompt, step) => unchanged(comparisons(prompt, step), step)],
    up: [`${metric} higher ${since}`, (prompt, step) => gain(comparisons(prompt, step), metric, step) > 0],
    down: [`${metric} lower ${since}`, (prompt, step) => gain(comparisons(prompt, step), metric, step) < 0],
    cut: ["Cut off at the length limit", (prompt, step) => rowsAt(prompt, step).some(({ run, row }) => run.reason(row) === "length")],
  };
  for (const name of states) all[`health:${name}`] = [`Health: ${name}`, (prompt, step) => hasState(prompt, step, name)];
  if (runs.length > 1) all.differ = ["The runs differ", runsDiffer];
  if (metric === null) {
    delete all.up;
    delete all.down;
  }
  return all;
}

/** Whether an answer to a prompt that was asked at a step is in a state. */
function hasState(prompt, step, name) {
  return rowsAt(prompt, step).some(({ run, row }) => run.when[row] === step && run.states(row).includes(name));
}

function unchanged(found, step) {
  const compared = found.filter(({ base }) => base);
  return compared.length > 0 && !compared.some((each) => changed(each, step));
}

/** The keys to sort by: what the menu says, and the value of a prompt. */
function sorts() {
  const metric = currentMetric();
  const all = {
    order: ["In order", (prompt) => prompt],
    prompt: ["By prompt", (prompt) => prompts[prompt].text],
  };
  for (const name of columns) all[`by:${name}`] = [`By ${name}`, (prompt, step) => meanValue(prompt, name, step)];
  if (metric !== null) {
    all.gain = [`By change of ${metric}`, (prompt, step) => gain(comparisons(prompt, step), metric, step)];
  }
  return all;
}

const loweredPrompts = new Array(prompts.length);

function matches(prompt, needle, step) {
  const text = (loweredPrompts[prompt] ??= prompts[prompt].text.toLowerCase());
  return text.includes(needle) || rowsAt(prompt, step).some(({ run, row }) => run.lower(row).includes(needle));
}

/** An entry of a table, also where an address has a name that every object knows, such as "constructor". */
function oneOf(table, name, fallback) {
  return Object.hasOwn(table, name) ? table[name] : table[fallback];
}

/** The prompts that pass search and filter, sorted; what has no value to sort by is last, whichever way. */
function chosenPrompts() {
  const step = currentStep();
  const needle = state.q.trim().toLowerCase();
  const [, passes] = oneOf(filters(), state.filter, "all");
  const found = [];
  for (let prompt = 0; prompt < prompts.length; prompt += 1) {
    if ((!needle || matches(prompt, needle, step)) && passes(prompt, step)) found.push(prompt);
  }
  const falling = state.sort.startsWith("-");
  const name = falling ? state.sort.slice(1) : state.sort;
  if (name === "order") return falling ? found.reverse() : found;
  const [, value] = oneOf(sorts(), name, "order");
  const keyed = found.map((prompt) => [value(prompt, step), prompt]);
  const empty = (key) => key === null || Number.isNaN(key);
  keyed.sort(([a, first], [b, second]) => {
    if (empty(a) || empty(b)) return empty(a) - empty(b) || first - second;
    const order = a < b ? -1 : a > b ? 1 : 0;
    return (falling ? -order : order) || first - second;
  });
  return keyed.map(([, prompt]) => prompt);
}

/** The lines of a prompt's metric, for a small curve: one per run. */
function promptLines(prompt, name) {
  return runs
    .map((run) => ({ run, curve: run.promptCurve(name, prompt) }))
    .filter(({ curve }) => curve && curve.steps.length > 0)
    .map(({ run, curve }) => ({ ...curve, style: `run-${run.place}` }));
}

/** An item of the list. */
function listItem(prompt, place, chosen, total) {
  const step = currentStep();
  const needle = state.q.trim().toLowerCase();
  const metric = currentMetric();
  const text = addText(h("span", { class: "item-prompt", dir: "auto" }), oneLine(prompts[prompt].text, PREVIEW), needle);
  const several = Math.max(...runs.map((run) => rowsAt(prompt, step).filter((each) => each.run === run).length));
  const samples = several > 1 ? h("span", { class: "id", title: `${several} answers; the first is shown here` }, `×${several}`) : null;
  const rollout = prompts[prompt].rollout ? h("span", { class: "id", title: "A question of a rollout: its best and worst answers" }, "rollout") : null;
  const lines = runs.map((run) => itemAnswer(run, prompt, step, needle));
  const values = runs.map((run) => {
    const rows = rowsAt(prompt, step).filter((each) => each.run === run);
    return h("span", { class: `now run-${run.place}` }, format(mean(rows.map(({ row }) => run.value(metric, row)))));
  });
  const side = h("div", { class: "item-side" }, h("div", { class: "item-values" }, metric === null ? [] : values));
  const lined = metric === null ? [] : promptLines(prompt, metric);
  if (lined.some((line) => line.steps.length > 1)) side.append(sparkline(lined, SPARK.width, SPARK.height, step) ?? "");
  return h(
    "div",
    {
      class: "item",
      id: `item-${place}`,
      role: "option",
      "aria-selected": String(prompt === chosen),
      "aria-posinset": place + 1,
      "aria-setsize": total,
      onclick: () => openPrompt(prompt),
    },
    h("div", { class: "item-text" }, h("div", { class: "item-head" }, h("span", { class: "id" }, idText(prompt)), rollout, samples, text), lines),
    side,
  );
}

function idText(prompt) {
  return `#${beginning(String(prompts[prompt].id), 12)}`;
}

/** The beginning of a run's answers to a prompt at a step. */
function itemAnswer(run, prompt, step, needle) {
  const element = h("div", { class: runs.length > 1 ? "item-answer one-line" : "item-answer", dir: "auto" });
  if (runs.length > 1) element.append(badge(run));
  const generations = run.generations(prompt);
  const rows = generations.map((generation) => run.rowAt(prompt, generation, step)).filter((row) => row >= 0);
  if (!rows.length) {
    element.append(h("span", { class: "none" }, generations.length ? `not asked yet` : "not asked"));
    return element;
  }
  const found = comparisons(prompt, step).filter((each) => each.run === run);
  if (found.some((each) => changed(each, step))) {
    element.append(h("span", { class: "changed", title: `changed since ${baseText()}` }));
  }
  if (run.when[rows[0]] !== step) element.append(h("span", { class: "older" }, `${data.axis} ${run.when[rows[0]]}`));
  const rank = run.words.rank?.[rows[0]];
  if (rank) element.append(h("span", { class: "older" }, rank));
  const answer = oneLine(run.text(rows[0]), PREVIEW);
  if (answer) addText(element, answer, needle);
  else element.append(h("span", { class: "none" }, "empty"));
  return element;
}

function badge(run) {
  return h("span", { class: `badge run-${run.place}`, title: run.name }, labels[run.place]);
}
