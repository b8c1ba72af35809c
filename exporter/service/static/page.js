// Adds to pages what a script alone can do: figures under the pointer, copy buttons, short addresses.
"use strict";

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent?.append(made);
  return made;
}

// A chart is drawn by the server; what the pointer is on comes from the table below it. Names are only ever text.
for (const plot of document.querySelectorAll("[data-chart]")) {
  const table = document.getElementById(plot.dataset.chart);
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const days = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
  const bars = plot.querySelector(".bars");
  const band = plot.querySelector(".band");
  const tip = element("div", "", plot);
  tip.className = "tip";
  tip.hidden = true;
  bars.addEventListener("pointermove", (event) => {
    const place = bars.getBoundingClientRect();
    const part = (event.clientX - place.left) / place.width;
    const day = Math.min(days.length - 1, Math.max(0, Math.floor(part * days.length)));
    const list = document.createElement("dl");
    names.slice(1).forEach((name, number) => {
      element("dt", name, list);
      element("dd", days[day][number + 1], list);
    });
    tip.replaceChildren(element("b", days[day][0]), list);
    tip.hidden = false;
    band.setAttribute("x", `${(100 * day) / days.length}%`);
    const left = place.left - plot.getBoundingClientRect().left + part * place.width;
    tip.style.left = `${part > 0.5 ? left - tip.offsetWidth - 12 : left + 12}px`;
  });
  bars.addEventListener("pointerleave", () => {
    tip.hidden = true;
    band.setAttribute("x", "-100%");
  });
}

for (const copied of navigator.clipboard ? document.querySelectorAll(".copied") : []) {
  const button = element("button", "Copy", copied);
  button.type = "button";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(copied.querySelector("pre").textContent);
    button.textContent = "Copied";
  });
}

// On a phone the menu is wider than the page, and a browser leaves a link in focus half hidden.
const menu = document.querySelector(".menu");
const show = (link) => link?.scrollIntoView({ block: "nearest", inline: "center" });
menu.addEventListener("focusin", (event) => show(event.target));
show(menu.querySelector("[aria-current]"));

// A period and two dates exclude each other.
const period = document.getElementById("f-window");
const dates = document.querySelectorAll("#f-from, #f-to");
period?.addEventListener("change", () => dates.forEach((date) => (date.value = "")));
dates.forEach((date) => date.addEventListener("input", () => (period.value = "")));

// An address says what was asked for and nothing else: empty fields stay out of it.
for (const form of document.querySelectorAll("form")) {
  form.addEventListener("formdata", (event) => {
    const [first, last] = ["from", "to"].map((name) => event.formData.get(name));
    if (first && last) {
      event.formData.set("window", `${first}..${last}`);
      event.formData.delete("from");
      event.formData.delete("to");
    }
    for (const [name, value] of [...event.formData.entries()]) {
      if (value === "" || (name === "share" && value === "none")) {
        event.formData.delete(name);
      }
    }
  });
}
