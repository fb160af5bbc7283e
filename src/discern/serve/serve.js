"use strict";
// Text is only ever put into text nodes.
(() => {
  const find = (selector, within = document) => within.querySelector(selector);
  const { models } = JSON.parse(find("#data").textContent);
  const LIVE = 20000; // characters; a longer text would make typing slow
  const MASK = "[MASK]";
  const element = (name, attributes, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const said = (message, kind = "soft") => element("p", { class: kind }, message);
  const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "under 0.1%");
  const grouped = (count) => count.toLocaleString("en");
  const ask = async (path, body) => {
    const answer = await fetch(path, { method: "POST", body: JSON.stringify(body) }).catch(() => { throw new Error("The server does not answer. Is it still running?"); });
    const found = await answer.json().catch(() => ({ error: { message: `The server answered ${answer.status}.` } }));
    if (found.error) throw new Error(found.error.message);
    return found;
  };
  // Runs the newest request only: while one is on its way, further changes wait, and only the last of them is sent.
  const newest = (work) => {
    let running = false, again = false;
    return async () => {
      again = true;
      if (running) return;
      running = true;
      while (again) { again = false; await work(); }
      running = false;
    };
  };
  // Names with a bar each. With `put`, a name can be chosen.
  const bars = (pairs, put) => element("ol", { class: put === null ? "bars long" : "bars" }, ...pairs.map(([name, value, label = percent(value)], at) => {
    let shown = element("bdi", {}, name);
    if (put) {
      shown = element("button", { type: "button", title: `Put “${name}” here` }, shown);
      shown.addEventListener("click", () => put(name, at));
    }
    return element("li", {}, shown, element("span", {}, label), element("i", { style: `--p: ${Math.max(0, value).toFixed(4)}` }));
  }));
  // Shows what each model answers, or why it cannot.
  const answering = (name, verb, work) => newest(async () => {
    const cards = models.map(async (model, number) => {
      let parts;
      try {
        parts = model.lacks[verb] ? [said(`Not available with this model: ${model.lacks[verb]}.`)] : await work(model, number);
      } catch (problem) { parts = [said(problem.message, "error")]; }
      return element("div", { class: "card" }, ...(models.length > 1 ? [element("h2", {}, model.name)] : []), ...parts);
    });
    find(`#${name} .results`).replaceChildren(...(await Promise.all(cards)));
  });
  const updates = {};
  const predictionsOf = ({ predictions }) => (Array.isArray(predictions[0]) ? predictions : [predictions]); // a list for each mask

  // Check. Offsets of the server count code points; those of a textarea count UTF-16 units.
  const text = find("#check-text"), panel = find("#panel");
  const state = models.map(() => ({ points: [], words: [] }));
  let chosen = null;
  const joins = /[\p{L}\p{M}\p{N}_]/u, han = /\p{Script=Han}/u;
  const wordsOf = (points, found) => {
    const words = [], inside = (at) => joins.test(points[at]) && !han.test(points[at]);
    found.offsets.forEach(([start, end], number) => {
      const p = found.replaced_probability[number], last = words[words.length - 1];
      if (last && start < end && (start < last.end || (start === last.end && inside(start) && inside(start - 1)))) {
        last.end = Math.max(last.end, end);
        last.p = Math.max(last.p, p);
      } else if (start < end) words.push({ start, end, p });
    });
    return words.map((word) => ({ ...word, marked: word.p >= found.threshold }));
  };
  const column = (number) => find(`#check [data-model="${number}"]`);
  const shade = (number) => {
    const { points, words } = state[number], parts = [];
    let done = 0;
    for (const { start, end, p, marked } of words) {
      const kind = `token${marked ? " marked" : ""}${chosen && chosen.start === start ? " chosen" : ""}`;
      const token = element("span", { class: kind, title: percent(p), style: `--p: ${p.toFixed(3)}`, "data-start": start }, points.slice(start, end).join(""));
      parts.push(points.slice(done, start).join(""), token);
      done = end;
    }
    find(".behind", column(number)).replaceChildren(...parts, points.slice(done).join(""), "\u200b");
  };
  const check = newest(async () => {
    const value = text.value, points = Array.from(value);
    await Promise.all(models.map(async (model, number) => {
      let words = [], summary = "";
      try {
        if (model.lacks.detect) summary = `Nothing is shaded: ${model.lacks.detect}.`;
        else if (points.length > LIVE) summary = `${grouped(points.length)} characters: this page checks up to ${grouped(LIVE)}. For longer texts: discern detect MODEL FILE --html page.html`;
        else if (value.trim()) {
          words = wordsOf(points, await ask("detect", { text: value, model: number }));
          if (text.value !== value) return;
          const count = words.filter((word) => word.marked).length, highest = percent(Math.max(0, ...words.map((word) => word.p)));
          summary = count ? `${count} of ${words.length} words look replaced.` : `No word of ${words.length} looks replaced; the highest probability is ${highest}.`;
        }
      } catch (problem) { summary = problem.message; }
      state[number] = { points: points.length > LIVE ? [] : points, words };
      shade(number);
      find(".summary", column(number)).textContent = summary;
    }));
  });
  const choose = (word) => {
    chosen = word || null;
    models.forEach((_, number) => shade(number));
    panel.hidden = !chosen;
    if (chosen) updates.panel();
  };
  text.addEventListener("input", () => {
    const points = Array.from(text.value);
    state.forEach((old, number) => { // until the answer arrives, words before the change keep their shades
      const change = points.findIndex((point, at) => point !== old.points[at]);
      const words = old.words.filter((word) => word.end < (change < 0 ? points.length : change));
      state[number] = { points: points.length > LIVE ? [] : points, words: points.length > LIVE ? [] : words };
    });
    choose();
    check();
  });
  const chooseAt = (place) => choose(state.flatMap((one) => one.words).find((word) => word.start <= place && place <= word.end));
  const chooseAtCursor = () => chooseAt(Array.from(text.value.slice(0, text.selectionStart)).length);
  text.addEventListener("click", chooseAtCursor);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.ctrlKey) { event.preventDefault(); chooseAtCursor(); }
  });
  find("#check").addEventListener("click", (event) => {
    const token = event.target.closest(".reading .token");
    if (token) chooseAt(Number(token.dataset.start));
  });
  find("[data-close]").addEventListener("click", () => { choose(); text.focus(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen) { choose(); text.focus(); } });
  updates.panel = answering("panel", "", async (model, number) => {
    const word = chosen, value = text.value, points = Array.from(value);
    if (!word) return [];
    find(".word bdi", panel).textContent = points.slice(word.start, word.end).join("");
    const own = state[number].words.find((other) => other.start === word.start);
    const replaced = said(own ? `Replaced with probability ${percent(own.p)}${own.marked ? ", marked" : ""}.` : "", "");
    if (model.lacks.fill) return [replaced, said(`No suggestions: ${model.lacks.fill}.`)];
    const before = points.slice(0, word.start).join(""), masked = before + MASK + points.slice(word.end).join("");
    const predictions = predictionsOf(await ask("fill", { text: masked, top: 22, model: number }))[before.split(MASK).length - 1];
    // Where words begin with a space, a token without one continues a word.
    const spaced = /\s$/u.test(before) || (!before && predictions[0].text.startsWith(" "));
    const words = predictions.filter(({ token, text }) => text.trim() && !token.startsWith("##") && !(spaced && /^[\p{L}\p{N}]/u.test(text)));
    const suggested = new Map();
    for (const { text, probability } of words) if (!suggested.has(text.trim())) suggested.set(text.trim(), probability);
    return [replaced, said("The generator suggests:"), bars([...suggested].slice(0, 6), (put) => {
      if (text.value !== value) return;
      text.setRangeText(put, points.slice(0, word.start).join("").length, points.slice(0, word.end).join("").length, "end");
      text.dispatchEvent(new Event("input"));
      text.focus();
    })];
  });

  // Fill in
  const masked = find("#fill-text");
  const insert = (added, start, end) => { masked.setRangeText(added, start, end, "end"); masked.focus(); updates.fill(); };
  updates.fill = answering("fill", "fill", async (_, number) => {
    const value = masked.value;
    if (!value.includes(MASK)) return [said(`Write ${MASK} where a token is to be predicted.`)];
    const lists = predictionsOf(await ask("fill", { text: value, model: number, top: 8 }));
    return lists.flatMap((predictions, place) => [
      element("h3", {}, lists.length > 1 ? `Mask ${place + 1}` : "Most likely tokens"),
      bars(predictions.map(({ shown, probability }) => [shown, probability]), (_, at) => {
        const added = predictions[at].text, start = value.split(MASK, place + 1).join(MASK).length;
        if (masked.value !== value || added.includes("\ufffd")) return; // a part of a character is no text
        insert(added.trim(), !added.startsWith(" ") && value[start - 1] === " " ? start - 1 : start, start + MASK.length);
      }),
    ]);
  });
  find("#fill-mask").addEventListener("click", () => insert(MASK, masked.selectionStart, masked.selectionEnd));

  // Score
  const pair = [find("#score-a"), find("#score-b")];
  updates.score = answering("score", "score", async (_, model) => {
    const { scores, scores_per_token: means, scorer, quantity } = await ask("score", { texts: pair.map((box) => box.value), model });
    const [a, b] = scores, gap = Math.abs(a - b), tokens = scores.map((score, at) => Math.round(score / means[at]));
    // The sum of scorer "rtd" grows with the number of tokens, whatever they are.
    const verdict = scorer === "rtd" && tokens[0] !== tokens[1] ? "Scorer rtd only compares sentences with the same number of tokens." : gap < 0.005 ? "Both are equally likely." : `The ${a > b ? "first" : "second"} sentence is more likely, by ${gap.toFixed(2)} nats.`;
    const number = (value) => element("td", { class: "number" }, value.toFixed(2).replace("-", "\u2212"));
    const rows = ["First", "Second"].map((name, at) => element("tr", {}, element("th", { scope: "row" }, name), number(scores[at]), number(means[at])));
    const head = ["Sentence", "Score (nats)", "Per token"].map((title, at) => element("th", { scope: "col", class: at ? "number" : "" }, title));
    return [said(verdict, "answer"), element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)), said(`${quantity}; scorer ${scorer}. Higher is likelier.`)];
  });

  // Find similar
  const searched = find("#near-text"), query = find("#near-query");
  const MOST_SENTENCES = 2000, MOST_BYTES = 1000000;
  const vectors = models.map(() => new Map());
  const embed = async (model, texts) => {
    const known = vectors[model], missing = texts.filter((one) => !known.has(one));
    while (missing.length) {
      const block = missing.splice(0, 32);
      (await ask("embed", { texts: block, model })).vectors.forEach((vector, at) => {
        const length = Math.hypot(...vector) || 1;
        known.set(block[at], vector.map((value) => value / length));
      });
    }
    return texts.map((one) => known.get(one));
  };
  updates.near = answering("near", "embed", async (_, model) => {
    const lines = searched.value.split(/(?<=[\u3002\uff01\uff1f])\s*|(?<=[.!?])\s+|\n+/u).map((line) => line.trim()).filter(Boolean);
    const all = [...new Set(lines)], sentences = all.slice(0, MOST_SENTENCES), left = all.length - sentences.length;
    if (!sentences.length || !query.value.trim()) return [said("Enter a text to search, and a sentence to compare it with.")];
    const [own, ...others] = await embed(model, [query.value.trim(), ...sentences]);
    const near = sentences.map((one, place) => [one, others[place].reduce((sum, value, at) => sum + value * own[at], 0)]).sort((one, other) => other[1] - one[1]);
    const title = `Nearest of ${grouped(sentences.length)} sentences, by cosine${left ? `; ${grouped(left)} more left out` : ""}`;
    return [element("h3", {}, title), bars(near.slice(0, 10).map(([one, cosine]) => [one, cosine, cosine.toFixed(3)]), null)];
  });
  const read = async (file) => {
    searched.value = await file.slice(0, MOST_BYTES).text();
    updates.near();
  };
  find("#near-file").addEventListener("change", (event) => { if (event.target.files.length) read(event.target.files[0]); });
  searched.addEventListener("dragover", (event) => event.preventDefault());
  searched.addEventListener("drop", (event) => {
    if (event.dataTransfer.files.length) { event.preventDefault(); read(event.dataTransfer.files[0]); }
  });

  // Predict
  const task = find("#predict-task"), input = find("#predict-text"), second = find("#predict-pair");
  const names = new Set(models.flatMap((model) => model.tasks).map((one) => one.name));
  task.append(...[...names].map((name) => element("option", { value: name }, name)));
  find("#predict-tasks").hidden = names.size < 2;
  const entities = ({ words, tags, spans }) => {
    const labeled = spans || tags.map((tag, at) => [at, at + 1, tag]), parts = [];
    let done = 0;
    for (const [start, stop, label] of labeled) {
      parts.push(`${words.slice(done, start).join(" ")} `, element("span", { class: "entity right" }, words.slice(start, stop).join(" "), element("small", {}, label)), " ");
      done = stop;
    }
    return element("p", { class: "text" }, ...parts, words.slice(done).join(" "));
  };
  const answered = (found) => {
    if (found.words) return [entities(found)];
    if (found.nbest) return [said(found.answer || "No answer", "answer"), bars(found.nbest.slice(0, 5).map((one) => [one.text, one.probability]))];
    if (found.score !== undefined) return [said(found.score.toFixed(3), "answer")];
    const shown = found.label !== undefined ? `${found.label} (${percent(found.probabilities[found.label])})` : found.labels.join(", ") || "None of the labels";
    return [said(shown, "answer"), bars(Object.entries(found.probabilities).sort((one, other) => other[1] - one[1]).slice(0, 12))];
  };
  updates.predict = answering("predict", "predict", async (model, number) => {
    const chosenTask = model.tasks.find((one) => one.name === task.value);
    if (!chosenTask) return [said(`This model was not fine-tuned on ${task.value}.`)];
    if (!input.value.trim()) return [said("Type a text above.")];
    const paired = second.value.trim() && chosenTask.reads === "text";
    const body = chosenTask.reads === "question" ? { question: second.value, context: input.value } : paired ? [input.value, second.value] : input.value;
    return answered((await ask("predict", { text: body, model: number, task: chosenTask.name })).predictions[0]);
  });

  // Every change of a control updates its tab.
  for (const name of ["fill", "score", "near", "predict"]) find(`#${name}`).addEventListener("input", () => updates[name]());

  // Tabs, by mouse, arrow keys or address.
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const nameOf = (tab) => tab.getAttribute("aria-controls");
  const select = (tab) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", other === tab);
      other.tabIndex = other === tab ? 0 : -1;
      find(`#${nameOf(other)}`).hidden = other !== tab;
    }
    if (updates[nameOf(tab)]) updates[nameOf(tab)]();
  };
  const open = (tab) => { history.replaceState(null, "", `#${nameOf(tab)}`); select(tab); tab.focus(); };
  for (const tab of tabs) {
    const lack = models.every((model) => model.lacks[tab.dataset.verb]) && models[0].lacks[tab.dataset.verb];
    if (lack) {
      tab.dataset.lacks = tab.title = lack;
      tab.setAttribute("aria-label", `${tab.textContent}: not available with this model`);
    }
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length]);
    });
  }
  const useful = tabs.find((tab) => !tab.dataset.lacks) || tabs[0];
  const follow = () => select(tabs.find((tab) => `#${nameOf(tab)}` === location.hash) || useful);
  addEventListener("hashchange", follow);
  follow();
  find("#origin").textContent = location.origin;
  text.value = models.every((model) => model.lacks.detect) ? "" : "The station was opened on 1 May 1895 and the was closed in 1964. The book became one of the most popular songs of the author because century.";
  check();
})();
