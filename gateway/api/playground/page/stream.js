// One request as a stream of chunks, over fetch: EventSource can neither POST nor send a key.

const RETRY_FIRST_MS = 200;
const RETRY_MOST_MS = 2000;
const RETRY_FOR_MS = 60_000;
// Errors that are no answer to the request: the gateway or its verifier went away, and another one may go on.
const PASSING = new Set([408, 502, 503, 504]);

export class Refused extends Error {}
class Lost extends Error {}

/** Yields chunks until [DONE]. A stream that breaks is resumed behind the last event, on this or another gateway of the
 *  same store. `onState` is called with "streaming" and "reconnecting". */
export async function* chunks(path, body, key, signal, onState) {
  let lastId = "";
  let delay = RETRY_FIRST_MS;
  let lostAt = 0;
  for (;;) {
    try {
      for await (const event of events(path, body, key, signal, lastId)) {
        onState("streaming");
        [lostAt, delay] = [0, RETRY_FIRST_MS];
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw chunk.error.type === "server_error" && chunk.error.code !== "internal" ? new Lost(chunk.error.message) : new Refused(chunk.error.message);
        lastId = event.id || lastId;
        yield chunk;
      }
      throw new Lost("The stream ended early.");
    } catch (error) {
      if (signal.aborted || error instanceof Refused) throw error;
      // Without an id nothing was admitted: a second request might pay twice, so the error is shown.
      if (!lastId) throw new Refused(error.message || "The gateway does not answer.");
      lostAt ||= Date.now();
      if (Date.now() - lostAt > RETRY_FOR_MS) throw new Refused(`No gateway went on: ${error.message}`);
      onState("reconnecting");
      await pause(delay, signal);
      delay = Math.min(2 * delay, RETRY_MOST_MS);
    }
  }
}

async function* events(path, body, key, signal, lastId) {
  const response = await fetch(path, { method: "POST", headers: headers(key, lastId), body: JSON.stringify(body), signal });
  if (!response.ok) {
    const message = await errorOf(response);
    throw PASSING.has(response.status) ? new Lost(message) : new Refused(message);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) yield { id: fields.id, data: fields.data };
    }
  }
}

export function headers(key, lastId = "") {
  const sent = { "content-type": "application/json", "x-event-ids": "true" };
  if (key) sent.authorization = `Bearer ${key}`;
  if (lastId) sent["last-event-id"] = lastId;
  return sent;
}

export async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  return body.error?.message ?? `The gateway answered ${response.status}.`;
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
