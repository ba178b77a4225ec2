// Numbers, arms and events in words.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A large number, as 16.8M. */
export function compact(value) {
  return short.format(value);
}

export function length(value) {
  return value === null || value === undefined ? NONE : value.toFixed(2);
}

/** Tokens per second; small ones with a decimal. */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value < 10 && value > 0 ? value.toFixed(1) : whole.format(value);
}

export function spoken(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 172_800) return `${(seconds / 3600).toFixed(0)} h`;
  return `${(seconds / 86_400).toFixed(0)} days`;
}

const minutes = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const toTheMinute = new Intl.DateTimeFormat("en", minutes);
const toTheSecond = new Intl.DateTimeFormat("en", { ...minutes, second: "2-digit" });

/** The time of day where the reader is. */
export function clock(time, seconds = true) {
  return (seconds ? toTheSecond : toTheMinute).format(1000 * time);
}

/** As the flag --arm has it. */
export function arm(value) {
  if (value?.source === "history") return `history:${value.num_steps}`;
  return value ? `${value.num_steps},${value.topk},${value.num_draft_tokens}` : "off";
}

export function kindOfArm(value) {
  if (!value) return "plain decoding";
  if (value.source === "history") return "of history";
  return value.topk === 1 ? "chain" : "tree";
}

export function batches({ first, last }) {
  return first === last ? `${first}` : `${first}–${last}`;
}

const LANES = [
  ["target", /^target_|^published$|^renamed$|^recalled$/],
  ["drafter", /^drafter_|^trainer_/],
  ["replicas", /^(joined|joining|stale|ready|suspect|quarantined|retired)$/],
  ["watchdog", /^accept_length_|^speculation_|^watchdog_/],
];

/** Where an event stands in the timeline. */
export function lane(kind) {
  return LANES.find(([, kinds]) => kinds.test(kind))?.[0] ?? "other";
}

export const lanes = [...LANES.map(([name]) => name), "other"];

const ALARMS = /incomplete|refused|rolled_back|collapsed|speculation_off|lost|quarantined|suspect|failed/;

export function alarming(kind) {
  return ALARMS.test(kind);
}

const SENTENCES = {
  target_published: (d) =>
    `target ${d.version} published${d.weight_version === null ? "" : ` as ${quoted(d.weight_version)}`}${d.seconds < 0.001 ? "" : ` in ${spoken(d.seconds)}`}`,
  target_incomplete: (d) => `target ${d.version} lacks ${d.missing} tensors: ${d.names}`,
  drafter_swapped: (d) =>
    `drafter ${d.version} took over from ${d.from_version}${d.trained_on === null ? "" : `, trained on target ${d.trained_on}`}`,
  drafter_rolled_back: (d) => `back from drafter ${d.from_version} to ${d.version}: ${d.why}`,
  drafter_refused: (d) => `drafter ${d.version} refused: ${d.why}`,
  drafter_kept: (d) => `drafter ${d.version} stays: accept length ${length(d.accept_length)}, at least ${length(d.least)} was demanded`,
  accept_length_collapsed: (d) =>
    `accept length ${length(d.accept_length)} since another ${d.since}, at least ${length(d.least)} was demanded: ${d.action.replaceAll("_", " ")}`,
  drafter_frozen: () => "drafter updates are held back",
  drafter_unfrozen: () => "drafter updates are let in again",
  speculation_off: (d) => `speculation off: ${d.why}`,
  speculation_on: (d) => `speculation on: ${d.why}`,
  trainer_connected: (d) => `drafter trainer ${d.address} connected`,
  trainer_lost: (d) => `drafter trainer ${d.address} lost`,
};

/** An event as a sentence; one of a kind that is not known here with all that it says. A fleet's has text for a
 * detail, and names its replica. */
export function sentence({ kind, detail, replica }) {
  if (typeof detail === "object" && SENTENCES[kind]) return SENTENCES[kind](detail);
  const told = typeof detail === "object" ? listed(detail) : detail;
  return `${typeof replica === "string" ? `${replica}: ` : ""}${kind.replaceAll("_", " ")}${told ? `: ${told}` : ""}`;
}

/** The fields of an object: `version 3, why it is slow`. */
function listed(told) {
  return Object.entries(told)
    .filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${shown(value)}`)
    .join(", ");
}

function shown(value) {
  if (typeof value === "number") return Number.isInteger(value) ? `${value}` : `${Number(value.toPrecision(3))}`;
  return typeof value === "object" ? JSON.stringify(value) : `${value}`;
}

export function quoted(text) {
  return `“${text}”`;
}
