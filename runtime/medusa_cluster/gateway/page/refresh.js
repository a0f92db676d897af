"use strict";
(() => {
  const main = document.querySelector("main");
  let busy = false;
  async function refresh() {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const answer = await fetch("cluster/status?form=html", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      // A selection, or a finger on the page, must not be lost.
      if (!String(getSelection())) main.innerHTML = text;
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale");
    } finally {
      busy = false;
    }
  }
  setInterval(refresh, 1000);
})();
