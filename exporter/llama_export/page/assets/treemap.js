// The treemap of the weights: parts, and the tensors within them. Areas are bytes.

const HUES = { embed: 265, attention: 222, mlp: 160, norm: 40, head: 330, other: 100 };

function role(kind) {
  if (/embed/.test(kind)) return "embed";
  if (/attn|attention/.test(kind)) return "attention";
  if (/mlp|feed_forward/.test(kind)) return "mlp";
  if (/norm/.test(kind)) return "norm";
  return /head/.test(kind) ? "head" : "other";
}

function colourOf(tensor, by) {
  if (by === "dtype") {
    const dtypes = [...new Set(data.weights.flatMap((part) => part.tensors.map((t) => t.dtype)))];
    return `hsl(${(222 + 137 * dtypes.indexOf(tensor.dtype)) % 360} 62% 76%)`;
  }
  const shades = { "self_attn.q_proj": 70, "self_attn.k_proj": 80, "self_attn.v_proj": 84,
    "mlp.gate_proj": 66, "mlp.up_proj": 73, "mlp.down_proj": 80 };
  return `hsl(${HUES[role(tensor.kind)]} 58% ${shades[tensor.kind] || 76}%)`;
}

// Rectangles whose areas are the sizes, as square as can be, row by row along the shorter side.
function squarify(items, box) {
  const sum = (list) => list.reduce((total, item) => total + item.size, 0);
  const scale = (box.w * box.h) / (sum(items) || 1);
  const rest = [...items].sort((a, b) => b.size - a.size), placed = [];
  let { x, y, w, h } = box;
  const worst = (row, side) => {
    const area = sum(row) * scale, sizes = row.map((item) => item.size * scale);
    return Math.max((side * side * Math.max(...sizes)) / area ** 2, area ** 2 / (side * side * Math.min(...sizes)));
  };
  while (rest.length) {
    const side = Math.min(w, h), row = [rest.shift()];
    while (rest.length && worst([...row, rest[0]], side) <= worst(row, side)) row.push(rest.shift());
    const thick = side > 0 ? (sum(row) * scale) / side : 0;
    let along = 0;
    for (const item of row) {
      const long = thick > 0 ? (item.size * scale) / thick : 0;
      placed.push(w >= h ? { item, x, y: y + along, w: thick, h: long } : { item, x: x + along, y, w: long, h: thick });
      along += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
  }
  return placed;
}

function setUpTreemap() {
  const view = document.getElementById("tree");
  if (!view) return;
  const crumbs = document.getElementById("tree-crumbs"), legend = document.getElementById("tree-legend");
  const colour = document.getElementById("tree-colour");
  const bytesOf = (part) => part.tensors.reduce((total, tensor) => total + tensor.bytes, 0);
  const total = data.weights.reduce((sum, part) => sum + bytesOf(part), 0);
  let open = null;

  const put = (element, box) => {
    Object.assign(element.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` });
    return element;
  };
  const cell = (tensor, box) => {
    const text = `${tensor.name}: ${tensor.dtype} ${tensor.shape}, ${showBytes(tensor.bytes)}`;
    const element = put(make("button", { type: "button", class: "cell", title: text, "aria-label": text }), box);
    element.style.background = colourOf(tensor, colour.value);
    if (box.w > 46 && box.h > 17) element.append(make("b", {}, tensor.kind.split(".").pop()));
    if (box.w > 60 && box.h > 34) element.append(make("span", {}, showBytes(tensor.bytes)));
    if (box.w > 110 && box.h > 50) element.append(make("span", {}, `${tensor.dtype} ${tensor.shape}`));
    element.addEventListener("click", () => tell(tensor));
    return element;
  };
  const tell = (tensor) => {
    const share = ((100 * tensor.bytes) / total).toFixed(2);
    crumb(`${tensor.name} · ${tensor.dtype} ${tensor.shape} · ${showBytes(tensor.bytes)} · ${share} %`);
  };
  const crumb = (text) => {
    const all = make("button", { type: "button" }, "All weights");
    all.addEventListener("click", () => { open = null; draw(); });
    crumbs.replaceChildren(all, open || text ? ` › ${text || open.name}` : ` · ${showBytes(total)}`);
  };
  const group = (part, box) => {
    const frame = put(make("div", { class: "cell group" }), box);
    const head = box.w > 34 && box.h > 44 && part.tensors.length > 1 ? 18 : 0;
    if (head) {
      const name = make("button", { type: "button", class: "group-name", title: `${part.name}, ${showBytes(bytesOf(part))}: enlarge` },
        part.name.replace(/^model\.layers\./, "layer "));
      name.addEventListener("click", () => { open = part; draw(); });
      frame.append(name);
    }
    const items = part.tensors.map((tensor) => ({ size: tensor.bytes, tensor }));
    const inner = { x: 0, y: head, w: box.w, h: Math.max(box.h - head, 0) };
    frame.append(...squarify(items, inner).map((place) => cell(place.item.tensor, place)));
    return frame;
  };
  const draw = () => {
    const box = { x: 0, y: 0, w: view.clientWidth, h: view.clientHeight };
    const parts = (open ? [open] : data.weights).map((part) => ({ size: bytesOf(part), part }));
    view.replaceChildren(...squarify(parts, box).map((place) => group(place.item.part, place)));
    crumb("");
    drawLegend();
  };
  const drawLegend = () => {
    const sizes = new Map();
    for (const part of data.weights) for (const tensor of part.tensors) {
      const key = colour.value === "dtype" ? tensor.dtype : role(tensor.kind);
      const known = sizes.get(key) || { bytes: 0, colour: colour.value === "dtype" ? colourOf(tensor, "dtype") : `hsl(${HUES[key]} 58% 74%)` };
      known.bytes += tensor.bytes;
      sizes.set(key, known);
    }
    legend.replaceChildren(...[...sizes].sort((a, b) => b[1].bytes - a[1].bytes).map(([name, item]) => {
      const swatch = make("i");
      swatch.style.background = item.colour;
      return make("span", {}, swatch, `${name} ${showBytes(item.bytes)} (${((100 * item.bytes) / total).toFixed(1)} %)`);
    }));
  };
  colour.addEventListener("change", draw);
  new ResizeObserver(draw).observe(view);
}

setUpTreemap();
