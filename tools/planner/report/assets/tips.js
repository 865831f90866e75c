"use strict";
// Hints at the pointer, and the GPUs of one stage while the pointer is on it.
const page = JSON.parse(document.getElementById("page-data").textContent);

const tip = {
  box: document.getElementById("tip"),
  show(text, x, y) {
    this.box.textContent = text; // never as markup: names come from users
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    this.box.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 4)) + "px";
    this.box.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
  },
  hide() { this.box.hidden = true; },
};

document.addEventListener("pointerover", (event) => {
  const holder = event.target.closest("[data-tip]");
  if (holder) tip.show(holder.dataset.tip, event.clientX, event.clientY);
  else if (event.target.tagName !== "CANVAS") tip.hide();
  const staged = event.target.closest("[data-stage]");
  for (const gpu of document.querySelectorAll(".gpu")) {
    gpu.classList.toggle("dim", Boolean(staged) && gpu.dataset.stage !== staged.dataset.stage);
  }
});
document.addEventListener("scroll", () => tip.hide(), { passive: true });
document.addEventListener("pointerleave", () => tip.hide());
