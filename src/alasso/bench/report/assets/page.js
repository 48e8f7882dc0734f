"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const parsed = new Map();
  function dataOf(id) {
    if (!parsed.has(id)) parsed.set(id, JSON.parse(document.getElementById(id).textContent));
    return parsed.get(id);
  }
  const countOf = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
  const plots = new Map(); // chart element → Bokeh plot
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // -- charts ----------------------------------------------------------------------------------------------------
  // Whatever draws one group carries as `tags` its colour on light, its colour on dark and the group's key: that is how
  // dark mode and legend find it. Its `name` is what hovering shows.

  const HEIGHT = 340;
  const MARKERS = {
    o: "circle", s: "square", "^": "triangle", v: "inverted_triangle", D: "diamond", d: "diamond", "*": "star", "<": "hex",
    ">": "hex", P: "square_pin", X: "triangle_pin", p: "square_pin", h: "hex", "": "dot",
  };
  const range = (count) => Array.from({ length: count }, (_, at) => at);

  function newPlot(xlabel, ylabel, ticks) {
    const plot = Bokeh.Plotting.figure({
      height: HEIGHT, sizing_mode: "stretch_width", toolbar_location: null, tools: [], min_border_right: 12,
      background_fill_color: null, border_fill_color: null, outline_line_color: null,
      x_axis_label: xlabel, y_axis_label: ylabel,
      // A single number would else have two whole units around it.
      y_range: new Bokeh.DataRange1d({ only_visible: true, default_span: 0.2 }),
      ...(ticks ? { x_range: new Bokeh.Range1d({ start: 0.5, end: Math.max(ticks.at(-1), 2) + 0.5 }) } : {}),
    });
    for (const axis of [...plot.below, ...plot.left]) {
      const font = "system-ui, sans-serif";
      axis.setv({ minor_tick_line_color: null, axis_label_text_font_style: "normal", axis_label_text_font: font, major_label_text_font: font });
    }
    for (const grid of plot.center) if (grid.dimension === 0) grid.visible = false;
    if (ticks) setTicks(plot.below, ticks);
    return plot;
  }

  function setTicks(axes, ticks) {
    for (const axis of axes) axis.ticker = new Bokeh.FixedTicker({ ticks });
  }

  function addHover(plot, renderers, rows) {
    plot.add_tools(new Bokeh.HoverTool({ renderers, tooltips: [["", "$name"], ...rows], point_policy: "snap_to_data" }));
  }

  function tag(renderer, look, key, visible) {
    renderer.setv({ name: look.label, tags: [look.light, look.dark, key], visible });
    return renderer;
  }

  function lineAndPoints(plot, source, look, key, visible, size) {
    const y = { field: "mean" };
    const x = { field: "x" };
    const line = plot.line(x, y, { source, line_color: look.light, line_width: look.further ? 1.6 : 2.4, line_dash: look.dashes });
    const hollow = look.further ? { fill_alpha: 0 } : {};
    const points = plot.scatter(x, y, { source, size, marker: MARKERS[look.marker], line_color: look.light, fill_color: look.light, ...hollow });
    points.glyph.hit_dilation = 1.5;
    tag(line, look, key, visible);
    return tag(points, look, key, visible);
  }

  /** Means over seeds with their bands. */
  function lines({ groups, ticks }, { y: ylabel, always, lines }) {
    const plot = newPlot("tasks learned", ylabel, ticks);
    const points = Object.entries(lines).map(([key, { mean, deviation }]) => {
      const look = groups[key];
      const visible = always || look.shown;
      const around = deviation ?? mean.map(() => 0);
      const low = mean.map((value, at) => value - around[at]);
      const high = mean.map((value, at) => value + around[at]);
      const data = { x: mean.map((_, at) => at + 1), mean, deviation: around, low, high };
      const source = new Bokeh.ColumnDataSource({ data, name: key });
      if (deviation) {
        const band = plot.varea({ field: "x" }, { field: "low" }, { field: "high" }, { source, fill_color: look.light, fill_alpha: 0.16 });
        tag(band, look, key, visible);
      }
      return lineAndPoints(plot, source, look, key, visible, ticks.at(-1) <= 40 ? 6 : 3.5);
    });
    addHover(plot, points, [["tasks learned", "@x"], [ylabel, "@mean{0.0000}"], ["± over seeds", "@deviation{0.0000}"]]);
    return plot;
  }

  /** Final accuracy at every so-many-th task, side by side. */
  function bars({ groups, ticks }, { y: ylabel, every, bars }) {
    const places = range(Math.floor(ticks.at(-1) / every)).map((at) => every * (at + 1));
    const plot = newPlot("task", ylabel, ticks);
    plot.y_range = new Bokeh.Range1d({ start: 0, end: 1 });
    plot.x_range = new Bokeh.Range1d({ start: every / 2, end: places.at(-1) + every / 2 });
    setTicks(plot.below, places);
    const count = Object.keys(bars).length;
    const width = (0.82 * every) / count;
    const drawn = Object.entries(bars).map(([key, mean], number) => {
      const look = groups[key];
      const x = places.map((place) => place + (number - (count - 1) / 2) * width);
      const source = new Bokeh.ColumnDataSource({ data: { x, task: places, mean }, name: key });
      const hatch = look.hatch ? { hatch_pattern: look.hatch, hatch_color: "white", hatch_alpha: 0.6, hatch_scale: 6 } : {};
      const bar = plot.vbar({ field: "x" }, width * 0.92, { field: "mean" }, 0, { source, fill_color: look.light, line_color: null, ...hatch });
      return tag(bar, look, key, true);
    });
    addHover(plot, drawn, [["task", "@task"], [ylabel, "@mean{0.0000}"]]);
    return plot;
  }

  /** Accuracy of one task while others are learned; the slider chooses the task. */
  function oneTask({ groups, ticks, matrices }) {
    const plot = newPlot("tasks learned", "accuracy of the task", ticks);
    const points = Object.entries(matrices).map(([key, rows]) => {
      const data = { x: rows.map((_, at) => at + 1), mean: rows.map((row) => row[0] / 1e4) };
      const source = new Bokeh.ColumnDataSource({ data, name: key });
      return lineAndPoints(plot, source, groups[key], key, groups[key].shown, ticks.at(-1) <= 40 ? 6 : 3.5);
    });
    addHover(plot, points, [["tasks learned", "@x"], ["accuracy", "@mean{0.0000}"]]);
    return plot;
  }

  const cells = (rows) => rows.flat().map((value) => value / 1e4);
  const lowest = (rows) => Math.min(0.9, Math.floor(rows.flat().reduce((a, b) => Math.min(a, b), 1e4) / 1e3) / 10);

  /** Accuracy on every task after learning every task, of the group that is chosen; colours begin at its lowest. */
  function matrix({ ticks, matrices }) {
    const plot = newPlot("accuracy on task", "after learning task", ticks);
    const [rows] = Object.values(matrices);
    const tasks = rows.length;
    plot.x_range = new Bokeh.Range1d({ start: 0.5, end: tasks + 0.5 });
    plot.y_range = new Bokeh.Range1d({ start: tasks + 0.5, end: 0.5 });
    setTicks(plot.left, ticks);
    for (const grid of plot.center) grid.visible = false;
    const mapper = new Bokeh.LinearColorMapper({ palette: Bokeh.Palettes.Cividis256, low: lowest(rows), high: 1 });
    const data = {
      x: rows.flatMap((row) => row.map((_, at) => at + 1)),
      y: rows.flatMap((row, after) => row.map(() => after + 1)),
      value: cells(rows),
    };
    const source = new Bokeh.ColumnDataSource({ data });
    const fill_color = { field: "value", transform: mapper };
    const drawn = plot.rect({ field: "x" }, { field: "y" }, 1, 1, { source, fill_color, line_color: null, dilate: true });
    plot.add_layout(new Bokeh.ColorBar({ color_mapper: mapper, width: 10, border_line_color: null, background_fill_alpha: 0 }), "right");
    const tooltips = [["after learning task", "@y"], ["on task", "@x"], ["accuracy", "@value{0.0000}"]];
    plot.add_tools(new Bokeh.HoverTool({ renderers: [drawn], tooltips }));
    return plot;
  }

  /** Lines that fill in as runs go on. */
  function running(runs, { live, x: xlabel, y: ylabel }) {
    const plot = newPlot(xlabel, ylabel, null);
    plot.below[0].ticker.min_interval = 1; // whole tasks and epochs
    const points = Object.values(runs).map((run) => {
      const source = new Bokeh.ColumnDataSource({ data: series(run, live), name: run.label });
      return lineAndPoints(plot, source, run, run.label, true, 5);
    });
    addHover(plot, points, [[xlabel, "@x"], [ylabel, "@mean{0.0000}"]]);
    return plot;
  }

  async function draw(element) {
    const { chart, live } = element.dataset;
    const data = dataOf(live ? "live-data" : `${element.closest(".benchmark").id}-data`);
    const kinds = { "one-task": oneTask, matrix, bars };
    const plot = live ? running(data, element.dataset) : (kinds[chart] ?? lines)(data, data.charts[chart]);
    paint(plot);
    await Bokeh.Plotting.show(plot, element);
    plots.set(element, plot);
  }

  // Colours follow the page, light or dark.
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
    const { matrices } = dataOf(`${section.id}-data`);
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
      const { data_source: source, glyph } = plotOf("matrix").renderers[0];
      glyph.fill_color.transform.low = lowest(matrices[select.value]);
      source.data = { ...source.data, value: cells(matrices[select.value]) };
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

  const version = document.body.dataset.watch;

  async function refresh() {
    let state;
    try {
      state = await (await fetch("state.json", { cache: "no-store" })).json();
    } catch {
      return; // the server was stopped; the page stays as it is
    }
    if (state.version !== version) return location.reload();
    for (const progress of state.live) {
      for (const element of all("[data-live]")) update(plots.get(element), progress, element.dataset.live);
      const note = all("[data-log]").find((each) => each.dataset.log === progress.label);
      const words = `${countOf(progress.tasks.length, "task")} learned, ${countOf(progress.loss.length, "epoch")}`;
      if (note && note.textContent !== words) note.textContent = words;
    }
  }

  function series(progress, key) {
    const mean = progress[key];
    return { x: key === "loss" || key === "penalty" ? mean.map((_, at) => at + 1) : progress.tasks, mean };
  }

  function update(plot, progress, key) {
    const source = plot?.renderers.map((each) => each.data_source).find((each) => each.name === progress.label);
    if (!source) return;
    source.data = series(progress, key);
  }

  // --------------------------------------------------------------------------------------------------------------

  async function start() {
    all("table.sortable").forEach(sortable);
    openTarget();
    addEventListener("hashchange", openTarget);
    await Promise.all(all(".chart").map(draw));
    const repaint = () => plots.forEach(paint);
    dark.addEventListener("change", repaint);
    for (const section of all(".benchmark")) {
      legend(section);
      controls(section);
    }
    document.body.dataset.ready = "";
    if ("watch" in document.body.dataset) {
      await refresh();
      setInterval(refresh, 2000);
    }
  }

  start();
})();
