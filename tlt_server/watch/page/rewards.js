// Rewards by bucket and arm: how many tokens a second each way to decode gives at each batch size.

import { h, keyed, say, set } from "./dom.js";
import { arm, batches, count, kindOfArm, length, NONE, rate } from "./words.js";

export class Rewards {
  constructor() {
    this.head = h("tr", {});
    this.body = h("tbody", {});
    const table = h("table", { class: "rewards" }, h("thead", {}, this.head), this.body);
    this.scroll = h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Rewards by batch size and arm" }, table);
    this.note = h("p", { class: "quiet" });
    this.node = h("section", {}, h("h2", {}, "Rewards by batch size and arm"), this.scroll, this.note);
  }

  /** strategy: a `Speculation`. running: requests now, or null. */
  show(strategy, running) {
    const buckets = strategy.selection?.buckets ?? [];
    this.scroll.hidden = buckets.length === 0;
    say(this.note, buckets.length ? legend(strategy) : "This server has no drafter, so there are no arms to choose from.");
    const arms = armsOf(buckets);
    const now = buckets.find((bucket) => isNow(bucket, running));
    const lengths = new Map(now?.arms.map((each) => [arm(each.arm), each.accept_length]));
    const heads = [...arms].map(([name, value]) => ({ name, note: kindAndTokens(value, lengths.get(name)) }));
    keyed(this.head, [{ name: "batch", note: "" }, ...heads], ({ name }) => name, heading);
    keyed(this.body, buckets, ({ first }) => first, row);
    const shown = strategy.selection?.mode === "paper" ? measured : expected;
    buckets.forEach((bucket, i) => fill(this.body.children[i], bucket, [...arms.keys()], running, shown));
  }
}

function legend({ mode, selection }) {
  const lost = selection.decoded_s ? ` Exploration has cost ${((100 * selection.explored_lost_s) / selection.decoded_s).toFixed(1)} % of decoding time.` : "";
  const of = selection.mode === "paper" ? "the median of what was measured" : "as expected now, from what was measured";
  return `Tokens/s of all requests together, ${of}; grey: not tried here yet. Framed: the active arm. A pass: tokens it is expected to give a request now. Mode ${mode}.${lost}`;
}

/** By name, in the order of their depth: off first. */
function armsOf(buckets) {
  const all = new Map(buckets.flatMap((bucket) => bucket.arms.map((each) => [arm(each.arm), each.arm])));
  const size = (value) => (value ? value.num_steps * 1000 + value.num_draft_tokens : 0);
  return new Map([...all].sort(([, a], [, b]) => size(a) - size(b)));
}

function heading({ name }) {
  const small = h("small", {});
  const node = h("th", { scope: "col" }, h("span", {}, name), small);
  return { node, update: ({ note }) => say(small, note) };
}

/** What an arm is, and how many tokens a pass of it is expected to give the batch of now. */
function kindAndTokens(value, tokens) {
  return value && tokens !== undefined ? `${kindOfArm(value)}, ${length(tokens)} a pass` : kindOfArm(value);
}

function isNow({ first, last }, running) {
  return running !== null && running >= first && running <= last;
}

function row() {
  return { node: h("tr", {}), update() {} };
}

function fill(node, bucket, names, running, reward) {
  const reports = new Map(bucket.arms.map((each) => [arm(each.arm), each]));
  const rewards = bucket.arms.map(reward).filter((value) => value !== null);
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  const cells = [null, ...names].map((name) => ({ name, report: reports.get(name), bucket, reward, least, most }));
  set(node, "aria-current", isNow(bucket, running) ? "true" : null);
  keyed(node, cells, ({ name }) => name, ({ name }) => {
    const cell = name === null ? h("th", { scope: "row" }) : h("td", {});
    return { node: cell, update: (item) => (name === null ? say(cell, batches(item.bucket)) : show(cell, item)) };
  });
}

/** What mode `paper` chooses by. */
function measured(report) {
  return report.median_reward;
}

/** What mode `bandit` chooses by: at the batch and context of now. */
function expected(report) {
  return report.expected_reward;
}

function show(cell, { report, bucket, reward, least, most }) {
  const value = report ? reward(report) : null;
  const active = report !== undefined && arm(report.arm) === arm(bucket.active);
  say(cell, value === null ? NONE : rate(value));
  set(cell, "class", [active && "active", report && !report.pulls && "expected"].filter(Boolean).join(" ") || null);
  cell.style.setProperty("--share", value === null || most === least ? 0 : (value - least) / (most - least));
  set(cell, "title", report ? told(report, active) : null);
}

function told(report, active) {
  const seen = `${count(report.pulls)} steps seen, median ${rate(report.median_reward)}, accept length ${length(report.accept_length)}, ${report.step_ms.toFixed(1)} ms a step`;
  return active ? `active: ${seen}` : seen;
}
