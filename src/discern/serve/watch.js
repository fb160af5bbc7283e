"use strict";
// The page is asked for again every few seconds, and replaced if it has changed. Drawing takes at most a twentieth of the time: the
// machine is there to train.
let shown = document.querySelector("#main").outerHTML;
const refresh = async () => {
  const begun = performance.now();
  if (!document.hidden) {
    const trouble = document.querySelector("#trouble");
    try {
      const answer = await fetch(location.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("#main");
      if (fresh.outerHTML !== shown) {
        const focused = document.activeElement.id;
        shown = fresh.outerHTML;
        document.querySelector("#main").replaceWith(fresh);
        if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
      }
      document.querySelector("#load").textContent = page.querySelector("#load").textContent;
      trouble.hidden = true;
    } catch {
      trouble.hidden = false;
    }
  }
  setTimeout(refresh, Math.max(5000, 20 * (performance.now() - begun)));
};
setTimeout(refresh, 5000);
