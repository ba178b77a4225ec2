// What happened: marks over time, a lane a kind, below charts of the same axis; and a list to read.

import { timeLabels } from "./chart.js";
import { h, keyed, s, say, set } from "./dom.js";
import { keyOfEvent } from "./samples.js";
import { alarming, clock, lane, lanes, sentence } from "./words.js";

const ROW = 22;
const DOT = "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0";
const DIAMOND = "M0 -6L6 0L0 6L-6 0Z";

export class Timeline {
  constructor() {
    this.svg = s("svg", { role: "img" });
    this.list = h("ol", { class: "events", tabindex: 0, "aria-label": "Events, the latest first" });
    this.nothing = h("p", { class: "quiet" }, "Nothing has happened yet.");
    this.node = h("section", {}, h("h2", {}, "Timeline"), this.svg, this.nothing, this.list);
  }

  /** events: oldest first. */
  show(events, axis) {
    const shown = lanes.filter((name) => events.some(({ kind }) => lane(kind) === name));
    const height = shown.length * ROW + 20;
    set(this.svg, "viewBox", `0 0 ${axis.width} ${height}`);
    set(this.svg, "height", height);
    set(this.svg, "hidden", events.length ? null : "");
    set(this.svg, "aria-label", `${events.length} events; the list below has them in words`);
    this.svg.replaceChildren(
      ...shown.flatMap((name, i) => laneOf(name, (i + 0.5) * ROW, axis)),
      ...events.filter(({ time }) => time >= axis.from).map((event) => glyph(event, shown, axis)),
      ...timeLabels(axis, height - 4),
    );
    this.nothing.hidden = events.length > 0;
    this.list.hidden = events.length === 0;
    keyed(this.list, events.toReversed(), keyOfEvent, entry);
  }
}

function laneOf(name, y, axis) {
  return [
    s("line", { class: "lane", x1: axis.x(axis.from), x2: axis.x(axis.until), y1: y, y2: y }),
    s("text", { x: axis.left - 8, y: y + 4, "text-anchor": "end" }, name),
  ];
}

function glyph(event, shown, axis) {
  const y = (shown.indexOf(lane(event.kind)) + 0.5) * ROW;
  const alarm = alarming(event.kind);
  const attributes = { d: alarm ? DIAMOND : DOT, transform: `translate(${axis.x(event.time)} ${y})` };
  return s("path", { ...attributes, class: alarm ? "alarm" : lane(event.kind) }, s("title", {}, words(event)));
}

function words(event) {
  return `${clock(event.time)} ${sentence(event)}`;
}

function entry() {
  const [time, glyphOf, text] = [h("time", {}), h("span", { "aria-hidden": "true" }), h("span", { class: "text" })];
  const node = h("li", {}, time, glyphOf, text);
  const update = (event) => {
    say(time, clock(event.time));
    set(time, "datetime", new Date(1000 * event.time).toISOString());
    say(glyphOf, alarming(event.kind) ? "◆" : "●");
    set(glyphOf, "class", alarming(event.kind) ? "alarm" : lane(event.kind));
    say(text, sentence(event));
  };
  return { node, update };
}
