"use strict";
// Lines between the boxes of the map: as wide as what flows, red where a link is busy most of the time.
(() => {
  const map = document.getElementById("map");
  if (!map) return;
  const drawing = map.querySelector("svg.links");
  const svg = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);
  const links = page.cluster.links.filter((link) => link.first !== link.second).slice(0, 40);
  const most = Math.max(1, ...links.map((link) => link.transfer_bytes + link.collective_bytes));

  function text(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.min(4, bytes > 0 ? Math.floor(Math.log2(bytes) / 10) : 0);
    return Number((bytes / 1024 ** power).toPrecision(3)) + " " + units[power];
  }

  // The middle of the side of a box that looks at the other box.
  function side(box, other) {
    const dx = other.x + other.width / 2 - box.x - box.width / 2;
    const dy = other.y + other.height / 2 - box.y - box.height / 2;
    if (other.y > box.y + box.height || other.y + other.height < box.y) {
      return [box.x + box.width / 2, dy > 0 ? box.y + box.height : box.y, 0, Math.sign(dy)];
    }
    return [dx > 0 ? box.x + box.width : box.x, box.y + Math.min(box.height, other.height) / 2, Math.sign(dx), 0];
  }

  // Shares of a line, from its middle to its ends, at which its label may stand.
  const SHARES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9];

  // A label's place beside a line that goes up and down, above one that goes across, hidden by no box and on no title.
  function free(points, upright, text, obstacles) {
    const width = 7 * text.length, places = SHARES.map((t) => {
      const weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
      const [x, y] = [0, 1].map((i) => weights.reduce((sum, w, k) => sum + w * points[k][i], 0));
      return upright ? [x + 10, y + 4] : [x, y - 8];
    });
    const hidden = ([x, y]) => obstacles.some((o) => {
      const left = upright ? x : x - width / 2;
      return left < o.x + o.width && left + width > o.x && y - 10 < o.y + o.height && y + 2 > o.y;
    });
    return places.find((place) => !hidden(place)) || places[0];
  }

  function draw() {
    const origin = map.getBoundingClientRect();
    const within = (element) => {
      const { x, y, width, height } = element.getBoundingClientRect();
      return { x: x - origin.x, y: y - origin.y, width, height };
    };
    const obstacles = [...map.querySelectorAll(".pool, h3")].map((element) => {
      if (element.tagName !== "H3") return within(element);
      const range = document.createRange();
      range.selectNodeContents(element);
      return within(range);
    });
    const boxes = new Map();
    for (const pool of map.querySelectorAll(".pool")) {
      boxes.set(Number(pool.dataset.pool), within(pool));
    }
    drawing.replaceChildren();
    for (const link of links) {
      const [a, b] = [boxes.get(link.first), boxes.get(link.second)];
      const [x1, y1, ax, ay] = side(a, b);
      const [x2, y2, bx, by] = side(b, a);
      const reach = Math.max(18, Math.hypot(x2 - x1, y2 - y1) / 2.5);
      const path = svg("path");
      const points = [[x1, y1], [x1 + ax * reach, y1 + ay * reach], [x2 + bx * reach, y2 + by * reach], [x2, y2]];
      path.setAttribute("d", `M${points[0].join(" ")}C${points.slice(1).flat().join(" ")}`);
      const bytes = link.transfer_bytes + link.collective_bytes;
      path.setAttribute("stroke-width", 1.5 + (5 * bytes) / most);
      if (link.load > 0.5) path.classList.add("full");
      const label = svg("text");
      const upright = ax === 0 && bx === 0;
      label.textContent = text(bytes);
      const [x, y] = free(points, upright, label.textContent, obstacles);
      label.setAttribute("x", x);
      label.setAttribute("y", y);
      if (upright) label.style.textAnchor = "start";
      drawing.append(path, label);
    }
  }

  // Paper has its own widths, and no script runs once it has them: what the style sheet says of it is said before.
  const paper = (on) => {
    map.classList.toggle("on-paper", on);
    draw();
  };
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  new ResizeObserver(draw).observe(map);
  draw();
})();
