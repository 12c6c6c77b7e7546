// Search, keys, tabs and the open site. Everything the page says is there without it.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const $ = (id) => document.getElementById(id);
  const index = JSON.parse($("index").textContent);
  const byName = new Map(index.map((site, i) => [site.n, i]));
  const grid = $("grid"), viewer = $("viewer"), search = $("search");
  const cells = [...grid.querySelectorAll("a.cell")];
  const cellOf = new Map(cells.map((cell) => [cell.dataset.site, cell]));
  let open = -1, returnTo = null;

  // --- tabs ---------------------------------------------------------------------------------
  const tabs = [...document.querySelectorAll("#tabs a")];
  const panels = [...document.querySelectorAll("section[data-tab]")];
  $("tabs").setAttribute("role", "tablist");
  tabs.forEach((tab, i) => {
    tab.setAttribute("role", "tab");
    tab.id = "tab-" + panels[i].id;
    tab.setAttribute("aria-controls", panels[i].id);
    panels[i].setAttribute("role", "tabpanel");
    panels[i].setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", (event) => { event.preventDefault(); show(i); });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { show((i + step + tabs.length) % tabs.length).focus(); event.preventDefault(); }
    });
  });
  function show(chosen) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === chosen));
      tab.tabIndex = i === chosen ? 0 : -1;
      panels[i].classList.toggle("open", i === chosen);
    });
    return tabs[chosen];
  }
  show(0);

  // --- the open site ------------------------------------------------------------------------
  function put(article) {
    const home = $(article.dataset.home);
    home.append(article);
  }
  function borrowPictures(article) {
    for (const frame of article.querySelectorAll("[data-picture]")) {
      if (frame.querySelector("svg")) continue;
      const [part, group] = frame.dataset.picture.split("-");
      const twin = document.querySelector(`#${group} [data-picture="${part}-${group}"] svg`);
      if (twin) frame.replaceChildren(twin.cloneNode(true));
    }
  }
  function openSite(position, focus) {
    const site = index[position];
    if (!site) return;
    show(0);
    const body = $("viewer-body");
    if (body.firstElementChild) put(body.firstElementChild);
    const article = $(site.g).querySelector("article");
    article.dataset.home = site.g;
    borrowPictures(article);
    body.replaceChildren(article);
    const place = site.l === null ? "after the layers" : "layer " + site.l;
    $("viewer-title").textContent = `${site.p}, ${place}: ${site.o}`;
    $("viewer-where").textContent =
      `anchor ${site.a}` + (site.w ? `, replaced by ${site.w}` : "") + (site.f ? `; form ${site.f}` : "");
    cellOf.get(index[open]?.n)?.removeAttribute("aria-current");
    open = position;
    cellOf.get(site.n)?.setAttribute("aria-current", "true");
    viewer.hidden = false;
    history.replaceState(null, "", "#" + site.n);
    if (focus) { viewer.focus({ preventScroll: true }); viewer.scrollIntoView({ block: "start" }); }
  }
  function closeSite() {
    if (open < 0) return;
    const cell = cellOf.get(index[open].n);
    cell?.removeAttribute("aria-current");
    if ($("viewer-body").firstElementChild) put($("viewer-body").firstElementChild);
    viewer.hidden = true;
    open = -1;
    history.replaceState(null, "", "#");
    (returnTo?.isConnected ? returnTo : cell)?.focus();
  }
  const step = (by) => openSite((open + by + index.length) % index.length, false);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-site]");
    if (!link) return;
    event.preventDefault();
    returnTo = link.closest("#viewer") ? cellOf.get(link.dataset.site) : link;
    openSite(byName.get(link.dataset.site), true);
  });
  $("close").addEventListener("click", closeSite);
  $("fit").addEventListener("click", () => {
    $("fit").setAttribute("aria-pressed", String(viewer.classList.toggle("fit")));
  });
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));

  // --- search -------------------------------------------------------------------------------
  const words = (site) => [
    site.l === null ? "final" : "layer " + site.l, site.n, site.p, site.o, ...site.c, site.f, site.k, site.a, site.w,
  ].join(" ").toLowerCase();
  const texts = index.map(words);
  function matches(query) {
    const number = /^(?:l|layer)?\s*0*(\d+)\b\s*(.*)$/.exec(query);
    const layer = number && index.some((s) => String(s.l) === number[1]) ? number[1] : null;
    const rest = (layer === null ? query : number[2]).split(/\s+/).filter(Boolean);
    return index.map((_, i) => i).filter((i) =>
      (layer === null || String(index[i].l) === layer) && rest.every((w) => texts[i].includes(w)));
  }
  function find() {
    const query = search.value.trim().toLowerCase();
    const found = query ? matches(query) : [];
    const names = new Set(found.map((i) => index[i].n));
    grid.classList.toggle("searching", Boolean(query));
    cells.forEach((cell) => cell.classList.toggle("hit", names.has(cell.dataset.site)));
    $("hits").textContent = query ? `${found.length} site${found.length === 1 ? "" : "s"}` : "";
    $("results").replaceChildren(...found.slice(0, 40).map((i) => {
      const item = document.createElement("li"), link = document.createElement("a");
      link.href = "#" + index[i].g;
      link.dataset.site = index[i].n;
      link.textContent = `${index[i].l ?? "final"} ${index[i].p} (${index[i].o})`;
      item.append(link);
      return item;
    }));
    return found;
  }
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { const [first] = find(); returnTo = search; openSite(first ?? -1, true); }
    if (event.key === "Escape") { search.value = ""; find(); search.blur(); event.stopPropagation(); }
  });

  // --- keys ---------------------------------------------------------------------------------
  cells.forEach((cell, i) => { cell.tabIndex = i ? -1 : 0; });
  grid.addEventListener("focusin", (event) => {
    if (!event.target.matches("a.cell")) return;
    cells.forEach((cell) => { cell.tabIndex = cell === event.target ? 0 : -1; });
  });
  grid.addEventListener("keydown", (event) => {
    const cell = event.target.closest("a.cell"), way = event.key.replace("Arrow", "");
    if (!cell || !["Left", "Right", "Up", "Down"].includes(way)) return;
    event.preventDefault();
    const column = (c) => [c.closest("td").cellIndex, [...c.parentNode.children].indexOf(c)].join();
    const row = (c) => c.closest("tr");
    const same = cells.filter((c) => (way === "Up" || way === "Down" ? column(c) === column(cell) : row(c) === row(cell)));
    same[same.indexOf(cell) + (way === "Right" || way === "Down" ? 1 : -1)]?.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input");
    if (event.key === "Escape" && !typing) closeSite();
    if (typing) return;
    if (event.key === "/") { event.preventDefault(); search.focus(); search.select(); }
    if (event.key === "t") theme(!dark());
    if (open >= 0 && event.key === "n") step(1);
    if (open >= 0 && event.key === "p") step(-1);
  });

  // --- light and dark -----------------------------------------------------------------------
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => root.dataset.theme === "dark";
  function theme(on, keep = true) {
    root.dataset.theme = on ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", String(on));
    if (keep) try { localStorage.setItem("k3fuse-theme", root.dataset.theme); } catch { /* no storage */ }
  }
  let kept = null;
  try { kept = localStorage.getItem("k3fuse-theme"); } catch { /* no storage */ }
  theme(kept ? kept === "dark" : system.matches, false);
  system.addEventListener("change", (event) => { if (!kept) theme(event.matches, false); });
  $("theme").addEventListener("click", () => theme(!dark()));

  const asked = decodeURIComponent(location.hash.slice(1));
  if (byName.has(asked)) openSite(byName.get(asked), true);
  else if (panels.some((p) => p.id === asked)) show(panels.findIndex((p) => p.id === asked));
})();
