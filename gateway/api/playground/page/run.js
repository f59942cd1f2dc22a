// One run on the page: its tokens, coloured by their origin, and its figures.

const KINDS = { bonus: "bonus token", recovered: "recovered token", plain: "plain decoding", unknown: "origin unknown" };
const COLOURS = 4;

/** Gives each drafter a colour, in the order of their first tokens. */
export class Palette {
  constructor(legend) {
    this.names = [];
    this.legend = legend;
    this.render();
  }

  of(name) {
    if (!this.names.includes(name)) {
      this.names.push(name);
      this.render();
    }
    return `drafter-${this.names.indexOf(name) % COLOURS}`;
  }

  render() {
    const items = this.names.map((name, index) => [`drafted drafter-${index % COLOURS}`, `accepted from ${name}`]);
    const kinds = ["bonus", "recovered", "plain"].map((kind) => [kind, KINDS[kind]]);
    this.legend.replaceChildren(...[...items, ...kinds].map(([names, text]) => {
      const item = document.createElement("li");
      item.append(element("span", `token ${names}`, text));
      return item;
    }));
  }
}

export class Run {
  constructor(title, palette, onRound) {
    this.root = document.getElementById("run-template").content.firstElementChild.cloneNode(true);
    this.root.querySelector("h2").textContent = title;
    this.output = this.root.querySelector(".output");
    this.output.setAttribute("aria-label", `Output, ${title}`);
    this.figures = this.root.querySelector("dl");
    this.palette = palette;
    this.onRound = onRound;
    this.text = "";
    this.rounds = [];
    this.tokens = 0;
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = 0;
    // One tab stop for all tokens: the arrow keys move between them.
    this.output.addEventListener("keydown", (event) => this.move(event));
    this.output.addEventListener("focusin", (event) => this.show(event.target));
    this.output.addEventListener("pointerover", (event) => this.show(event.target));
    this.render();
  }

  /** Takes one chunk of the stream. */
  add(chunk) {
    for (const choice of chunk.choices) {
      const rounds = choice.speculation?.rounds ?? [];
      this.rounds.push(...rounds);
      this.append(choice.text ?? choice.delta?.content ?? "", rounds);
      if (choice.arithmetics) this.mark(choice.arithmetics);
    }
    // After a lost connection the rounds of missed tokens are not sent; the sum at the end counts all tokens.
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    this.render();
  }

  append(text, rounds) {
    if (!text) return;
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    this.text += text;
    let rest = text;
    for (const round of rounds) {
      for (const token of round.tokens) {
        if (!rest.startsWith(token.text)) continue;
        rest = rest.slice(token.text.length);
        if (token.text) this.span(token.text, token.origin, token.drafters, round);
      }
    }
    if (rest) this.span(rest, "unknown", [], null);
  }

  span(text, origin, drafters, round) {
    const span = element("span", `token ${origin}`, text);
    if (origin === "drafted") span.classList.add(this.palette.of(drafters.join(" + ") || "a drafter"));
    span.tabIndex = this.output.childElementCount ? -1 : 0;
    span.note = describe(text, origin, drafters, round);
    this.output.append(span);
  }

  /** Says where a text went on with another arithmetic: it is none of theirs alone. */
  mark(spans) {
    const changes = spans.map(({ arithmetic, offset }) => `${arithmetic} from token ${offset}`).join(", ");
    const note = this.root.querySelector(".mixed");
    note.textContent = `Mixed text: ${changes}.`;
    note.hidden = false;
  }

  move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = step ? event.target[step] : { Home: this.output.firstElementChild, End: this.output.lastElementChild }[event.key];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  show(token) {
    if (token.note) this.onRound(token.note);
  }

  get speed() {
    return this.tokens > 1 && this.lastAt > this.firstAt ? (1000 * (this.tokens - 1)) / (this.lastAt - this.firstAt) : 0;
  }

  render() {
    const drafted = sum(this.rounds, "drafted");
    const accepted = sum(this.rounds, "accepted");
    const tried = this.rounds.filter((round) => round.drafted).length;
    const shown = {
      "Tokens": this.tokens,
      "Tokens/s": this.speed ? this.speed.toFixed(1) : "–",
      "TTFT": this.firstAt ? `${Math.round(this.firstAt - this.startedAt)} ms` : "–",
      "Acceptance rate": drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–",
      "Acceptance length": tried ? (1 + accepted / tried).toFixed(2) : "–",
    };
    this.figures.replaceChildren(...Object.entries(shown).map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      return pair;
    }));
  }
}

function describe(text, origin, drafters, round) {
  const kind = origin === "drafted" ? `guessed by ${drafters.join(" and ") || "a drafter"}, accepted` : KINDS[origin];
  const token = `${JSON.stringify(text)}: ${kind}.`;
  if (!round) return token;
  const each = round.drafters.map((share) => `${share.name} ${share.accepted} of ${share.drafted}`).join(", ");
  return `${token} Round ${round.round}: ${round.drafted} drafted, ${round.accepted} accepted${each ? ` (${each})` : ""}; `
    + `waited ${ms(round.wait_ms)}, of it ${ms(round.bubble_ms)} for candidates; verified in ${ms(round.verify_ms)}.`;
}

const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
const sum = (rounds, key) => rounds.reduce((total, round) => total + round[key], 0);

export function element(name, names, text) {
  const made = document.createElement(name);
  if (names) made.className = names;
  made.textContent = text;
  return made;
}
