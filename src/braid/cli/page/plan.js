// Timelines: rows of ops on a canvas, zoomed by wheel, drag and keys. Data: braid/cli/packed_timeline.py.
"use strict";
for (const root of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(document.getElementById(root.id + "-data").textContent);
  const canvas = root.querySelector("canvas"), tip = root.querySelector(".tip");
  const status = document.getElementById(root.id + "-view");
  const LEFT = 76, TOP = 24, GAP = 6, LEAST = data.ticks / 20000;
  const HEIGHTS = { compute: 17, communication: 8, weights: 5 };
  const WORDS = {
    F: "forward", B: "backward", W: "weight gradients", RECOMPUTE: "recompute",
    SUM_COPIES: "all-reduce of replicated weights", UNSHARD: "all-gather of weights", WAIT: "wait for weights",
    REDUCE_GRAD: "reduction of gradients", FINISH: "wait for the reductions", RESHARD: "free weights",
    ACCUM: "accumulate gradients",
  };

  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)), numbers = [];
    for (let at = 0; at < bytes.length; ) {
      let number = 0, factor = 1, byte;
      do {
        byte = bytes[at++];
        number += (byte & 127) * factor;
        factor *= 128;
      } while (byte > 127);
      numbers.push(number);
    }
    const count = numbers.length / 4, lane = { count };
    for (const name of ["kind", "batch", "start", "end", "until"]) lane[name] = new Int32Array(count);
    for (let i = 0, at = 0, start = 0, until = 0; i < count; i++, at += 4) {
      start += numbers[at + 2];
      lane.kind[i] = numbers[at];
      lane.batch[i] = numbers[at + 1] - 1;
      lane.start[i] = start;
      lane.end[i] = start + numbers[at + 3];
      lane.until[i] = until = Math.max(until, lane.end[i]); // ops of a lane may overlap: where none goes on
    }
    return lane;
  }

  const shown = Object.keys(HEIGHTS).filter((lane) => data.rows.some((row) => lane in row.lanes));
  const shrink = Math.max(0.4, Math.min(1.5, 20 / data.rows.length));
  let below = TOP;
  const rows = data.rows.map((row) => {
    const top = below;
    const lanes = shown.map((name) => {
      const lane = name in row.lanes ? unpack(row.lanes[name]) : { count: 0 };
      Object.assign(lane, { name, top: below, height: Math.max(2, Math.round(HEIGHTS[name] * shrink)) });
      below += lane.height + 1;
      return lane;
    });
    const found = { name: row.name, rank: row.rank, lanes, top, bottom: below };
    below += Math.round(GAP * shrink);
    return found;
  });
  const HEIGHT = below + 2;
  canvas.style.height = HEIGHT + "px";

  let from = 0, to = data.ticks, width = 0, colours = {}, pending = false;
  const context = canvas.getContext("2d");
  const xOf = (tick) => LEFT + ((tick - from) / (to - from)) * (width - LEFT);
  const tickOf = (x) => from + ((x - LEFT) / (width - LEFT)) * (to - from);

  function first(array, count, value) {
    let low = 0, high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (array[middle] > value) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function timeText(ticks, digits = 3) {
    const amount = (ticks / data.ticks) * data.seconds;
    if (ticks === 0) return data.real ? "0 s" : "0 units";
    if (!data.real) return Number((amount * 1e3).toPrecision(digits)).toLocaleString("en") + " units";
    const [size, unit] = amount >= 1 ? [1, "s"] : amount >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return Number((amount / size).toPrecision(digits)) + " " + unit;
  }

  const colourOf = (lane, act) => colours[lane.name === "compute" ? act : lane.name];
  const letterOf = (act) => ({ RECOMPUTE: "R" })[act] || act;

  function paint() {
    pending = false;
    const scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    width = canvas.clientWidth;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(HEIGHT * scale);
    for (const name of ["F", "B", "W", "RECOMPUTE", "communication", "weights", "on", "idle", "soft", "line", "text"])
      colours[name] = style.getPropertyValue("--" + name).trim();
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    paintAxis();
    for (const row of rows) paintRow(row);
    status.textContent = `${timeText(from, 4)} to ${timeText(to, 4)}`;
  }

  function paintAxis() {
    const ticks = data.ticks / (data.real ? data.seconds : data.seconds * 1e3);
    const rough = ((to - from) / ticks / (width - LEFT)) * 110, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    for (let number = Math.ceil(from / ticks / step); number * step * ticks <= to; number++) {
      const x = Math.round(xOf(number * step * ticks)) + 0.5, value = number * step;
      context.fillStyle = colours.line;
      context.fillRect(x, TOP - 6, 1, HEIGHT - TOP + 4);
      context.fillStyle = colours.soft;
      const places = Math.max(0, -Math.floor(Math.log10(step)));
      const small = data.real && step < 0.01;
      const label = small ? (value * 1e3).toFixed(Math.max(0, places - 3)) + " ms" : value.toFixed(places) + (data.real ? " s" : "");
      if (x < width - 14) context.fillText(label, Math.max(x, LEFT + 8), 12);
    }
  }

  function paintRow(row) {
    context.textAlign = "right";
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colours.text;
    const high = row.bottom - row.top;
    if (high >= 11 || rows.indexOf(row) % 2 === 0) context.fillText(row.name, LEFT - 10, row.top + Math.min(high, row.lanes[0].height) / 2 + 4);
    context.fillStyle = colours.idle;
    context.fillRect(LEFT, row.top, width - LEFT, row.lanes[0].height);
    for (const lane of row.lanes) paintLane(lane);
  }

  // Ops of one micro-batch that follow one another and are too narrow for a name are one box: up to which op.
  function boxFrom(lane, i) {
    const act = data.kinds[lane.kind[i]][0], pixel = (to - from) / (width - LEFT);
    let last = i;
    while (
      last + 1 < lane.count && lane.batch[last + 1] === lane.batch[i] && data.kinds[lane.kind[last + 1]][0] === act &&
      lane.start[last + 1] - lane.end[last] < pixel && lane.end[last + 1] - lane.start[last + 1] < 28 * pixel
    ) last++;
    return last;
  }

  function paintLane(lane) {
    if (!lane.count) return;
    const font = Math.min(11, lane.height - 4);
    context.font = `600 ${font}px system-ui, sans-serif`;
    context.textAlign = "left";
    let drawn = -1;
    for (let i = first(lane.until, lane.count, from); i < lane.count && lane.start[i] < to; i++) {
      const last = boxFrom(lane, i), left = Math.max(LEFT, xOf(lane.start[i])), right = Math.min(width, xOf(lane.end[last]));
      const batch = lane.batch[i], [act, before, after] = data.kinds[lane.kind[i]], wide = right - left;
      const name = batch < 0 ? before : letterOf(act) + batch;
      const names = last === i ? [name + after, name] : [name];
      i = last;
      if (right - drawn < 0.4) continue; // of several in one pixel, one is seen
      drawn = right;
      context.fillStyle = colourOf(lane, act);
      context.fillRect(left, lane.top, Math.max(wide - (wide > 6 ? 0.7 : 0), 0.4), lane.height);
      const text = font < 7 || wide < 12 ? null : names.find((each) => context.measureText(each).width < wide - 5);
      if (text) {
        context.fillStyle = colours.on;
        context.fillText(text, left + 3, lane.top + lane.height / 2 + font * 0.36);
      }
    }
  }

  function repaint() {
    if (!pending) requestAnimationFrame(paint);
    pending = true;
  }

  function show(start, end) {
    const span = Math.min(data.ticks, Math.max(LEAST, end - start));
    from = Math.min(Math.max(0, start), data.ticks - span);
    to = from + span;
    repaint();
  }

  function zoom(factor, at = (from + to) / 2) {
    show(at - (at - from) * factor, at + (to - at) * factor);
  }

  function find(x, y) {
    const row = rows.find((each) => y >= each.top && y < each.bottom + 2);
    const lane = row && row.lanes.find((each) => y >= each.top && y < each.top + each.height + 1);
    if (!lane || !lane.count || x < LEFT) return null;
    const near = (3 / (width - LEFT)) * (to - from), at = tickOf(x); // narrow ops can be hit, too
    let best = null, distance = near;
    for (let i = first(lane.until, lane.count, at - near); i < lane.count && lane.start[i] <= at + near; i++) {
      const off = Math.max(lane.start[i] - at, at - lane.end[i], 0);
      if (off <= distance) [best, distance] = [i, off];
    }
    return best === null ? null : { row, lane, index: best };
  }

  function describe({ row, lane, index }) {
    const [act, before, after] = data.kinds[lane.kind[index]], batch = lane.batch[index];
    return {
      name: before + (batch < 0 ? "" : batch) + after,
      lines: [
        (WORDS[act] || act) + (batch < 0 ? "" : `, micro-batch ${batch}`),
        `${row.name}, rank ${row.rank}, ${lane.name}`,
        `${timeText(lane.end[index] - lane.start[index])}, from ${timeText(lane.start[index], 5)}`,
      ],
    };
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const found = find(event.clientX - box.left, event.clientY - box.top);
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    const { name, lines } = describe(found), head = document.createElement("b");
    head.textContent = name;
    tip.replaceChildren(head, ...lines.flatMap((line) => [document.createTextNode(line), document.createElement("br")]));
    const x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = Math.max(0, Math.min(x + 14, width - tip.offsetWidth)) + "px";
    tip.style.top = y + 18 + "px";
  }

  let held = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const span = to - from;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / (width - LEFT)) * span;
      show(from + by, to + by);
    } else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005), tickOf(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragged");
    tip.style.display = "none";
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return hover(event);
    const by = ((held.x - event.clientX) / (width - LEFT)) * (held.to - held.from);
    show(held.from + by, held.to + by);
  });
  const release = () => { held = null; canvas.classList.remove("dragged"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, tickOf(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("keydown", (event) => {
    const span = to - from;
    const actions = {
      ArrowLeft: () => show(from - span / 5, to - span / 5), ArrowRight: () => show(from + span / 5, to + span / 5),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, data.ticks),
      Home: () => show(0, span), End: () => show(data.ticks - span, data.ticks),
    };
    if (event.key in actions && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      actions[event.key]();
    }
  });
  new ResizeObserver(repaint).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  paint();
  canvas.dataset.ops = rows.reduce((sum, row) => sum + row.lanes.reduce((all, lane) => all + lane.count, 0), 0);
}
