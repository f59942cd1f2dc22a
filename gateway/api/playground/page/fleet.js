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
  say(note, `${fleet.sessions} sessions at this gateway.`);
  fill("verifiers", ["Verifier", "Model", "State", "Sessions", "Waiting", "KV used"], fleet.verifiers.map((each) => [
    each.address, each.model || "–", each.draining ? "draining" : each.ready ? "ready" : "away", each.sessions, each.waiting,
    each.kv_blocks_total ? `${Math.round(100 - (100 * each.kv_blocks_free) / each.kv_blocks_total)} %` : "–",
  ]));
  fill("drafters", ["Drafter", "Method", "State", "Sessions", "Address"], fleet.drafters.map((each) => [
    each.name, each.method || "–", each.draining ? "draining" : !each.present ? "away" : each.breaker === "closed" ? "ready" : "failing", each.sessions, each.address,
  ]));
}

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
