// The data of the page: the columns that the file has, and indices into them.

performance.mark("report-start");
const data = JSON.parse(document.getElementById("data").textContent);
performance.mark("report-parsed");
const prompts = data.prompts;

/** A number of the data; what JSON has no word for is there by its name. */
function number(value) {
  return typeof value === "string" ? { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity }[value] : value;
}

/** The mean of the values that are there; null where none is. */
function mean(values) {
  let sum = 0;
  let count = 0;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    sum += value;
    count += 1;
  }
  return count ? sum / count : null;
}

/** The place of the last of some rising numbers that is not above a limit; -1 where all are. */
function lastUpTo(numbers, limit) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** An object with these entries and nothing else: a column may have any name, also "constructor". */
function table(entries) {
  const made = Object.create(null);
  for (const [name, value] of entries) made[name] = value;
  return made;
}

/** One run: its rows by prompt and generation, in the order of their steps. A row is its number in the columns. */
class Run {
  constructor(raw, place) {
    this.name = raw.name;
    this.files = raw.files;
    this.place = place;
    this.when = raw.when;
    this.texts = raw.texts;
    this.words = table(Object.entries(raw.words));
    this.tokens = raw.tokens;
    this.turns = raw.turns;
    this.series = raw.series;
    this.strips = raw.strips;
    this.alarms = raw.alarms;
    this.healthOf = raw.health;
    this.healths = raw.healths.map((states) => states.split(" ").filter(Boolean));
    this.changes = raw.changes;
    this.numbers = table(Object.entries(raw.numbers).map(([name, all]) => [name, all.map(number)]));
    this.textOf = raw.text;
    this.reasonOf = raw.reason;
    this.reasons = raw.reasons;
    this.generationOf = raw.generation;
    this.promptOf = raw.prompt;
    this.steps = [...new Set(raw.when)].sort((a, b) => a - b);
    this.answers = prompts.map(() => new Map());
    this.asked = prompts.map(() => []);
    const order = raw.when.map((_, row) => row).sort((a, b) => raw.when[a] - raw.when[b]);
    this.before = new Int32Array(order.length).fill(-1);
    for (const row of order) {
      const generations = this.answers[raw.prompt[row]];
      const line = generations.get(raw.generation[row]) ?? { rows: [], when: [] };
      generations.set(raw.generation[row], line);
      if (line.rows.length) this.before[row] = line.rows.at(-1);
      const asked = this.asked[raw.prompt[row]];
      if (asked.at(-1) !== raw.when[row]) asked.push(raw.when[row]);
      line.rows.push(row);
      line.when.push(raw.when[row]);
    }
    this.atStep = new Map(this.steps.map((step) => [step, []]));
    for (const row of order) this.atStep.get(raw.when[row]).push(row);
    this.means = new Map();
    this.lowered = new Array(this.texts.length);
  }

  /** The numbers of a prompt's generations. */
  generations(prompt) {
    return [...this.answers[prompt].keys()].sort((a, b) => a - b);
  }

  /** All rows of a prompt's generation, in the order of their steps. */
  rowsOf(prompt, generation) {
    return this.answers[prompt].get(generation)?.rows ?? [];
  }

  /** The last step up to one at which a prompt was asked; undefined where it had not been asked yet. */
  askedAt(prompt, step) {
    return this.asked[prompt][lastUpTo(this.asked[prompt], step)];
  }

  /** The row of a prompt's generation as it was at a step, that is when the prompt was asked last; -1 where there is none. */
  rowAt(prompt, generation, step) {
    const line = this.answers[prompt].get(generation);
    const when = this.askedAt(prompt, step);
    if (!line || when === undefined) return -1;
    const place = lastUpTo(line.when, when);
    return line.when[place] === when ? line.rows[place] : -1;
  }

  text(row) {
    return this.texts[this.textOf[row]];
  }

  /** The states of a row's health; none where nothing is wrong or nobody has looked. */
  states(row) {
    return this.healths[this.healthOf[row]] ?? [];
  }

  reason(row) {
    return this.reasons[this.reasonOf[row]];
  }

  /** A row's text in lower case, made once. */
  lower(row) {
    const place = this.textOf[row];
    return (this.lowered[place] ??= this.texts[place].toLowerCase());
  }

  value(name, row) {
    return row < 0 ? null : (this.numbers[name]?.[row] ?? null);
  }

  /** Whether a row is one of the best or worst answers of a rollout, whose mean says nothing of all answers. */
  isRollout(row) {
    return prompts[this.promptOf[row]].rollout;
  }

  /** The mean of a column over the samples of each step; that of a reward over all answers of each rollout, as logged. */
  meanCurve(name) {
    if (!this.numbers[name]) return null;
    if (!this.means.has(name)) this.means.set(name, this.sampledCurve(name) ?? this.loggedCurve(name));
    return this.means.get(name);
  }

  sampledCurve(name) {
    const sampled = this.steps.map((step) => [step, this.atStep.get(step).filter((row) => !this.isRollout(row))]);
    const asked = sampled.filter(([, rows]) => rows.length);
    const values = asked.map(([, rows]) => mean(rows.map((row) => this.value(name, row))));
    return values.some((value) => value !== null) ? { steps: asked.map(([step]) => step), values, logged: false } : null;
  }

  loggedCurve(name) {
    const curve = this.series[name === "reward" ? "reward/mean" : `reward/${name}/mean`];
    return curve ? { steps: curve.steps, values: curve.values.map(number), logged: true } : null;
  }

  /** The mean of a column over a prompt's generations at each step that it was asked at. */
  promptCurve(name, prompt) {
    if (!this.numbers[name]) return null;
    const found = new Map();
    for (const { rows } of this.answers[prompt].values()) {
      for (const row of rows) {
        if (!found.has(this.when[row])) found.set(this.when[row], []);
        found.get(this.when[row]).push(this.value(name, row));
      }
    }
    const steps = [...found.keys()].sort((a, b) => a - b);
    return { steps, values: steps.map((step) => mean(found.get(step))) };
  }
}

const runs = data.runs.map((raw, place) => new Run(raw, place));
const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
const columns = [...new Set(runs.flatMap((run) => Object.keys(run.numbers)))];
const wordColumns = [...new Set(runs.flatMap((run) => Object.keys(run.words)))];
const hasHealth = runs.some((run) => Object.keys(run.strips).length > 0 || run.alarms.length > 0);
const states = [...new Set(runs.flatMap((run) => run.healths.flat()))].sort();
const hasLogprobs = runs.some((run) => Object.keys(run.tokens).length > 0);
const labels = ["A", "B"];

/** The generations of a prompt in any run. */
function allGenerations(prompt) {
  return [...new Set(runs.flatMap((run) => run.generations(prompt)))].sort((a, b) => a - b);
}

/** What a row is compared with: a row of the same prompt and generation, of a run; null where there is none. */
function comparedWith(run, row, prompt, generation, base, step) {
  if (row < 0) return null;
  let other = run;
  let found;
  if (base === "previous") found = run.before[row];
  else if (base === "first") found = run.rowsOf(prompt, generation)[0];
  else if (base === "other") {
    other = runs[0];
    found = run === runs[0] ? -1 : runs[0].rowAt(prompt, generation, step);
  } else found = run.rowAt(prompt, generation, base);
  return found === undefined || found < 0 ? null : { run: other, row: found };
}
