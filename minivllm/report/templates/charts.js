{
  const unpack = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  // Text and lines were drawn for a light page; the reader's colours take their place.
  const themed = (text) => {
    const style = getComputedStyle(document.documentElement);
    return text.replace(/#[0-9a-f]{6}/gi, (c) => style.getPropertyValue(`--c${c.slice(1)}`).trim() || c);
  };
  let ready = null;
  const charts = () => ready ??= (async () => {
    const [library, text] = await Promise.all([unpack("bokeh"), unpack("charts")]);
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
    return new Map(JSON.parse(themed(text)));
  })();
  const figures = (model) => model.renderers ? [model] : (model.children ?? []).flatMap((child) => figures(child));
  const draw = async (place) => {
    const drawn = [];
    place.classList.add("drawing-now"); // has its width, and is not seen
    const items = (await charts()).get(place.dataset.chart);
    for (const [i, slot] of place.querySelectorAll(".plot").entries()) {
      const manager = await Bokeh.embed.embed_item(items[i], slot);
      for (const view of manager.roots) drawn.push(...figures(view.model));
    }
    for (const key of place.querySelectorAll(".legend button")) {
      key.addEventListener("click", () => {
        const shown = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", shown);
        for (const figure of drawn)
          for (const renderer of [...figure.renderers, ...figure.center])
            if (renderer.name === key.dataset.series) renderer.visible = shown;
      });
    }
    place.classList.replace("drawing-now", "drawn");
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      // The static picture stays where a browser cannot draw.
      draw(target).catch((error) => { target.classList.remove("drawing-now"); console.warn(error.message); });
    }
  }, { rootMargin: "800px" });
  for (const place of document.querySelectorAll(".drawing")) watch.observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
}
