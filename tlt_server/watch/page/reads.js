// What is asked of the server. The key is kept for this tab alone, and goes nowhere but into a header.

const STORED = "tlt-key";
const WAIT_MS = 10_000;

/** The server answered, and not with what was asked for. */
export class Refused extends Error {
  constructor(status, path) {
    super(`${path} answered ${status}`);
    this.status = status;
  }
}

/** There was no answer, or half of one. */
export class Unanswered extends Error {}

export function useKey(key) {
  sessionStorage.setItem(STORED, key);
}

export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

/** JSON of a path below /tlt/. Refused: another status. Unanswered: none in time, or no JSON. */
async function get(path) {
  const key = sessionStorage.getItem(STORED);
  const asked = {
    headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(WAIT_MS),
  };
  const answer = await answered(fetch(new URL(path, document.baseURI), asked));
  if (!answer.ok) throw new Refused(answer.status, path);
  return await answered(answer.json());
}

async function answered(promise) {
  try {
    return await promise;
  } catch (cause) {
    throw new Unanswered("no answer", { cause });
  }
}

/** The fleet that this front is of; null: it is a single server. */
export async function readFleet() {
  try {
    return await get("v1/fleet");
  } catch (error) {
    if (error instanceof Refused && error.status === 404) return null;
    throw error;
  }
}

/** The reads of one server: of this one, or of a replica behind this front. */
export class Server {
  #base;

  constructor(replica = null) {
    const name = replica === null ? "" : encodeURIComponent(replica).replaceAll("%3A", ":");
    this.#base = replica === null ? "" : `v1/replicas/${name}/tlt/`;
  }

  status() {
    return get(`${this.#base}v1/status`);
  }

  strategy() {
    return get(`${this.#base}v1/strategy`);
  }

  events(after) {
    return get(`${this.#base}v1/events?after=${after}`);
  }
}
