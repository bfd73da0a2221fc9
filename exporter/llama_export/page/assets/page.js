"use strict";
// What the other scripts share, the theme, and the sliders of the states.

const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function showBytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let size = count, unit = 0;
  while (size >= 999.95 && unit < units.length - 1) { size /= 1000; unit += 1; }
  const text = size.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  return unit ? `${text} ${units[unit]}` : `${count} B`;
}

function setUpTheme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const set = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${button.textContent.toLowerCase()} theme`);
  };
  const query = matchMedia("(prefers-color-scheme: dark)");
  set(query.matches ? "dark" : "light");
  query.addEventListener("change", (event) => set(event.matches ? "dark" : "light"));
  button.addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
}

// Details are closed on the screen and open on paper.
function setUpPrint() {
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const item of closed) item.open = true;
  });
  addEventListener("afterprint", () => { for (const item of closed) item.open = false; });
}

function setUpStates(panel) {
  const state = data.states[Number(panel.dataset.index)];
  const find = (name) => panel.querySelector(`.${name}`);
  const batch = find("batch"), length = find("length");
  const built = state.batch * state.length * state.position_bytes;
  const cells = [...panel.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td")]);
  const show = () => {
    const rows = 2 ** batch.value, positions = 2 ** length.value;
    const bytes = rows * Math.ceil(positions / state.page_size) * state.page_size * state.position_bytes;
    find("batch-out").textContent = rows.toLocaleString("en-US");
    find("length-out").textContent = positions.toLocaleString("en-US");
    find("bytes").textContent = showBytes(bytes);
    find("compare").textContent =
      ` built for ${state.batch} × ${state.length.toLocaleString("en-US")}: ${showBytes(built)}`;
    batch.setAttribute("aria-valuetext", `${rows} rows`);
    length.setAttribute("aria-valuetext", `${positions} positions`);
    cells.forEach((row, i) => row.forEach((cell, j) =>
      cell.classList.toggle("here", 2 ** i === rows && columns[j] === positions)));
  };
  const columns = [...panel.querySelectorAll("thead th")].slice(1)
    .map((cell) => Number(cell.textContent.replaceAll(",", "")));
  batch.value = Math.round(Math.log2(state.batch));
  length.value = Math.round(Math.log2(state.length));
  batch.addEventListener("input", show);
  length.addEventListener("input", show);
  show();
}

document.documentElement.classList.add("scripted");
setUpTheme();
setUpPrint();
document.querySelectorAll(".panel.states").forEach(setUpStates);
