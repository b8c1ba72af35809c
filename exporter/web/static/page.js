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

  // The server's own Date header is the other end of the age: the two clocks need not agree.
  function note(response) {
    var taken = parseFloat((live.firstElementChild || live).dataset.taken), served = Date.parse(response.headers.get("Date"));
    ageAtFetch = isNaN(taken) || isNaN(served) ? null : Math.max(0, served / 1000 - taken);
    fetchedAt = performance.now();
  }

  function replace(html) {
    var focused = document.activeElement, id = focused && live.contains(focused) ? focused.id : "";
    var x = window.scrollX, y = window.scrollY;
    live.innerHTML = html;
    if (id) { var again = document.getElementById(id); if (again) { again.focus({preventScroll: true}); } }
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
  setInterval(function () { if (!document.hidden) { show(); } }, 1000);
  start();
})();
