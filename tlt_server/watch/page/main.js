// Polls, and shows what came: a server, or all replicas of a fleet.

import { say, set } from "./dom.js";
import { FleetView } from "./fleet.js";
import { hasKey, readFleet, Refused, Server, Unanswered, useKey } from "./reads.js";
import { Events, Samples } from "./samples.js";
import { ServerView } from "./server.js";
import { spoken } from "./words.js";

const POLL_MS = 2000;
const [main, connection, title, form, note] = ["main", "connection", "title", "key", "key-note"].map((id) => document.getElementById(id));
let wake = () => {};

/** What is known of one server between polls. */
class Watched {
  status = null;
  samples = new Samples();
  events = new Events();

  constructor(replica = null) {
    this.server = new Server(replica);
  }

  async readStatus() {
    this.status = await this.server.status();
    if (this.samples.add(this.status)) this.events.clear();
  }

  async readEvents() {
    this.events.add(await this.server.events(this.events.after));
  }

  lost() {
    this.status = null;
    this.samples.lost();
  }
}

/** Of a single server. */
class Single {
  watched = new Watched();
  view = new ServerView();

  async poll() {
    const { watched } = this;
    const [strategy] = await Promise.all([watched.server.strategy(), watched.readStatus().then(() => watched.readEvents())]);
    this.view.show(watched.status, strategy, watched.samples, watched.events);
    say(title, `tlt-server: ${watched.status.models.target.split("/").pop()}`);
  }

  lost() {
    this.watched.samples.lost();
  }
}

/** Of a fleet. One replica that does not answer is no news of the others. */
class Fleet {
  replicas = new Map();
  events = new Events();
  view = new FleetView(() => wake());

  async poll() {
    const fleet = await readFleet();
    if (fleet === null) throw new Unanswered("the fleet's front is gone");
    this.replicas = new Map(fleet.replicas.map(({ name }) => [name, this.replicas.get(name) ?? new Watched(name)]));
    const detailed = this.view.detailed(fleet);
    let strategy = null;
    await Promise.all([...this.replicas].map(async ([name, watched]) => {
      try {
        await watched.readStatus();
        if (name === detailed) [strategy] = await Promise.all([watched.server.strategy(), watched.readEvents()]);
      } catch (error) {
        if (!wentWrong(error) || error.status === 401) throw error;
        watched.lost();
      }
    }));
    this.events.add(fleet.events);
    this.view.show(fleet, this.replicas, this.events, strategy, Date.now() / 1000);
    say(title, `tlt-server: fleet of ${fleet.replicas.length}`);
  }

  lost() {
    for (const watched of this.replicas.values()) watched.lost();
  }
}

/** Whether it is the network's doing, or the server's; else it is a bug of this page. */
function wentWrong(error) {
  return error instanceof Refused || error instanceof Unanswered;
}

/** Resolves with the next key that is given. */
function askForKey() {
  form.hidden = false;
  say(connection, "this server wants a key");
  set(connection, "class", "lost");
  if (hasKey()) say(note, "That key was refused.");
  const input = form.querySelector("input");
  input.focus();
  return new Promise((given) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      useKey(input.value.trim());
      input.value = "";
      form.hidden = true;
      given();
    };
  });
}

function pause() {
  return new Promise((over) => {
    wake = over;
    setTimeout(over, POLL_MS);
  });
}

async function run() {
  let watching = null;
  let answered = null;
  for (;;) {
    try {
      if (watching === null) {
        watching = (await readFleet()) === null ? new Single() : new Fleet();
        main.replaceChildren(watching.view.node);
      }
      await watching.poll();
      answered = performance.now();
      say(connection, "live");
      set(connection, "class", "live");
      set(main, "class", null);
    } catch (error) {
      if (error.status === 401) {
        await askForKey();
        continue;
      }
      if (!wentWrong(error)) {
        say(connection, "this page has a bug: the browser's console says which");
        throw error;
      }
      watching?.lost();
      say(connection, `${lost(error, answered)}; trying again`);
      set(connection, "class", "lost");
      set(main, "class", "old");
    }
    await pause();
  }
}

function lost(error, answered) {
  return answered === null ? error.message : `${error.message} for ${spoken((performance.now() - answered) / 1000)}`;
}

await run();
