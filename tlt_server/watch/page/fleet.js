// A fleet: who serves and who does not, all of them together, and one in detail.

import { h, keyed, say, set } from "./dom.js";
import { History, summed } from "./samples.js";
import { Charts, historyTile, Holds, ServerView, Tiles } from "./server.js";
import { count, length, NONE, quoted, rate, spoken } from "./words.js";

const COLUMNS = ["Replica", "State", "Weights", "Running", "Tokens/s", "Accept length", "Since"];

export class FleetView {
  #history = new History();
  #last = null;

  /** changed: called when another replica is chosen. */
  constructor(changed) {
    [this.holds, this.tiles] = [new Holds(), new Tiles()];
    this.charts = new Charts(() => this.#draw());
    this.body = h("tbody", {});
    const head = h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name))));
    const table = h("table", { class: "replicas" }, h("caption", { class: "unseen" }, "Replicas; a button shows one in detail"), head, this.body);
    this.name = h("h2", { class: "replica-name" });
    this.lost = h("p", { class: "quiet" });
    this.detail = new ServerView();
    this.part = h("section", { class: "detail" }, this.name, this.lost, this.detail.node);
    this.node = h("div", { class: "fleet" }, this.holds.node, this.tiles.node, table, this.charts.node, this.part);
    this.choose = (name) => {
      this.chosen = name;
      history.replaceState(null, "", `#${new URLSearchParams({ replica: name })}`);
      changed();
      this.part.scrollIntoView({ block: "nearest" });
    };
    this.chosen = new URLSearchParams(location.hash.slice(1)).get("replica");
  }

  /** The replica to ask for details: the one that was chosen, while it is there. */
  detailed(fleet) {
    const names = fleet.replicas.map(({ name }) => name);
    if (!names.includes(this.chosen)) this.chosen = names[0] ?? null;
    return this.chosen;
  }

  /** watched: by name {status, samples, events}; status is null of one that does not answer. events: an `Events`.
   * strategy: of the one in detail, or null. */
  show(fleet, watched, events, strategy, now) {
    const sums = summed([...watched.values()].filter(({ status }) => status !== null).map(({ samples }) => samples));
    this.#history.add(now, sums);
    this.#last = { events, now };
    this.holds.show(held(fleet));
    this.tiles.show(tiles(fleet, sums, [...watched.values()].map(({ status }) => status?.history)));
    keyed(this.body, fleet.replicas, ({ name }) => name, ({ name }) => row(name, this.choose));
    [...this.body.children].forEach((node, i) => fill(node, fleet, fleet.replicas[i], watched.get(fleet.replicas[i].name), this.chosen, now));
    this.#draw();
    this.#showDetail(watched.get(this.chosen), strategy);
  }

  #draw() {
    if (this.#last !== null) this.charts.show(this.#history, this.#last.events.all, this.#last.now);
  }

  #showDetail(one, strategy) {
    this.part.hidden = this.chosen === null;
    const known = one !== undefined && one.status !== null && strategy !== null;
    say(this.name, `Replica ${this.chosen}`);
    say(this.lost, known ? "" : "It does not answer now.");
    this.lost.hidden = known;
    this.detail.node.hidden = !known;
    if (known) this.detail.show(one.status, strategy, one.samples, one.events);
  }
}

function held(fleet) {
  const ready = fleet.replicas.filter(({ state }) => state === "ready").length;
  return [
    fleet.paused && { text: "Requests wait for the trainer: it has paused, or publishes." },
    fleet.transaction && { text: underWay(fleet.transaction) },
    fleet.held > 0 && { text: `${count(fleet.held)} requests wait.` },
    ready < fleet.min_ready && { text: `${ready} ready, of at least ${fleet.min_ready}: requests wait.`, alarm: true },
  ].filter(Boolean);
}

function underWay({ call, phase, waiting_for }) {
  return `A control call is under way: ${call}, ${phase}, waiting for ${waiting_for.join(", ") || "nobody"}.`;
}

function tiles(fleet, sums, histories) {
  const ready = fleet.replicas.filter(({ state }) => state === "ready").length;
  const running = fleet.replicas.reduce((sum, each) => sum + (each.running ?? 0), 0);
  return [
    { name: "Ready", value: `${ready} of ${fleet.replicas.length}`, note: `at least ${fleet.min_ready}` },
    { name: "Weights", value: fleet.weight_version ?? NONE, note: "of the fleet" },
    { name: "Accept length", value: length(sums.accept_length), note: "over all drafts" },
    { name: "Tokens/s", value: rate(sums.tokens_per_s), note: "all replicas" },
    { name: "Running", value: count(running), note: `${count(sums.waiting)} waiting` },
    ...historyTile(histories, sums),
  ];
}

function row(name, choose) {
  const button = h("button", { type: "button" }, name);
  button.addEventListener("click", () => choose(name));
  const cells = COLUMNS.slice(1).map((column) => h("td", { "data-label": column }));
  cells[0].append(h("span", { class: "glyph", "aria-hidden": "true" }), h("span", {}));
  const node = h("tr", {}, h("th", { scope: "row" }, button), ...cells);
  return { node, update() {} };
}

function fill(node, fleet, replica, one, chosen, now) {
  const [button, state, weights, running, tokens, accepted, since] = [node.querySelector("button"), ...node.querySelectorAll("td")];
  const rates = one?.samples.rates;
  set(button, "aria-pressed", replica.name === chosen);
  set(state, "class", `state ${known(replica.state)}`);
  say(state.lastChild, replica.why ? `${replica.state}: ${replica.why}` : replica.state);
  const other = replica.weight_version !== fleet.weight_version;
  say(weights, replica.weight_version === null ? NONE : quoted(replica.weight_version));
  set(weights, "class", other ? "other" : null);
  say(running, count(replica.running));
  say(tokens, rate(rates?.tokens_per_s));
  say(accepted, length(rates?.accept_length));
  say(since, typeof replica.since === "number" ? spoken(Math.max(now - replica.since, 0)) : NONE);
}

const STATES = ["joining", "stale", "ready", "suspect", "quarantined", "retired"];

function known(state) {
  return STATES.includes(state) ? state : "unknown";
}
