// Elements, numbers, the tooltip and the charts of the report. Comes before page.js in one script element. Everything
// reaches the page as text (textContent, createElement), never as markup, and nothing is fetched.
"use strict";
const Charts = (() => {
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  function el(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined && text !== null) node.textContent = text;
    return node;
  }
  function svgEl(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // --- numbers: finite, absent (null), or the text "NaN", "Infinity", "-Infinity" ---
  const isFiniteNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const isBroken = (value) => typeof value === "string";
  const trim = (text) => text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  function format(value, unit) {
    if (value === null || value === undefined) return "–";
    if (isBroken(value)) return value;
    if (unit === "bytes") {
      const units = ["B", "KB", "MB", "GB", "TB"];
      let i = 0;
      while (Math.abs(value) >= 1000 && i < 4) { value /= 1000; i += 1; }
      return `${trim(value.toFixed(value < 10 && i ? 2 : value < 100 && i ? 1 : 0))} ${units[i]}`;
    }
    const size = Math.abs(value);
    const suffix = unit === "s" ? " s" : "";
    if (size === 0) return `0${suffix}`;
    if (size < 1e-3 || size >= 1e7) return trim(value.toExponential(2).replace(/\.?0+e/, "e")) + suffix;
    if (size >= 1000) return Math.round(value).toLocaleString("en-US") + suffix;
    return trim(value.toFixed(size < 0.01 ? 5 : size < 1 ? 3 : size < 100 ? 2 : 1)) + suffix;
  }

  // Text as it is, but with signs in place of what can't be seen or could reorder the line.
  function visible(text) {
    return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
      (sign) => `⟨U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  }

  // --- tooltip ---
  const tip = byId("tip");
  function showTip(nodes, event) {
    tip.replaceChildren(...nodes);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 16;
    const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - 14 - box.height : event.clientY + 18;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${Math.max(8, y)}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  function tipLine(label, value) {
    const line = el("div");
    line.append(el("span", "", label), el("b", "", value));
    return line;
  }

  // --- scales ---
  function niceStep(span, count) {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
    return power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
  }
  function linearScale(values, zero) {
    let low = Math.min(...values), high = Math.max(...values);
    if (zero) { low = Math.min(0, low); high = Math.max(0, high); }
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low = zero && low >= 0 ? 0 : low - pad; high += pad; }
    const step = niceStep(high - low, 4);
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    const ticks = [];
    for (let i = 0; low + i * step <= high + step / 2; i += 1) ticks.push(Number((low + i * step).toPrecision(12)));
    return { at: (value) => (value - low) / (high - low), ticks, label: (tick) => tick };
  }
  function logScale(values) {
    const positive = values.filter((value) => value > 0);
    if (!positive.length) return linearScale(values.concat([1e-9]), true);
    const hasZero = values.some((value) => value <= 0);
    let low = Math.floor(Math.log10(Math.min(...positive)));
    let high = Math.ceil(Math.log10(Math.max(...positive)));
    if (low === high) high += 1;
    if (hasZero) low -= 1; // zeros sit on the bottom line, which is labelled 0
    const every = Math.max(1, Math.ceil((high - low) / 6));
    const ticks = [];
    for (let e = low; e <= high; e += every) ticks.push(10 ** e);
    const at = (value) => (value <= 0 ? 0 : (Math.log10(value) - low) / (high - low));
    return { at, ticks, label: (tick) => (hasZero && tick === 10 ** low ? 0 : tick) };
  }

  // --- charts ---
  const colorOf = (series) => `var(--c${(series.color || 0) % 8})`;
  function chart(spec, host) {
    const figure = el("figure", spec.wide ? "wide" : "");
    figure.dataset.chart = spec.id;
    const caption = el("figcaption", "", spec.title);
    if (spec.unit_label) caption.append(el("span", "unit", spec.unit_label));
    figure.append(caption);
    if (spec.note) figure.append(el("p", "reason", spec.note));
    host.append(figure);
    if (!spec.series.some((series) => series.values.some((value) => value !== null))) {
      figure.append(el("p", "empty", spec.empty || "Not recorded in this run."));
      return;
    }
    const legend = el("div", "legend");
    spec.series.forEach((series) => {
      const entry = el("span"), mark = el("i", spec.kind === "stack" ? "box" : series.sparse ? "dot" : "");
      mark.style.background = colorOf(series);
      if (series.faint) mark.style.opacity = "0.6";
      entry.append(mark, series.label);
      legend.append(entry);
    });
    if (isFiniteNumber(spec.bound)) {
      const entry = el("span");
      entry.append(el("i", "dashed"), `${spec.bound_label} ${format(spec.bound)}`);
      legend.append(entry);
    }
    figure.append(legend);
    const holder = el("div");
    figure.append(holder);
    let drawnWidth = 0;
    const draw = () => {
      const width = Math.max(260, Math.round(holder.clientWidth || 600));
      if (Math.abs(width - drawnWidth) < 2) return;
      drawnWidth = width;
      holder.replaceChildren(drawChart(spec, width, spec.wide ? 260 : 220));
    };
    draw();
    new ResizeObserver(draw).observe(holder);
  }

  function drawChart(spec, width, height) {
    const left = 58, right = 14, top = 10, bottom = 26;
    const innerWidth_ = width - left - right, innerHeight_ = height - top - bottom;
    const steps = spec.steps, stacked = spec.kind === "stack";
    const totals = steps.map((_, i) => spec.series.reduce((sum, s) => sum + (isFiniteNumber(s.values[i]) ? s.values[i] : 0), 0));
    const values = stacked ? totals : spec.series.flatMap((series) => series.values.filter(isFiniteNumber));
    if (isFiniteNumber(spec.bound)) values.push(spec.bound);
    if (!values.length) values.push(0, 1);
    const scale = spec.log ? logScale(values) : linearScale(values, spec.zero || stacked);
    const y = (value) => top + innerHeight_ * (1 - Math.min(1, Math.max(0, scale.at(value))));
    const first = steps[0], last = steps[steps.length - 1];
    const slot = innerWidth_ / Math.max(1, steps.length);
    const x = stacked
      ? (i) => left + slot * (i + 0.5)
      : (i) => left + (last === first ? innerWidth_ / 2 : (innerWidth_ * (steps[i] - first)) / (last - first));
    const svg = svgEl("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title });
    for (const tick of scale.ticks) {
      svg.append(svgEl("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      svg.append(svgEl("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(scale.label(tick), spec.unit)));
    }
    svg.append(svgEl("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    drawStepLabels(svg, steps, x, height, innerWidth_);
    if (isFiniteNumber(spec.bound)) {
      svg.append(svgEl("rect", { class: "bound-area", x: left, y: top, width: innerWidth_, height: Math.max(0, y(spec.bound) - top) }));
      svg.append(svgEl("line", { class: "bound", x1: left, x2: width - right, y1: y(spec.bound), y2: y(spec.bound) }));
    }
    if (stacked) drawStack(svg, spec, x, y, slot);
    else for (const series of spec.series) drawLine(svg, series, steps, x, y, top);
    addCross(svg, spec, x, left, right, top, bottom, width, height, stacked ? totals : null);
    return svg;
  }

  function drawStepLabels(svg, steps, x, height, innerWidth_) {
    const first = steps[0], last = steps[steps.length - 1];
    const every = Math.max(1, niceStep(Math.max(1, last - first), Math.max(1, innerWidth_ / 64)));
    const labelled = steps.map((step, i) => [step, i]).filter(([step, i]) => i === 0 || step % every === 0);
    let free = -Infinity;
    for (const [step, i] of labelled) {
      if (x(i) < free) continue;
      free = x(i) + (i === 0 ? 58 : 40);
      svg.append(svgEl("text", { x: x(i), y: height - 8, "text-anchor": "middle" }, (i === 0 ? "step " : "") + step));
    }
  }

  function drawLine(svg, series, steps, x, y, top) {
    let path = "", open = false;
    const dots = [];
    series.values.forEach((value, i) => {
      if (isFiniteNumber(value)) {
        path += `${open ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
        open = true;
        dots.push([x(i), y(value)]);
      } else if (isBroken(value)) {
        open = false;
        const cross = svgEl("path", { class: "broken", d: `M${x(i) - 5},${top}l10,10m0,-10l-10,10` });
        cross.append(svgEl("title", {}, `${series.label}: ${value} at step ${steps[i]}`));
        svg.append(cross);
      } else if (!series.sparse) open = false;
    });
    const line = svgEl("path", { class: "series", d: path || "M0,0" });
    line.style.stroke = colorOf(series);
    if (series.sparse) line.style.strokeDasharray = "1 5";
    if (series.faint) line.style.opacity = "0.6";
    svg.append(line);
    if (series.faint) return;
    if (dots.length > 80 && !series.sparse) return;
    for (const [cx, cy] of dots) {
      const dot = svgEl("circle", { cx, cy, r: series.sparse ? 4.5 : 2.5 });
      dot.style.fill = colorOf(series);
      svg.append(dot);
    }
  }

  function drawStack(svg, spec, x, y, slot) {
    const width = Math.max(1, Math.min(46, slot * 0.78));
    const bases = spec.steps.map(() => 0);
    spec.series.forEach((series) => {
      series.values.forEach((value, i) => {
        if (!isFiniteNumber(value) || value <= 0) return;
        const topY = y(bases[i] + value), baseY = y(bases[i]);
        const bar = svgEl("rect", { x: x(i) - width / 2, y: topY, width, height: Math.max(0, baseY - topY) });
        bar.style.fill = colorOf(series);
        svg.append(bar);
        bases[i] += value;
      });
    });
  }

  function addCross(svg, spec, x, left, right, top, bottom, width, height, totals) {
    const cross = svgEl("line", { class: "cross", y1: top, y2: height - bottom, x1: 0, x2: 0, visibility: "hidden" });
    const pad = svgEl("rect", { x: left, y: 0, width: width - left - right, height, fill: "transparent" });
    pad.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) * width) / box.width;
      let nearest = 0;
      for (let i = 1; i < spec.steps.length; i += 1) if (Math.abs(x(i) - at) < Math.abs(x(nearest) - at)) nearest = i;
      cross.setAttribute("x1", x(nearest));
      cross.setAttribute("x2", x(nearest));
      cross.setAttribute("visibility", "visible");
      const lines = spec.series.filter((s) => s.values[nearest] !== null).map((s) => tipLine(s.label, format(s.values[nearest], spec.unit)));
      if (totals) lines.push(tipLine("sum", format(totals[nearest], spec.unit)));
      showTip([el("b", "", `step ${spec.steps[nearest]}`), ...lines], event);
    });
    pad.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
    svg.append(cross, pad);
  }

  return { byId, el, isFiniteNumber, isBroken, format, visible, showTip, hideTip, tipLine, chart };
})();
