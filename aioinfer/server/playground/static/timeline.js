// The timeline: lanes of the loop, the launch thread and the device, and when loop and device work at once.

const LANES = ["loop", "launch", "device"];
const LABELS = { loop: "Event loop", launch: "Launch thread", device: "Device", both: "Loop and device at once" };
/** milliseconds and events per lane that are kept */
const KEPT_MS = 60_000;
const KEPT_EVENTS = 20_000;
/** milliseconds that the picture is behind: events come ten times a second */
const BEHIND_MS = 250;
const LABEL_HEIGHT = 14;
const LANE_HEIGHT = 20;

/** Intervals [start, end] in order, joined where they touch. */
export function joined(intervals) {
  const found = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}

/** What two lists of joined intervals have in common. */
export function common(left, right) {
  const found = [];
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    const start = Math.max(left[i][0], right[j][0]);
    const end = Math.min(left[i][1], right[j][1]);
    if (start < end) found.push([start, end]);
    if (left[i][1] < right[j][1]) i += 1;
    else j += 1;
  }
  return found;
}

export function lengthOf(intervals) {
  return intervals.reduce((sum, [start, end]) => sum + end - start, 0);
}

/** Milliseconds that a slider from 0 to 100 stands for: 5 ms to 10 s. */
export function spanOf(slider) {
  return 5 * 2000 ** (slider / 100);
}

export class Timeline {
  span = spanOf(50);
  /** the end of the picture when it is paused, else null */
  #paused = null;
  #events = Object.fromEntries(LANES.map((lane) => [lane, []]));
  #offset = Infinity;
  #newest = 0;
  #canvas;
  #calm;
  #colors = {};

  constructor(canvas, calm) {
    this.#canvas = canvas;
    this.#calm = calm;
  }

  add(frame, first) {
    if (first) {
      this.#offset = Infinity;
      for (const lane of LANES) this.#events[lane] = [];
    }
    const t = frame.t / 1000;
    this.#newest = t;
    this.#offset = Math.min(this.#offset, performance.now() - t);
    for (const lane of LANES) {
      const kept = this.#events[lane];
      for (const [name, step, start, length] of frame.lanes[lane]) {
        kept.push({ name, step, start: start / 1000, end: (start + length) / 1000 });
      }
      let old = Math.max(0, kept.length - KEPT_EVENTS);
      while (old < kept.length && kept[old].end < t - KEPT_MS) old += 1;
      if (old && this.#paused === null) kept.splice(0, old);
      else if (kept.length > 2 * KEPT_EVENTS) kept.splice(0, kept.length - 2 * KEPT_EVENTS);
    }
  }

  get end() {
    if (this.#paused !== null) return this.#paused;
    if (this.#calm.matches || this.#offset === Infinity) return this.#resting(this.#newest);
    return this.#resting(performance.now() - this.#offset - BEHIND_MS);
  }

  /** While the engine rests, the picture stays where the latest steps are still in it. */
  #resting(end) {
    const latest = Math.max(...LANES.map((lane) => this.#events[lane].at(-1)?.end ?? -Infinity));
    return latest === -Infinity ? end : Math.min(end, latest + this.span / 4);
  }

  pause(paused) {
    const end = this.end;
    this.#paused = paused ? end : null;
  }

  /** Move the picture of a pause to a share of what is kept: 0 is the oldest, 1 the newest. */
  move(share) {
    const oldest = Math.min(...LANES.map((lane) => this.#events[lane][0]?.start ?? this.#newest));
    const first = Math.min(oldest + this.span, this.#newest);
    this.#paused = first + share * (this.#newest - first);
  }

  shift(milliseconds) {
    if (this.#paused !== null) this.#paused = Math.min(this.#newest, this.#paused + milliseconds);
  }

  /** The events of a lane in the picture. */
  #visible(lane, start, end) {
    return this.#events[lane].filter((event) => event.end >= start && event.start <= end);
  }

  readColors() {
    const style = getComputedStyle(this.#canvas);
    for (const name of ["ink", "muted", "line", "loop", "launch", "device", "both", "deliver", "sample"]) {
      this.#colors[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.#colors.font = style.fontFamily;
  }

  /** Draw; returns figures of what is seen. */
  draw() {
    const width = this.#canvas.clientWidth;
    const rows = [...LANES, "both"];
    const height = rows.length * (LABEL_HEIGHT + LANE_HEIGHT) + 18;
    const ratio = devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * ratio) || this.#canvas.height !== Math.round(height * ratio)) {
      this.#canvas.width = Math.round(width * ratio);
      this.#canvas.height = Math.round(height * ratio);
      this.#canvas.style.height = `${height}px`;
    }
    const pen = this.#canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${this.#colors.font}`;
    const end = this.end;
    const start = end - this.span;
    const at = (time) => ((time - start) / this.span) * width;
    this.#grid(pen, start, end, at, height);
    const seen = Object.fromEntries(LANES.map((lane) => [lane, this.#visible(lane, start, end)]));
    const busy = Object.fromEntries(LANES.map((lane) => [lane, busyOf(seen[lane], start, end)]));
    const both = common(busy.loop, busy.device);
    rows.forEach((row, index) => {
      const top = index * (LABEL_HEIGHT + LANE_HEIGHT);
      pen.fillStyle = this.#colors.muted;
      pen.fillText(LABELS[row], 0, top + LABEL_HEIGHT - 3);
      if (row === "both") this.#spans(pen, both, top + LABEL_HEIGHT, at);
      else this.#lane(pen, row, seen[row], top + LABEL_HEIGHT, at);
    });
    const share = (intervals) => lengthOf(intervals) / this.span;
    return {
      steps: new Set(seen.device.map((event) => event.step)).size,
      loop: share(busy.loop),
      launch: share(busy.launch),
      device: share(busy.device),
      hidden: busy.loop.length ? lengthOf(both) / lengthOf(busy.loop) : 0,
    };
  }

  #grid(pen, start, end, at, height) {
    const step = 10 ** Math.floor(Math.log10(this.span / 2));
    pen.fillStyle = this.#colors.line;
    for (let time = Math.ceil(start / step) * step; time < end; time += step) {
      pen.fillRect(at(time), 0, 1, height - 16);
    }
    pen.fillStyle = this.#colors.muted;
    pen.textAlign = "right";
    const unit = step >= 1000 ? `${step / 1000} s` : `${step} ms`;
    pen.fillText(`one line per ${unit}`, at(end), height - 4);
    pen.textAlign = "left";
  }

  #lane(pen, lane, events, top, at) {
    // At a large span many events share a pixel.
    let drawn = -1;
    for (const event of events) {
      const left = at(event.start);
      const right = Math.max(at(event.end), left + 0.75);
      if (right <= drawn) continue;
      pen.fillStyle = this.#colors[event.name] ?? this.#colors[lane];
      const width = Math.max(0.75, right - left - (right - left > 3 ? 1 : 0));
      pen.fillRect(left, top, width, LANE_HEIGHT - 4);
      drawn = Math.max(drawn, right - 0.5);
    }
  }

  #spans(pen, intervals, top, at) {
    pen.fillStyle = this.#colors.both;
    for (const [start, end] of intervals) {
      pen.fillRect(at(start), top, Math.max(0.75, at(end) - at(start)), LANE_HEIGHT - 4);
    }
  }

  /** The event at a place of the canvas, as a sentence. */
  at(x, y) {
    const lane = LANES[Math.floor(y / (LABEL_HEIGHT + LANE_HEIGHT))];
    if (!lane) return "";
    const perPixel = this.span / this.#canvas.clientWidth;
    const time = this.end - this.span + x * perPixel;
    const event = this.#events[lane].findLast(
      (each) => each.start - 2 * perPixel <= time && time <= each.end + 2 * perPixel,
    );
    if (!event) return "";
    return `${LABELS[lane]}: ${event.name} of step ${event.step}, ${(event.end - event.start).toFixed(3)} ms`;
  }
}

function busyOf(events, start, end) {
  return joined(events.map((each) => [Math.max(start, each.start), Math.min(end, each.end)]));
}
