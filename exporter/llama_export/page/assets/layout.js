// Where the boxes of a graph stand: a tree of modules, each laid out from top to bottom by rank.

const LINE = 30, GAP_X = 18, GAP_Y = 26, PAD = 14, HEAD = 30, MIN_RUN = 4;

// The tree: modules with children in the order in which they first run. Longer runs of operators
// between modules become groups, so that a module reads as a list of steps.
function buildTree(graph) {
  const root = { id: "", label: "", kind: "module", children: [], path: "" };
  const modules = new Map([["", root]]);
  graph.nodes.forEach((node, index) => {
    let parent = root, before = "";
    for (const name of node.path) {
      if (!modules.has(name)) {
        const label = before && name.startsWith(`${before}.`) ? name.slice(before.length + 1) : name;
        const module = { id: `m:${name}`, label, kind: "module", children: [], path: name, repeats: graph.repeats[name] || 1 };
        modules.set(name, module);
        parent.children.push(module);
      }
      parent = modules.get(name);
      before = name;
    }
    parent.children.push({ id: `n:${index}`, label: node.label, kind: node.kind, node, index });
  });
  for (const module of modules.values()) groupRuns(module);
  count(root);
  return root;
}

function groupRuns(module) {
  if (!module.children.some((child) => child.kind === "module")) return;
  const children = [];
  let run = [];
  const flush = () => {
    if (run.length < MIN_RUN) children.push(...run);
    else children.push({ id: `g:${run[0].id}`, label: "operators", kind: "module", children: run, path: module.path, repeats: 1 });
    run = [];
  };
  for (const child of module.children) {
    if (child.kind === "op") run.push(child);
    else { flush(); children.push(child); }
  }
  flush();
  module.children = children;
}

function count(item) {
  item.size = item.children ? item.children.reduce((sum, child) => sum + count(child), 0) : Number(item.kind === "op");
  return item.size;
}

// What kind of work an operator does, by its name.
function sortOf(label) {
  const name = label.replace(/^aten\./, "").toLowerCase();
  if (/linear|matmul|gemm|mm$|bmm|attention|conv|einsum/.test(name)) return "product";
  if (/mean|sum|softmax|rsqrt|sqrt|norm|pow|square|reduce|max|min|argmax/.test(name)) return "norm";
  if (/index|embedding|gather|scatter|select|slice|copy|cat|concat|repeat|where|masked|tile/.test(name)) return "move";
  if (/view|reshape|transpose|squeeze|flatten|expand|permute|cast|^to$|chunk|split|shape|size|item|clone|contiguous/.test(name)) return "shape";
  return "math";
}

function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function nameOf(item) {
  return item.label === "operators" ? plural(item.size, "operator") : item.label;
}

// A closed module in a few words: how much it does, or the most telling operators of a group.
function digest(item) {
  const size = `${plural(item.size, "operator")}${item.repeats > 1 ? " each" : ""}`;
  if (item.label !== "operators") return size;
  const weight = { product: 0, norm: 1, move: 2, math: 3, shape: 4 };
  const names = [...new Set(item.children.map((child) => child.label))];
  names.sort((a, b) => weight[sortOf(a)] - weight[sortOf(b)]);
  return names.slice(0, 3).map((name) => name.replace(/^aten\./, "")).join(" · ");
}

// Gives every box x, y, w, h relative to its parent, and returns the edges of each open module.
function layOut(item, isOpen, edges) {
  if (item.kind !== "module" || !isOpen(item)) {
    const sub = item.kind === "module" ? digest(item) : item.node.out[0] || "";
    const times = item.kind === "module" ? 5 : 0;
    item.w = Math.max(96, (nameOf(item).length + times) * 7.4 + 34, sub.length * 5.7 + 40);
    item.h = item.kind === "op" && !(item.node.out[0]) ? LINE : LINE + 12;
    item.open = false;
    return;
  }
  item.open = true;
  for (const child of item.children) layOut(child, isOpen, edges);
  const links = linksBetween(item.children, edges);
  const ranks = rankAll(item.children, links);
  const rows = addWaypoints(item.children, links, ranks);
  order(rows);
  const size = place(rows);
  item.links = links;
  const head = item.id ? HEAD : 0;
  for (const row of rows) for (const box of row) { box.x += PAD; box.y += PAD + head; }
  item.w = Math.max(size.w + 2 * PAD, item.label.length * 7.4 + 110);
  item.h = size.h + 2 * PAD + head;
  const shift = (item.w - 2 * PAD - size.w) / 2;
  for (const row of rows) for (const box of row) box.x += shift;
}

function leaves(item, found = []) {
  if (item.children) item.children.forEach((child) => leaves(child, found));
  else found.push(item.index);
  return found;
}

function linksBetween(children, edges) {
  const owner = new Map();
  children.forEach((child, at) => leaves(child).forEach((index) => owner.set(index, at)));
  const found = new Map();
  for (const [from, to] of edges) {
    const a = owner.get(from), b = owner.get(to);
    if (a !== undefined && b !== undefined && a !== b) found.set(`${a} ${b}`, { a, b, via: [] });
  }
  return [...found.values()];
}

// An order in which boxes come after what they read, the earliest first where there is a choice.
// Where boxes read each other, the earliest goes on, and links that lead up are marked.
function inOrder(children, links) {
  const missing = children.map((_, at) => links.filter((link) => link.b === at).length);
  const rest = new Set(children.keys()), position = [];
  while (rest.size) {
    const next = [...rest].find((at) => missing[at] === 0) ?? [...rest][0];
    rest.delete(next);
    position[next] = children.length - rest.size;
    for (const link of links) if (link.a === next) missing[link.b] -= 1;
  }
  for (const link of links) link.isUp = position[link.a] > position[link.b];
  return position;
}

// The longest way from a source; what nothing comes before stands right above its first reader.
function rankAll(children, links) {
  const position = inOrder(children, links), ranks = children.map(() => 0);
  const down = links.filter((link) => !link.isUp).sort((p, q) => position[p.a] - position[q.a]);
  for (const { a, b } of down) ranks[b] = Math.max(ranks[b], ranks[a] + 1);
  children.forEach((child, at) => {
    if (down.some((link) => link.b === at)) return;
    const readers = down.filter((link) => link.a === at).map((link) => ranks[link.b]);
    if (readers.length) ranks[at] = Math.max(0, Math.min(...readers) - 1);
  });
  return ranks;
}

// Rows of boxes; a link over several rows goes through a waypoint in each, shared per source.
function addWaypoints(children, links, ranks) {
  const rows = Array.from({ length: Math.max(0, ...ranks) + 1 }, () => []);
  children.forEach((child, at) => { child.up = []; child.down = []; rows[ranks[at]].push(child); });
  const chains = new Map();
  for (const link of links.filter((one) => !one.isUp)) {
    let last = children[link.a];
    for (let rank = ranks[link.a] + 1; rank < ranks[link.b]; rank += 1) {
      const key = `${link.a} ${rank}`;
      if (!chains.has(key)) {
        const point = { w: 2, h: 0, up: [last], down: [], isPoint: true };
        last.down.push(point);
        rows[rank].push(point);
        chains.set(key, point);
      }
      last = chains.get(key);
      link.via.push(last);
    }
    last.down.push(children[link.b]);
    children[link.b].up.push(last);
  }
  return rows;
}

function order(rows) {
  const sort = (row, side) => {
    row.forEach((box, at) => {
      const near = box[side].map((other) => other.at);
      box.wish = near.length ? near.reduce((a, b) => a + b, 0) / near.length : at;
    });
    row.sort((p, q) => p.wish - q.wish);
    row.forEach((box, at) => { box.at = at - row.length / 2; });
  };
  rows.forEach((row) => row.forEach((box, at) => { box.at = at - row.length / 2; }));
  for (let round = 0; round < 4; round += 1) {
    rows.forEach((row) => sort(row, "up"));
    [...rows].reverse().forEach((row) => sort(row, "down"));
  }
  rows.forEach((row) => sort(row, "up"));
}

function place(rows) {
  let y = 0;
  for (const row of rows) {
    let x = 0;
    const height = Math.max(...row.map((box) => box.h));
    for (const box of row) {
      box.x = x;
      x += box.w + GAP_X;
      if (box.isPoint) box.h = height;
      box.y = y + (height - box.h) / 2;
    }
    row.forEach((box) => { box.x -= (x - GAP_X) / 2; });
    y += height + GAP_Y;
  }
  const middle = (box) => box.x + box.w / 2;
  for (let round = 0; round < 8; round += 1) {
    const sides = round % 2 ? ["down", "up"] : ["up", "down"];
    for (const row of round % 2 ? [...rows].reverse() : rows) straighten(row, sides[0], middle);
  }
  const all = rows.flat();
  const left = Math.min(...all.map((box) => box.x)), right = Math.max(...all.map((box) => box.x + box.w));
  for (const box of all) box.x -= left;
  return { w: right - left, h: y - GAP_Y };
}

// Boxes move towards their neighbours in the next row, without passing each other.
function straighten(row, side, middle) {
  const wishes = row.map((box) => {
    const near = box[side].map(middle);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length - box.w / 2 : box.x;
  });
  const fit = (step) => {
    const at = [...wishes];
    for (let i = step > 0 ? 1 : row.length - 2; i >= 0 && i < row.length; i += step) {
      const before = i - step;
      at[i] = step > 0 ? Math.max(at[i], at[before] + row[before].w + GAP_X) : Math.min(at[i], at[before] - row[i].w - GAP_X);
    }
    return at;
  };
  const right = fit(1), left = fit(-1);
  row.forEach((box, at) => { box.x = (right[at] + left[at]) / 2; });
}
