"use strict";
// The timelines: one canvas each, one window of time for all of them.
(() => {
  const canvases = [...document.querySelectorAll("canvas.timeline")];
  if (!canvases.length) return;
  const COLOURS = {
    forward: "#4269d0", backward: "#3ca951", "weight gradient": "#8fb3ef", "other compute": "#a463f2",
    transfer: "#9498a0", collective: "#e0a10f", "host copy": "#ff8ab7",
  };
  const THIN = { transfer: 0, collective: 1, "host copy": 1 }; // which of the lines below a row
  const AXIS = 22;
  const span = Math.max(...page.timelines.map((t) => t.makespan_s)) * 1e9;
  const view = { from: 0, to: span };
  let byMicrobatch = false;
  const PAPER = 560; // height of a printed timeline
  let printing = false;

  const dark = () => !printing && matchMedia("(prefers-color-scheme: dark)").matches;
  const bytesText = (n) => {
    const power = Math.min(4, n > 0 ? Math.floor(Math.log2(n) / 10) : 0);
    return Number((n / 1024 ** power).toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
  };
  const timeText = (ns, digits = 4) => {
    if (ns <= 0) return "0";
    const [scale, unit] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
    return Number((ns / scale).toPrecision(digits)) + " " + unit;
  };

  function colour(group, microbatch) {
    if (!byMicrobatch || microbatch < 0 || group in THIN) return COLOURS[group];
    return `hsl(${Math.round(microbatch * 222.5) % 360} ${group === "forward" ? "65% 55%" : "50% 38%"})`;
  }

  // One canvas and its timeline.
  function chart(canvas, data) {
    const events = data.events;
    const count = events.start.length;
    const lanes = data.lanes.length;
    const usual = lanes > 48 ? 16 : lanes > 20 ? 21 : 28;
    let row = usual;
    const first = new Int32Array(lanes + 1); // events are sorted by lane, then by start
    for (let i = 0; i < count; i++) first[events.lane[i] + 1]++;
    for (let l = 0; l < lanes; l++) first[l + 1] += first[l];
    const longest = events.duration.reduce((a, b) => Math.max(a, b), 0);
    let gutter = 60, width = 0;

    function fromPixel(x) { return view.from + ((x - gutter) / (width - gutter)) * (view.to - view.from); }

    // The first event of a lane that may still be running at a time.
    function search(lane, time) {
      let low = first[lane], high = first[lane + 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (events.start[middle] < time - longest) low = middle + 1; else high = middle;
      }
      return low;
    }

    function place(lane, group) {
      const top = AXIS + lane * row, thick = Math.round(row * 0.64);
      if (group in THIN) return [top + 2 + thick + 1 + THIN[group] * 3, 3];
      return [top + 2, thick];
    }

    function axis(ink, height, line) {
      const wanted = (view.to - view.from) / Math.max(2, (width - gutter) / 110);
      const power = 10 ** Math.floor(Math.log10(wanted));
      const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
      ink.textAlign = "center";
      for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
        const x = gutter + ((t - view.from) / (view.to - view.from)) * (width - gutter);
        ink.fillStyle = line;
        ink.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
        ink.fillStyle = dark() ? "#9ba3b0" : "#5c6470";
        if (x < width - 24 && x > gutter - 1) ink.fillText(timeText(t, 5), Math.max(x, gutter + 8), AXIS - 11);
      }
    }

    function draw() {
      width = printing ? 700 : canvas.parentElement.clientWidth;
      // Paper cannot cut a drawing: what leaves no room goes onto the next page, and a page stays empty.
      row = printing ? Math.max(8, Math.min(usual, (PAPER - AXIS) / lanes)) : usual;
      const height = AXIS + lanes * row + 4, ratio = printing ? 3 : devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.aspectRatio = `${width} / ${height}`;
      const ink = canvas.getContext("2d");
      ink.scale(ratio, ratio);
      ink.font = `${Math.min(11, row - 1)}px system-ui, 'DejaVu Sans', sans-serif`;
      ink.textBaseline = "middle";
      gutter = Math.min(width / 3, 14 + Math.max(...data.lanes.map((lane) => ink.measureText(lane.name).width)));
      canvas.dataset.gutter = gutter;
      const [back, line, text] = dark() ? ["#1c2027", "#323843", "#e6e8ec"] : ["#f4f5f7", "#dcdfe5", "#1b1f27"];
      for (let l = 0; l < lanes; l++) {
        ink.fillStyle = back;
        ink.fillRect(gutter, place(l, "forward")[0], width - gutter, place(l, "forward")[1]);
      }
      axis(ink, height, line);
      const scale = (width - gutter) / (view.to - view.from);
      ink.save();
      ink.beginPath();
      ink.rect(gutter, 0, width - gutter, height);
      ink.clip();
      ink.textAlign = "center";
      for (let l = 0; l < lanes; l++) {
        for (let i = search(l, view.from); i < first[l + 1] && events.start[i] <= view.to; i++) {
          const end = events.start[i] + events.duration[i];
          if (end < view.from) continue;
          const [mnemonic, , group] = data.labels[events.label[i]];
          const x = gutter + (events.start[i] - view.from) * scale;
          const long = events.duration[i] * scale;
          const [y, tall] = place(l, group);
          ink.fillStyle = colour(group, events.microbatch[i]);
          ink.fillRect(x, y, Math.max(0.4, long - (long > 3 ? 0.7 : 0)), tall);
          if (long > 12 && tall > 8) {
            const m = events.microbatch[i];
            const label = (group === "forward" || group === "backward" ? "" : mnemonic) + (m < 0 ? "" : m);
            const left = Math.max(x, gutter), right = Math.min(x + long, width);
            if (label && ink.measureText(label).width < right - left - 2) {
              ink.fillStyle = "#ffffff";
              ink.fillText(label, (left + right) / 2, y + tall / 2 + 0.5);
            }
          }
        }
      }
      ink.restore();
      ink.textAlign = "left";
      data.lanes.forEach((lane, l) => {
        const [y, tall] = place(l, "forward");
        ink.fillStyle = `hsl(${page.hues[lane.stage]} 55% 48%)`;
        ink.fillRect(0, y, 4, tall);
        ink.fillStyle = text;
        ink.save();
        ink.beginPath();
        ink.rect(0, y - 4, gutter - 3, tall + 8);
        ink.clip();
        ink.fillText(lane.name, 8, y + tall / 2 + 0.5);
        ink.restore();
      });
    }

    function at(x, y) {
      const lane = Math.floor((y - AXIS) / row);
      if (lane < 0 || lane >= lanes || x < gutter) return -1;
      const time = fromPixel(x), slack = (view.to - view.from) / (width - gutter);
      let found = -1;
      for (let i = search(lane, time); i < first[lane + 1] && events.start[i] <= time + slack; i++) {
        if (events.start[i] + events.duration[i] < time - slack) continue;
        const [top, tall] = place(lane, data.labels[events.label[i]][2]);
        if (y >= top - 1 && y <= top + tall + 1) found = i;
      }
      return found;
    }

    function words(i) {
      const [mnemonic, name, group] = data.labels[events.label[i]];
      const lines = [`${name} (${mnemonic})` + (events.microbatch[i] < 0 ? "" : ` of microbatch ${events.microbatch[i]}`)];
      if (events.slice[i] > 0 || data.sliced) lines.push(`slice ${events.slice[i]}`);
      if (events.chunk[i] >= 0) lines.push(`chunk ${events.chunk[i]} on ${data.lanes[events.lane[i]].name}`);
      if (events.peer[i] >= 0) lines.push(`from ${data.lanes[events.peer[i]].name}`);
      if (events.bytes[i] >= 0) {
        const moved = group in THIN || group === "other compute";
        const verb = moved ? "" : group === "forward" ? "keeps " : "uses ";
        lines.push(verb + bytesText(events.bytes[i]) + (moved ? "" : " of activations"));
      }
      lines.push(`${timeText(events.duration[i])}, from ${timeText(events.start[i], 6)}`);
      return lines.join("\n");
    }

    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, from: view.from, to: view.to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointercancel", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        const shift = ((held.x - event.clientX) / (width - gutter)) * (held.to - held.from);
        look(held.from + shift, held.to + shift);
        return;
      }
      const box = canvas.getBoundingClientRect();
      const i = at(event.clientX - box.x, event.clientY - box.y);
      if (i >= 0) tip.show(words(i), event.clientX, event.clientY); else tip.hide();
    });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("dblclick", (event) => zoom(0.4, fromPixel(event.clientX - canvas.getBoundingClientRect().x)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), fromPixel(event.clientX - canvas.getBoundingClientRect().x));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const name = { "+": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
      if (name) { event.preventDefault(); act(name); }
    });
    return { draw, at, words };
  }

  const charts = canvases.map((canvas) => chart(canvas, page.timelines[Number(canvas.dataset.timeline)]));
  const output = document.getElementById("shown-time");
  let asked = false;
  function redraw() {
    asked = false;
    for (const one of charts) one.draw();
    output.textContent = `${timeText(view.from)} to ${timeText(view.to)} of ${timeText(span)}`;
  }
  function soon() { if (!asked) { asked = true; requestAnimationFrame(redraw); } }

  function look(from, to) {
    const length = Math.min(span, Math.max(1e3, to - from)); // from a microsecond to everything
    view.from = Math.max(0, Math.min(from, span - length));
    view.to = view.from + length;
    soon();
  }
  function zoom(factor, around = (view.from + view.to) / 2) {
    look(around - (around - view.from) * factor, around + (view.to - around) * factor);
  }
  function act(name) {
    const length = view.to - view.from;
    if (name === "in") zoom(0.5);
    if (name === "out") zoom(2);
    if (name === "left") look(view.from - length / 3, view.to - length / 3);
    if (name === "right") look(view.from + length / 3, view.to + length / 3);
    if (name === "all") look(0, span);
  }
  for (const button of document.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", () => {
      if (button.dataset.do !== "colour") return act(button.dataset.do);
      byMicrobatch = !byMicrobatch;
      button.setAttribute("aria-pressed", String(byMicrobatch));
      return soon();
    });
  }
  addEventListener("beforeprint", () => { printing = true; redraw(); });
  addEventListener("afterprint", () => { printing = false; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  new ResizeObserver(soon).observe(canvases[0].parentElement);
  redraw();
})();
