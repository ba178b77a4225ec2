// Lines over time, in SVG; what a sighted reader sees in the curve, its label says in figures.

import { h, s, say, set } from "./dom.js";
import { alarming, clock, NONE } from "./words.js";

const HEIGHT = 148;
const LEFT = 40;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** The x axis that charts and timeline share. */
export class Axis {
  /** left: room for labels. */
  constructor(width, until, span, left = LEFT) {
    Object.assign(this, { width, until, span, left, from: until - span });
  }

  x(time) {
    return this.left + ((time - this.from) / this.span) * (this.width - this.left - RIGHT);
  }

  time(x) {
    return this.from + ((x - this.left) / (this.width - this.left - RIGHT)) * this.span;
  }

  /** Four or five round times. */
  ticks() {
    const step = [60, 300, 900, 1800].find((each) => this.span / each <= 5) ?? 3600;
    const first = Math.ceil(this.from / step) * step;
    return Array.from({ length: Math.floor((this.until - first) / step) + 1 }, (_, i) => first + i * step);
  }
}

/** The next round number at or above, whose half is round too. */
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 4, 6, 8, 10].map((each) => each * power).find((each) => each >= value * (1 - 1e-9));
}

/** `d` of a line through what is known of a column; it breaks where nothing is. */
export function path(rows, name, x, y) {
  let drawn = "";
  let broken = true;
  for (const row of rows) {
    const value = row[name];
    if (value !== null) drawn += `${broken ? "M" : "L"}${x(row.time).toFixed(1)} ${y(value).toFixed(1)}`;
    broken = value === null;
  }
  return drawn;
}

export class Chart {
  /** lines: {name, label}, the names of columns. least: where y begins. format: of a value. */
  constructor({ title, lines, least, format }) {
    Object.assign(this, { title, lines, least, format, rows: [], axis: null, cursor: null });
    this.values = lines.map((_, i) => h("span", { class: `value line-${i}` }));
    const legend = lines.map(({ label }, i) =>
      h("span", { class: "entry" }, ...(label ? [h("span", { class: `swatch line-${i}` }), `${label} `] : []), this.values[i]),
    );
    this.at = h("span", { class: "at" });
    this.grid = s("g", { class: "grid" });
    this.marks = s("g", { class: "marks" });
    this.paths = lines.map((_, i) => s("path", { class: `line line-${i}` }));
    this.hair = s("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM });
    this.svg = s("svg", { role: "img", height: HEIGHT }, this.grid, this.marks, ...this.paths, this.hair);
    const caption = h("figcaption", {}, h("span", { class: "name" }, title), ...legend, this.at);
    this.node = h("figure", { class: "chart", tabindex: 0, "aria-label": `${title}: arrow keys read values` }, caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.#point(this.axis?.time(event.offsetX) ?? null));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
    this.node.addEventListener("blur", () => this.#point(null));
    this.node.addEventListener("keydown", (event) => this.#key(event));
  }

  /** rows: of a `History`. events: to mark. */
  show(rows, axis, events) {
    Object.assign(this, { rows, axis });
    const most = Math.max(...rows.flatMap((row) => this.lines.map(({ name }) => row[name] ?? 0)), this.least);
    const top = this.least + nice(Math.max(most - this.least, 2));
    const y = (value) => HEIGHT - BOTTOM - ((value - this.least) / (top - this.least)) * (HEIGHT - TOP - BOTTOM);
    set(this.svg, "viewBox", `0 0 ${axis.width} ${HEIGHT}`);
    this.#drawGrid([this.least, (this.least + top) / 2, top], y);
    this.lines.forEach(({ name }, i) => set(this.paths[i], "d", path(rows, name, (time) => axis.x(time), y)));
    const bounds = { y1: TOP, y2: HEIGHT - BOTTOM };
    this.marks.replaceChildren(...events.map((event) => vertical(axis.x(event.time), { class: alarming(event.kind) ? "alarm" : "target", ...bounds })));
    set(this.svg, "aria-label", this.#summary());
    this.#read();
  }

  #drawGrid(values, y) {
    const { axis } = this;
    const levels = values.flatMap((value) => [
      s("line", { x1: LEFT, x2: axis.width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    this.grid.replaceChildren(...levels, ...timeLabels(axis, HEIGHT - 4));
  }

  #summary() {
    const said = this.lines.map(({ name, label }) => {
      const known = this.rows.map((row) => row[name]).filter((value) => value !== null);
      if (!known.length) return `${label || this.title}: nothing yet`;
      const [now, least, most] = [known.at(-1), Math.min(...known), Math.max(...known)].map(this.format);
      return `${label || this.title}: last ${now}, least ${least}, most ${most}`;
    });
    return said.join("; ");
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || !this.rows.length) return;
    event.preventDefault();
    const at = this.cursor === null ? this.rows.length : this.#nearest();
    this.#point(this.rows[Math.min(Math.max(at + step, 0), this.rows.length - 1)].time);
    set(this.at, "aria-live", "polite");
  }

  #nearest() {
    const away = (row) => Math.abs(row.time - this.cursor);
    return this.rows.reduce((best, row, i) => (away(row) < away(this.rows[best]) ? i : best), 0);
  }

  #point(time) {
    this.cursor = time;
    set(this.at, "aria-live", null);
    this.#read();
  }

  /** What the legend says: at the cursor, else now. */
  #read() {
    const row = this.rows.length === 0 ? null : this.cursor === null ? this.rows.at(-1) : this.rows[this.#nearest()];
    const pointed = row !== null && this.cursor !== null;
    this.lines.forEach(({ name }, i) => say(this.values[i], row === null ? NONE : this.format(row[name])));
    say(this.at, pointed ? clock(row.time) : "");
    set(this.hair, "class", pointed ? "hair shown" : "hair");
    if (pointed) for (const name of ["x1", "x2"]) set(this.hair, name, this.axis.x(row.time));
  }
}

/** Times below an axis, those that it has room for. */
export function timeLabels(axis, y) {
  const places = axis.ticks().map((time) => [axis.x(time), clock(time, false)]);
  const fit = places.filter(([x]) => x > axis.left + 10 && x < axis.width - 16);
  return fit.map(([x, time]) => s("text", { x, y, "text-anchor": "middle" }, time));
}

function vertical(x, attributes) {
  return s("line", { x1: x, x2: x, ...attributes });
}
