// Draws the charts of a page from the data that stands in it. Everything else works without a script.
"use strict";

const PATTERNS = { idle: "/", unknown: ".", unattributed: "x", unallocated: "" };

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Plotly reads names as markup: links, bold text, line breaks. A name here is text that a tenant chose.
function asText(name) {
  return name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function traces(data) {
  return data.stacks.map((stack) => ({
    type: "bar",
    name: asText(stack.name),
    x: data.periods,
    y: stack.values,
    marker: {
      color: style(`--c-${stack.look}`),
      pattern: { shape: PATTERNS[stack.look] || "", fgcolor: style("--panel"), size: 5, solidity: 0.25, fillmode: "overlay" },
      line: { width: 0 },
    },
    hovertemplate: data.money ? "%{y:,.2f}" : "%{y:,.1f} h",
  }));
}

function layout(data) {
  const ink = style("--dim");
  const line = style("--line");
  return {
    barmode: "stack",
    bargap: 0.18,
    margin: { l: 56, r: 6, t: 30, b: 30 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemclick: false, itemdoubleclick: false },
    hovermode: "x unified",
    hoverlabel: { bgcolor: style("--panel"), bordercolor: line, font: { color: style("--ink") } },
    xaxis: { type: "date", tickformat: "%d %b", hoverformat: "%a, %d %b %Y", showgrid: false, linecolor: line, fixedrange: true },
    yaxis: { tickformat: ",.2~s", gridcolor: line, zeroline: false, fixedrange: true, rangemode: "tozero" },
  };
}

function draw() {
  for (const place of document.querySelectorAll("[data-chart]")) {
    const source = document.getElementById(place.dataset.chart);
    if (window.Plotly && source) {
      const data = JSON.parse(source.textContent);
      window.Plotly.react(place, traces(data), layout(data), { displayModeBar: false, responsive: true, staticPlot: false });
      place.dataset.drawn = "1";
    }
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// An address says what was asked for and nothing else: empty fields stay out of it.
for (const form of document.querySelectorAll("form")) {
  form.addEventListener("formdata", (event) => {
    for (const [name, value] of [...event.formData.entries()]) {
      if (value === "" || (name === "share" && value === "none")) {
        event.formData.delete(name);
      }
    }
  });
}
