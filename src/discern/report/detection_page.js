"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const panel = document.getElementById("panel");
  const part = (name) => panel.querySelector(`[data-part="${name}"]`);
  let selected = null;

  const percent = (p) => (p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "under 0.1%");

  const show = (token) => {
    if (selected) selected.removeAttribute("aria-pressed");
    selected = token;
    token.setAttribute("aria-pressed", "true");
    const [, text, place] = token.id.match(/^t(\d+)-(\d+)$/);
    part("word").textContent = token.textContent;
    part("replaced").textContent = token.dataset.p + (token.classList.contains("marked") ? ", marked" : "");
    const places = data[Number(text)];
    part("with").hidden = !places;
    part("without").hidden = Boolean(places);
    if (places) {
      const [own, best] = places[Number(place)];
      part("own").textContent = percent(own);
      part("best").replaceChildren(...best.map(([word, p]) => {
        const item = document.createElement("li");
        const name = document.createElement("bdi");
        name.textContent = word;
        const value = document.createElement("span");
        value.textContent = percent(p);
        const bar = document.createElement("i");
        bar.style.setProperty("--p", p);
        item.append(name, value, bar);
        return item;
      }));
    }
    part("help").hidden = true;
    part("found").hidden = false;
    history.replaceState(null, "", `#${token.id}`);
  };

  const focus = (token) => {
    if (!token) return;
    for (const other of token.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
    token.scrollIntoView({ block: "nearest" });
    show(token);
  };

  const hide = () => {
    if (selected) selected.removeAttribute("aria-pressed");
    selected = null;
    part("help").hidden = false;
    part("found").hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
  };

  document.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) focus(token);
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const token = event.target.closest && event.target.closest(".token");
    if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...token.parentElement.querySelectorAll(".token")];
    const at = all.indexOf(token);
    const step = getComputedStyle(token.parentElement).direction === "rtl" ? -1 : 1;
    const keys = {
      ArrowRight: () => all[at + step],
      ArrowLeft: () => all[at - step],
      Home: () => all[0],
      End: () => all[all.length - 1],
      Enter: () => token,
      " ": () => token,
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    focus(keys[event.key]());
  });

  const linked = location.hash && document.getElementById(location.hash.slice(1));
  if (linked && linked.classList.contains("token")) focus(linked);
})();
