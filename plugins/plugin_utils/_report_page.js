/* SPDX-License-Identifier: GPL-3.0-or-later */
(function () {
  "use strict";
  var table = document.getElementById("cards-table");
  if (!table) { return; }
  var body = table.tBodies[0];
  var rows = Array.prototype.slice.call(body.rows);
  var text = document.getElementById("filter-text");
  var state = document.getElementById("filter-state");
  var count = document.getElementById("filter-count");

  function value(row, column) {
    var cell = row.cells[column];
    return cell.hasAttribute("data-value") ? cell.getAttribute("data-value") : cell.textContent.toLowerCase();
  }

  // Numbers are compared as numbers, empty cells come last in both directions.
  function sort(column, direction) {
    rows.sort(function (a, b) {
      var x = value(a, column), y = value(b, column);
      if (x === "" || y === "") { return x === y ? 0 : (x === "" ? 1 : -1); }
      var n = Number(x), m = Number(y);
      var order = isNaN(n) || isNaN(m) ? x.localeCompare(y, "en", { numeric: true }) : n - m;
      return direction * order;
    });
    rows.forEach(function (row) { body.appendChild(row); });
  }

  Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
    var button = head.querySelector("button");
    if (!button) { return; }
    button.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending";
      Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      sort(column, up ? 1 : -1);
    });
  });

  function filter() {
    var wanted = text.value.toLowerCase(), status = state.value, shown = 0;
    rows.forEach(function (row) {
      var states = " " + row.getAttribute("data-state") + " ";
      var hit = row.textContent.toLowerCase().indexOf(wanted) >= 0 && (status === "" || states.indexOf(" " + status + " ") >= 0);
      row.hidden = !hit;
      shown += hit ? 1 : 0;
    });
    count.textContent = shown + " of " + rows.length + " cards";
  }
  text.addEventListener("input", filter);
  state.addEventListener("change", filter);

  function open() {
    var target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") { target.open = true; }
  }
  window.addEventListener("hashchange", open);
  document.querySelector(".controls").hidden = false;
  filter();
  open();
})();
