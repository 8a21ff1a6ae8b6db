// One prompt: its answers at a step beside each other, its curves, and how its answers came to be.

const LONG = 20000; // characters of an answer that are shown at once
const FIGURE = 24; // characters of a text that stands beside the numbers
const MAX_VERSIONS = 40;
let unfolded = new Set(); // answers that are shown in full, by run and row
let versionsOf = { prompt: null, generation: null, shown: MAX_VERSIONS };

/** Fill the panel. */
function drawDetail(prompt, list) {
  const panel = byId("detail");
  if (prompt === null) {
    panel.replaceChildren(h("p", { class: "empty" }, "No prompt passes search and filter."));
    return;
  }
  const place = list.indexOf(prompt);
  const head = h(
    "header",
    { class: "detail-head" },
    h("button", { type: "button", class: "back", onclick: () => showPane("list") }, "‹ Prompts"),
    h("h2", {}, `Prompt ${idText(prompt)}`),
    h("span", { class: "muted" }, place < 0 ? "not in the list" : `${place + 1} of ${list.length.toLocaleString("en")}`),
    h("span", { class: "gap" }),
    h("button", { type: "button", title: "Previous prompt (↑)", "aria-label": "Previous prompt", onclick: () => movePrompt(-1) }, "↑"),
    h("button", { type: "button", title: "Next prompt (↓)", "aria-label": "Next prompt", onclick: () => movePrompt(1) }, "↓"),
  );
  const needle = state.q.trim().toLowerCase();
  const question = h("div", { class: "prompt-text", dir: "auto" });
  addLong(question, prompts[prompt].text, `p${prompt}`, (text) => addText(question, text, needle));
  const scrolled = panel.dataset.prompt === String(prompt) ? panel.scrollTop : 0;
  panel.dataset.prompt = prompt;
  panel.replaceChildren(head, question, modes(), answers(prompt), promptCurves(prompt), versions(prompt));
  panel.scrollTop = scrolled;
}

/** The buttons that choose how answers are shown. */
function modes() {
  const names = { text: "Text", difference: "Difference", logprobs: "Log-probability" };
  if (!hasLogprobs) delete names.logprobs;
  const keys = { text: "t", difference: "d", logprobs: "l" };
  const buttons = Object.entries(names).map(([mode, name]) =>
    h("button", { type: "button", "aria-pressed": String(state.mode === mode), title: `${name} (${keys[mode]})`, onclick: () => show({ mode }) }, name),
  );
  const from = state.base === "other" ? `from ${labels[0]} to ${labels[1]}` : `since ${baseText()}`;
  const against = state.mode === "difference" ? h("span", { class: "muted" }, from) : null;
  const legend = state.mode === "logprobs" ? probabilityLegend() : null;
  return h("div", { class: "modes" }, h("div", { class: "segments", role: "group" }, buttons), against, legend);
}

/** A prompt's answers: a card per generation and run. */
function answers(prompt) {
  const step = currentStep();
  const asked = rowsAt(prompt, step).map(({ generation }) => generation);
  const generations = asked.length ? [...new Set(asked)].sort((a, b) => a - b) : allGenerations(prompt).slice(0, 1);
  const cards = generations.flatMap((generation) => runs.map((run) => card(run, prompt, generation, step, generations.length)));
  return h("div", { class: runs.length > 1 ? "cards pairs" : "cards" }, cards);
}

function card(run, prompt, generation, step, generations) {
  const row = run.rowAt(prompt, generation, step);
  const rank = row < 0 ? null : run.words.rank?.[row];
  const title = [runs.length > 1 ? badge(run) : null, generations > 1 ? `Sample ${generation}` : runs.length > 1 ? run.name : "Answer", rank ? `, ${rank} of the rollout` : null];
  const head = h("header", { class: "card-head" }, h("strong", {}, title));
  const body = h("div", { class: "answer", dir: "auto" });
  const element = h("section", { class: `card run-${run.place}` }, head, body);
  if (row < 0) {
    const first = run.asked[prompt][0];
    const later = first > step ? `Not asked until ${data.axis} ${first}.` : "There is no such sample.";
    body.append(h("span", { class: "none" }, first === undefined ? "Not asked in this run." : later));
    return element;
  }
  const when = run.when[row];
  head.append(h("span", { class: when === step ? "muted" : "older" }, `${data.axis} ${when.toLocaleString("en")}`), h("span", { class: "gap" }), copyButton(run.text(row)));
  fillAnswer(element, body, run, row, comparedWith(run, row, prompt, generation, state.base, step));
  element.append(figures(run, row));
  return element;
}

/** The answer in the mode that is chosen. */
function fillAnswer(element, body, run, row, base) {
  const note = (text) => element.insertBefore(h("p", { class: "note" }, text), body);
  const key = `r${run.place}.${row}`;
  const text = run.text(row);
  const needle = state.q.trim().toLowerCase();
  if (state.mode === "logprobs") {
    const tokens = run.tokens[row];
    if (tokens) return addTokens(body, tokens);
    note("This row has no log-probabilities of its tokens.");
  }
  if (state.mode === "difference") {
    const before = base && base.run.text(base.row);
    if (!base && state.base !== "other") note("There is nothing before it to compare with.");
    else if (!base && run !== runs[0]) note(`${labels[0]} has nothing to compare with.`);
    else if (base && before === text) note(`The same as at ${whenText(base)}.`);
    else if (base) {
      note(`Since ${whenText(base)}:`);
      const long = Math.max(before.length, text.length) > LONG && !unfolded.has(key);
      const coarse = long ? addDifference(body, beginning(before, LONG), beginning(text, LONG)) : addDifference(body, before, text);
      if (coarse) note("The texts differ too much to be compared word by word.");
      if (long) body.append(moreButton(key, `The first ${count(LONG, "character")} of each are compared. Compare all`));
      return;
    }
  }
  const turns = run.turns[row];
  if (turns) addTurns(body, turns, key, needle);
  else if (text) addLong(body, text, key, (part) => addText(body, part, needle));
  else body.append(h("span", { class: "none" }, "The answer is empty."));
}

function whenText({ run, row }) {
  const when = `${data.axis} ${run.when[row].toLocaleString("en")}`;
  return runs.length > 1 ? `${when} of ${labels[run.place]}` : when;
}

/** Show a text, or its beginning with a button where it is long. */
function addLong(element, text, key, addPart) {
  if (text.length <= LONG || unfolded.has(key)) {
    addPart(text);
    return;
  }
  addPart(beginning(text, LONG));
  element.append(moreButton(key, `Show all ${count(text.length, "character")}`));
}

function moreButton(key, text) {
  return h("button", { type: "button", class: "more", onclick: () => show((unfolded.add(key), {})) }, text);
}

function copyButton(text) {
  const button = h("button", { type: "button", class: "quiet", title: "Copy the answer as the model wrote it" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return button;
}

/** The numbers and texts about an answer. */
function figures(run, row) {
  const reason = run.reason(row);
  const turns = run.turns[row]?.filter((turn) => turn.role === "assistant").length;
  const found = [
    ...(turns ? [["turns", format(turns)]] : []),
    ...columns.filter((name) => name in run.numbers).map((name) => [name, format(run.value(name, row))]),
    ...(reason ? [["finish", reason]] : []),
    ...(run.states(row).length ? [["health", run.states(row).join(" ")]] : []),
  ];
  const list = h(
    "dl",
    { class: "figures" },
    found.map(([name, value]) => h("div", {}, h("dt", {}, name), addText(h("dd", { class: name === "health" || (name === "finish" && value !== "stop") ? "warn" : null }), value))),
  );
  const shown = wordColumns.filter((name) => name !== "rank"); // which is in the title
  const words = shown.map((name) => [name, run.words[name]?.[row]]).filter(([, text]) => text !== null && text !== undefined);
  const isLong = ([, text]) => text.length > FIGURE || text.includes("\n");
  words.sort((first, second) => isLong(first) - isLong(second));
  for (const [name, text] of words) {
    const value = h("dd", { dir: "auto" });
    addLong(value, text, `w${run.place}.${row}.${name}`, (part) => addText(value, part));
    list.append(h("div", { class: isLong([name, text]) ? "words" : "words short" }, addText(h("dt"), name), value));
  }
  return list;
}

// --- log-probabilities ---

const SHADES = 8;

/** How unlikely a token was: 0 for one that was certain, SHADES for one of a probability below e⁻⁸. */
function shade(logprob) {
  return Number.isNaN(logprob) ? SHADES : Math.min(SHADES, Math.max(0, Math.round(-logprob)));
}

function addTokens(element, tokens) {
  tokens.texts.forEach((text, place) => {
    const logprob = number(tokens.logprobs[place]);
    const share = Math.exp(logprob);
    const title = `log-probability ${format(logprob)}, probability ${format(share)}`;
    element.append(addText(h("span", { class: `token shade-${shade(logprob)}`, title }), text));
  });
}

function probabilityLegend() {
  const levels = [0, 2, 4, 6, 8].map((level) => h("span", { class: `token shade-${level}` }, level ? `−${level}` : "0"));
  return h("span", { class: "legend muted" }, "log-probability", levels, "and below");
}

// --- curves and history ---

/** A prompt's values over the steps, beside the mean of all prompts. */
function promptCurves(prompt) {
  if (steps.length < 2) return "";
  const cards = columns.flatMap((name) => {
    const lines = runs.flatMap((run) => {
      const own = run.promptCurve(name, prompt);
      const all = run.meanCurve(name);
      const label = runs.length > 1 ? ` ${labels[run.place]}` : "";
      return [
        ...(all ? [{ ...all, label: `mean${label}`, style: `mean run-${run.place}` }] : []),
        ...(own ? [{ ...own, label: `prompt${label}`, style: `run-${run.place}` }] : []),
      ];
    });
    const chart = new Chart({ title: name, lines, step: currentStep(), onPick: pickStep });
    return chart.lines.length ? [chart.element] : [];
  });
  const caption = h("p", { class: "muted" }, "This prompt in colour, the mean of all prompts in grey. Click to go there.");
  return h("section", { class: "block" }, h("h3", {}, `Over the ${data.axis}s`), caption, h("div", { class: "charts" }, cards));
}

/** Every answer that a generation of a prompt has had, each with what changed since the one before. */
function versions(prompt) {
  if (steps.length < 2) return "";
  const generations = allGenerations(prompt);
  if (versionsOf.prompt !== prompt) versionsOf = { prompt, generation: generations[0], shown: MAX_VERSIONS };
  const choose = generations.map((generation) =>
    h("button", { type: "button", "aria-pressed": String(generation === versionsOf.generation), onclick: () => show((versionsOf = { ...versionsOf, generation, shown: MAX_VERSIONS }, {})) }, `Sample ${generation}`),
  );
  const block = h("section", { class: "block" }, h("h3", {}, "History"));
  if (generations.length > 1) block.append(h("div", { class: "segments", role: "group" }, choose));
  const lists = runs.map((run) => versionList(run, prompt, versionsOf.generation));
  block.append(h("div", { class: runs.length > 1 ? "histories pairs" : "histories" }, lists));
  return block;
}

function versionList(run, prompt, generation) {
  const found = [];
  for (const row of run.rowsOf(prompt, generation)) {
    const last = found.at(-1);
    if (last && run.textOf[last.row] === run.textOf[row]) last.until = run.when[row];
    else found.push({ row, before: last?.row ?? null, since: run.when[row], until: run.when[row] });
  }
  found.reverse();
  const list = h("ol", { class: `versions run-${run.place}` });
  if (runs.length > 1) list.append(h("li", { class: "version-run" }, badge(run), run.name));
  const step = currentStep();
  for (const { row, before, since, until } of found.slice(0, versionsOf.shown)) {
    const when = since === until ? since.toLocaleString("en") : `${since.toLocaleString("en")} – ${until.toLocaleString("en")}`;
    const body = h("div", { class: "version-text", dir: "auto" });
    const text = beginning(run.text(row), 1000);
    if (before === null) addText(body, text);
    else addDifference(body, beginning(run.text(before), 1000), text);
    if (run.text(row).length > 1000) body.append(" …");
    if (!run.text(row) && before === null) body.append(h("span", { class: "none" }, "empty"));
    const now = row === run.rowAt(prompt, generation, step) || (since <= step && step <= until);
    list.append(
      h("li", { class: now ? "version now-shown" : "version" }, h("button", { type: "button", class: "when", title: `Go to ${data.axis} ${since}`, onclick: () => pickStep(since) }, when), body),
    );
  }
  const left = found.length - versionsOf.shown;
  if (left > 0) {
    const more = () => show((versionsOf = { ...versionsOf, shown: versionsOf.shown * 4 }, {}));
    list.append(h("li", {}, h("button", { type: "button", class: "more", onclick: more }, `Show ${count(left, "earlier answer")}`)));
  }
  if (!found.length) list.append(h("li", { class: "none" }, "Not asked in this run."));
  return list;
}

/** Go to the step with samples that is nearest to one. */
function pickStep(step) {
  showStepAt(nearest(steps, step));
}
