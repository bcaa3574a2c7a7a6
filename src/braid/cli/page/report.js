// Curves of runs: one canvas per metric, all over the same steps. Data: braid/cli/packed_curves.py.
"use strict";
(() => {
  const source = document.getElementById("curves");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const LEFT = 54, RIGHT = 24, TOP = 6, BOTTOM = 20, FEW = 60, SMOOTHED = 100;
  const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [14, 4], [4, 4], [9, 3, 2, 3, 2, 3], [1, 4]];

  function bytesOf(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  }

  function unpack({ steps, values }, scale) {
    const y = new Float32Array(bytesOf(values));
    if (scale !== 1) for (let i = 0; i < y.length; i++) y[i] *= scale;
    const step = typeof steps === "string" ? new Int32Array(bytesOf(steps)) : Int32Array.from({ length: steps[1] }, (_, i) => steps[0] + i);
    return { step, y, smoothed: new Map([[0, y]]) };
  }

  const runs = data.runs.map((run, number) => ({ ...run, number, shown: true, unpacked: {} }));

  // Unpacked when it is first drawn: most charts are below the fold.
  function seriesOf(run, metric) {
    if (!(metric in run.series)) return null;
    return (run.unpacked[metric] ??= unpack(run.series[metric], data.scales[metric]));
  }

  // Of both axes that are offered, x is what the view is in; a run has its own number of tokens per step.
  let axis = "steps", smoothing = 0, from = 0, to = 1, hovered = null, pending = false, colours = {};
  const factorOf = (run) => (axis === "tokens" ? run.tokens : 1);

  function ends() {
    let low = Infinity, high = -Infinity;
    for (const run of runs.filter((each) => each.shown && each.span)) {
      low = Math.min(low, run.span[0] * factorOf(run));
      high = Math.max(high, run.span[1] * factorOf(run));
    }
    return low < high ? [low, high] : Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
  }

  // Exponential moving average without the bias towards zero at the beginning; gaps stay gaps.
  function smooth(series) {
    if (series.y.length < SMOOTHED) return series.y;
    if (!series.smoothed.has(smoothing)) {
      const found = new Float32Array(series.y.length);
      for (let i = 0, sum = 0, weight = 0; i < found.length; i++) {
        if (Number.isNaN(series.y[i])) { found[i] = NaN; continue; }
        sum = smoothing * sum + (1 - smoothing) * series.y[i];
        weight = smoothing * weight + 1 - smoothing;
        found[i] = sum / weight;
      }
      series.smoothed = new Map([[0, series.y], [smoothing, found]]);
    }
    return series.smoothed.get(smoothing);
  }

  function firstAtLeast(array, value) {
    let low = 0, high = array.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (array[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // ------------------------------------------------------------------------------------------------ numbers

  function numberText(value, digits = 4) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (!Number.isFinite(value)) return "none";
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(digits)) + letter;
    if (size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(digits)));
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    const found = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) found.push(number * step);
    return found;
  }

  function logTicks(low, high, count) {
    const found = [];
    for (let power = Math.floor(low); power <= high; power++)
      for (const factor of [1, 2, 5]) {
        const at = power + Math.log10(factor);
        if (at >= low && at <= high && (factor === 1 || high - low < 2.5)) found.push(at);
      }
    return found.length >= 2 && found.length <= 3 * count ? found : ticks(low, high, count);
  }

  // ------------------------------------------------------------------------------------------------ a chart

  class Chart {
    constructor(root, index) {
      this.metric = root.dataset.metric;
      this.canvas = root.querySelector("canvas");
      this.readout = root.querySelector(".readout");
      this.context = this.canvas.getContext("2d");
      this.log = root.querySelector(".log input");
      this.log.addEventListener("change", () => this.paint());
      this.first = index === 0;
      this.drag = null;
      this.listen();
    }

    x(value) { return LEFT + ((value - from) / (to - from)) * (this.width - LEFT - RIGHT); }
    at(x) { return from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (to - from); }
    y(value) { return TOP + (1 - (value - this.low) / (this.high - this.low)) * (this.height - TOP - BOTTOM); }
    of(value) { return this.log.checked ? (value > 0 ? Math.log10(value) : NaN) : value; }

    // What is drawn of a run: points, or for each column of pixels the least, the mean and the greatest.
    columns(run) {
      const series = run.shown ? seriesOf(run, this.metric) : null, factor = factorOf(run);
      if (!series) return null;
      const begin = Math.max(0, firstAtLeast(series.step, from / factor) - 1);
      const end = Math.min(series.step.length, firstAtLeast(series.step, to / factor + 1e-9) + 1);
      const pixels = this.width - LEFT - RIGHT, line = smooth(series), found = [];
      const size = Math.max(1, Math.floor((end - begin) / pixels));
      for (let i = begin; i < end; i += size) {
        const until = Math.min(end, i + size);
        let least = Infinity, greatest = -Infinity, sum = 0, place = 0, count = 0;
        for (let j = i; j < until; j++) {
          const value = this.of(series.y[j]), middle = this.of(line[j]);
          if (Number.isNaN(value)) continue;
          least = Math.min(least, value);
          greatest = Math.max(greatest, value);
          sum += middle;
          place += series.step[j];
          count++;
        }
        found.push(count ? { x: (place / count) * factor, least, greatest, mean: sum / count } : null);
      }
      return { run, found, exact: size === 1 };
    }

    // From what is least to what is greatest; of many values on one column, without the outermost hundredths.
    range(all) {
      let low = Infinity, high = -Infinity;
      const noisy = [];
      for (const { found } of all)
        for (const column of found) {
          if (!column) continue;
          low = Math.min(low, column.mean);
          high = Math.max(high, column.mean);
          noisy.push(column.least, column.greatest);
        }
      noisy.sort((a, b) => a - b);
      if (noisy.length) {
        const cut = noisy.length > 400 ? Math.floor(noisy.length / 100) : 0;
        low = Math.min(low, noisy[cut]);
        high = Math.max(high, noisy[noisy.length - 1 - cut]);
      }
      if (!(low <= high)) [low, high] = [0, 1];
      const room = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
      [this.low, this.high] = [low - room, high + room];
      if (!this.log.checked && low >= 0) this.low = Math.max(0, this.low);
      if (this.low === this.high) this.high += 1;
    }

    get inView() {
      const { top, bottom } = this.canvas.getBoundingClientRect();
      return bottom > -200 && top < innerHeight + 200;
    }

    paint() {
      this.stale = !this.inView;
      if (this.stale) return;
      const scale = window.devicePixelRatio || 1, { context, canvas } = this;
      this.width = canvas.clientWidth;
      this.height = canvas.clientHeight;
      if (!this.width) return;
      canvas.width = Math.round(this.width * scale);
      canvas.height = Math.round(this.height * scale);
      context.setTransform(scale, 0, 0, scale, 0, 0);
      const all = runs.map((run) => this.columns(run)).filter(Boolean);
      this.range(all);
      this.axes();
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height - BOTTOM + 1);
      context.clip();
      for (const each of all) this.band(each);
      for (const each of all) this.line(each);
      if (this.first) this.marks();
      context.restore();
      this.letters(all);
      this.cursor();
      canvas.dataset.view = [from, to].join(" ");
      canvas.dataset.drawn = all.reduce((sum, { found }) => sum + found.length, 0);
      this.tell();
    }

    axes() {
      const { context } = this, bottom = this.height - BOTTOM;
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "right";
      const marks = (this.log.checked ? logTicks : ticks)(this.low, this.high, this.height / 48);
      for (const value of marks) {
        const y = Math.round(this.y(value)) + 0.5;
        context.fillStyle = colours.line;
        context.fillRect(LEFT, y, this.width - LEFT - RIGHT, 1);
        context.fillStyle = colours.soft;
        context.fillText(numberText(this.log.checked ? 10 ** value : value, 3), LEFT - 7, Math.max(9, y + 4));
      }
      context.textAlign = "center";
      for (const value of ticks(from, to, (this.width - LEFT - RIGHT) / 90)) {
        const x = Math.round(this.x(value)) + 0.5;
        if (axis === "steps" && value !== Math.round(value)) continue;
        context.fillStyle = colours.line;
        context.fillRect(x, bottom, 1, 4);
        context.fillStyle = colours.soft;
        context.fillText(axis === "steps" ? value.toLocaleString("en") : numberText(value, 3), Math.min(x, this.width - 26), bottom + 15);
      }
      context.fillStyle = colours.line;
      context.fillRect(LEFT, bottom, this.width - LEFT - RIGHT, 1);
    }

    band({ run, found, exact }) {
      if (exact && smoothing === 0) return;
      const { context } = this;
      context.globalAlpha = runs.length > 2 ? 0.16 : 0.24;
      context.fillStyle = context.strokeStyle = colours.runs[run.number];
      for (const part of parts(found)) {
        context.beginPath();
        if (exact) {
          part.forEach((each, i) => context[i ? "lineTo" : "moveTo"](this.x(each.x), this.y(each.least)));
          context.stroke();
          continue;
        }
        part.forEach((each, i) => context[i ? "lineTo" : "moveTo"](this.x(each.x), this.y(each.greatest) - 0.5));
        for (const each of [...part].reverse()) context.lineTo(this.x(each.x), this.y(each.least) + 0.5);
        context.fill();
      }
      context.globalAlpha = 1;
    }

    line({ run, found }) {
      const { context } = this;
      context.strokeStyle = context.fillStyle = colours.runs[run.number];
      context.lineWidth = 1.7;
      context.lineJoin = "round";
      context.setLineDash(DASHES[run.number]);
      for (const part of parts(found)) {
        context.beginPath();
        part.forEach((each, i) => context[i ? "lineTo" : "moveTo"](this.x(each.x), this.y(each.mean)));
        context.stroke();
      }
      context.setLineDash([]);
      context.lineWidth = 1;
      if (found.length > FEW) return;
      for (const each of found.filter(Boolean)) {
        context.beginPath();
        context.arc(this.x(each.x), this.y(each.mean), 2.4, 0, 2 * Math.PI);
        context.fill();
      }
    }

    marks() {
      const { context } = this, bottom = this.height - BOTTOM;
      for (const run of runs.filter((each) => each.shown)) {
        context.fillStyle = colours.runs[run.number];
        for (const [step] of run.marks) {
          const x = this.x(step * factorOf(run));
          context.beginPath();
          context.moveTo(x, bottom - 7);
          context.lineTo(x - 4, bottom);
          context.lineTo(x + 4, bottom);
          context.fill();
        }
      }
    }

    // The letter of each run at its right end, none over another.
    letters(all) {
      if (runs.length < 2) return;
      const { context } = this;
      context.font = "700 11px system-ui, sans-serif";
      context.textAlign = "left";
      const labels = all.flatMap(({ run, found }) => {
        const last = found.findLast((each) => each && each.x <= to + (to - from) * 1e-6);
        return last ? [{ run, x: this.x(last.x) + 5, y: this.y(last.mean) + 4 }] : [];
      }).sort((a, b) => a.y - b.y);
      labels.forEach((each, i) => {
        const above = labels.slice(0, i).filter((other) => Math.abs(other.x - each.x) < 12);
        each.y = Math.max(10, each.y, ...above.map((other) => other.y + 11));
      });
      // Those that were pushed off the bottom push the others up.
      for (let i = labels.length - 1; i >= 0; i--) {
        const each = labels[i], below = labels.slice(i + 1).filter((other) => Math.abs(other.x - each.x) < 12);
        each.y = Math.min(each.y, this.height - BOTTOM, ...below.map((other) => other.y - 11));
        context.fillStyle = colours.runs[each.run.number];
        context.fillText(each.run.letter, each.x, each.y);
      }
    }

    cursor() {
      const { context } = this, bottom = this.height - BOTTOM;
      if (this.drag && this.drag.select !== null) {
        context.globalAlpha = 0.18;
        context.fillStyle = colours.accent;
        context.fillRect(Math.min(this.drag.x, this.drag.select), TOP, Math.abs(this.drag.select - this.drag.x), bottom - TOP);
        context.globalAlpha = 1;
      } else if (hovered !== null && hovered >= from && hovered <= to) {
        context.fillStyle = colours.soft;
        context.fillRect(Math.round(this.x(hovered)), TOP, 1, bottom - TOP);
      }
    }

    // The values at the cursor, or the last ones.
    tell() {
      const parts = [];
      let place = null;
      for (const run of runs.filter((each) => each.shown && each.series[this.metric])) {
        const series = seriesOf(run, this.metric), { step, y } = series, line = smooth(series), factor = factorOf(run);
        if (!step.length) continue;
        let i = hovered === null ? step.length - 1 : firstAtLeast(step, hovered / factor);
        if (hovered !== null && i > 0 && (i === step.length || step[i] - hovered / factor > hovered / factor - step[i - 1])) i--;
        while (hovered === null && i > 0 && Number.isNaN(y[i])) i--;
        const far = hovered !== null && Math.abs(step[i] * factor - hovered) > Math.max((to - from) / 20, 0.75 * factor);
        const letter = Object.assign(document.createElement("i"), { textContent: runs.length > 1 ? run.letter : "" });
        letter.style.color = colours.runs[run.number];
        const value = Object.assign(document.createElement("b"), { textContent: far ? "none" : numberText(y[i], 5) });
        parts.push(" ", letter, " ", value);
        if (line !== y && !far) parts.push(` (${numberText(line[i], 4)})`);
        if (this.first && hovered !== null) {
          const near = run.marks.filter(([each]) => Math.abs(each * factor - hovered) < ((to - from) / this.width) * 5);
          for (const [at, words] of near.slice(0, 2)) parts.push(` ${words} at ${at.toLocaleString("en")}`);
        }
        if (!far && hovered !== null) place = place === null ? step[i] : place;
      }
      const head = hovered === null ? "last" : axis === "steps" ? `step ${(place ?? Math.round(hovered)).toLocaleString("en")}` : `${numberText(hovered)} tokens`;
      this.readout.replaceChildren(head, ...parts);
    }

    listen() {
      const { canvas } = this, place = (event) => event.clientX - canvas.getBoundingClientRect().left;
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        this.drag = { x: place(event), from, to, select: event.shiftKey ? null : place(event) };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        const x = place(event);
        if (!this.drag) {
          hovered = Math.min(to, Math.max(from, this.at(x)));
          return repaint();
        }
        if (this.drag.select !== null) {
          this.drag.select = x;
          return repaint();
        }
        const by = ((this.drag.x - x) / (this.width - LEFT - RIGHT)) * (this.drag.to - this.drag.from);
        show(this.drag.from + by, this.drag.to + by);
      });
      canvas.addEventListener("pointerup", () => {
        const drag = this.drag;
        this.drag = null;
        if (drag && drag.select !== null && Math.abs(drag.select - drag.x) > 4) {
          const [start, end] = [this.at(drag.x), this.at(drag.select)].sort((a, b) => a - b);
          show(start, end);
        } else repaint();
      });
      canvas.addEventListener("pointercancel", () => { this.drag = null; repaint(); });
      canvas.addEventListener("pointerleave", () => { if (!this.drag) { hovered = null; repaint(); } });
      canvas.addEventListener("dblclick", () => show(...ends()));
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005), this.at(place(event)));
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const span = to - from;
        const actions = {
          ArrowLeft: () => show(from - span / 5, to - span / 5), ArrowRight: () => show(from + span / 5, to + span / 5),
          "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(...ends()),
        };
        if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        actions[event.key]();
      });
    }
  }

  function parts(found) {
    const all = [[]];
    for (const each of found) {
      if (each) all[all.length - 1].push(each);
      else if (all[all.length - 1].length) all.push([]);
    }
    return all;
  }

  // -------------------------------------------------------------------------------------------- all charts

  const charts = [...document.querySelectorAll(".chart")].map((root, index) => new Chart(root, index));

  function paint() {
    pending = false;
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue("--" + name).trim();
    colours = { line: colour("line"), soft: colour("soft"), accent: colour("accent"), runs: DASHES.map((_, i) => colour("run-" + i)) };
    for (const chart of charts) chart.paint();
  }

  function repaint() {
    if (!pending) requestAnimationFrame(paint);
    pending = true;
  }

  function show(start, end) {
    const [low, high] = ends(), least = (high - low) / 1e5 || 1;
    const span = Math.min(high - low, Math.max(least, end - start));
    from = Math.min(Math.max(low, start), high - span);
    to = from + span;
    repaint();
  }

  function zoom(factor, at = (from + to) / 2) {
    show(at - (at - from) * factor, at + (to - at) * factor);
  }

  document.getElementById("smooth").addEventListener("input", (event) => {
    smoothing = event.target.value / 100;
    repaint();
  });
  document.getElementById("axis").addEventListener("change", (event) => {
    axis = event.target.value;
    show(...ends());
  });
  document.getElementById("whole").addEventListener("click", () => show(...ends()));
  const keys = [...document.querySelectorAll(".key input")];
  for (const key of keys)
    key.addEventListener("change", () => {
      runs[key.value].shown = key.checked;
      for (const other of keys) if (other.value === key.value) other.checked = key.checked;
      repaint();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("scroll", () => { if (charts.some((each) => each.stale && each.inView)) repaint(); }, { passive: true });
  [from, to] = ends();
  paint();
  new ResizeObserver(repaint).observe(charts[0].canvas);
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
