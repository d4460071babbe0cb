// Text of a model into the document: text nodes only, with fenced code as blocks.

const FENCE = "```";

/** Splits text that arrives in pieces into parts: {kind: "text" | "code" | "open" | "close", text}. */
export class Fences {
  #code = false;
  #mark = ""; // "open" or "close" while the rest of a fence's line is read
  #atStart = true;
  #held = "";
  #parts = [];

  push(text) {
    this.#parts = [];
    for (const character of text) this.#take(character);
    return this.#parts;
  }

  /** The parts that were held back because a fence could have begun. */
  finish() {
    this.#parts = [];
    this.#emit(this.#held);
    this.#held = "";
    return this.#parts;
  }

  #take(character) {
    if (this.#mark) {
      if (character !== "\n") return;
      this.#code = this.#mark === "open";
      this.#mark = "";
      this.#atStart = true;
      return;
    }
    if (this.#atStart && FENCE.startsWith(this.#held + character)) {
      this.#held += character;
      if (this.#held !== FENCE) return;
      this.#held = "";
      this.#mark = this.#code ? "close" : "open";
      this.#parts.push({ kind: this.#mark, text: "" });
      return;
    }
    this.#emit(this.#held + character);
    this.#held = "";
    this.#atStart = character === "\n";
  }

  #emit(text) {
    if (!text) return;
    const kind = this.#code ? "code" : "text";
    const last = this.#parts.at(-1);
    if (last?.kind === kind) last.text += text;
    else this.#parts.push({ kind, text });
  }
}

/** Appends to an element. */
export class Writer {
  #fences = new Fences();
  #into;
  #element;

  constructor(element) {
    this.#element = element;
    this.#into = element;
  }

  /** Text, and the probability of its token or null. */
  write(text, p = null) {
    for (const part of this.#fences.push(text)) this.#add(part, p);
  }

  finish() {
    for (const part of this.#fences.finish()) this.#add(part, null);
  }

  #add(part, p) {
    if (part.kind === "open") {
      const block = document.createElement("pre");
      block.tabIndex = 0;
      this.#into = document.createElement("code");
      block.append(this.#into);
      this.#element.append(block);
    } else if (part.kind === "close") {
      this.#into = this.#element;
    } else {
      this.#text(part.text, p);
    }
  }

  #text(text, p) {
    if (p !== null) {
      const span = document.createElement("span");
      span.className = `p${Math.min(4, Math.floor(p * 5))}`;
      span.title = `${(100 * p).toFixed(1)} %`;
      span.textContent = text;
      this.#into.append(span);
    } else if (this.#into.lastChild?.nodeType === Node.TEXT_NODE) {
      this.#into.lastChild.appendData(text);
    } else {
      this.#into.append(document.createTextNode(text));
    }
  }
}

const UNKNOWN = "\u2591";

/** Shows a draft: what is unknown as shades, what has become known since the last draft marked as new. */
export function showDraft(element, draft, before) {
  const parts = draft ? draft.text.match(new RegExp(`${UNKNOWN}+|[^${UNKNOWN}]+`, "g")) ?? [] : [];
  element.replaceChildren(
    ...parts.map((text) => {
      const span = document.createElement("span");
      const known = text[0] !== UNKNOWN;
      span.className = known ? (before.has(text) ? "known" : "known born") : "unknown";
      span.textContent = text;
      return span;
    }),
  );
  return new Set(parts);
}
