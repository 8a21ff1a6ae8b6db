// Elements and texts. What a model or a file says becomes text nodes and nothing else.

/** Make an element. Attributes that begin with "on" are listeners; null and false leave an attribute out. */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

// Control characters, what reverses or hides text, and halves of surrogate pairs: shown by a sign.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ufffe\\uffff]" +
    "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

/** The sign of a character that is not shown as itself: its escape, as programmers write it. */
function sign(character) {
  const code = character.charCodeAt(0).toString(16);
  return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
}

/** Append a text to an element, with signs for what would not be seen, and what is searched for marked. */
function addText(element, text, needle = "") {
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    addPlain(element, text.slice(end, match.index), needle);
    element.append(h("span", { class: "sign", title: "a character that would not be seen" }, sign(match[0])));
    end = match.index + 1;
  }
  addPlain(element, text.slice(end), needle);
  return element;
}

function addPlain(element, text, needle) {
  const lower = needle && text.toLowerCase();
  // Where lower case has another length (as of "İ"), places in it are not places in the text.
  if (!needle || lower.length !== text.length) {
    if (text) element.append(text);
    return;
  }
  let end = 0;
  for (let place = lower.indexOf(needle); place >= 0; place = lower.indexOf(needle, end)) {
    if (place > end) element.append(text.slice(end, place));
    end = place + needle.length;
    element.append(h("mark", {}, text.slice(place, end)));
  }
  if (end < text.length) element.append(text.slice(end));
}

/** The beginning of a text, without half of a surrogate pair at its end. */
function beginning(text, length) {
  if (text.length <= length) return text;
  const last = text.charCodeAt(length - 1);
  return text.slice(0, last >= 0xd800 && last <= 0xdbff ? length - 1 : length);
}

/** A text on one line, for lists. */
function oneLine(text, length) {
  const start = beginning(text, length).trim().replace(/\s*\n\s*/g, " ↵ ");
  return text.length > length ? `${start}…` : start;
}

/** A number for reading. */
function format(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-3 || size >= 1e12)) text = value.toExponential(2);
  else if (size >= 1e9) text = `${trim(value / 1e9)}G`;
  else if (size >= 1e6) text = `${trim(value / 1e6)}M`;
  else if (size >= 1e5) text = `${trim(value / 1e3)}k`;
  else if (size >= 1000) text = Math.round(value).toLocaleString("en");
  else text = trim(value);
  return text.replace("-", "−");
}

function trim(value) {
  return String(Number(value.toPrecision(Math.abs(value) >= 1 ? 4 : 3)));
}

/** A number of things with its noun. */
function count(number_, noun) {
  return `${number_.toLocaleString("en")} ${noun}${number_ === 1 ? "" : "s"}`;
}
