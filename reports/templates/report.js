"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columnIndex = Object.fromEntries(data.columns.map((column, index) => [column.key, index]));
  const rowsByTrial = new Map(data.rows.map((row) => [row[columnIndex.trial], row]));

  /* ------------------------------------------------------------------ commands and copying */

  const hasResult = (row) => ["knee", "front", "dominated", "infeasible", "repeat"].includes(row[columnIndex.status]);
  const commandOf = (row) => data.command[0] + row[columnIndex.trial] + data.command[1];

  async function copyText(text) {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea"); // a page opened from disk has no clipboard interface
    area.value = text;
    area.style.position = "fixed";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) throw new Error("the browser refused");
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = button.dataset.command ?? button.previousElementSibling.textContent;
    const label = button.textContent;
    try {
      await copyText(text);
      button.textContent = "Copied";
    } catch {
      window.prompt("Copy this command:", text);
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });

  /* ------------------------------------------------------------------ table */

  const PAGE_SIZE = 50;
  const state = { sort: "status", descending: false, page: 0, text: "", status: "" };
  const table = document.getElementById("table");
  const haystacks = data.rows.map((row) => row.filter((cell) => cell !== null).join(" ").toLowerCase());

  function element(tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function matchingRows() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const trial = /^#(\d+)$/.exec(state.text.trim());
    const found = data.rows.filter((row, index) => {
      if (state.status && row[columnIndex.status] !== state.status) return false;
      if (trial) return row[columnIndex.trial] === Number(trial[1]);
      return words.every((word) => haystacks[index].includes(word));
    });
    const index = columnIndex[state.sort];
    const rank = state.sort === "status" ? (cell) => data.statuses.indexOf(cell) : (cell) => cell;
    return found.sort((first, second) => {
      const a = rank(first[index]), b = rank(second[index]);
      if (a === b) return first[columnIndex.trial] - second[columnIndex.trial];
      if (a === null || b === null) return a === null ? 1 : -1; // absent values last, either way
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return (state.descending ? -order : order) || first[columnIndex.trial] - second[columnIndex.trial];
    });
  }

  function drawHead() {
    const row = element("tr");
    data.columns.forEach((column) => {
      const head = element("th", undefined, column.numeric ? "number" : "");
      const sorted = state.sort === column.key;
      head.ariaSort = sorted ? (state.descending ? "descending" : "ascending") : "none";
      const button = element("button", column.label + (sorted ? (state.descending ? " ▾" : " ▴") : ""));
      button.type = "button";
      button.addEventListener("click", () => {
        state.descending = sorted && !state.descending;
        state.sort = column.key;
        state.page = 0;
        draw();
      });
      head.append(button);
      row.append(head);
      if (column.key === "trial") {
        const apply = element("th");
        apply.append(element("span", "Apply"));
        row.append(apply);
      }
    });
    table.tHead.replaceChildren(row);
  }

  const shown = (column, cell) =>
    cell === null ? "" : column.decimals === null ? String(cell) : cell.toFixed(column.decimals);

  function drawRow(row) {
    const line = element("tr", undefined, row[columnIndex.status]);
    data.columns.forEach((column, index) => {
      const cell = row[index];
      const node = element("td", undefined, column.numeric ? "number" : column.key === "detail" ? "detail-cell" : "");
      if (column.key === "status") node.append(element("span", cell, `chip ${cell}`));
      else node.textContent = shown(column, cell);
      if (column.key === "detail" && cell) node.title = cell;
      line.append(node);
      if (column.key === "trial") {
        const apply = element("td");
        if (hasResult(row)) {
          const button = element("button", "Copy", "copy");
          button.type = "button";
          button.dataset.command = button.title = commandOf(row);
          apply.append(button);
        }
        line.append(apply);
      }
    });
    return line;
  }

  function draw() {
    const rows = matchingRows();
    const numPages = Math.max(1, Math.ceil(rows.length / PAGE_SIZE));
    state.page = Math.min(state.page, numPages - 1);
    const start = state.page * PAGE_SIZE;
    drawHead();
    table.tBodies[0].replaceChildren(...rows.slice(start, start + PAGE_SIZE).map(drawRow));
    document.getElementById("matches").textContent = `${rows.length} of ${data.rows.length} trials`;
    document.getElementById("page").textContent = `Page ${state.page + 1} of ${numPages}`;
    document.getElementById("previous").disabled = state.page === 0;
    document.getElementById("next").disabled = state.page >= numPages - 1;
    document.querySelector(".pager").hidden = numPages === 1;
  }

  const filter = document.getElementById("filter");
  const statusSelect = document.getElementById("status");
  const present = new Set(data.rows.map((row) => row[columnIndex.status]));
  data.statuses.filter((status) => present.has(status)).forEach((status) => {
    const option = element("option", status);
    option.value = status;
    statusSelect.append(option);
  });
  filter.addEventListener("input", () => { state.text = filter.value; state.page = 0; draw(); });
  statusSelect.addEventListener("change", () => { state.status = statusSelect.value; state.page = 0; draw(); });
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("previous").addEventListener("click", () => { state.page -= 1; draw(); });
  document.getElementById("next").addEventListener("click", () => { state.page += 1; draw(); });

  function showTrial(number) {
    filter.value = state.text = `#${number}`;
    statusSelect.value = state.status = "";
    draw();
    document.getElementById("candidates").scrollIntoView({ behavior: "smooth" });
  }

  draw();

  /* ------------------------------------------------------------------ figures */

  const escaped = (text) => String(text).replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
  const clipped = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);

  function hoverText(number) {
    const row = rowsByTrial.get(number);
    const plan = columnIndex.plan === undefined ? "" : String(row[columnIndex.plan]);
    const lines = [`<b>Trial ${number}</b> ${escaped(clipped(plan))}`];
    data.columns.forEach((column, index) => {
      if (["trial", "status", "plan", "detail"].includes(column.key) || row[index] === null) return;
      lines.push(`${escaped(clipped(column.label))}: ${escaped(clipped(shown(column, row[index])))}`);
    });
    return lines.join("<br>");
  }

  /* Plotly keeps number arrays as base64; customdata is needed here as numbers. */
  function unpacked(array) {
    if (!array || !array.bdata) return array;
    const bytes = Uint8Array.from(atob(array.bdata), (character) => character.charCodeAt(0));
    const types = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array };
    return Array.from(new types[array.dtype](bytes.buffer));
  }

  function withHover(traces) {
    traces.filter((trace) => trace.customdata).forEach((trace) => {
      trace.customdata = unpacked(trace.customdata);
      trace.text = trace.customdata.map(hoverText);
      trace.hovertemplate = "%{text}<extra></extra>";
    });
    return traces;
  }

  const touches = window.matchMedia("(pointer: coarse)").matches;

  function themed(layout) {
    const style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, color: colour("--quiet") };
    const flat = { ...axis, title: { font: { size: 12 }, standoff: 10 }, tickfont: { size: 11 } };
    const merged = (own, common) => ({ ...common, ...own, title: { ...common.title, ...own?.title } });
    const result = {
      ...layout,
      font: { family: style.fontFamily, color: colour("--text"), size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" },
      dragmode: layout.scene ? "turntable" : touches ? false : "zoom", // a finger scrolls the page
    };
    for (const name of ["xaxis", "yaxis"]) if (layout[name]) result[name] = merged(layout[name], flat);
    if (layout.scene) {
      result.scene = { ...layout.scene };
      const cube = { ...flat, title: { font: { size: 11 } }, tickfont: { size: 9 }, showbackground: false };
      for (const name of ["xaxis", "yaxis", "zaxis"]) result.scene[name] = merged(layout.scene[name], cube);
    }
    return result;
  }

  function hasWebGL() {
    const canvas = document.createElement("canvas");
    return Boolean(canvas.getContext("webgl2") || canvas.getContext("webgl"));
  }

  async function loadPlotly() {
    const packed = document.getElementById("plotly");
    const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
  }

  const notice = (plot, text) => plot.replaceChildren(element("p", text, "notice"));

  async function drawFigure(plot) {
    const figure = data.figures[plot.dataset.figure];
    const leastWidth = figure.layout.width; // narrower, the figure scrolls
    if (leastWidth) figure.layout.width = Math.max(leastWidth, plot.clientWidth);
    const config = { responsive: !leastWidth, displaylogo: false, displayModeBar: false };
    await Plotly.newPlot(plot, withHover(figure.data), themed(figure.layout), config);
    plot.on("plotly_click", (event) => {
      const number = event.points[0]?.customdata;
      if (number !== undefined && !touches) showTrial(number);
    });
  }

  async function drawFigures() {
    const plots = [...document.querySelectorAll(".plot")];
    if (!plots.length) return;
    if (!window.DecompressionStream) {
      plots.forEach((plot) => notice(plot, "This browser is too old for the figures; the table below has every number."));
      return;
    }
    await loadPlotly();
    const drawable = plots.filter((plot) => !("webgl" in plot.dataset) || hasWebGL());
    plots.filter((plot) => !drawable.includes(plot)).forEach((plot) =>
      notice(plot, "This figure needs WebGL, which this browser does not have or has switched off. The other figures and the table show the same trials."));
    const observer = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      observer.unobserve(entry.target);
      drawFigure(entry.target);
    }), { rootMargin: "400px" });
    drawable.forEach((plot) => observer.observe(plot));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      drawable.filter((plot) => plot.layout).forEach((plot) => Plotly.relayout(plot, themed(plot.layout))));
  }

  drawFigures();
})();
