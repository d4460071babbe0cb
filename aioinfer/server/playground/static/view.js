// One answer in the document. Chunks are shown once per frame of the screen, drafts one after the other.

import { Writer, showDraft } from "./text.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
/** milliseconds that a draft stays, and that all waiting drafts may take together */
const DRAFT_MS = 120;
const DRAFTS_MS = 5000;

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function question(log, text) {
  const turn = element("article", "turn user");
  turn.append(element("p", "who", "You"), element("div", "text", text));
  log.append(turn);
  log.scrollTop = log.scrollHeight;
}

export class View {
  #log;
  #turn = element("article", "turn model-turn");
  #thought = element("div", "thought");
  #draft = element("span", "draft");
  #text = element("span", "final");
  #writer = new Writer(this.#text);
  #thoughts = new Writer(this.#thought);
  #queue = [];
  #slow;
  #scheduled = false;
  #shown = 0;
  #deadline = Infinity;
  #known = new Set();
  #drained = null;

  constructor(log, name, slow) {
    this.#log = log;
    this.#slow = slow && !calm.matches;
    this.#thought.hidden = true;
    this.#turn.setAttribute("aria-busy", "true");
    const text = element("div", "text");
    text.append(this.#text, this.#draft);
    this.#turn.append(element("p", "who", name), this.#thought, text);
    log.append(this.#turn);
    log.scrollTop = log.scrollHeight;
  }

  /** What an Answer said of a chunk. */
  add(shown) {
    this.#queue.push(shown);
    this.#schedule();
  }

  /** Show all that waits at once. */
  hurry() {
    this.#slow = false;
  }

  /** Show the rest, then the figures. */
  async finish(answer) {
    this.#deadline = performance.now() + DRAFTS_MS;
    if (this.#queue.length) {
      await new Promise((resolve) => {
        this.#drained = resolve;
        this.#schedule();
      });
    }
    this.#known = showDraft(this.#draft, null, this.#known);
    this.#writer.finish();
    this.#thoughts.finish();
    if (answer.error) this.#turn.append(element("p", "failure", answer.error));
    const figures = element("dl", "figures");
    for (const [name, value] of answer.figures()) {
      const pair = element("div", "");
      pair.append(element("dt", "", name), element("dd", "", value));
      figures.append(pair);
    }
    this.#turn.append(figures);
    this.#turn.setAttribute("aria-busy", "false");
    this.#stayDown(true);
  }

  #schedule() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    // Frames of the screen end while the page is hidden.
    if (document.hidden) setTimeout(() => this.#paint(performance.now()), 100);
    else requestAnimationFrame((now) => this.#paint(now));
  }

  #paint(now) {
    this.#scheduled = false;
    const down = this.#atBottom();
    if (this.#slow && !document.hidden) this.#paintDue(now);
    else for (const shown of this.#queue.splice(0)) this.#show(shown);
    this.#stayDown(down);
    if (this.#queue.length) this.#schedule();
    else this.#drained?.();
  }

  #paintDue(now) {
    const left = Math.min(DRAFTS_MS, Math.max(1, this.#deadline - now));
    const wait = Math.min(DRAFT_MS, left / this.#queue.length);
    const due = this.#shown ? Math.floor((now - this.#shown) / wait) : 1;
    if (due < 1) return;
    this.#shown = now;
    for (const shown of this.#queue.splice(0, due)) this.#show(shown);
  }

  #show({ pieces, thought, draft }) {
    if (thought) {
      this.#thought.hidden = false;
      this.#thoughts.write(thought);
    }
    for (const { text, p } of pieces) this.#writer.write(text, p);
    this.#known = showDraft(this.#draft, draft, this.#known);
  }

  #atBottom() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 48;
  }

  #stayDown(down) {
    if (down) this.#log.scrollTop = this.#log.scrollHeight;
  }
}
