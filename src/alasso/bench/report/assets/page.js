"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const dataOf = (id) => JSON.parse(document.getElementById(id).textContent);
  const countOf = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
  const plots = new Map(); // chart element → Bokeh plot
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // -- charts: colours follow the page, light or dark ------------------------------------------------------------

  async function draw(element) {
    const views = await Bokeh.embed.embed_item(dataOf(element.dataset.item), element);
    plots.set(element, views.roots ? views.roots[0].model : views[0].model);
  }

  function paint(plot) {
    const page = getComputedStyle(document.body);
    const [ink, soft, rule] = ["--ink", "--soft", "--rule"].map((name) => page.getPropertyValue(name).trim());
    for (const part of [...plot.below, ...plot.left, ...plot.right, ...plot.center]) {
      if ("axis_line_color" in part) {
        part.setv({ axis_line_color: rule, major_tick_line_color: rule, major_label_text_color: soft, axis_label_text_color: ink });
      } else if ("grid_line_color" in part) {
        part.setv({ grid_line_color: rule });
      } else if ("major_label_text_color" in part) {
        part.setv({ major_label_text_color: soft });
      }
    }
    for (const renderer of plot.renderers) {
      const [onLight, onDark] = renderer.tags;
      if (!onLight) continue;
      const value = dark.matches ? onDark : onLight;
      const glyph = renderer.glyph;
      if ("fill_color" in glyph) glyph.fill_color = { value };
      if ("line_color" in glyph && glyph.line_color?.value !== null) glyph.line_color = { value };
    }
  }

  // -- legend: a button switches a line in every chart of its section --------------------------------------------

  const remembered = JSON.parse(sessionStorage.getItem("lines") || "{}");

  function show(section, key, visible) {
    for (const element of all(".chart", section)) {
      for (const renderer of plots.get(element)?.renderers ?? []) {
        if (renderer.tags[2] === key) renderer.visible = visible;
      }
    }
  }

  function legend(section) {
    for (const button of all(".key", section)) {
      const key = button.dataset.group;
      const place = `${section.id} ${key}`;
      const set = (visible) => {
        button.setAttribute("aria-pressed", String(visible));
        show(section, key, visible);
      };
      if (place in remembered) set(remembered[place]);
      button.addEventListener("click", () => {
        remembered[place] = button.getAttribute("aria-pressed") !== "true";
        sessionStorage.setItem("lines", JSON.stringify(remembered));
        set(remembered[place]);
      });
    }
  }

  // -- charts that show a part of the accuracy matrices ----------------------------------------------------------

  function controls(section) {
    const matrices = dataOf(`matrices-${section.id.split("-")[1]}`);
    const plotOf = (name) => plots.get(section.querySelector(`[data-chart="${name}"]`));
    const slider = section.querySelector(".task-slider");
    slider?.addEventListener("input", () => {
      const task = Number(slider.value) - 1;
      slider.nextElementSibling.textContent = slider.value;
      for (const { data_source: source } of plotOf("one-task").renderers) {
        const rows = matrices[source.name];
        const mean = rows.map((row) => (row.length > task ? row[task] / 1e4 : NaN));
        source.data = { ...source.data, mean };
      }
    });
    const select = section.querySelector(".group-select");
    select?.addEventListener("change", () => {
      const source = plotOf("matrix").renderers[0].data_source;
      source.data = { ...source.data, value: matrices[select.value].flat().map((value) => value / 1e4) };
    });
  }

  // -- tables ----------------------------------------------------------------------------------------------------

  function sortable(table) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const first = head.dataset.kind === "number" ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        sortRows(table, column, head.dataset.kind === "number", order === "ascending" ? 1 : -1);
      });
    });
  }

  function sortRows(table, column, numeric, sign) {
    const value = (row) => (numeric ? row.cells[column].dataset.value : row.cells[column].textContent);
    const compare = (one, other) => {
      const [a, b] = [value(one), value(other)];
      if (numeric && (a === "" || b === "")) return (a === "") - (b === ""); // unknown ones last, either way
      return sign * (numeric ? a - b : a.localeCompare(b));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }

  function openTarget() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  }

  // -- served while runs go on -----------------------------------------------------------------------------------

  let version = null;

  async function refresh() {
    let state;
    try {
      state = await (await fetch("state.json", { cache: "no-store" })).json();
    } catch {
      return; // the server was stopped; the page stays as it is
    }
    if (version !== null && state.version !== version) return location.reload();
    version = state.version;
    for (const progress of state.live) {
      for (const element of all("[data-live]")) update(plots.get(element), progress, element.dataset.live);
      const note = all("[data-log]").find((each) => each.dataset.log === progress.label);
      const words = `${countOf(progress.tasks.length, "task")} learned, ${countOf(progress.loss.length, "epoch")}`;
      if (note && note.textContent !== words) note.textContent = words;
    }
  }

  function update(plot, progress, key) {
    const source = plot?.renderers.map((each) => each.data_source).find((each) => each.name === progress.label);
    if (!source) return;
    const y = progress[key];
    const x = key === "loss" || key === "penalty" ? y.map((_, at) => at + 1) : progress.tasks;
    source.data = { x: [...x], y: [...y] };
  }

  // --------------------------------------------------------------------------------------------------------------

  async function start() {
    all("table.sortable").forEach(sortable);
    openTarget();
    addEventListener("hashchange", openTarget);
    await Promise.all(all(".chart").map(draw));
    const repaint = () => plots.forEach(paint);
    repaint();
    dark.addEventListener("change", repaint);
    for (const section of all(".benchmark")) {
      legend(section);
      controls(section);
    }
    document.body.dataset.ready = "";
    if ("watch" in document.body.dataset) setInterval(refresh, 2000);
  }

  start();
})();
