// The curves of a report. The data are in the page; nothing is fetched.
"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const RUNS = DATA.runs;
  const NS = "http://www.w3.org/2000/svg";
  const AXES = { step: "Steps", tokens: "Tokens", seconds: "Training time" };
  const KINDS = { save: "save", resume: "resume", spike: "spike", skipped: "skipped update", failure: "failure", note: "note" };
  const MARGIN = { left: 52, right: 12, top: 10, bottom: 26 };
  const state = { axis: "step", smooth: 0.6, whole: false, range: null, hidden: new Set(), unmarked: new Set(["note"]), at: null };
  const tip = document.getElementById("tip");
  const charts = [];

  // --- small helpers -------------------------------------------------------------------------------------------------

  function make(tag, attributes = {}, ...children) {
    const one = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
      else if (value !== false) one.setAttribute(name, value === true ? "" : value);
    }
    one.append(...children);
    return one;
  }

  function draw(parent, tag, attributes, text) {
    const one = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    if (text !== undefined) one.textContent = text;
    parent.append(one);
    return one;
  }

  const color = (run) => `var(--run-${run % 8})`;
  const dashes = (run) => ["", "7 4", "2 4", "10 3 2 3"][Math.floor(run / 8) % 4];

  function duration(seconds) {
    const s = Math.round(seconds);
    if (s < 60) return `${Math.round(seconds * 10) / 10} s`;
    if (s < 3600) return `${Math.floor(s / 60)}m ${String(s % 60).padStart(2, "0")}s`;
    if (s < 86400) return `${Math.floor(s / 3600)}h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
    return `${Math.floor(s / 86400)}d ${String(Math.floor((s % 86400) / 3600)).padStart(2, "0")}h`;
  }

  /** 1.5k, 20M, 3B: as axes have it; digits: as many as neighbouring ticks need to differ. */
  function brief(n, digits = 3) {
    const size = Math.abs(n);
    for (const [unit, of] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
      if (size >= of * (unit === "k" ? 10 : 1)) return `${Number((n / of).toPrecision(digits))}${unit}`;
    if (size && size < 1e-3) return n.toExponential(Math.min(2, digits - 1)).replace(/\.?0+e/, "e");
    return String(Number(n.toPrecision(Math.max(digits, size >= 1000 ? 4 : 0))));
  }

  const long = (n) => n.toLocaleString("en-US");

  function value(n) {
    if (n === null || n === undefined) return "–";
    const size = Math.abs(n);
    if (size >= 1e4) return long(Math.round(n));
    if (size && size < 1e-3) return n.toExponential(3);
    if (size >= 0.1 && size < 100) return n.toFixed(4);
    return String(Number(n.toPrecision(5)));
  }

  /** The first index whose x is at least `x`. */
  function bisect(xs, x) {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function nearest(xs, x) {
    const i = bisect(xs, x);
    if (i === xs.length) return i - 1;
    return i > 0 && x - xs[i - 1] < xs[i] - x ? i - 1 : i;
  }

  /** An exponential average that begins without a bias towards 0; gaps stay gaps. */
  function smoothed(ys, weight) {
    if (!weight) return ys;
    let sum = 0, all = 0;
    return ys.map((y) => {
      if (y === null) return null;
      sum = sum * weight + y * (1 - weight);
      all = all * weight + 1 - weight;
      return sum / all;
    });
  }

  function quantile(sorted, q) {
    return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];
  }

  function ticksOf(low, high, wanted) {
    const rough = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-6 && ticks.length < 100; n++) ticks.push(n * step);
    return ticks;
  }

  function timeTicks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].find((n) => n >= rough);
    if (!step || rough < 1) return ticksOf(low, high, wanted);
    const ticks = [];
    for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(t);
    return ticks;
  }

  function logTicks(low, high, wanted) {
    if (high / low < 4) return ticksOf(low, high, wanted);
    const ticks = [];
    const factors = high / low < 100 ? [1, 2, 3, 5] : high / low < 1e4 ? [1, 3] : [1];
    for (let decade = 10 ** Math.floor(Math.log10(low)); decade <= high; decade *= 10)
      for (const factor of factors) if (decade * factor >= low && decade * factor <= high) ticks.push(decade * factor);
    return ticks.length > 2 ? ticks : ticksOf(low, high, wanted);
  }

  /** Decimals that evenly spaced ticks need, all of them the same; null where they are too large or small for that. */
  function decimals(ticks) {
    const size = Math.max(...ticks.map(Math.abs));
    if (ticks.length < 2 || size >= 1e4 || size < 0.01) return null;
    for (let places = 0; places < 5; places++)
      if (ticks.every((tick) => Math.abs(tick - Number(tick.toFixed(places))) < 1e-9 * size)) return places;
    return null;
  }

  // --- a chart -------------------------------------------------------------------------------------------------------

  function seriesOf(spec) {
    const found = [];
    RUNS.forEach((run, i) => {
      const bunch = spec.source ? run.evals[spec.source] : run.train;
      const curve = bunch && bunch.curves[spec.name];
      if (curve) found.push({ run: i, bunch, curve, few: bunch.step.length <= 60 });
    });
    return found;
  }

  function addChart(spec, parent, wide) {
    const box = make("section", { class: `card chart${wide ? " wide" : ""}` });
    const chart = { spec, box, log: false, series: seriesOf(spec), scale: null };
    const log = make("button", { "aria-pressed": "false", title: "Logarithmic scale" }, "log");
    log.addEventListener("click", () => {
      chart.log = !chart.log;
      log.setAttribute("aria-pressed", chart.log);
      render(chart);
    });
    const size = make("button", { class: "width", "aria-pressed": String(Boolean(wide)), title: "Over the whole width" }, "wide");
    size.addEventListener("click", () => {
      size.setAttribute("aria-pressed", box.classList.toggle("wide"));
      render(chart);
    });
    const title = make("div", { class: "title" }, make("h3", {}, spec.title), " ", make("span", { class: "soft" }, spec.unit));
    box.append(make("header", {}, title, log, size));
    chart.svg = draw(box, "svg", { tabindex: "0", role: "img", "aria-label": `${spec.title}; arrow keys show values` });
    listen(chart);
    parent.append(box);
    charts.push(chart);
  }

  function shown(chart) {
    return chart.series.filter((one) => !state.hidden.has(one.run));
  }

  /** [least, greatest] x of what is shown. */
  function extent() {
    let low = Infinity, high = -Infinity;
    RUNS.forEach((run, i) => {
      if (state.hidden.has(i)) return;
      for (const bunch of [run.train, ...Object.values(run.evals)]) {
        const xs = bunch[state.axis];
        if (xs.length) [low, high] = [Math.min(low, xs[0]), Math.max(high, xs[xs.length - 1])];
      }
    });
    if (low > high) return [0, 1];
    if (low < high / 4) low = 0;
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  function domain(chart, lines, x) {
    const values = [], certain = [];
    for (const { one, ys } of lines) {
      const xs = one.bunch[state.axis];
      const begin = bisect(xs, x[0]), end = bisect(xs, x[1] * (1 + 1e-12) + 1e-12);
      for (let i = begin; i < end; i++) {
        if (ys[i] !== null) certain.push(ys[i]);
        for (const y of [one.curve.y[i], one.curve.lo && one.curve.lo[i], one.curve.hi && one.curve.hi[i]])
          if (y !== null && y !== undefined) values.push(y);
      }
    }
    const positive = chart.log ? (y) => y > 0 : () => true;
    const sorted = values.filter(positive).sort((a, b) => a - b);
    if (!sorted.length) return chart.log ? [0.1, 1] : [0, 1];
    let low = sorted[0], high = sorted[sorted.length - 1];
    if (!state.whole && sorted.length > 5 && lines.every(({ one }) => one.few)) {
      // Few points, of which the first may be that of an untrained model: room for what lies close to most of them.
      const inner = [quantile(sorted, 0.1), quantile(sorted, 0.85)], more = (inner[1] - inner[0]) * 0.8;
      if (more > 0) [low, high] = [Math.max(low, inner[0] - more), Math.min(high, inner[1] + more)];
    } else if (!state.whole && sorted.length > 5) {
      const sure = certain.filter(positive).sort((a, b) => a - b);
      [low, high] = [quantile(sorted, 0.01), quantile(sorted, 0.99)];
      if (sure.length) [low, high] = [Math.min(low, quantile(sure, 0.01)), Math.max(high, quantile(sure, 0.985))];
    }
    // A constant comes out of an average with its last bits changed.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) high = low;
    if (chart.log) return low === high ? [low / 1.5, high * 1.5] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    if (low === high) return low ? [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1] : [-1, 1];
    const room = (high - low) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  function pathOf(xs, ys, X, Y, begin, end) {
    let path = "", pen = false;
    for (let i = begin; i < end; i++) {
      const y = ys[i] === null || ys[i] === undefined ? NaN : Y(ys[i]);
      if (Number.isFinite(y)) path += `${pen ? "L" : "M"}${X(xs[i]).toFixed(1)} ${y.toFixed(1)}`;
      pen = Number.isFinite(y);
    }
    return path;
  }

  function bandOf(xs, lo, hi, X, Y, begin, end, floor) {
    let path = "";
    for (let i = begin; i < end; ) {
      if (lo[i] === null) { i++; continue; }
      const first = i;
      let there = "", back = "";
      for (; i < end && lo[i] !== null; i++) {
        const low = Y(lo[i]), high = Y(hi[i]), x = X(xs[i]).toFixed(1);
        there += `${i === first ? "M" : "L"}${x} ${(Number.isFinite(high) ? high : floor).toFixed(1)}`;
        back = `L${x} ${(Number.isFinite(low) ? low : floor).toFixed(1)}${back}`;
      }
      path += `${there}${back}Z`;
    }
    return path;
  }

  function render(chart) {
    const { svg, spec } = chart;
    const width = svg.clientWidth, height = svg.clientHeight;
    svg.replaceChildren();
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const area = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const x = state.range || extent();
    const lines = shown(chart).map((one) => ({ one, ys: spec.noisy && !one.few ? smoothed(one.curve.y, state.smooth) : one.curve.y }));
    const y = domain(chart, lines, x);
    const place = chart.log ? Math.log : (n) => n;
    const X = (n) => area.left + ((n - x[0]) / (x[1] - x[0])) * (area.right - area.left);
    const Y = (n) => (chart.log && n <= 0 ? NaN : area.bottom - ((place(n) - place(y[0])) / (place(y[1]) - place(y[0]))) * (area.bottom - area.top));
    chart.scale = { area, x, y, X, Y, lines };
    drawAxes(chart, width);

    const clip = `clip-${charts.indexOf(chart)}`;
    const box = draw(draw(draw(svg, "defs", {}), "clipPath", { id: clip }), "rect", {});
    for (const [name, n] of Object.entries({ x: area.left, y: area.top - 4, width: area.right - area.left, height: area.bottom - area.top + 4 }))
      box.setAttribute(name, n);
    const plot = draw(svg, "g", { "clip-path": `url(#${clip})` });
    for (const { one, ys } of lines) {
      const xs = one.bunch[state.axis];
      const begin = Math.max(0, bisect(xs, x[0]) - 1), end = Math.min(xs.length, bisect(xs, x[1]) + 1);
      const stroke = { stroke: color(one.run), "stroke-dasharray": dashes(one.run), "data-run": one.run };
      if (one.curve.lo) draw(plot, "path", { class: "band", fill: color(one.run), d: bandOf(xs, one.curve.lo, one.curve.hi, X, Y, begin, end, area.bottom) });
      if (ys !== one.curve.y) draw(plot, "path", { class: "raw", ...stroke, d: pathOf(xs, one.curve.y, X, Y, begin, end) });
      draw(plot, "path", { class: "line", ...stroke, d: pathOf(xs, ys, X, Y, begin, end) });
      if (one.few)
        for (let i = begin; i < end; i++)
          if (ys[i] !== null && Number.isFinite(Y(ys[i])))
            draw(plot, "circle", { class: "point", cx: X(xs[i]).toFixed(1), cy: Y(ys[i]).toFixed(1), r: 3, fill: color(one.run) });
    }
    drawMarks(chart, plot);
    if (!lines.length) draw(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no run that is shown has this");
    chart.over = draw(svg, "g", { class: "over" });
    showCross(chart);
  }

  function drawAxes(chart, width) {
    const { svg } = chart, { area, x, y, X, Y } = chart.scale;
    const rows = Math.max(3, Math.round((area.bottom - area.top) / 42));
    const values = (chart.log ? logTicks : ticksOf)(y[0], y[1], rows);
    const places = decimals(values);
    for (const tick of values) {
      const at = Y(tick);
      draw(svg, "line", { class: "grid", x1: area.left, x2: area.right, y1: at, y2: at });
      const text = chart.spec.name === "mfu" ? `${Number((100 * tick).toPrecision(4))}%` : places === null ? brief(tick, 4) : tick.toFixed(places);
      draw(svg, "text", { x: area.left - 7, y: at + 4, "text-anchor": "end" }, text);
    }
    draw(svg, "line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom });
    const wanted = Math.max(2, Math.floor((area.right - area.left) / 75));
    const ticks = (state.axis === "seconds" ? timeTicks : ticksOf)(x[0], x[1], wanted);
    for (const tick of ticks) {
      const text = state.axis === "seconds" ? duration(tick) : brief(tick, 6);
      const at = X(tick), anchor = at > width - 34 ? "end" : "middle";
      draw(svg, "line", { class: "axis", x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4 });
      draw(svg, "text", { x: anchor === "end" ? area.right : at, y: area.bottom + 18, "text-anchor": anchor }, text);
    }
  }

  // --- what happened -------------------------------------------------------------------------------------------------

  const AXIS_OF_MARK = { step: 1, tokens: 2, seconds: 3 };

  function marksShown() {
    const found = [];
    RUNS.forEach((run, i) => {
      if (state.hidden.has(i)) return;
      for (const mark of run.marks) if (!state.unmarked.has(mark[0]) && mark[0] in KINDS) found.push({ run: i, kind: mark[0], at: mark[AXIS_OF_MARK[state.axis]], text: mark[4], step: mark[1] });
    });
    return found;
  }

  function drawMarks(chart, plot) {
    const { area, X, x } = chart.scale, taken = new Set();
    const there = marksShown().filter(({ at }) => at >= x[0] && at <= x[1]);
    const upright = new Set(["failure", "resume", ...(chart.spec.name === "lm_loss" ? ["spike"] : [])]);
    const few = there.filter(({ kind }) => upright.has(kind)).length <= 40;
    for (const { kind, at } of there) {
      const px = Math.round(X(at)), key = `${kind} ${px}`;
      if (taken.has(key)) continue;
      taken.add(key);
      const stroke = `var(--mark-${kind})`;
      if (few && upright.has(kind))
        draw(plot, "path", { class: "mark line-up", stroke, fill: "none", d: `M${px} ${area.top}V${area.bottom}` });
      const shape = { save: `M${px} ${area.bottom}v-7`, resume: `M${px - 4} ${area.bottom}l4 -8l4 8z`, note: `M${px} ${area.bottom}v-4`,
        skipped: `M${px} ${area.bottom}v-11`, spike: `M${px - 4} ${area.top + 4}l4 -5l4 5l-4 5z`, failure: `M${px - 4} ${area.top}l8 8m0 -8l-8 8` }[kind];
      draw(plot, "path", { class: `mark ${kind}`, stroke, fill: kind === "resume" || kind === "spike" ? stroke : "none", d: shape });
    }
  }

  // --- pointing and zooming ------------------------------------------------------------------------------------------

  function listen(chart) {
    const { svg } = chart;
    let from = null;
    const within = (event) => event.clientX - svg.getBoundingClientRect().left;
    const toX = (px) => {
      const { area, x } = chart.scale;
      return x[0] + ((Math.min(area.right, Math.max(area.left, px)) - area.left) / (area.right - area.left)) * (x[1] - x[0]);
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch" && event.button === 0 && chart.scale) {
        from = within(event);
        svg.setPointerCapture(event.pointerId);
      }
      if (chart.scale) point(chart, toX(within(event)), event);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!chart.scale) return;
      point(chart, toX(within(event)), event);
      if (from === null) return;
      const { area } = chart.scale, to = within(event);
      chart.over.querySelectorAll(".zoom").forEach((one) => one.remove());
      draw(chart.over, "rect", { class: "zoom", x: Math.min(from, to), width: Math.abs(to - from), y: area.top, height: area.bottom - area.top });
    });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = within(event);
      const [low, high] = [toX(Math.min(from, to)), toX(Math.max(from, to))];
      const far = Math.abs(to - from) > 8;
      from = null;
      if (far && high > low) zoom([low, high]);
      else renderAll();
    });
    svg.addEventListener("pointercancel", () => { from = null; });
    svg.addEventListener("pointerleave", () => { if (from === null) leave(); });
    svg.addEventListener("blur", leave);
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("keydown", (event) => {
      if (!chart.scale) return;
      const { x } = chart.scale, one = (x[1] - x[0]) / 100;
      if (event.key === "Escape") zoom(null);
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const now = state.at === null ? (x[0] + x[1]) / 2 : state.at + (event.key === "ArrowLeft" ? -one : one);
        point(chart, Math.min(x[1], Math.max(x[0], now)), null);
        event.preventDefault();
      }
    });
  }

  function point(chart, at, event) {
    state.at = at;
    for (const other of charts) showCross(other);
    showTip(chart, at, event);
  }

  function leave() {
    state.at = null;
    tip.hidden = true;
    for (const chart of charts) showCross(chart);
  }

  function showCross(chart) {
    if (!chart.scale || !chart.over) return;
    chart.over.replaceChildren();
    const { area, x, X, Y, lines } = chart.scale;
    if (state.at === null || state.at < x[0] || state.at > x[1]) return;
    draw(chart.over, "line", { class: "cross", x1: X(state.at), x2: X(state.at), y1: area.top, y2: area.bottom });
    for (const { one, ys } of lines) {
      const xs = one.bunch[state.axis], i = nearest(xs, state.at);
      if (i < 0 || ys[i] === null || !Number.isFinite(Y(ys[i]))) continue;
      const cy = Y(ys[i]);
      if (cy >= area.top - 4 && cy <= area.bottom + 1 && xs[i] >= x[0] && xs[i] <= x[1])
        draw(chart.over, "circle", { class: "point", cx: X(xs[i]), cy, r: 4, fill: color(one.run) });
    }
  }

  function showTip(chart, at, event) {
    const { x, X, lines } = chart.scale, { noisy, name } = chart.spec;
    tip.replaceChildren();
    const text = (n) => (name === "mfu" && n !== null ? `${(100 * n).toFixed(2)}%` : value(n));
    lines.forEach(({ one, ys }, k) => {
      const { bunch, curve } = one, i = nearest(bunch[state.axis], at);
      if (i < 0) return;
      if (k === 0) tip.append(make("div", { class: "at" }, `step ${long(bunch.step[i])} · ${brief(bunch.tokens[i], 4)} tokens · ${duration(bunch.seconds[i])}`));
      const row = make("div", { class: "row" });
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = color(one.run);
      row.append(swatch, make("span", { class: "name" }, RUNS[one.run].name), make("b", {}, curve.y[i] === null ? "not finite" : text(curve.y[i])));
      const more = [];
      if (lines.length > 1 && bunch.step[i] !== lines[0].one.bunch.step[nearest(lines[0].one.bunch[state.axis], at)]) more.push(`step ${long(bunch.step[i])}`);
      if (curve.lo && curve.lo[i] !== null) more.push(`${text(curve.lo[i])} to ${text(curve.hi[i])}`);
      if (noisy && ys !== curve.y && ys[i] !== null) more.push(`smoothed ${text(ys[i])}`);
      for (const also of ["ppl", "bits_per_byte"]) if (bunch.curves[also] && name === "val_loss") more.push(`${also === "ppl" ? "perplexity" : "bits a byte"} ${value(bunch.curves[also].y[i])}`);
      tip.append(row);
      if (more.length) tip.append(make("div", { class: "row" }, make("small", {}, more.join(" · "))));
    });
    const near = marksShown().filter((mark) => Math.abs(X(mark.at) - X(at)) < 5).slice(0, 4);
    for (const mark of near) {
      const dot = make("span", { class: "swatch dot" });
      dot.style.background = `var(--mark-${mark.kind})`;
      const of = RUNS.length > 1 ? `${RUNS[mark.run].name}, ` : "";
      tip.append(make("div", { class: "happened" }, dot, `${of}step ${long(mark.step)}: ${mark.text}`));
    }
    if (!tip.childElementCount) { tip.hidden = true; return; }
    tip.hidden = false;
    const frame = chart.svg.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const px = event ? event.clientX : frame.left + X(at), py = event ? event.clientY : frame.top + 20;
    if (innerWidth < 640) {
      // No room beside the pointer: above the chart, or below it.
      tip.style.left = `${Math.max(8, Math.min(px - size.width / 2, innerWidth - size.width - 8))}px`;
      tip.style.top = `${frame.top - size.height > 8 ? frame.top - size.height - 4 : Math.min(frame.bottom + 6, innerHeight - size.height - 8)}px`;
      return;
    }
    let left = px + 16, top = py + 14;
    if (left + size.width > innerWidth - 8) left = px - size.width - 16;
    if (left < 8) [left, top] = [Math.max(8, Math.min(px - size.width / 2, innerWidth - size.width - 8)), py - size.height - 22];
    if (top + size.height > innerHeight - 8) top = py - size.height - 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  function zoom(range) {
    state.range = range;
    tip.hidden = true;
    state.at = null;
    document.getElementById("reset").disabled = !range;
    document.querySelectorAll("[data-part]").forEach((one) => one.setAttribute("aria-pressed", String(!range && one.dataset.part === "1")));
    renderAll();
  }

  let waiting = false;
  function renderAll() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      charts.forEach(render);
      document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
    });
  }

  // --- controls ------------------------------------------------------------------------------------------------------

  function chooser(label, options, chosen, change) {
    const buttons = options.map(([key, text, more]) =>
      make("button", { "aria-pressed": String(key === chosen), ...more, onclick: () => {
        buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(options[i][0] === key)));
        change(key);
      } }, text));
    return make("div", { class: "group" }, make("span", { class: "soft" }, label), make("div", { class: "choice" }, ...buttons));
  }

  function addControls(parent) {
    parent.append(chooser("Against", Object.entries(AXES), state.axis, (axis) => {
      state.axis = axis;
      zoom(null);
    }));
    parent.append(chooser("Show", [1, 0.5, 0.1].map((part) => [part, part === 1 ? "all" : `last ${100 * part}%`, { "data-part": part }]), 1, (part) => {
      const [low, high] = extent();
      state.range = part === 1 ? null : [high - (high - low) * part, high];
      document.getElementById("reset").disabled = part === 1;
      renderAll();
    }));
    const amount = make("output", {}, state.smooth.toFixed(2));
    const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, "aria-label": "Smoothing" });
    slider.addEventListener("input", () => {
      state.smooth = Number(slider.value);
      amount.textContent = state.smooth.toFixed(2);
      renderAll();
    });
    parent.append(make("label", { class: "group" }, make("span", { class: "soft" }, "Smoothing"), slider, amount));
    const whole = make("button", { "aria-pressed": "false", title: "Make room for the hundredth part of the values that lies farthest out, too" }, "Outliers");
    whole.addEventListener("click", () => {
      state.whole = !state.whole;
      whole.setAttribute("aria-pressed", String(state.whole));
      renderAll();
    });
    const log = make("button", { "aria-pressed": "false", title: "Logarithmic scale on all charts" }, "Log scale");
    log.addEventListener("click", () => {
      const on = log.getAttribute("aria-pressed") === "false";
      log.setAttribute("aria-pressed", String(on));
      for (const chart of charts) {
        chart.log = on;
        chart.box.querySelector("button").setAttribute("aria-pressed", String(on));
      }
      renderAll();
    });
    const reset = make("button", { id: "reset", disabled: true, title: "Or double-click a chart" }, "Reset zoom");
    reset.addEventListener("click", () => zoom(null));
    parent.append(make("div", { class: "group" }, whole, log, reset));
  }

  function chip(text, swatch, on, change, title = "") {
    const dot = make("span", { class: `swatch ${swatch.dot ? "dot" : ""}` });
    dot.style.background = swatch.color;
    const one = make("button", { class: "chip", "aria-pressed": String(on), title }, dot, text);
    one.addEventListener("click", () => {
      const now = one.getAttribute("aria-pressed") === "false";
      one.setAttribute("aria-pressed", String(now));
      change(now);
      renderAll();
    });
    return one;
  }

  function addChips(runs, marks) {
    if (RUNS.length > 1)
      RUNS.forEach((run, i) => runs.append(chip(run.name, { color: color(i) }, true, (on) => (on ? state.hidden.delete(i) : state.hidden.add(i)))));
    for (const [kind, name] of Object.entries(KINDS)) {
      const count = RUNS.reduce((sum, run) => sum + run.marks.filter((mark) => mark[0] === kind).length, 0);
      if (count)
        marks.append(chip(`${long(count)} ${name}${count === 1 ? "" : "s"}`, { color: `var(--mark-${kind})`, dot: true }, !state.unmarked.has(kind), (on) => (on ? state.unmarked.delete(kind) : state.unmarked.add(kind))));
    }
  }

  if (DATA.charts.length) {
    addControls(document.getElementById("controls"));
    addChips(document.getElementById("run-chips"), document.getElementById("mark-chips"));
    const main = document.getElementById("charts");
    DATA.charts.forEach((spec, i) => addChart(spec, main, i === 0));
    const more = document.getElementById("more-charts");
    if (more) {
      DATA.more.forEach((spec) => addChart(spec, more, false));
      more.closest("details").addEventListener("toggle", renderAll);
    }
    new ResizeObserver(renderAll).observe(main);
    renderAll();
  }
})();
