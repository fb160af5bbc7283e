(() => {
  const AXES = ["", "step", "tokens", "FLOPs", "time in training"];
  const TITLES = {
    loss: "Loss, weighted sum", grad_norm: "Gradient norm before clipping", learning_rate: "Learning rate", tokens_per_second: "Tokens per second",
    discriminator_auc: "Discriminator AUC, held out", discriminator_recall: "Discriminator recall, held out", discriminator_precision: "Discriminator precision, held out",
    discriminator_accuracy: "Discriminator accuracy, held out", generator_accuracy: "Generator accuracy, held out", sampled_accuracy: "Sampled accuracy, held out",
    replaced_fraction: "Replaced fraction, held out",
  };
  const FIRST = ["loss", "generator_loss", "discriminator_loss", "mlm_loss", "permutation_lm_loss", "discriminator_auc"];
  const LAST = ["learning_rate", "grad_norm", "tokens_per_second"];
  let runs = [], axis = 1;
  const known = [];

  const words = (key) => TITLES[key] || (key.charAt(0).toUpperCase() + key.slice(1)).replaceAll("_", " ");
  const grouped = (value) => Math.round(value).toLocaleString("en");
  const duration = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 90) return `${minutes} min`;
    return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.round(minutes / 1440)} days`;
  };
  const size = (bytes) => (bytes ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : "–");
  const short = (value) => {
    const large = Math.abs(value);
    if (large >= 1e15 || (large > 0 && large < 1e-3)) return value.toExponential(1);
    for (const [unit, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (large >= unit) return `${+(value / unit).toPrecision(3)}${name}`;
    return `${+value.toPrecision(4)}`;
  };
  const ticks = (low, high, count) => {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) found.push(at * step);
    return found;
  };

  // Charts: a line per run, told apart by color and dashes; held-out losses as points over those of training.
  const DASHES = ["", "7 4", "2 3", "8 3 2 3"];
  const svg = (name, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const W = 440, H = 260, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 34;
  const chart = (key) => {
    const lines = [], dots = [];
    runs.forEach((run, number) => {
      const take = (name) => (run.curves[name] || []).filter((point) => point[axis] !== null).map((point) => [point[axis], point[0]]);
      const mine = take(key), held = take(`heldout_${key}`);
      if (mine.length) lines.push([number, mine]);
      if (held.length) dots.push([number, held]);
    });
    const all = [...lines, ...dots].flatMap(([, points]) => points);
    if (!all.length) return null;
    const high = Math.max(...all.map((point) => point[0])) || 1;
    let [bottom, top] = [Math.min(...all.map((point) => point[1])), Math.max(...all.map((point) => point[1]))];
    if (key === "learning_rate" || key === "tokens_per_second") bottom = Math.min(0, bottom);
    if (bottom === top) { bottom -= Math.abs(bottom) / 10 || 0.5; top += Math.abs(top) / 10 || 0.5; }
    const pad = (top - bottom) * 0.04;
    [bottom, top] = [bottom === 0 ? 0 : bottom - pad, top + pad];
    const x = (value) => LEFT + (value / high) * (W - LEFT - RIGHT), y = (value) => H - BOTTOM - ((value - bottom) / (top - bottom)) * (H - TOP - BOTTOM);
    const parts = [];
    for (const value of ticks(bottom, top, 5)) {
      parts.push(svg("line", { class: "gridline", x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(+value.toPrecision(12))));
    }
    for (const value of ticks(0, high, 4)) parts.push(svg("text", { x: x(value), y: H - BOTTOM + 15, "text-anchor": value === 0 ? "start" : value > 0.95 * high ? "end" : "middle" }, axis === 4 ? duration(value) : short(value)));
    parts.push(svg("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }));
    parts.push(svg("text", { x: W - RIGHT, y: H - 3, "text-anchor": "end" }, AXES[axis]));
    for (const [number, points] of lines) {
      const path = points.map(([a, b], at) => `${at ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
      parts.push(svg("path", { class: "curve", d: path, stroke: `var(--line-${number + 1})`, "stroke-dasharray": DASHES[number % 4], "stroke-width": number > 3 ? 3 : 1.8 }));
      if (points.length === 1) parts.push(svg("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, fill: `var(--line-${number + 1})` }));
    }
    for (const [number, points] of dots) for (const [a, b] of points) parts.push(svg("circle", { cx: x(a), cy: y(b), r: 3, fill: "var(--card)", stroke: `var(--line-${number + 1})`, "stroke-width": 1.6 }));
    const latest = [...lines, ...dots].map(([number, points]) => `${runs[number].name} ${short(points[points.length - 1][1])}`).join(", ");
    const title = words(key), held = dots.length ? " ○ held out" : "";
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} over ${AXES[axis]}. Latest: ${latest}.` }, ...parts);
    return element("figure", { class: "card" }, element("figcaption", {}, element("b", {}, title), element("small", {}, held)), picture);
  };
  const drawCharts = () => {
    const keys = new Set(runs.flatMap((run) => Object.keys(run.curves)).filter((key) => !key.startsWith("heldout_")));
    const place = (key) => (FIRST.includes(key) ? FIRST.indexOf(key) : LAST.includes(key) ? 100 + LAST.indexOf(key) : 50);
    const terms = [...keys].filter((key) => key.endsWith("_loss"));
    if (terms.length === 1) keys.delete("loss"); // with one term, the sum is the same number
    const order = [...keys].sort((one, other) => place(one) - place(other) || one.localeCompare(other));
    const made = order.map(chart).filter(Boolean);
    find("#charts").replaceChildren(...(made.length ? made : [element("p", { class: "soft" }, axis === 3 ? "These runs have not recorded FLOPs." : "No records yet.")]));
    find("#keys").replaceChildren(...runs.map((run, number) => element("span", { class: `key dash-${(number % 4) + 1}${number > 3 ? " bold" : ""}`, style: { "--color": `var(--line-${number + 1})` } }, run.name)));
  };
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      axis = Number(button.dataset.axis);
      for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", other === button);
      drawCharts();
    });
  }

  const drawRuns = () => {
    const fact = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, value));
    const cards = runs.map((run) => {
      const condition = run.condition === "silent" ? `no record for ${duration(run.silent_seconds)}` : run.condition;
      const head = element("h2", {}, run.name, element("span", { class: "condition", "data-is": run.condition }, condition));
      const done = run.progress === null ? [] : [element("progress", { max: 1, value: run.progress, "aria-label": `Progress of ${run.name}` })];
      const waiting = Object.entries(run.waiting).map(([key, share]) => `${(100 * share).toFixed(1)}% for ${key === "data_share" ? "data" : "the host"}`);
      return element("section", { class: "card run" }, head, ...done, element("dl", { class: "facts" },
        fact("Step", `${grouped(run.step)}${run.max_steps ? ` of ${grouped(run.max_steps)}` : ""}`),
        fact("Remaining", run.condition === "finished" ? (run.time_used ? "its time is used" : "done") : duration(run.seconds_left)),
        fact("Speed", run.tokens_per_second ? `${grouped(run.tokens_per_second)} tokens/s` : "–"),
        fact("In training", duration(run.seconds)),
        fact("Newest checkpoint", run.checkpoint === null ? "none yet" : `step ${grouped(run.checkpoint)}`),
        fact("Peak memory", size(run.memory_bytes)),
        ...(waiting.length ? [fact("Waiting", waiting.join(", "))] : [])));
    });
    find("#runs").replaceChildren(...cards);
  };

  const drawMetrics = () => {
    const names = new Map(runs.flatMap((run) => run.held_out.map((metric) => [metric.name, metric.meaning])));
    const head = element("tr", {}, element("th", { scope: "col" }, "Metric"), ...runs.map((run) => element("th", { scope: "col", class: "number" }, run.name, element("br"), run.evaluated === null ? "no evaluation" : `step ${grouped(run.evaluated)}`)));
    const rows = [...names].map(([name, meaning]) => element("tr", {}, element("th", { scope: "row", title: meaning }, name), ...runs.map((run) => {
      const found = run.held_out.find((metric) => metric.name === name);
      return element("td", { class: "number" }, found ? found.value.toFixed(4) : "–");
    })));
    find("#metrics").replaceChildren(element("thead", {}, head), element("tbody", {}, ...(rows.length ? rows : [element("tr", {}, element("td", { colspan: runs.length + 1 }, "No evaluation yet."))])));
  };

  const drawFindings = () => {
    const unusual = runs.flatMap((run) => run.findings.filter((one) => one.verdict === "low" || one.verdict === "high").map((one) => [run, one]));
    const fine = runs.flatMap((run) => run.findings).length - unusual.length;
    const cards = unusual.map(([run, one]) => element("div", { class: "card finding" },
      element("h3", {}, `${run.name}: ${words(one.name).toLowerCase()} ${one.value === null ? "" : +one.value.toFixed(4)} is ${one.verdict}`),
      element("p", {}, `${one.cause}.`), ...(one.knob ? [element("p", { class: "soft" }, `Try ${one.knob}.`)] : [])));
    const rest = !fine && !unusual.length ? "Nothing to judge yet." : unusual.length ? `${fine} other metrics are usual, or cannot be judged yet.` : "Nothing unusual.";
    find("#findings").replaceChildren(...cards, element("p", { class: "soft" }, rest));
  };

  // Examples: the newest evaluation, unless another one was chosen.
  const chosen = find("#example-run"), slider = find("#example-step");
  let newest_ = true;
  const drawExamples = () => {
    const run = runs[chosen.value] || runs[0];
    const examples = run ? run.examples : [];
    slider.max = Math.max(0, examples.length - 1);
    if (newest_) slider.value = slider.max;
    slider.disabled = examples.length < 2;
    const shown = examples[Number(slider.value)];
    find("#example-at").textContent = shown ? `step ${grouped(shown.step)}` : "";
    if (!shown) {
      find("#example-rows").replaceChildren(element("p", { class: "soft" }, "No examples yet: a run of an objective with a discriminator records some at each evaluation."));
      return;
    }
    find("#example-rows").replaceChildren(...shown.rows.map((row) => element("p", { class: "text" }, ...row.flatMap((piece) => {
      const style = `token${piece.p > 0.5 ? " marked" : ""}${piece.was ? " was" : ""}`;
      // What shade, underline and box show, for those who hear the page.
      const said = piece.was || piece.p > 0.5 ? [element("span", { class: "sr" }, ` (${piece.was ? `was ${piece.was}, ` : ""}${piece.p > 0.5 ? "marked, " : ""}${percent(piece.p)})`)] : [];
      const was = piece.was ? [element("small", { "aria-hidden": "true" }, piece.was)] : [];
      const token = element("span", { class: style, style: { "--p": piece.p }, title: percent(piece.p) }, piece.text, ...was, ...said);
      return piece.joined ? [token] : [" ", token];
    }))));
  };
  chosen.addEventListener("change", () => { newest_ = true; drawExamples(); });
  slider.addEventListener("input", () => { newest_ = slider.value === slider.max; drawExamples(); });

  const look = async () => {
    try {
      const found = await ask(`data?known=${known.map(encodeURIComponent).join(",")}`);
      const changed = found.runs.filter((run) => run.curves).length > 0 || found.runs.length !== runs.length;
      runs = found.runs.map((run, number) => (run.curves ? run : { ...runs[number], ...run }));
      runs.forEach((run, number) => { known[number] = run.version; });
      drawRuns();
      if (changed) {
        const before = chosen.value;
        chosen.replaceChildren(...runs.map((run, number) => element("option", { value: number }, run.name)));
        chosen.value = before && before < runs.length ? before : 0;
        drawCharts();
        drawMetrics();
        drawFindings();
        drawExamples();
      }
      const { busy, cores, free_bytes, memory_bytes } = found.machine;
      find("#machine").textContent = [busy === null ? "" : `load ${busy.toFixed(1)} on ${cores} cores`, memory_bytes ? `${size(free_bytes)} of ${size(memory_bytes)} memory free` : ""].filter(Boolean).join(" · ");
      find("#left-out").textContent = `${found.left_out} more runs are not shown: a chart tells ${runs.length} apart.`;
      find("#left-out").hidden = !found.left_out;
    } catch (problem) { trouble(`${problem.message === "no answer" ? "The server does not answer. Is it still running?" : problem.message}`); }
    setTimeout(look, document.hidden ? 15000 : 2000);
  };
  look();
})();
