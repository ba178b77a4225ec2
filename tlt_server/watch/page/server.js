// One server: what it is doing, how well, with which weights, and what happened to it.

import { Axis, Chart } from "./chart.js";
import { h, keyed, say, set } from "./dom.js";
import { Rewards } from "./rewards.js";
import { SPAN_S, timeOf } from "./samples.js";
import { Timeline } from "./timeline.js";
import { alarming, arm, batches, compact, count, kindOfArm, lane, length, NONE, quoted, rate, spoken } from "./words.js";

const SPANS = [
  [300, "5 min"],
  [900, "15 min"],
  [SPAN_S, "1 h"],
];

const LANE_NAMES = 68;

/** Figures in a row: {name, value, note}. */
export class Tiles {
  node = h("dl", { class: "tiles" });

  show(tiles) {
    keyed(this.node, tiles, ({ name }) => name, ({ name }) => {
      const [value, note] = [h("dd", { class: "figure" }), h("dd", { class: "note" })];
      const update = (tile) => {
        say(value, tile.value);
        say(note, tile.note ?? "");
      };
      return { node: h("div", {}, h("dt", {}, name), value, note), update };
    });
  }
}

/** What is held, paused or wrong: lines of text; gone where nothing is. */
export class Holds {
  node = h("ul", { class: "holds", role: "status", "aria-label": "What is held" });

  show(lines) {
    this.node.hidden = lines.length === 0;
    keyed(this.node, lines, ({ text }) => text, ({ text }) => {
      const node = h("li", {}, text);
      return { node, update: ({ alarm }) => set(node, "class", alarm ? "alarm" : null) };
    });
  }
}

/** Accept length, tokens/s and requests over one time. */
export class Charts {
  #span = SPANS[0][0];

  constructor(shown) {
    this.all = [
      new Chart({ title: "Accept length", lines: [{ name: "accept_length", label: "" }], least: 1, format: length }),
      new Chart({ title: "Tokens/s", lines: [{ name: "tokens_per_s", label: "" }], least: 0, format: rate }),
      new Chart({
        title: "Requests",
        lines: [
          { name: "running", label: "running" },
          { name: "waiting", label: "waiting" },
        ],
        least: 0,
        format: count,
      }),
    ];
    this.timeline = new Timeline();
    const choices = SPANS.map(([span, name]) => {
      const button = h("button", { type: "button", "aria-pressed": span === this.#span }, name);
      button.addEventListener("click", () => {
        this.#span = span;
        for (const each of choices) set(each, "aria-pressed", each === button);
        shown();
      });
      return button;
    });
    const spans = h("div", { class: "spans", role: "group", "aria-label": "Time shown" }, ...choices);
    const charts = h("div", { class: "charts" }, ...this.all.map(({ node }) => node));
    this.node = h("div", {}, spans, charts, this.timeline.node);
  }

  show(history, events, now) {
    const marks = events.filter(({ time, kind }) => time >= now - this.#span && (alarming(kind) || lane(kind) === "target"));
    // all widths before anything is drawn: each would have the page laid out again
    const [wide, ...widths] = [this.timeline, ...this.all].map(({ node }) => Math.max(node.clientWidth, 200));
    this.all.forEach((chart, i) => {
      const axis = new Axis(widths[i], now, this.#span);
      chart.show(history.since(axis.from), axis, marks);
    });
    this.timeline.show(events, new Axis(wide, now, this.#span, LANE_NAMES));
  }
}

export class ServerView {
  #last = null;

  constructor() {
    this.help = h("p", { class: "help" });
    [this.holds, this.tiles, this.rewards] = [new Holds(), new Tiles(), new Rewards()];
    this.charts = new Charts(() => this.#draw());
    this.weights = h("dl", { class: "weights" });
    const weights = h("section", {}, h("h2", {}, "Weights"), this.weights);
    this.node = h("div", { class: "server" }, this.help, this.holds.node, this.tiles.node, this.charts.node, this.rewards.node, weights);
  }

  /** samples: a `Samples`; events: an `Events`. */
  show(status, strategy, samples, events) {
    this.#last = { status, samples, events };
    const running = status.load?.running ?? null;
    say(this.help, status.help);
    this.holds.show(held(status, strategy));
    this.tiles.show(tiles(status, strategy, samples.rates));
    this.rewards.show(strategy, running);
    describe(this.weights, weights(status));
    this.#draw();
  }

  #draw() {
    if (this.#last === null) return;
    const { status, samples, events } = this.#last;
    this.charts.show(samples.history, events.all, timeOf(status));
  }
}

/** Why the server does not do all that it could. */
export function held(status, strategy) {
  const { target, drafter } = status.versions ?? {};
  const { trainer } = status;
  const lines = [
    status.paused && { text: "Generation is paused: requests wait until it is continued." },
    status.offloaded?.length && { text: `Memory is given to the trainer: ${status.offloaded.join(", ")}.` },
    target?.partial && { text: "A publication of the target is under way." },
    target?.missing?.length && { text: `The last publication lacked tensors: ${target.missing.join(", ")}.`, alarm: true },
    strategy.held && { text: `Speculation is held: ${strategy.held}.`, alarm: true },
    drafter?.frozen && { text: "Drafter updates are held back." },
    drafter?.watch?.state === "worse" && { text: "The drafter is plainly worse than the one before.", alarm: true },
    trainer && !trainer.connected && { text: `The drafter trainer at ${trainer.address} does not answer.`, alarm: true },
  ];
  return lines.filter(Boolean);
}

function tiles(status, strategy, rates) {
  const { target, drafter } = status.versions ?? {};
  const running = status.load?.running ?? null;
  const bucket = strategy.selection?.buckets.find(({ first, last }) => running >= first && running <= last) ?? null;
  const active = bucket ? bucket.active : status.arm;
  const since = status.accept_length.total;
  return [
    { name: "Accept length", value: length(rates.accept_length), note: since === null ? "nothing verified yet" : `${length(since)} since start` },
    { name: "Tokens/s", value: rate(rates.tokens_per_s), note: rates.tokens_per_s === null ? "" : "now, all requests" },
    { name: "Running", value: count(running), note: `${count(status.load?.waiting)} waiting` },
    { name: "Arm", value: arm(active), note: bucket ? `${kindOfArm(active)}, batches of ${batches(bucket)}` : kindOfArm(active) },
    { name: "Target", value: target ? `${target.version}` : NONE, note: target ? quoted(target.weight_version) : "" },
    { name: "Drafter", value: drafter ? `${drafter.live.version}` : NONE, note: drafter ? behind(drafter, target) : "none" },
    ...historyTile([status.history], rates),
  ];
}

/** Tokens of a pass that history drafts for, of one server or several; nothing where none keeps any. */
export function historyTile(histories, rates) {
  const kept = histories.filter(Boolean);
  if (kept.length === 0) return [];
  const sum = (name) => kept.reduce((all, each) => all + each[name], 0);
  const share = sum("lookups") ? `${((100 * sum("found")) / sum("lookups")).toFixed(0)} % found` : "not asked yet";
  const note = `${share}, ${compact(sum("tokens"))} of ${compact(sum("capacity"))} tokens`;
  return [{ name: "Of history", value: length(rates.history_length), note }];
}

function behind({ live }, target) {
  if (live.trained_on === null) return "";
  const publications = target.version - live.trained_on;
  return publications > 0 ? `${publications} target${publications > 1 ? "s" : ""} behind` : "for this target";
}

function weights(status) {
  const { target, drafter } = status.versions ?? {};
  const { models, trainer } = status;
  const { live, previous, staging, watch } = drafter ?? {};
  return [
    ["Target", models.target],
    target && ["Weights", `version ${target.version}, ${quoted(target.weight_version)}${target.partial ? ", a publication is under way" : ""}`],
    drafter && ["Drafter", `version ${live.version}${live.trained_on === null ? "" : `, trained on target ${live.trained_on}`}: ${live.path}`],
    previous && ["Before it", `version ${previous.version}, which a rollback brings back`],
    staging && ["On its way", `version ${staging.version}, ${staging.ready ? "read" : "being read"}`],
    watch && ["Watchdog", `${watch.mode}, ${watch.state}${watch.accept_length === null ? "" : `; accept length ${length(watch.accept_length)}`}${watch.least === null ? "" : `, at least ${length(watch.least)} is demanded`}`],
    trainer && ["Trainer", `${trainer.address}, ${trainer.connected ? "connected" : "does not answer"}${trainer.reason ? `; refused ${trainer.refused}: ${trainer.reason}` : ""}`],
    ["Server", `tlt-server ${status.version}, SGLang ${status.sglang_version}, up for ${spoken(status.uptime_s)}${status.devices.length ? `, on ${status.devices.join(", ")}` : ""}`],
  ].filter(Boolean);
}

/** Terms and what they are: [[term, text], ...]. */
export function describe(list, pairs) {
  keyed(list, pairs, ([term]) => term, ([term]) => {
    const text = h("dd", {});
    return { node: h("div", {}, h("dt", {}, term), text), update: ([, said]) => say(text, said) };
  });
}
