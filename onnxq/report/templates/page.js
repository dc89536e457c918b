"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  // Names come from models that may be hostile: all text becomes text nodes, never markup.
  const made = (space, tag, attributes, children) => {
    const one = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    one.append(...children);
    return one;
  };
  const html = (tag, attributes = {}, ...children) => made("", tag, attributes, children);
  const svg = (tag, attributes = {}, ...children) => made(SVG, tag, attributes, children);
  const figure = (value, unit) => (value === null ? "–" : `${value} ${unit}`);
  const share = (value) => (value === 0 ? "nothing" : value < 1e-4 ? "under 0.01 %" : `${(100 * value).toFixed(2)} %`);

  // --- rows as the tables and cards read them

  const words = data.words;
  const nodes = data.nodes.map((row, index) => ({
    index, name: row[0], operator: words[row[1]], mode: words[row[2]], reason: words[row[3]], formats: words[row[4]],
    ranges: words[row[5]], kernel: words[row[6]], before: row[7], after: row[8], sqnr: row[9],
  }));
  const tensors = data.tensors.map((row, index) => ({
    index, name: row[0], low: row[1], high: row[2], from: row[3], to: row[4], clipped: row[5], bars: row[6],
  }));
  const weights = data.weights.map((row, index) => ({
    index, name: row[0], node: row[1], channels: row[2], maxima: row[3],
    spread: row[3][0] > 0 ? row[3][4] / row[3][0] : Infinity,
  }));

  // --- drawings

  const histogram = (one) => {
    const width = 240, height = 68, span = one.high - one.low || 1, step = width / one.bars.length;
    const place = (value) => Math.min(Math.max(((value - one.low) / span) * width, 0), width);
    const most = Math.log1p(Math.max(...one.bars, 1));
    const path = (keep) => one.bars.map((count, bar) => {
      const start = one.low + (bar / one.bars.length) * span, end = one.low + ((bar + 1) / one.bars.length) * span;
      if (!count || !keep(start, end)) return "";
      const tall = Math.max((Math.log1p(count) / most) * (height - 6), 1.5);
      return `M${(bar * step).toFixed(1)} ${height}v-${tall.toFixed(1)}h${(step * 0.86).toFixed(1)}v${tall.toFixed(1)}z`;
    }).join("");
    const inside = (start, end) => end >= one.from && start <= one.to;
    const told = `${one.name}: values from ${one.low} to ${one.high}, range ${one.from} to ${one.to}, ${share(one.clipped)} clipped`;
    return svg("svg", { class: "histogram", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": told },
      svg("rect", { class: "band", x: place(one.from), y: 0, width: Math.max(place(one.to) - place(one.from), 0), height }),
      svg("path", { class: "inside", d: path(inside) }), svg("path", { class: "outside", d: path((start, end) => !inside(start, end)) }));
  };

  const spread = (one) => {
    const width = 144, floor = Math.max(one.maxima[4], 1e-30) * 1e-4;
    const [least, lower, middle, upper, most] = one.maxima.map((value) => {
      const low = Math.log(Math.max(one.maxima[0], floor) * 0.8), high = Math.log(Math.max(one.maxima[4], 1e-30) * 1.25);
      return ((Math.log(Math.max(value, floor)) - low) / (high - low)) * width;
    });
    const told = `least ${one.maxima[0]}, median ${one.maxima[2]}, greatest ${one.maxima[4]}`;
    return svg("svg", { class: "spread", viewBox: `0 0 ${width} 16`, role: "img", "aria-label": told },
      svg("line", { x1: least, x2: most, y1: 8, y2: 8 }), svg("rect", { x: lower, y: 3, width: Math.max(upper - lower, 1.5), height: 10, rx: 2 }),
      svg("line", { class: "middle", x1: middle, x2: middle, y1: 3, y2: 13 }));
  };

  // --- one list for all: searched, sorted, shown page by page

  const compared = (key, down) => (one, other) => {
    const [a, b] = [one[key], other[key]];
    if (a === b) return one.index - other.index;
    if (a === null || b === null) return a === null ? 1 : -1;
    return (a < b ? -1 : 1) * (down ? -1 : 1);
  };

  const list = (root, rows, { what, size, searched, choices, draw, sortable }) => {
    const state = { page: 0, key: "index", down: false, text: "", choice: "", rows };
    const search = html("input", { type: "search", placeholder: `Search ${what}`, "aria-label": `Search ${what}` });
    const select = choices && html("select", { "aria-label": choices.label }, html("option", { value: "" }, choices.all),
      ...[...new Set(rows.map((row) => row[choices.key]))].map((value) => html("option", { value }, value)));
    const order = sortable && html("select", { "aria-label": `Order of ${what}` }, ...sortable.map(([value, label]) => html("option", { value }, label)));
    const told = html("output", { "aria-live": "polite" });
    const back = html("button", { type: "button", "aria-label": "Previous page" }, "←");
    const on = html("button", { type: "button", "aria-label": "Next page" }, "→");
    const body = html("div");
    const find = () => {
      const text = state.text.toLowerCase();
      state.rows = rows.filter((row) => (!state.choice || row[choices.key] === state.choice) &&
        (!text || searched.some((key) => row[key].toLowerCase().includes(text)))).sort(compared(state.key, state.down));
      state.page = 0;
      show();
    };
    const show = (all = false) => {
      const first = all ? 0 : state.page * size, last = all ? Math.min(state.rows.length, 2000) : Math.min(first + size, state.rows.length);
      const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
      body.replaceChildren(draw(state.rows.slice(first, last), state, (key) => {
        Object.assign(state, { down: state.key === key && !state.down, key });
        find();
      }));
      if (focused) body.querySelector(`[data-key="${focused}"]`)?.focus();
      told.textContent = state.rows.length ? `${first + 1} to ${last} of ${state.rows.length} ${what}` : `none of ${rows.length} ${what}`;
      back.disabled = !first;
      on.disabled = last >= state.rows.length;
    };
    search.addEventListener("input", () => { state.text = search.value; find(); });
    select?.addEventListener("change", () => { state.choice = select.value; find(); });
    order?.addEventListener("change", () => { const [key, way] = order.value.split(" "); Object.assign(state, { key, down: way === "down" }); find(); });
    back.addEventListener("click", () => { state.page -= 1; show(); });
    on.addEventListener("click", () => { state.page += 1; show(); });
    window.addEventListener("beforeprint", () => show(true));
    window.addEventListener("afterprint", () => show());
    root.replaceChildren(html("div", { class: "bar" }, ...[search, select, order, told, back, on].filter(Boolean)), body);
    find();
  };

  const table = (label, columns) => (rows, state, sort) => {
    const head = columns.map(({ title, key, number }) => {
      const button = html("button", { type: "button", "data-key": key }, title);
      button.addEventListener("click", () => sort(key));
      const way = state.key === key ? (state.down ? "descending" : "ascending") : "none";
      return html("th", { scope: "col", "aria-sort": way, ...(number && { class: "number" }) }, button);
    });
    const cell = (row, { of, number, main }) => html(main ? "th" : "td", { ...(main && { scope: "row" }), ...(number && { class: "number" }) }, of(row));
    const lines = rows.map((row) => html("tr", {}, ...columns.map((column) => cell(row, column))));
    return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...lines)));
  };

  const name = (row) => html("bdi", {}, row.name);
  const NODES = [
    { title: "Node", key: "name", of: name, main: true },
    { title: "Operator", key: "operator", of: (row) => row.operator },
    { title: "Mode", key: "mode", of: (row) => html("span", { class: `mode ${row.mode}` }, row.mode) },
    { title: "Why", key: "reason", of: (row) => html("div", { class: "why" }, row.reason) },
    { title: "Formats", key: "formats", of: (row) => html("span", { class: "codes" }, row.formats || (row.ranges ? "" : "–"), html("small", {}, row.ranges)) },
    ...(nodes.some((row) => row.kernel) ? [{ title: "Kernel", key: "kernel", of: (row) => html("span", { class: "codes" }, row.kernel) }] : []),
    ...(nodes.some((row) => row.before !== null) ? [
      { title: "Float", key: "before", number: true, of: (row) => figure(row.before, "ms") },
      { title: "Quantized", key: "after", number: true, of: (row) => figure(row.after, "ms") },
    ] : []),
    ...(nodes.some((row) => row.sqnr !== null) ? [{ title: "Alone", key: "sqnr", number: true, of: (row) => figure(row.sqnr, "dB") }] : []),
  ];
  const nodeList = { what: "nodes", size: 50, searched: ["name", "operator", "reason", "kernel"], choices: { key: "mode", label: "Mode", all: "all modes" } };
  const rootOf = (id) => document.getElementById(id);

  list(rootOf("node-list"), nodes, { ...nodeList, draw: table("Table of nodes", NODES) });
  if (tensors.length) list(rootOf("tensor-list"), tensors, {
    what: "tensors", size: 24, searched: ["name"], sortable: [["index up", "in graph order"], ["clipped down", "most clipped first"], ["name up", "by name"]],
    draw: (rows) => html("ul", { class: "grid-of-cards" }, ...rows.map((row) => html("li", {}, html("code", { title: row.name }, name(row)), histogram(row),
      html("p", {}, `${row.from} to ${row.to}; ${share(row.clipped)} clipped`)))),
  });
  if (weights.length) list(rootOf("weight-list"), weights, {
    what: "weights", size: 25, searched: ["name", "node"], draw: table("Table of weights", [
      { title: "Weight", key: "name", of: name, main: true },
      { title: "Node", key: "node", of: (row) => html("bdi", {}, row.node) },
      { title: "Channels", key: "channels", number: true, of: (row) => String(row.channels) },
      { title: "Greatest / least", key: "spread", number: true, of: (row) => (Number.isFinite(row.spread) ? row.spread.toPrecision(3) : "a channel of zeros") },
      { title: "Spread of channels", key: "spread", of: spread },
    ]),
  });

  // --- the chain opens its nodes

  const region = rootOf("region"), chain = document.querySelector(".chain");
  chain.addEventListener("click", (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    const open = chosen.getAttribute("aria-expanded") === "true";
    for (const other of chain.querySelectorAll("[aria-expanded=true]")) other.setAttribute("aria-expanded", "false");
    chosen.setAttribute("aria-expanded", String(!open));
    region.hidden = open;
    if (open) return;
    const first = Number(chosen.dataset.first);
    list(region, nodes.slice(first, first + Number(chosen.dataset.nodes)), { ...nodeList, size: 20, draw: table("Table of the region", NODES) });
  });
  for (const radio of document.querySelectorAll("input[name=colour]")) radio.addEventListener("change", () => { chain.dataset.colour = radio.value; });

  rootOf("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  });
})();
