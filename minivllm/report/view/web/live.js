// The other end of a live page: a socket that brings bundles, and commands to the server.

const MOST_WAIT_MS = 10_000;
let attempts = 0; // since the server was reached
let opened = null; // the latest socket
let retry = 0; // timer of the next attempt

// Keeps one socket open; every connection begins with the whole state.
function connect() {
  clearTimeout(retry);
  if (opened) {
    opened.onopen = opened.onmessage = opened.onclose = null;
    opened.close();
  }
  const url = new URL("ws/events", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  show({ connection: attempts ? "reconnecting" : "connecting" });
  const socket = (opened = new WebSocket(url));
  let timeline = null;
  socket.onopen = () =>
    view.key && socket.send(JSON.stringify({ type: "auth", api_key: view.key }));
  socket.onmessage = ({ data }) => {
    if (timeline === null) {
      timeline = new Timeline(MOST_LIVE);
      attempts = 0;
      show({ connection: "live", next: timeline });
      if (view.isPlaying || view.index < 0) adopt(timeline);
    }
    for (const item of JSON.parse(data)) timeline.append(item);
    repaint();
  };
  socket.onclose = () => {
    const wait = Math.min(MOST_WAIT_MS, 500 * 2 ** attempts) * (0.75 + Math.random() / 2);
    attempts += 1;
    show({ connection: `connection lost, trying again in ${Math.ceil(wait / 1000)} s` });
    retry = setTimeout(join, wait);
  };
}

// Asks what the server is, and connects unless a key is missing.
async function join() {
  try {
    const answer = await fetch(new URL("view/info", document.baseURI), { headers: headers() });
    if (answer.ok) show({ info: await answer.json() });
    else if (answer.status === 401) show({ info: { key: true } });
  } catch {
    // The server cannot be reached: the socket says so, too.
  }
  if (view.info?.key && !view.key) show({ connection: "waiting for the API key" });
  else connect();
}

const headers = () => ({
  "content-type": "application/json",
  ...(view.key ? { authorization: `Bearer ${view.key}` } : {}),
});

// Sends a command; raises what the server complains of.
async function post(path, body, signal) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body ?? {}), signal };
  const answer = await fetch(new URL(path, document.baseURI), options);
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    message = JSON.parse(text).error?.message ?? text;
  } catch {
    // It is no JSON: the text itself says what is wrong.
  }
  throw new Error(message.slice(0, 300) || `HTTP ${answer.status}`);
}

// Yields the texts of a streamed answer.
async function* pieces(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
      const message = JSON.parse(line.slice(5));
      if (message.error) throw new Error(message.error.message);
      const choice = message.choices?.[0];
      yield choice?.delta?.content ?? choice?.text ?? "";
    }
  }
}

// A conversation with the model; a model without a chat template continues the text so far.
function Chat() {
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [most, setMost] = useState(64);
  const [stop, setStop] = useState(null);
  const [problem, setProblem] = useState("");
  const end = useRef();
  useEffect(() => end.current.scrollTo(0, 1e9), [turns]);
  const send = async () => {
    if (!text.trim() || stop) return;
    const messages = [...turns, { role: "user", content: text }];
    const control = new AbortController();
    let written = "";
    const show = () => setTurns([...messages, { role: "assistant", content: written }]);
    setText("");
    setProblem("");
    setStop(control);
    show();
    try {
      const { model, chat } = view.info ?? {};
      const body = { model, stream: true, max_tokens: most };
      const answer = chat
        ? await post("v1/chat/completions", { ...body, messages }, control.signal)
        : await post("v1/completions", { ...body, prompt: messages.map((one) => one.content).join("") }, control.signal);
      view.awaited = answer.headers.get("x-engine-request-id");
      for await (const piece of pieces(answer)) {
        written += piece;
        show();
      }
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    setStop(null);
  };
  return html`<section class="panel chat">
    <h2>Prompt <button class="quiet" onClick=${() => setTurns([])} disabled=${stop}>new conversation</button></h2>
    <div class="turns" ref=${end} tabindex="0" aria-label="Conversation">${turns.map((turn, at) => html`
      <p key=${at} class=${turn.role}>${turn.content}${stop && at === turns.length - 1 ? "▍" : ""}</p>`)}
      ${!turns.length && html`<p class="note">What you send becomes a request in the lanes above.</p>`}</div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <form onSubmit=${(event) => (event.preventDefault(), send())}>
      <textarea rows="2" value=${text} aria-label="Prompt" placeholder="Say something"
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && (event.preventDefault(), send())}></textarea>
      <label>at most <input type="number" min="1" max="4096" value=${most}
        onInput=${(event) => setMost(Math.max(1, +event.target.value || 1))} /> tokens</label>
      ${stop
        ? html`<button type="button" onClick=${() => stop.abort()}>stop</button>`
        : html`<button class="main" disabled=${!text.trim()}>send</button>`}
    </form>
  </section>`;
}

// A synthetic load of random prompts.
function Load() {
  const [load, setLoad] = useState({ rate: 0, input_len: 64, output_len: 32 });
  const [problem, setProblem] = useState("");
  const timer = useRef();
  const set = (change) => {
    const next = { ...load, ...change };
    setLoad(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => tell("view/load", next), 250);
  };
  const tell = (path, body) =>
    post(path, body).then(() => setProblem(""), (error) => setProblem(error.message));
  const number = (name, label) => html`<label>${label} <input type="number" min="1" value=${load[name]}
    name=${name} onChange=${(event) => set({ [name]: Math.max(1, +event.target.value || 1) })} /> tokens</label>`;
  return html`<section class="panel load">
    <h2>Load <span class="note">random prompts, sent by the server itself</span></h2>
    <label class="slider"><input type="range" min="0" max="100" step="0.5" value=${load.rate} name="rate"
      onInput=${(event) => set({ rate: +event.target.value })} /><output>${load.rate} requests/s</output></label>
    <div class="row">${number("input_len", "prompt")} ${number("output_len", "output")}
      <button class="quiet" onClick=${() => tell("reset_prefix_cache")}>empty the prefix cache</button></div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </section>`;
}

// Where the server wants a key: it is kept no longer than the page is open.
function Key() {
  return html`<section class="panel"><label>API key <input type="password" autocomplete="off"
    onChange=${(event) => (show({ key: event.target.value }), join())} /></label></section>`;
}
