// The state of an engine, rebuilt from its step bundles, as state.py does.

class ViewState {
  constructor() {
    this.engine = null;
    this.requests = new Map(); // unfinished ones, by number
    this.cached = new Map(); // hashes of blocks that the prefix cache may give to a request
    this.numWaiting = this.numUsedBlocks = 0;
  }

  // Takes the next bundle; returns the requests that ended in it.
  apply(bundle) {
    if (bundle.engine) {
      this.engine = bundle.engine;
      this.requests = new Map();
      this.cached = new Map();
    }
    const { requests } = this;
    for (const [number, id, numPrompt, most, priority, arrival, parent] of bundle.new ?? []) {
      requests.set(number, {
        number, id, numPrompt, most, priority, arrival, parent,
        state: "waiting", reason: null, numTokens: 0, numComputed: 0, blocks: [],
      });
    }
    for (const [, number, state, reason] of bundle.states ?? []) {
      Object.assign(requests.get(number), { state, reason });
    }
    for (const number of bundle.decoded ?? []) {
      const request = requests.get(number);
      request.numTokens += 1;
      request.numComputed += 1;
    }
    for (const [number, numTokens, numComputed] of bundle.sizes ?? []) {
      Object.assign(requests.get(number), { numTokens, numComputed });
    }
    for (const [number, numKept, blocks] of bundle.tables ?? []) {
      const request = requests.get(number);
      request.blocks = request.blocks.slice(0, numKept).concat(blocks);
    }
    for (const event of bundle.kv_events ?? []) this.applyToCache(event);
    this.numWaiting = bundle.num_waiting;
    this.numUsedBlocks = bundle.num_used_blocks;
    const ended = [...requests.values()].filter((one) => one.state === "done");
    for (const one of ended) requests.delete(one.number);
    return ended;
  }

  applyToCache(event) {
    if (event.type === "AllBlocksCleared") this.cached = new Map();
    else if (event.type === "BlockRemoved") event.blocks.forEach((one) => this.cached.delete(one));
    else event.blocks.forEach((one, index) => this.cached.set(one, event.block_hashes[index]));
  }

  clone() {
    const copy = Object.assign(new ViewState(), this);
    copy.cached = new Map(this.cached);
    // Block tables are replaced, not changed, so copies may share them.
    copy.requests = new Map([...this.requests].map(([number, one]) => [number, { ...one }]));
    return copy;
  }

  // Numbers of the requests that hold each block: one number, or a list where several share it.
  owners() {
    const owners = new Map();
    for (const { number, blocks } of this.requests.values()) {
      for (const block of blocks) {
        const known = owners.get(block);
        if (known === undefined) owners.set(block, number);
        else if (Array.isArray(known)) known.push(number);
        else owners.set(block, [known, number]);
      }
    }
    return owners;
  }
}
