// Line charts in SVG: curves over the steps, with the values under the pointer.

const CHART_HEIGHT = 132;
const MARGIN = { top: 8, right: 10, bottom: 20, left: 44 };

/** A round number, of which about as many as wanted are from low to high. */
function roundStep(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 2.5, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
}

/** Multiples of a step from low to high. */
function ticks(low, high, step) {
  const found = [];
  for (let value = Math.ceil(low / step); value * step <= high + step * 1e-9; value += 1) found.push(value * step);
  return found;
}

/** The path of a line; it breaks where there is no value, and a value on its own is a dot. */
function linePath(points) {
  let path = "";
  points.forEach(([x, y], place) => {
    if (y === null) return;
    const joined = place > 0 && points[place - 1][1] !== null;
    const alone = !joined && (place === points.length - 1 || points[place + 1][1] === null);
    path += `${joined ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${alone ? "m-1 0l1 1 1-1-1-1z" : ""}`;
  });
  return path;
}

/** What a curve's values allow on the axis: finite ones only. */
function finite(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

const charts = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart?.draw();
});

class Chart {
  /**
   * title: its name. lines: {label, style, steps, values} each. step: the step that is marked. onPick: called with a
   * step that is clicked.
   */
  constructor({ title, lines, step, onPick }) {
    this.lines = lines.filter((line) => line.values.some((value) => value !== null));
    this.step = step;
    this.onPick = onPick;
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h("div", { class: "plot" });
    const caption = h("figcaption", {}, h("span", { class: "chart-title", title }, title), this.current());
    this.element = h("figure", { class: "chart" }, caption, this.plot, this.tip);
    this.plot.chart = this;
    charts.observe(this.plot);
  }

  /** The values at the marked step, or the last ones before it. */
  current() {
    return h(
      "span",
      { class: "chart-now" },
      this.lines.map((line) => {
        const place = lastUpTo(line.steps, this.step);
        return h("span", { class: `now ${line.style}` }, place < 0 ? "–" : format(line.values[place]));
      }),
    );
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const all = this.lines.flatMap((line) => line.values.filter(finite));
    const marked = this.lines.flatMap((line) => line.steps);
    const [first, last] = [Math.min(...ends(marked)), Math.max(...ends(marked))];
    let low = all.reduce((a, b) => Math.min(a, b), Infinity);
    let high = all.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!all.length) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const rise = roundStep(low, high, 3);
    [low, high] = [Math.floor(low / rise + 1e-9) * rise, Math.ceil(high / rise - 1e-9) * rise];
    const room = { width: width - MARGIN.left - MARGIN.right, height: CHART_HEIGHT - MARGIN.top - MARGIN.bottom };
    this.x = (step) => MARGIN.left + (last > first ? (step - first) / (last - first) : 0.5) * room.width;
    const y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * room.height;
    const bottom = CHART_HEIGHT - MARGIN.bottom;
    const grid = ticks(low, high, rise).map((value) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value)),
    ]);
    const stride = last > first ? Math.max(1, roundStep(first, last, Math.max(2, Math.floor(room.width / 70)))) : 1;
    const below = ticks(first, last, stride)
      .filter(Number.isInteger)
      .map((step) =>
        svg("text", { class: "tick", x: this.x(step), y: CHART_HEIGHT - 5, "text-anchor": "middle" }, format(step)),
      );
    const curves = this.lines.map((line) =>
      svg("path", {
        class: `line ${line.style}`,
        d: linePath(line.steps.map((step, place) => [this.x(step), finite(line.values[place]) ? y(line.values[place]) : null])),
      }),
    );
    const changes = runs.flatMap((run) =>
      run.changes.filter(([step]) => step >= first && step <= last).map(([step, text, processes]) => [
        svg("line", { class: `change run-${run.place}`, x1: this.x(step), x2: this.x(step), y1: MARGIN.top, y2: bottom },
          svg("title", {}, text)),
        svg("text", { class: "tick", x: this.x(step) + 3, y: MARGIN.top + 8 }, `${processes}p`),
      ]),
    );
    this.mark = svg("line", { class: "mark", y1: MARGIN.top, y2: bottom });
    this.hair = svg("line", { class: "hair", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    this.plot.replaceChildren(
      svg(
        "svg",
        { width, height: CHART_HEIGHT, role: "img", "aria-label": this.element.querySelector(".chart-title").textContent },
        grid.flat(),
        below,
        changes.flat(),
        this.mark,
        curves,
        this.hair,
      ),
    );
    this.marks(first, last);
    this.listen(first, last);
  }

  marks(first, last) {
    const shown = this.step >= first && this.step <= last;
    this.mark.setAttribute("visibility", shown ? "visible" : "hidden");
    this.mark.setAttribute("x1", this.x(this.step));
    this.mark.setAttribute("x2", this.x(this.step));
  }

  listen(first, last) {
    const stepAt = (event) => {
      const box = this.plot.getBoundingClientRect();
      const part = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      return first + Math.min(1, Math.max(0, part)) * (last - first);
    };
    const area = this.plot.firstChild;
    area.addEventListener("pointermove", (event) => this.hover(stepAt(event)));
    area.addEventListener("pointerleave", () => {
      this.hair.setAttribute("visibility", "hidden");
      this.tip.hidden = true;
    });
    area.addEventListener("click", (event) => this.onPick?.(stepAt(event)));
  }

  hover(step) {
    const near = this.lines.map((line) => nearest(line.steps, step));
    const shown = this.lines[0] && this.lines[0].steps[near[0]];
    if (shown === undefined) return;
    this.hair.setAttribute("visibility", "visible");
    this.hair.setAttribute("x1", this.x(shown));
    this.hair.setAttribute("x2", this.x(shown));
    const rows = this.lines.map((line, place) =>
      h("div", { class: `now ${line.style}` }, `${line.label}  ${format(line.values[near[place]])}`),
    );
    this.tip.replaceChildren(h("div", { class: "tip-step" }, `${data.axis} ${shown.toLocaleString("en")}`), ...rows);
    this.tip.hidden = false;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, this.x(shown) + 10))}px`;
  }
}

/** The first and the last of some numbers in rising stretches, without a copy of them all as arguments. */
function ends(numbers) {
  return [numbers.reduce((a, b) => Math.min(a, b), Infinity), numbers.reduce((a, b) => Math.max(a, b), -Infinity)];
}

/** The place of the nearest of some rising numbers. */
function nearest(numbers, value) {
  const place = lastUpTo(numbers, value);
  if (place < 0) return 0;
  if (place === numbers.length - 1) return place;
  return value - numbers[place] <= numbers[place + 1] - value ? place : place + 1;
}

/** A small curve without axes. Its lines share one range of values, unless one is given. */
function sparkline(lines, width, height, step) {
  const values = lines.flatMap((line) => line.values.filter(finite));
  if (values.length === 0) return null;
  const [first, last] = ends(lines.flatMap((line) => line.steps));
  let [low, high] = ends(values);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const x = (at) => 2 + (last > first ? (at - first) / (last - first) : 1) * (width - 4);
  const y = (value) => 2 + (1 - (value - low) / (high - low)) * (height - 4);
  const paths = lines.map((line) =>
    svg("path", {
      class: `line ${line.style}`,
      d: linePath(line.steps.map((at, place) => [x(at), finite(line.values[place]) ? y(line.values[place]) : null])),
    }),
  );
  const dots = lines.flatMap((line) => {
    const place = lastUpTo(line.steps, step);
    if (place < 0 || !finite(line.values[place])) return [];
    return [svg("circle", { class: `dot ${line.style}`, cx: x(line.steps[place]), cy: y(line.values[place]), r: 2 })];
  });
  return svg("svg", { class: "spark", width, height, "aria-hidden": "true" }, paths, dots);
}
