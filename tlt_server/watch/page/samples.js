// What a server's counters did between two polls, of the last hour: as much memory after a week as after an hour.

export const SPAN_S = 3600;
const STEP_S = 2;
const EVENTS = 200;

/** Samples by time, at most one a step and a span of them; the last of a step stands for it. */
export class History {
  #rows = [];

  add(time, values) {
    const rows = this.#rows;
    const step = Math.floor(time / STEP_S);
    // a clock that was set back: what lies ahead of now would never leave
    while (rows.length && rows.at(-1).step >= step) rows.pop();
    rows.push({ time, step, ...values });
    let old = 0;
    while (rows[old].time < time - SPAN_S) old += 1;
    rows.splice(0, old);
  }

  since(time) {
    return this.#rows.filter((row) => row.time >= time);
  }

  get last() {
    return this.#rows.at(-1) ?? null;
  }

  get length() {
    return this.#rows.length;
  }
}

const UNKNOWN = { drafts: 0, accepted: 0, recalls: 0, recalled: 0, tokens_per_s: null, accept_length: null, history_length: null };

/** What one server did. */
export class Samples {
  history = new History();
  /** Of the last two polls; null where the server said nothing to tell it from. */
  rates = UNKNOWN;
  #before = null;

  /** Of a `Status`. Returns whether the server is another one than before: it was started anew. */
  add(status) {
    const before = this.#before;
    this.#before = status;
    const restarted = before !== null && status.uptime_s < before.uptime_s;
    this.rates = before === null || restarted ? UNKNOWN : between(before, status);
    const { running = null, waiting = null } = status.load ?? {};
    const { tokens_per_s, accept_length } = this.rates;
    this.history.add(timeOf(status), { tokens_per_s, accept_length, running, waiting });
    return restarted;
  }

  /** Nobody knows what the server did meanwhile: a gap, and the next rates begin anew. */
  lost() {
    this.#before = null;
    this.rates = UNKNOWN;
    const { last } = this.history;
    const nothing = { tokens_per_s: null, accept_length: null, running: null, waiting: null };
    if (last !== null && last.running !== null) this.history.add(last.time + STEP_S, nothing);
  }
}

/** Seconds since 1970, by the server's clock, as its events are told. */
export function timeOf(status) {
  return status.time ?? Date.now() / 1000;
}

function between(before, now) {
  const seconds = now.uptime_s - before.uptime_s;
  const drafts = now.counters.drafts - before.counters.drafts;
  const accepted = now.counters.accepted_tokens - before.counters.accepted_tokens;
  const [recalls, recalled] = ["lookups", "accepted"].map((name) => (now.history?.[name] ?? 0) - (before.history?.[name] ?? 0));
  const known = seconds > 0 && typeof now.generated_tokens === "number" && typeof before.generated_tokens === "number";
  return {
    drafts,
    accepted,
    recalls,
    recalled,
    history_length: recalls > 0 ? 1 + recalled / recalls : null,
    tokens_per_s: known ? (now.generated_tokens - before.generated_tokens) / seconds : null,
    accept_length: drafts > 0 ? 1 + accepted / drafts : null,
  };
}

/** The sums of several servers: rates add up, and an accept length is that of all their drafts. */
export function summed(all) {
  const sum = (values) => (values.some((each) => each !== null) ? values.reduce((a, b) => a + (b ?? 0), 0) : null);
  const drafts = sum(all.map((each) => each.rates.drafts));
  const accepted = sum(all.map((each) => each.rates.accepted));
  const [recalls, recalled] = ["recalls", "recalled"].map((name) => sum(all.map((each) => each.rates[name])));
  return {
    history_length: recalls > 0 ? 1 + recalled / recalls : null,
    tokens_per_s: sum(all.map((each) => each.rates.tokens_per_s)),
    accept_length: drafts > 0 ? 1 + accepted / drafts : null,
    running: sum(all.map((each) => each.history.last?.running ?? null)),
    waiting: sum(all.map((each) => each.history.last?.waiting ?? null)),
  };
}

/** The last events of a server, oldest first. */
export class Events {
  all = [];

  /** The number to ask after. Each replica of data parallelism counts for itself: that of the one that is behind. */
  get after() {
    const last = new Map();
    for (const { replica = 0, number } of this.all) last.set(replica, number);
    return Math.min(...last.values(), ...(last.size ? [] : [0]));
  }

  add(events) {
    const known = new Set(this.all.map(keyOfEvent));
    this.all = [...this.all, ...events.filter((event) => !known.has(keyOfEvent(event)))].slice(-EVENTS);
  }

  clear() {
    this.all = [];
  }
}

export function keyOfEvent({ replica = 0, number, time, kind }) {
  return `${replica} ${number} ${time} ${kind}`;  // numbers begin anew where a process does
}
