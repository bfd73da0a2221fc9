// The graph on the screen: drawing, opening and closing, moving, zooming, and what a box is.

const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setUpGraph() {
  const view = document.getElementById("graph-view");
  if (!view) return;
  const by = (id) => document.getElementById(`graph-${id}`);
  const detail = by("detail");
  let graph, tree, edges, opened, selected = null;
  let frame = { x: 0, y: 0, scale: 1 };
  const layer = draw("g", {});
  view.append(layer);

  const isOpen = (item) => !item.id || opened.has(item.id);
  const move = () => layer.setAttribute("transform", `translate(${frame.x} ${frame.y}) scale(${frame.scale})`);

  function choose(index) {
    graph = data.graphs[index];
    tree = buildTree(graph);
    edges = graph.nodes.flatMap((node, to) => node.sources.map((from) => [from, to]));
    opened = new Set();
    selected = null;
    const shown = graph.nodes.filter((node) => node.kind === "op").length;
    by("facts").textContent = `${graph.num_ops.toLocaleString("en-US")} operators, ${shown} shown` +
      (graph.num_checks ? `; ${graph.num_checks} assertions left out` : "");
    tellNothing();
    render();
    fit();
  }

  function render() {
    layOut(tree, isOpen, edges);
    const focus = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.id : null;
    layer.replaceChildren();
    drawInside(tree, layer, 0, 0);
    move();
    if (focus) { const same = [...layer.querySelectorAll(".node")].find((node) => node.dataset.id === focus); if (same) same.focus({ preventScroll: true }); }
  }

  function drawInside(item, parent, x, y) {
    const lines = draw("g", {});
    parent.append(lines);
    for (const link of item.links) lines.append(edge(item.children[link.a], item.children[link.b], link));
    for (const child of item.children) parent.append(box(child));
  }

  function edge(from, to, { via, isUp }) {
    let x = from.x + from.w / 2, y = from.y + from.h, path = `M${x} ${y}`;
    for (const stop of [...via, to]) {
      const x1 = stop.x + stop.w / 2, middle = (y + stop.y) / 2;
      path += `C${x} ${middle} ${x1} ${middle} ${x1} ${stop.y}`;
      if (stop.isPoint) path += `V${stop.y + stop.h}`;
      [x, y] = [x1, stop.y + stop.h];
    }
    const line = draw("path", { class: isUp ? "edge up" : "edge", d: path });
    line.dataset.from = from.id;
    line.dataset.to = to.id;
    return line;
  }

  function box(item) {
    const times = item.repeats > 1 ? `, ${item.repeats} equal layers` : "";
    const name = item.kind === "module" ? nameOf(item) + times : item.label;
    const element = draw("g", { class: `node ${item.kind}`, transform: `translate(${item.x} ${item.y})`, tabindex: 0, role: "button", "aria-label": name });
    element.dataset.id = item.id;
    element.append(draw("rect", { width: item.w, height: item.h, rx: item.kind === "module" ? 8 : 6 }));
    if (item.kind === "module") moduleBox(item, element); else leafBox(item, element);
    element.addEventListener("click", (event) => { event.stopPropagation(); press(item, element); });
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      press(item, element);
    });
    element.addEventListener("focus", () => select(item, element));
    if (item.open) drawInside(item, element);
    return element;
  }

  function moduleBox(item, element) {
    element.setAttribute("aria-expanded", String(item.open));
    if (item.repeats > 1 && !item.open) {
      element.classList.add("stack");
      element.prepend(draw("rect", { class: "behind", x: 6, y: 6, width: item.w, height: item.h, rx: 8 }));
      element.append(element.querySelector("rect:not(.behind)"));
    }
    const times = item.repeats > 1 ? `  × ${item.repeats}` : "";
    element.append(draw("text", { x: 12, y: 19 }, `${item.open ? "▾" : "▸"} ${nameOf(item)}${times}`));
    if (!item.open) element.append(draw("text", { class: "sub", x: 27, y: 34 }, digest(item)));
  }

  function leafBox(item, element) {
    if (item.kind === "op") element.append(draw("rect", { class: `swatch ${sortOf(item.label)}`, x: 0, y: 6, width: 4, height: item.h - 12, rx: 2 }));
    element.append(draw("text", { x: 14, y: 19 }, item.label));
    const shape = item.node.out[0];
    if (shape) element.append(draw("text", { class: "sub", x: 14, y: 34 }, shape));
  }

  function press(item, element) {
    select(item, element);
    if (item.kind !== "module") return;
    const before = element.getBoundingClientRect();
    if (!opened.delete(item.id)) opened.add(item.id);
    render();
    const same = [...layer.querySelectorAll(".node")].find((node) => node.dataset.id === item.id);
    const after = same.getBoundingClientRect();
    frame.x += before.left + before.width / 2 - after.left - after.width / 2;
    frame.y += before.top - after.top;
    move();
    same.focus({ preventScroll: true });
  }

  function select(item, element) {
    selected = item.id;
    layer.querySelectorAll(".selected").forEach((node) => node.classList.remove("selected"));
    element.classList.add("selected");
    layer.querySelectorAll(".edge").forEach((line) => line.classList.toggle("lit", line.dataset.from === selected || line.dataset.to === selected));
    if (item.kind === "module") tellModule(item); else tellNode(item);
  }

  function tell(title, facts) {
    const list = make("dl");
    for (const [name, values] of facts) {
      if (!values.length) continue;
      list.append(make("dt", {}, name), ...values.map((value) => make("dd", {}, value)));
    }
    detail.replaceChildren(make("h4", {}, title), list);
  }

  function tellNothing() {
    const kinds = [["product", "products"], ["norm", "norms and reductions"], ["math", "arithmetic"], ["move", "indexing and copies"], ["shape", "shapes and casts"]];
    const legend = make("div", { class: "legend" });
    for (const [kind, name] of kinds) {
      const mark = draw("svg", { width: 10, height: 10 }, draw("rect", { class: `swatch ${kind}`, width: 10, height: 10, rx: 2 }));
      legend.append(make("span", {}, mark, ` ${name}`));
    }
    detail.replaceChildren(make("p", { class: "muted" }, "Choose a box to see what it is."), legend);
  }

  function tellNode(item) {
    const node = item.node, readers = edges.filter(([from]) => from === item.index).map(([, to]) => graph.nodes[to].label);
    tell(item.label, [
      ["Kind", [node.kind === "op" ? "operator" : node.kind]],
      ["Module", node.path.slice(-1)],
      ["Gives", node.out.filter(Boolean)],
      ["Takes", node.sources.map((from) => `${graph.nodes[from].label} ${graph.nodes[from].out[0] || ""}`)],
      ["Weights", node.weights || []],
      ["States", node.states || []],
      ["Read by", readers],
    ]);
  }

  function tellModule(item) {
    const inside = leaves(item).map((index) => graph.nodes[index]);
    const counts = new Map();
    for (const node of inside) counts.set(node.label, (counts.get(node.label) || 0) + 1);
    const sorted = [...counts].sort((a, b) => b[1] - a[1]).map(([name, times]) => `${times} × ${name}`);
    tell(nameOf(item), [
      ["Module", item.path ? [item.path] : []],
      ["Equal layers", item.repeats > 1 ? [String(item.repeats)] : []],
      ["Weights", [...new Set(inside.flatMap((node) => node.weights || []))]],
      ["States", [...new Set(inside.flatMap((node) => node.states || []))]],
      ["Operators", sorted],
    ]);
  }

  function fit() {
    const w = view.clientWidth, h = view.clientHeight;
    const scale = Math.min(w / (tree.w || 1), h / (tree.h || 1), 1.25);
    // A tall graph is shown from its top, at a size that can be read.
    frame.scale = Math.max(scale, Math.min(0.7, w / (tree.w || 1)));
    frame.x = (w - tree.w * frame.scale) / 2;
    frame.y = tree.h * frame.scale > h ? 8 : (h - tree.h * frame.scale) / 2;
    move();
  }

  function zoom(factor, x = view.clientWidth / 2, y = view.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.05, frame.scale * factor)), ratio = scale / frame.scale;
    frame = { x: x - (x - frame.x) * ratio, y: y - (y - frame.y) * ratio, scale };
    move();
  }

  function setAll(isWanted) {
    opened = new Set();
    const visit = (item) => { if (item.children) { if (item.id) opened.add(item.id); item.children.forEach(visit); } };
    if (isWanted) visit(tree);
    render();
    fit();
  }

  function setUpMoving() {
    let start = null;
    view.addEventListener("pointerdown", (event) => { start = { x: event.clientX - frame.x, y: event.clientY - frame.y }; });
    addEventListener("pointermove", (event) => {
      if (!start) return;
      view.classList.add("dragging");
      frame.x = event.clientX - start.x;
      frame.y = event.clientY - start.y;
      move();
    });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { start = null; view.classList.remove("dragging"); });
    view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const area = view.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), event.clientX - area.left, event.clientY - area.top);
    }, { passive: false });
    const steps = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    view.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (step) { frame.x += step[0]; frame.y += step[1]; move(); }
      else if (event.key === "+" || event.key === "=") zoom(1.2);
      else if (event.key === "-") zoom(1 / 1.2);
      else if (event.key === "0") fit();
      else return;
      event.preventDefault();
    });
  }

  by("entry").addEventListener("change", (event) => choose(Number(event.target.value)));
  by("open").addEventListener("click", () => setAll(true));
  by("close").addEventListener("click", () => setAll(false));
  by("in").addEventListener("click", () => zoom(1.25));
  by("out").addEventListener("click", () => zoom(1 / 1.25));
  by("fit").addEventListener("click", fit);
  setUpMoving();
  choose(0);
}

setUpGraph();
