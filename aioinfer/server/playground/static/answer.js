// The state of one answer, without a document: what a stream has said so far.

export const WAITING = "waiting";
export const STREAMING = "streaming";
export const DONE = "done";
export const STOPPED = "stopped";
export const FAILED = "failed";

/** waiting -> streaming -> done; from both to stopped and failed, from which nothing leads on. */
export class Answer {
  state = WAITING;
  text = "";
  reason = "";
  usage = null;
  error = "";
  #sent;
  #first = 0;
  #last = 0;
  #chunks = 0;

  constructor(now) {
    this.#sent = now;
  }

  get ended() {
    return this.state === DONE || this.state === STOPPED || this.state === FAILED;
  }

  /** Take one chunk; returns what to show of it: pieces of text, and the draft that follows them. */
  take(chunk, now) {
    if (this.ended) return null;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return null;
    const content = choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    const draft = choice.draft ?? null;
    if (content || thought || draft) {
      if (!this.#first) this.#first = now;
      this.#last = now;
      this.#chunks += 1;
      this.state = STREAMING;
    }
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.text += content;
    return { pieces: piecesOf(content, choice.logprobs?.content), thought, draft };
  }

  end(state, error = "") {
    if (this.ended) return;
    this.state = state;
    this.error = error;
  }

  /** The figures of the footer as [name, value] pairs. */
  figures() {
    const found = [];
    if (this.#first) found.push(["first token", `${Math.round(this.#first - this.#sent)} ms`]);
    const tokens = this.usage?.completion_tokens;
    // From the first event on; without usage, of a stopped answer, events stand for tokens.
    const seconds = (this.#last - this.#first) / 1000;
    const counted = (tokens ?? this.#chunks) - 1;
    if (seconds > 0 && counted > 0) found.push(["speed", `${figure(counted / seconds)} tok/s`]);
    if (tokens !== undefined) {
      found.push(["tokens", `${tokens}`]);
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      found.push(["prompt", `${this.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`]);
    }
    found.push(["end", this.state === DONE ? this.reason || "unknown" : this.state]);
    return found;
  }
}

/** Text with the probabilities of its tokens, if these spell it. */
function piecesOf(content, logprobs) {
  if (!logprobs?.length) return content ? [{ text: content, p: null }] : [];
  if (logprobs.map((each) => each.token).join("") === content) {
    return logprobs.map((each) => ({ text: each.token, p: Math.exp(each.logprob) }));
  }
  // Characters of several tokens, or text that was held back: the least likely token counts.
  const p = Math.exp(Math.min(...logprobs.map((each) => each.logprob)));
  return content ? [{ text: content, p }] : [];
}

/** A number with as many digits as say something. */
export function figure(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en-US");
  return value >= 10 ? value.toFixed(0) : value.toFixed(1);
}
