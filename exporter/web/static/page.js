"use strict";
(function () {
  var live = document.getElementById("live"), bar = document.getElementById("status");
  var state = document.getElementById("state"), age = document.getElementById("age");
  var PERIOD = 2000, OLD = 10, ageAtFetch = null, fetchedAt = performance.now(), timer = 0, busy = false, failed = false;
  bar.hidden = false;

  function say(text) { if (state.textContent !== text) { state.textContent = text; } }

  function words(seconds) {
    seconds = Math.max(0, Math.round(seconds));
    if (seconds < 120) { return seconds + " s"; }
    return seconds < 7200 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h";
  }

  function show() {
    var elapsed = (performance.now() - fetchedAt) / 1000, old = ageAtFetch === null ? null : ageAtFetch + elapsed;
    age.textContent = old === null ? "" : "data is " + words(old) + " old";
    bar.className = "statusbar" + (failed ? " lost" : old !== null && old > OLD ? " old" : "");
    say(failed ? "Connection lost. What you see is old; trying again." : old !== null && old > OLD ? "The agent answers, but its data is old." : "Live");
  }

  var tools = document.getElementById("tools"), filter = document.getElementById("filter");
  var sort = document.getElementById("sort"), shown = document.getElementById("shown");

  // A device is its row and those of its holders after it; a GPU and its instances share a table body.
  function devicesOf(body) {
    var found = [];
    Array.from(body.rows).forEach(function (row) {
      if (row.classList.contains("user")) { found[found.length - 1].push(row); } else { found.push([row]); }
    });
    return found;
  }

  function largest(rows) {
    return Math.max.apply(null, rows.map(function (row) { return parseFloat(row.dataset[sort.value] || -1); }));
  }

  function compare(a, b) { return (sort.value && largest(b) - largest(a)) || a[0].place - b[0].place; }

  // A GPU is shown with those of its instances that have all words, or with all of them if it has the words itself.
  function arrange() {
    var table = live.querySelector("table.devices"), words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    var all = 0, count = 0;

    function hit(rows) {
      var text = rows.map(function (row) { return row.textContent; }).join(" ").toLowerCase();
      return words.every(function (word) { return text.includes(word); });
    }

    tools.hidden = !table;
    if (!table) { return; }
    Array.from(table.rows).forEach(function (row, place) { if (row.place === undefined) { row.place = place; } });
    Array.from(table.tBodies).sort(function (a, b) {
      return compare(Array.from(a.rows), Array.from(b.rows));
    }).forEach(function (body) {
      var devices = devicesOf(body), gpu = devices.shift(), whole = hit(gpu), hits = Number(whole);
      all += 1 + devices.length;
      devices.sort(compare).forEach(function (rows) {
        var visible = whole || hit(rows);
        hits += visible;
        rows.forEach(function (row) { row.hidden = !visible; body.appendChild(row); });
      });
      count += hits;
      body.hidden = !hits;
      table.appendChild(body);
    });
    var text = words.length ? count + " of " + all + " devices" : "";
    if (shown.textContent !== text) { shown.textContent = text; }
  }

  // The server's own Date header is the other end of the age: the two clocks need not agree.
  function note(response) {
    var taken = parseFloat((live.firstElementChild || live).dataset.taken), served = Date.parse(response.headers.get("Date"));
    ageAtFetch = isNaN(taken) || isNaN(served) ? null : Math.max(0, served / 1000 - taken);
    fetchedAt = performance.now();
  }

  // A link is found again by its place among those to the same address: most links have no id.
  function linksLike(link) {
    return Array.from(live.querySelectorAll("a")).filter(function (one) { return one.href === link.href; });
  }

  function replace(html) {
    var focused = document.activeElement, index = focused && focused.href ? linksLike(focused).indexOf(focused) : -1;
    var x = window.scrollX, y = window.scrollY, made = document.createElement("template");
    made.innerHTML = html;
    var parts = Array.from(made.content.children);
    Array.from(live.children).filter(function (one) { return one !== tools; }).forEach(function (former, number) {
      former.replaceWith(parts[number]);
    });
    arrange();
    if (index >= 0) { var again = linksLike(focused)[index]; if (again) { again.focus({preventScroll: true}); } }
    window.scrollTo({left: x, top: y, behavior: "instant"});
  }

  function selecting() {
    var selection = window.getSelection();
    return selection && !selection.isCollapsed && live.contains(selection.anchorNode);
  }

  function turn() {
    if (document.hidden || busy) { return; }
    busy = true;
    var stop = new AbortController(), late = setTimeout(function () { stop.abort(); }, 5000);
    fetch("/?fragment=1", {cache: "no-store", signal: stop.signal}).then(function (response) {
      if (!response.ok) { throw new Error(response.status); }
      return response.text().then(function (html) {
        if (!selecting()) { replace(html); note(response); }
        failed = false;
      });
    }).catch(function () { failed = true; }).then(function () { clearTimeout(late); busy = false; show(); });
  }

  function start() { clearInterval(timer); timer = setInterval(turn, PERIOD); turn(); }

  document.addEventListener("visibilitychange", function () {
    if (document.hidden) { clearInterval(timer); say("Paused"); } else { start(); }
  });
  filter.addEventListener("input", arrange);
  sort.addEventListener("change", arrange);
  setInterval(function () { if (!document.hidden) { show(); } }, 1000);
  arrange();
  start();
})();
