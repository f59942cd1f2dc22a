// What the gateway knows of its workers, asked again every two seconds while somebody looks.

import { element } from "./run.js";
import { errorOf, headers } from "./stream.js";

const POLL_MS = 2000;

/** Asks until the page is left. `key` returns the API key of the moment. */
export function watchFleet(key) {
  const note = document.getElementById("fleet-note");
  let refused = null; // the key that was wrong: asking with it again and again would lock this address out
  const poll = async () => {
    const asked = key();
    if (!document.hidden && asked !== refused) {
      try {
        const response = await fetch("/playground/fleet", { headers: headers(asked) });
        refused = response.status === 401 || response.status === 403 ? asked : null;
        if (response.ok) render(await response.json(), note);
        else say(note, await errorOf(response));
      } catch {
        say(note, "The gateway does not answer.");
      }
    }
    setTimeout(poll, POLL_MS);
  };
  poll();
}

function render(fleet, note) {
  say(note, `${fleet.sessions} ${fleet.sessions === 1 ? "session" : "sessions"} at this gateway.`);
  const of = (role) => fleet.workers.filter((each) => each.role === role);
  fill("verifiers", ["Verifier", "Model", "State", "Sessions", "Waiting", "KV used"], of("ROLE_VERIFIER").map((each) => [
    each.address, each.model?.name ?? "–", state(each), each.load.sessions, each.load.waiting, used(each.load),
  ]));
  fill("drafters", ["Drafter", "Model", "State", "Sessions", "KV used", "Address"], of("ROLE_DRAFTER").map((each) => [
    each.name, each.model?.name ?? "–", state(each), each.load.sessions, used(each.load), each.address,
  ]));
}

const state = (each) => (each.load.draining ? "draining" : !each.present ? "away" : each.problem || each.warning || "ready");
const used = (load) => (load.kv_blocks_total ? `${Math.round(100 - (100 * load.kv_blocks_free) / load.kv_blocks_total)} %` : "–");

// Only what changed is said again to those who listen to the page.
function say(note, text) {
  if (note.textContent !== text) note.textContent = text;
}

function fill(id, names, rows) {
  const head = document.createElement("tr");
  head.append(...names.map((name) => element("th", "", name)));
  document.getElementById(id).replaceChildren(head, ...rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((value) => element("td", "", value)));
    return line;
  }));
}
