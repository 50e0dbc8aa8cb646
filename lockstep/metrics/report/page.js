// Fills the report from the JSON in #data, with what charts.js offers.
(() => {
  const { byId, el, isFiniteNumber, isBroken, format, visible, showTip, hideTip, tipLine, chart } = Charts;
  const data = JSON.parse(byId("data").textContent);

  // --- headline ---
  function headline() {
    byId("description").textContent = data.description;
    byId("verdict").textContent = data.verdict.text;
    byId("verdict").className = `pill ${data.verdict.level}`;
    byId("verdict-sentence").textContent = data.verdict.sentence;
    for (const tile of data.tiles) {
      const node = el("div", "tile"), value = el("div", "value");
      if (tile.before !== null && tile.before !== undefined) value.append(el("span", "from", `${format(tile.before, tile.unit)} → `));
      value.append(typeof tile.value === "string" ? tile.value : format(tile.value, tile.unit));
      node.append(el("div", "label", tile.label), value, el("div", "detail", tile.detail));
      byId("tiles").append(node);
    }
    for (const note of data.notes) byId("notes").append(el("li", "", note));
    byId("footer").textContent = data.footer;
  }

  function explorer() {
    const keys = Object.keys(data.explorer);
    if (!keys.length) { byId("explorer-section").hidden = true; return; }
    const select = byId("explorer-key");
    for (const key of keys) select.append(new Option(key, key));
    const show = () => {
      byId("explorer").replaceChildren();
      const { values, unit } = data.explorer[select.value];
      chart({ id: "explorer", title: select.value, unit, steps: data.steps, wide: true, series: [{ label: select.value, values }] }, byId("explorer"));
    };
    select.addEventListener("change", show);
    show();
  }

  // --- agreement: numbers, buckets, worst tokens ---
  function numbers() {
    if (!data.numbers.length) { byId("numbers-section").hidden = true; return; }
    for (const [name, value] of data.numbers) {
      const line = el("tr");
      line.append(el("td", "", name), el("td", "num", format(value)));
      byId("numbers").append(line);
    }
  }

  function buckets() {
    const { kinds, note } = data.buckets;
    byId("buckets-note").textContent = note;
    if (!kinds.length) { byId("bucket-step").parentElement.hidden = true; return; }
    const steps = [...new Set(kinds.flatMap((kind) => Object.keys(kind.steps)))].filter((step) => step !== "all").sort((a, b) => a - b);
    const select = byId("bucket-step");
    select.append(new Option("all", "all"));
    for (const step of steps) select.append(new Option(step, step));
    const show = () => byId("buckets").replaceChildren(...kinds.map((kind) => bucketFigure(kind, select.value)));
    select.addEventListener("change", show);
    show();
  }

  function bucketFigure(kind, step) {
    const figure = el("figure"), caption = el("figcaption", "", kind.title);
    figure.dataset.buckets = kind.kind;
    caption.append(el("span", "unit", kind.hint));
    figure.append(caption);
    const rows = kind.labels.map((label, i) => [label, (kind.steps[step] || [])[i]]).filter(([, cell]) => cell);
    if (!rows.length) { figure.append(el("p", "empty", "Not recorded at this step.")); return figure; }
    const top = Math.max(...rows.map(([, cell]) => cell[1]));
    const table = el("table", "bars"), head = el("tr");
    for (const [name, style] of [["", ""], ["mean |d|", "num"], ["", "bar"], ["max |d|", "num"], ["tokens", "num"]]) head.append(el("th", style, name));
    table.append(head);
    for (const [label, [count, mean, most]] of rows) {
      const line = el("tr"), bar = el("td", "bar"), fill = el("i");
      fill.style.width = `${top > 0 ? (100 * mean / top).toFixed(1) : 0}%`;
      bar.append(fill);
      line.append(el("td", "", label), el("td", "num", format(mean)), bar, el("td", "num", format(most)), el("td", "num", format(count)));
      table.append(line);
    }
    figure.append(table);
    return figure;
  }

  function worst() {
    if (!data.worst.length) { byId("worst-section").hidden = true; return; }
    const head = el("tr");
    for (const [name, style] of [["step", "num"], ["train − rollout", "num"], ["log π train", "num"], ["log π rollout", "num"], ["token in its text", ""], ["where", ""]]) head.append(el("th", style, name));
    byId("worst").append(head);
    for (const token of data.worst) {
      const line = el("tr"), text = el("td", "context");
      if (token.text === null) text.append(token.id === undefined ? "–" : `token id ${token.id}`);
      else text.append(visible(token.before || ""), el("mark", "", visible(token.text) || "∅"), visible(token.after || ""));
      const known = [["sequence_id", "sequence"], ["token", "token"], ["id", "id"], ["version", "version"], ["replica", "replica"]];
      const where = known.filter(([key]) => token[key] !== undefined).map(([key, name]) => `${name} ${visible(String(token[key]))}`).join(", ");
      line.append(el("td", "num", format(token.step)), el("td", "num", format(token.diff)), el("td", "num", format(token.train)),
        el("td", "num", format(token.rollout)), text, el("td", "muted", where));
      byId("worst").append(line);
    }
  }

  // --- refit receipts ---
  const claimLevel = (status) => (status === "held" ? "good" : status === "failed" ? "bad" : "plain");
  function refits() {
    if (data.numbers.length) { byId("refits-section").hidden = true; return; }
    byId("refits-summary").textContent = data.refits.summary;
    if (!data.refits.rows.length) { byId("refits").parentElement.hidden = true; return; }
    const head = el("tr");
    for (const [name, number] of data.refits.columns) head.append(el("th", number ? "num" : "", name));
    head.append(el("th", "", "claims"));
    byId("refits").append(head);
    for (const row of data.refits.rows) {
      const line = el("tr");
      row.cells.forEach((cell, i) => {
        const [, number, unit] = data.refits.columns[i];
        line.append(el("td", number ? "num" : "", typeof cell === "number" ? format(cell, unit) : cell === null ? "–" : String(cell)));
      });
      const claims = el("td");
      for (const claim of row.claims) {
        const chip = el("span", `claim ${claimLevel(claim.status)}`, `${claim.name}: ${claim.status}`);
        if (claim.why) chip.title = claim.why;
        claims.append(chip);
      }
      line.append(claims);
      byId("refits").append(line);
    }
  }

  // --- samples ---
  const FILTERS = {
    all: ["all", () => true],
    right: ["right answers", (sample) => sample.correct === true],
    wrong: ["wrong answers", (sample) => sample.correct === false],
    truncated: ["not finished", (sample) => sample.status !== "finished"],
    far: ["largest difference first", () => true],
  };
  const absDiffs = (sample) => sample.diff.filter(isFiniteNumber).map(Math.abs);
  const maxDiff = (sample) => Math.max(0, ...absDiffs(sample));

  function samples() {
    if (data.numbers.length) { byId("samples-section").hidden = true; return; }
    byId("samples-note").textContent = data.samples.note;
    const steps = Object.keys(data.samples.steps).map(Number).sort((a, b) => a - b);
    if (!steps.length) return;
    byId("samples").hidden = false;
    const stepSelect = byId("sample-step"), filterSelect = byId("sample-filter"), list = byId("sample-list");
    for (const step of steps) stepSelect.append(new Option(step, step));
    for (const [key, [label]] of Object.entries(FILTERS)) filterSelect.append(new Option(label, key));
    stepSelect.value = String(steps[steps.length - 1]);
    let shown = [], at = 0;
    const pick = (index) => {
      at = Math.max(0, Math.min(shown.length - 1, index));
      const items = list.querySelectorAll(".item");
      items.forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
      if (items[at]) {
        const item = items[at];
        if (item.offsetTop < list.scrollTop) list.scrollTop = item.offsetTop - 30;
        if (item.offsetTop + item.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = item.offsetTop + item.offsetHeight - list.clientHeight + 8;
      }
      const scale = Math.max(0, ...data.samples.steps[stepSelect.value].map(maxDiff));
      byId("sample").replaceChildren(...(shown.length ? sampleNodes(shown[at], scale) : [el("p", "empty", "No sample of this kind in this step.")]));
    };
    const refill = () => {
      shown = data.samples.steps[stepSelect.value].filter(FILTERS[filterSelect.value][1]);
      const sorted = filterSelect.value === "far";
      if (sorted) shown.sort((a, b) => maxDiff(b) - maxDiff(a));
      list.replaceChildren();
      let group = null;
      shown.forEach((sample, i) => {
        if (!sorted && sample.group !== group) list.append(el("div", "group", (group = sample.group)));
        list.append(sampleItem(sample, () => pick(i)));
      });
      pick(0);
    };
    list.style.position = "relative";
    list.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      pick(at + move);
    });
    stepSelect.addEventListener("change", refill);
    filterSelect.addEventListener("change", refill);
    refill();
  }

  const correctLevel = (sample) => (sample.correct === true ? "good" : sample.correct === false ? "bad" : "plain");
  function sampleItem(sample, choose) {
    const item = el("div", "item");
    item.setAttribute("role", "option");
    item.append(el("span", `dot ${correctLevel(sample)}`), el("span", "text", visible(sample.completion.trim().slice(0, 80)) || "(empty)"),
      el("span", "reward", sample.reward === null ? "no reward" : format(sample.reward)));
    item.addEventListener("click", choose);
    return item;
  }

  function sampleNodes(sample, scale) {
    const facts = el("div", "facts");
    const fact = (text, level) => facts.append(el("span", level || "plain", text));
    fact(sample.reward === null ? "no reward" : `reward ${format(sample.reward)}`);
    if (sample.correct !== null) fact(sample.correct ? "right" : "wrong", correctLevel(sample));
    if (sample.formatted !== null) fact(sample.formatted ? "asked form" : "not the asked form", sample.formatted ? "good" : "warn");
    fact(sample.status, sample.status === "finished" ? "plain" : "warn");
    for (const [name, value] of Object.entries(sample.parts)) fact(`${name} ${format(value)}`);
    if (sample.answer !== null) fact(`reference answer: ${visible(sample.answer)}`);
    if (sample.error) fact(`grader: ${visible(sample.error)}`, "bad");
    const nodes = [el("div", "muted", `${sample.id} · problem ${sample.problem}`), facts];
    nodes.push(el("h3", "", "Prompt"), el("pre", "prompt", visible(sample.prompt)), el("h3", "", "Completion"));
    const text = el("pre", "completion");
    if (sample.tokens.length) sample.tokens.forEach((_, i) => text.append(tokenNode(sample, i, scale)));
    else text.textContent = visible(sample.completion);
    nodes.push(text);
    if (sample.cut) nodes.push(el("p", "muted", sample.cut));
    nodes.push(...differenceNodes(sample, scale));
    return nodes;
  }

  function differenceNodes(sample, scale) {
    const diffs = absDiffs(sample), broken = sample.diff.filter(isBroken).length;
    if (!diffs.length && !broken) return [el("p", "muted", "The trainer computed no log-probs for this sample, so there is no difference to show.")];
    const line = el("div", "scale");
    const mean = diffs.reduce((sum, value) => sum + value, 0) / Math.max(1, diffs.length);
    line.append("|log π_train − log π_rollout| per token: 0", el("i"), `${format(scale)} (largest shown in this step)`,
      el("span", "", `here: mean ${format(mean)}, max ${format(maxDiff(sample))} over ${diffs.length} tokens${broken ? `, ${broken} not finite` : ""}`));
    return [line];
  }

  function tokenNode(sample, i, scale) {
    const raw = sample.tokens[i], diff = sample.diff[i];
    const shown = raw === "" ? "∅" : visible(raw).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
    const node = el("span", "tok", shown);
    node.dataset.diff = diff === null ? "" : String(diff);
    if (!sample.mask[i]) node.classList.add("outside");
    if (isBroken(diff)) node.classList.add("lost");
    if (isFiniteNumber(diff) && scale > 0) node.style.background = `rgba(var(--shade), ${(0.75 * Math.abs(diff) / scale).toFixed(3)})`;
    node.addEventListener("pointermove", (event) => {
      const lines = [el("span", "token", JSON.stringify(raw)), tipLine("token id", String(sample.ids[i]))];
      if (sample.mask[i]) {
        lines.push(tipLine("log π rollout", format(sample.rollout[i])), tipLine("log π train", format(sample.train[i])),
          tipLine("train − rollout", format(diff)), tipLine("policy version", String(sample.versions[i])));
      } else lines.push(tipLine("", "not sampled or not counted"));
      showTip(lines, event);
    });
    node.addEventListener("pointerleave", hideTip);
    return node;
  }

  headline();
  for (const spec of data.charts) chart(spec, byId("charts"));
  numbers();
  buckets();
  worst();
  explorer();
  refits();
  samples();
  document.documentElement.dataset.ready = "yes";
})();
